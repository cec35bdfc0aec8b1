"""Fills memory, lets most of it be swapped out, unmaps that part, and prints what it cost.

    python3 munmap.py MEBIBYTES BALLAST_MEBIBYTES

The range is filled first, then the ballast, which drives the range out.  Printed as
one JSON object: the time for which munmap kept the caller, and the processor time
from then until all is freed, of this process and of the one that started it (memfold,
if it was).  The ballast is checked at the end.
"""

import ctypes
import glob
import json
import mmap
import os
import random
import sys
import time

PAGE = 4096
SETTLE_SECONDS = 0.6


def pattern():
    """A page that lz4 compresses about 2:1, but for its first bytes."""
    source = random.Random(7)
    return bytearray(b"".join(source.randbytes(12) + b"twenty bytes of text" for _ in range(PAGE // 32)))


def fill(area, first):
    page = pattern()
    for number in range(len(area) // PAGE):
        page[:8] = (first + number).to_bytes(8, "little")
        page[2048:2056] = (first * 31 + number * 17).to_bytes(8, "little")
        area[number * PAGE:(number + 1) * PAGE] = page


def wrong_pages(area, first):
    page = pattern()
    wrong = 0
    for number in range(len(area) // PAGE):
        page[:8] = (first + number).to_bytes(8, "little")
        page[2048:2056] = (first * 31 + number * 17).to_bytes(8, "little")
        wrong += area[number * PAGE:(number + 1) * PAGE] != page
    return wrong


def allocate(mebibytes):
    area = mmap.mmap(-1, mebibytes << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_NOHUGEPAGE)
    return area


def resident_bytes(area):
    """How much of the area is in memory, by the kernel's page table."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        file.seek(address // PAGE * 8)
        entries = memoryview(file.read(len(area) // PAGE * 8)).cast("Q")
    return sum(entry >> 63 for entry in entries) * PAGE


def processor_seconds(process):
    """Of all threads that the process has now."""
    total = 0
    for path in glob.glob(f"/proc/{process}/task/*/schedstat"):
        with open(path, encoding="ascii") as file:
            total += int(file.read().split()[0])
    return total / 1e9


def main():
    size, ballast_size = (int(word) for word in sys.argv[1:3])
    area, ballast = allocate(size), allocate(ballast_size)
    fill(area, 0)
    fill(ballast, 1 << 40)
    resident = resident_bytes(area)
    supervised = "memfold" in os.environ.get("LD_PRELOAD", "")
    processes = [os.getpid()] + ([os.getppid()] if supervised else [])

    def spent():
        return sum(processor_seconds(process) for process in processes)

    # What goes on beside is no part of it: measured for as long just before.
    time.sleep(SETTLE_SECONDS)
    before = spent()
    time.sleep(SETTLE_SECONDS)
    idle = spent() - before
    before = spent()
    started = time.perf_counter()
    area.close()
    took = time.perf_counter() - started
    time.sleep(SETTLE_SECONDS)
    used = spent() - before - idle
    print(json.dumps({
        "munmap_ms": took * 1e3,
        "munmap_cpu_ms": max(used, 0) * 1e3,
        "swapped_mib": size - resident / (1 << 20),
        "wrong_pages": wrong_pages(ballast, 1 << 40),
    }))


if __name__ == "__main__":
    main()
