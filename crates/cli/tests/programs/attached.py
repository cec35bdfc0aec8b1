"""Threads fill and check memory, and fork children that check it, and say after each round whether it was right."""

import hashlib
import os
import sys
import threading

log = open(sys.argv[1], "a")


def value(thread, number):
    return hashlib.md5(b"%d %d" % (thread, number)).hexdigest() + "x" * 400


def fill(thread, table):
    for number in range(5000):
        table[number] = value(thread, number)


def check(tables):
    return all(
        text == value(thread, number) for thread, table in enumerate(tables) for number, text in list(table.items())[::7]
    )


while True:
    tables = [{} for _ in range(4)]
    threads = [threading.Thread(target=fill, args=item) for item in enumerate(tables)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    child = os.fork()
    if child == 0:
        os._exit(0 if check(tables) else 1)
    right = check(tables)
    _, status = os.waitpid(child, 0)
    log.write("right\n" if right and status == 0 else "wrong: %s, child %d\n" % (right, status))
    log.flush()
