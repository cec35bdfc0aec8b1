"""Forks again and again while a thread reads memory; every child verifies a part of what it inherited.

Prints a dot for each child that was right. After the fifth it waits until there is a file of the name
that it was given.
"""

import os
import sys
import threading
import time

PAGE = 4096
PAGES = 8192
CHILDREN = 60


def page(number):
    return number.to_bytes(8, "little") * (PAGE // 8)


data = bytearray(b"".join(page(number) for number in range(PAGES)))
done = threading.Event()
wrong = []


def is_right(number):
    return data[number * PAGE : (number + 1) * PAGE] == page(number)


def read():
    while not done.is_set():
        for number in range(0, PAGES, 13):
            if not is_right(number):
                wrong.append(number)
            if done.is_set():
                break


reader = threading.Thread(target=read)
reader.start()
for child in range(CHILDREN):
    while child == 5 and not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    process = os.fork()
    if process == 0:
        os._exit(0 if all(is_right(number) for number in range(child, PAGES, 61)) else 1)
    _, status = os.waitpid(process, 0)
    if status != 0:
        wrong.append((child, status))
        break
    sys.stdout.write(".")
    sys.stdout.flush()
done.set()
reader.join()
sys.exit(f"wrong: {wrong}" if wrong else 0)
