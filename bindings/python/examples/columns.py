"""Sums the columns of a matrix whose memory was moved out: memfold's arrays, and ordinary ones in
the swap space of the host (zram, say), in turn.

    python bindings/python/examples/columns.py [--megabytes 256] [--runs 5]

A row takes 20 000 bytes, so each element of a column lies on another page, at distances that are no
whole pages. The five columns together touch every page once. Both sums are checked.
"""

import argparse
import mmap
import statistics
import time

import numpy
import memfold

WIDTH = 2500
COLUMNS = range(0, WIDTH, 500)
MADV_PAGEOUT = 21
MADV_NOHUGEPAGE = 15


def fill(table):
    """Numbers below 256 in 8 bytes each; some of them repeat."""
    random = numpy.random.default_rng(1)
    for first in range(0, len(table), 64):
        part = table[first : first + 64]
        part[:] = random.integers(0, 256, part.shape)
        part[:, ::3] = 7


class Ours:
    def __init__(self, rows, mode):
        self.name = f"memfold, {mode} mode"
        # Room for all of it: nothing moves unless it is asked to.
        limit = memfold.Memfold(resident_limit=rows * WIDTH * 8 * 2, mode=mode)
        self.table = limit.zeros((rows, WIDTH), dtype="i8")

    def page_out(self):
        memfold.page_out(self.table)
        return 1.0


class Systems:
    """Ordinary memory, without huge pages."""

    name = "host swap"

    def __init__(self, rows):
        self.memory = mmap.mmap(-1, rows * WIDTH * 8, flags=mmap.MAP_PRIVATE)
        self.memory.madvise(MADV_NOHUGEPAGE)
        self.table = numpy.frombuffer(self.memory, dtype="i8").reshape(rows, WIDTH)

    def page_out(self):
        self.memory.madvise(MADV_PAGEOUT)
        return self.fraction_out()

    def fraction_out(self):
        address = self.table.ctypes.data
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            pages = len(self.memory) // mmap.PAGESIZE
            pagemap.seek(address // mmap.PAGESIZE * 8)
            entries = numpy.frombuffer(pagemap.read(pages * 8), dtype="u8")
        return 1 - float((entries >> 63).sum()) / pages


def measure(contestant):
    out = contestant.page_out()
    start, used = time.perf_counter(), time.process_time()
    sums = [int(contestant.table[:, column].sum()) for column in COLUMNS]
    return time.perf_counter() - start, time.process_time() - used, out, sums


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    rows = arguments.megabytes * (1 << 20) // (WIDTH * 8)
    contestants = [Systems(rows), Ours(rows, "signal")]
    for contestant in contestants:
        fill(contestant.table)
    expected = [int(contestants[0].table[:, column].sum()) for column in COLUMNS]
    times = {contestant: [] for contestant in contestants}
    for run in range(arguments.runs + 1):
        for contestant in contestants:
            seconds, processor, out, sums = measure(contestant)
            assert sums == expected, f"{contestant.name}: {sums}, not {expected}"
            if out < 0.9:
                print(f"{contestant.name}: only {out:.0%} was moved out; is there swap space?")
            if run > 0:
                times[contestant].append((seconds, processor))
    for contestant, found in times.items():
        seconds, processor = zip(*found)
        print(
            f"{contestant.name}: {statistics.median(seconds):.3f} s "
            f"(spread {max(seconds) / min(seconds):.2f}), "
            f"CPU time {statistics.median(processor):.3f} s"
        )


if __name__ == "__main__":
    main()
