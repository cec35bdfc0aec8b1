#!/usr/bin/env python3
"""What `memfold run --proactive` gives back, and what it costs.

    bench/proactive/run.py [--memfold PATH] [--pairs N] [--seconds S] [PROGRAM...]

Three programs that use a small part of their memory: Redis with 400,000 keys of which 10,000 are asked for,
a Node program with the objects of pages that are not shown, and a JVM that answers requests beside a large
cache. Each serves requests at a fixed rate for S seconds (90 by default), with `--proactive` and without in
turn. Printed as JSON: memory (resident, pool and metadata, the mean of the last third) and the median and
99th percentile of a request's time, with the ratio of each pair's two.
"""
import argparse
import json
import random
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

PROGRAMS = Path(__file__).resolve().parents[2] / "crates/lab/programs/proactive"
RATE = 200  # requests a second


class Lines:
    """Requests to a program that answers a line with a line."""

    def __init__(self, run):
        self.run = run

    def ready(self):
        assert self.run.stdout.readline() == b"ready\n"

    def ask(self, number):
        self.run.stdin.write(b"%d\n" % number)
        self.run.stdin.flush()
        assert self.run.stdout.readline().strip() == b"%d" % number

    def end(self):
        self.run.stdin.close()


class Redis:
    """Requests to Redis over a Unix socket."""

    KEYS, HOT, BATCH = 400_000, 10_000, 20

    def __init__(self, run, path):
        self.run, self.path, self.socket = run, path, None

    def ready(self):
        while self.socket is None:
            try:
                self.socket = socket.socket(socket.AF_UNIX)
                self.socket.connect(self.path)
            except OSError:
                self.socket = None
                time.sleep(0.05)
        self.file = self.socket.makefile("rb")
        for first in range(0, self.KEYS, 1000):
            keys = range(first, first + 1000)
            text = b"".join(b"SET k%d %s\r\n" % (key, b"%d_" % key * 30) for key in keys)
            self.socket.sendall(text)
            for _ in keys:
                answer = self.file.readline()
                assert answer == b"+OK\r\n", answer

    def ask(self, number):
        keys = [(number * 7919 + step * 104729) % self.HOT for step in range(self.BATCH)]
        self.socket.sendall(b"".join(b"GET k%d\r\n" % key for key in keys))
        for key in keys:
            self.file.readline()
            assert self.file.readline().startswith(b"%d_" % key)

    def end(self):
        self.run.terminate()


def started(name, memfold, options):
    command = [memfold, "run", "--limit", "4G", "--summary", "never", *options, "--"]
    if name == "redis":
        path = f"/tmp/memfold-proactive-{random.randrange(10**9)}"
        arguments = ["--port", "0", "--unixsocket", path, "--save", "", "--loglevel", "warning"]
        run = subprocess.Popen([*command, "redis-server", *arguments], stdout=subprocess.DEVNULL)
        return Redis(run, path)
    programs = {"node": ["node", PROGRAMS / "pages.js"], "jvm": ["java", "-XX:-UseContainerSupport", PROGRAMS / "Cache.java"]}
    pipe = subprocess.PIPE
    return Lines(subprocess.Popen([*command, *programs[name]], stdin=pipe, stdout=pipe))


def measured(name, memfold, options, seconds):
    program = started(name, memfold, options)
    try:
        return served(program, memfold, seconds)
    finally:
        program.end()
        program.run.wait()


def served(program, memfold, seconds):
    program.ready()
    sizes, times, done = [], [], threading.Event()

    def watch():
        while not done.wait(1):
            text = subprocess.run([memfold, "stat", "--json", str(program.run.pid)], capture_output=True)
            now = json.loads(text.stdout)
            sizes.append(now["resident_bytes"] + now["pool_bytes"] + now["metadata_bytes"])

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    begin = time.monotonic()
    for number in range(int(seconds * RATE)):
        due = begin + number / RATE
        time.sleep(max(0, due - time.monotonic()))
        since = time.monotonic()
        program.ask(number)
        times.append(time.monotonic() - since)
    done.set()
    watcher.join()
    late = sorted(times[len(times) // 3 :])
    return {
        "mebibytes": statistics.mean(sizes[len(sizes) * 2 // 3 :]) / 2**20,
        "p50_us": late[len(late) // 2] * 1e6,
        "p99_us": late[len(late) * 99 // 100] * 1e6,
        "mean_us": statistics.mean(late) * 1e6,
    }


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--memfold", default=shutil.which("memfold") or "target/release/memfold")
    options.add_argument("--pairs", type=int, default=5)
    options.add_argument("--seconds", type=float, default=90)
    options.add_argument("programs", nargs="*", default=["redis", "node", "jvm"])
    options = options.parse_args()
    result = {}
    for name in options.programs:
        pairs = []
        for pair in range(options.pairs):
            modes = [[], ["--proactive"]]
            order = modes if pair % 2 == 0 else modes[::-1]
            runs = {bool(mode): measured(name, options.memfold, mode, options.seconds) for mode in order}
            pairs.append({"without": runs[False], "proactive": runs[True]})
            print(name, json.dumps(pairs[-1]), file=sys.stderr)
        ratios = {}
        for value in pairs[0]["without"]:
            all_ratios = sorted(pair["proactive"][value] / pair["without"][value] for pair in pairs)
            ratios[value] = {
                "median": statistics.median(all_ratios),
                "least": all_ratios[0],
                "most": all_ratios[-1],
            }
        result[name] = {"ratios": ratios, "pairs": pairs}
    json.dump(result, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
