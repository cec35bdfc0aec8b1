"""NumPy workload: two passes over three large arrays.

Prints a digest that depends on the size only.  Usage: arrays.py [MEGABYTES].
"""

import hashlib
import sys

import numpy


def main():
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 192
    count = megabytes * (1 << 20) // 3 // 8
    index = numpy.arange(count, dtype=numpy.int64)
    scrambled = index * 0x9E3779B1 % 1_000_003
    rows = scrambled.reshape(-1, 256) if count % 256 == 0 else scrambled[: count // 256 * 256].reshape(-1, 256)
    state = hashlib.blake2b(digest_size=16)
    for _ in range(2):
        running = numpy.cumsum(rows, axis=1)
        state.update(running.sum(axis=0).tobytes())
        state.update(numpy.sort(scrambled[:: 64]).tobytes())
        state.update(int(index.sum()).to_bytes(16, "little"))
    expected = (count - 1) * count // 2
    if int(index.sum()) != expected:
        print("MISMATCH")
        sys.exit(1)
    print(f"digest {state.hexdigest()}")


if __name__ == "__main__":
    main()
