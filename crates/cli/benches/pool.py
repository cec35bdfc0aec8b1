"""Three processes that start and end, again and again:

    memfold run --resident 48M -- python3 crates/cli/benches/pool.py ROUNDS STRINGS

Prints the median time of a round in milliseconds, and how much of it the starts take.
"""
import multiprocessing
import sys
import time

PROCESSES = 3


def work():
    pass


def one_round():
    began = time.perf_counter()
    workers = [multiprocessing.Process(target=work) for _ in range(PROCESSES)]
    for worker in workers:
        worker.start()
    started = time.perf_counter()
    for worker in workers:
        worker.join()
    return time.perf_counter() - began, started - began


if __name__ == "__main__":
    rounds, strings = int(sys.argv[1]), int(sys.argv[2])
    multiprocessing.set_start_method("fork")
    # What the children share, and write reference counts of.
    memory = [str(number) for number in range(strings)]
    times = [one_round() for _ in range(rounds)]
    median = sorted(times)[rounds // 2]
    print(f"{1000 * median[0]:.2f} ms, of which {1000 * median[1]:.2f} ms to start {PROCESSES} processes")
