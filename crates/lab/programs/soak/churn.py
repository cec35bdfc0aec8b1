# Replaces objects continuously, their number constant; forked children verify them.
# Runs while the file named by its argument exists.
import hashlib
import os
import random
import sys
import time

RECORDS = 30_000
REPLACED = 200


def record(index, generation):
    text = f"record {index} of generation {generation} " * (3 + index % 9)
    return [index, generation, text, hashlib.blake2b(text.encode(), digest_size=8).digest()]


def check(records, indices):
    for index in indices:
        found = records[index]
        if found != record(index, found[1]):
            print(f"WRONG RESULT: record {index}", file=sys.stderr)
            os._exit(3)


records = {index: record(index, 0) for index in range(RECORDS)}
print("ready", flush=True)
generation = 0
while os.path.exists(sys.argv[1]):
    generation += 1
    replaced = random.choices(range(RECORDS), k=REPLACED)
    check(records, replaced)
    for index in replaced:
        records[index] = record(index, generation)
    if generation % 25 == 0:
        child = os.fork()
        if child == 0:
            check(records, random.choices(range(RECORDS), k=1000))
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0:
            sys.exit(3)
    time.sleep(0.02)
