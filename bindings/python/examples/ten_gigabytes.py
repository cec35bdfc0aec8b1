"""A computation on 10 GB of NumPy arrays in 2 GB of memory, with its result checked.

    pip install ./bindings/python && python bindings/python/examples/ten_gigabytes.py [--gigabytes 1]

A table of sensor readings, 16-bit steps of a slow curve as 64-bit numbers, is written, its columns
are summed (strided accesses), and it is smoothed along its rows. The sums are known beforehand.
"""

import argparse
import time

import numpy
import memfold

COLUMNS = 4096


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--gigabytes", type=float, default=10.0, help="size of the table; the limit is a fifth of it"
    )
    gigabytes = parser.parse_args().gigabytes
    rows = max(int(gigabytes * 1e9) // (COLUMNS * 8), 64)
    limit = memfold.limit(max(int(gigabytes * 1e9 / 5), 4 << 20))
    start = time.perf_counter()

    table = memfold.zeros((rows, COLUMNS), dtype="i8")
    wave = numpy.arange(COLUMNS, dtype="i8") // 64
    for row in range(rows):
        table[row] = wave + row % 1000

    in_rows = sum(row % 1000 for row in range(rows))
    for column in range(0, COLUMNS, COLUMNS // 4):
        found = int(table[:, column].sum())
        expected = in_rows + rows * (column // 64)
        assert found == expected, f"column {column}: {found}, not {expected}"

    total = 0
    for row in range(rows):
        table[row, 1:] = (table[row, 1:] + table[row, :-1]) // 2
        total += int(table[row].sum())
    smooth = wave.copy()
    smooth[1:] = (wave[1:] + wave[:-1]) // 2
    expected = int(smooth.sum()) * rows + in_rows * COLUMNS
    assert total == expected, f"{total}, not {expected}"

    stats = limit.stats()
    print(
        f"{table.nbytes / 1e9:.2f} GB in {stats['limit_bytes'] / 1e9:.2f} GB: right, "
        f"{time.perf_counter() - start:.1f} s; at most {stats['peak_resident_bytes'] / 1e9:.2f} GB "
        f"resident, {stats['pages_out']} pages out, {stats['pages_in']} in "
        f"({stats['pages_read_ahead']} read ahead), mode {stats['mode']}"
    )


if __name__ == "__main__":
    main()
