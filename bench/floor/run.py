#!/usr/bin/env python3
"""Programs under limits that cannot be held, with several shares kept resident (memfold run --floor).

  bench/floor/run.py [--memfold PATH] [--rounds N] [--program python,node,sort] [--floor 0%,10%,20%]

For each program: how much it needs, what of it is in the pool when most is out, and then two limits below that.
Prints, for each limit and floor, the median time with the least and the most, the peak of memory in MiB (limit and
excess), and the pages that came in. The floors are tried in turn, so that other load meets all alike. As root."""
import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time

WORDS = """
import os
words = [os.urandom(12).hex() + str(n) for n in range(600000)]
places = {word: n for n, word in enumerate(words)}
print(sum(places[word] for word in words))
"""
OBJECTS = (
    "let a=[];for(let i=0;i<700000;i++)a.push({i,s:'k'+i*7919,f:Math.sin(i)});"
    "let t=0;for(let r=0;r<3;r++)for(const o of a)t+=o.f+o.s.length;console.log(t.toFixed(6))"
)
PROGRAMS = {
    "python": ["python3", "-c", WORDS],
    "node": ["node", "--max-old-space-size=400", "-e", OBJECTS],
    "sort": ["sh", "-c", "seq 2000000 | sort -rn -S 1G --parallel=1 | md5sum"],
}
MIB = 1 << 20
# Of what is in the pool when nearly all is out.
LIMITS = [0.6, 0.4]
LEAST_LIMIT = 16 * MIB


def run(memfold, command, options):
    with tempfile.TemporaryDirectory() as folder:
        stats = os.path.join(folder, "stats.json")
        began = time.monotonic()
        subprocess.run(
            [memfold, "run", "--quiet", *options, "--stats", stats, "--", *command],
            stdout=subprocess.DEVNULL,
            check=True,
        )
        seconds = time.monotonic() - began
        with open(stats) as file:
            return seconds, json.load(file)


def measure(arguments, name):
    command = PROGRAMS[name]
    began = time.monotonic()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    native = time.monotonic() - began
    need = run(arguments.memfold, command, ["--limit", "4G"])[1]["peak_needed_bytes"]
    resident = str(max(int(need * 0.3), LEAST_LIMIT))
    _, found = run(arguments.memfold, command, ["--resident", resident])
    pool = found["peak_pool_bytes"] / (1 - int(resident) / need)
    for share in LIMITS:
        limit = max(int(pool * share), LEAST_LIMIT)
        print(
            f"{name}: {native:.2f} s natively, needs {need / MIB:.0f} MiB, {pool / MIB:.0f} compressed; "
            f"--limit {limit / MIB:.0f} MiB"
        )
        outcomes = {floor: [] for floor in arguments.floor}
        for _ in range(arguments.rounds):
            for floor in arguments.floor:
                options = ["--limit", str(limit), "--floor", floor]
                outcomes[floor].append(run(arguments.memfold, command, options))
        for floor, found in outcomes.items():
            times = [seconds for seconds, _ in found]
            peak = statistics.median(limit + stats["over_limit_pages"] * 4096 for _, stats in found)
            pages = statistics.median(stats["pages_in"] for _, stats in found)
            print(
                f"  {floor:>4}  {statistics.median(times):7.2f} s ({min(times):.2f} to {max(times):.2f})"
                f"  peak {peak / MIB:.0f} MiB  {pages:.0f} pages in",
                flush=True,
            )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--memfold", default="target/release/memfold")
    parser.add_argument("--rounds", type=int, default=1)
    split = lambda text: text.split(",")
    parser.add_argument("--program", type=split, default=list(PROGRAMS))
    parser.add_argument("--floor", type=split, default=["0%", "10%", "20%", "33%"])
    arguments = parser.parse_args()
    for name in arguments.program:
        measure(arguments, name)


if __name__ == "__main__":
    main()
