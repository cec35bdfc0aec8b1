"""multiprocessing with spawned workers, which take arrays and return some. Run by test_forks.py."""

import multiprocessing

import memfold
import numpy


def work(values):
    with memfold.Limit("16M").allocating():
        return float((values * 2 + 1).sum())


def main():
    limit = memfold.Limit("16M")
    with limit.allocating():
        table = numpy.arange(400_000.0).reshape(4, 100_000)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        found = pool.map(work, list(table))
    assert found == [float((row * 2 + 1).sum()) for row in table], found
    print("right")


if __name__ == "__main__":
    main()
