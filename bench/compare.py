#!/usr/bin/env python3
"""Runs real programs natively, under zram, and under memfold, alternately.

    cargo build --release -p memfold-cli
    sudo python3 bench/compare.py cpython redis-get native-overhead

zram (lz4) with a memory cgroup and `memfold run --resident` get the same
resident size.  Every run's result is checked; a wrong one ends the comparison
with exit code 1.  Medians, spread (max/min) and ratios are printed, and written
with all single runs by `--json FILE`.  Python's standard library and util-linux
suffice; the Redis cases need redis-server and redis-benchmark.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile

import host
import workloads

MIB = 1 << 20
KILLS_ALLOWED = 10


class Contestant:
    """A way to run a program: natively, in a cgroup over zram, or under memfold."""

    def __init__(self, name, options, resident=None):
        self.name = name
        self.options = options
        self.resident = resident
        self.group = None
        self.zram = None
        self.stats = {}

    @contextlib.contextmanager
    def ready(self):
        """Sets the host up for one run and puts it back."""
        with contextlib.ExitStack() as stack:
            if self.name.startswith("zram:"):
                self.zram = stack.enter_context(host.Zram(self.name.split(":")[1], 4096 * MIB))
                self.group = stack.enter_context(host.MemoryGroup(self.resident))
            self.stats_file = tempfile.NamedTemporaryFile(suffix=".json")  # noqa: SIM115
            stack.enter_context(self.stats_file)
            yield self

    def start(self, command, **how):
        """Starts `command` as this contestant runs programs."""
        if self.name == "memfold":
            limits = ["--resident", str(self.resident)] if self.resident else ["--limit", self.options.ample]
            command = [self.options.memfold, "run", *limits, "--quiet",
                       "--stats", self.stats_file.name, "--", *command]
        join = self.group.join if self.group else None
        return subprocess.Popen(command, preexec_fn=join, **how)

    def after(self):
        """What the run cost, as far as this contestant can say; call before leaving `ready`."""
        if self.zram:
            return {"zram_at_fullest": self.zram.fullest}
        if self.name == "memfold":
            with open(self.stats_file.name, encoding="utf-8") as file:
                return {"memfold": json.load(file)}
        return {}


def run_once(case, contestant):
    """One checked run.

    The kernel's out-of-memory killer now and then ends a program in a cgroup that
    is small against it although swap is free.  That is counted and the run
    repeated, for zram only: from any other contestant it is a wrong result.
    """
    for killed in range(KILLS_ALLOWED):
        try:
            with contestant.ready():
                figures = case.run(contestant)
                figures.update(contestant.after())
                figures["killed_before"] = killed
                return figures
        except workloads.Killed as error:
            if contestant.zram is None:
                raise
            print(f"  {error}: killed by the kernel, running it again", file=sys.stderr)
    raise workloads.WrongResult(f"{contestant.name}: killed {KILLS_ALLOWED} times at this resident size")


def alternate(case, contestants, options):
    """`options.runs` rounds of every contestant in turn; returns all runs by contestant."""
    results = {contestant.name: [] for contestant in contestants}
    for round_number in range(options.runs):
        for contestant in contestants:
            figures = run_once(case, contestant)
            results[contestant.name].append(figures)
            shown = "  ".join(f"{name} {figures[name]:.4g}" for name in case.metrics)
            print(f"  {case.name} round {round_number + 1}/{options.runs} {contestant.name:<10} {shown}",
                  file=sys.stderr, flush=True)
    return results


def summarise(case, results):
    """One row a contestant and metric: median, spread, and how many times better than the reference."""
    rows = []
    reference = case.reference if case.reference in results else next(iter(results))
    for metric, better in case.metrics.items():
        base = statistics.median(run[metric] for run in results[reference])
        for name, runs in results.items():
            values = [run[metric] for run in runs]
            middle = statistics.median(values)
            ratio = base / middle if better == "lower" else middle / base
            rows.append({
                "workload": case.name, "contestant": name, "metric": metric, "median": middle,
                "runs": len(values), "spread": max(values) / min(values),
                "reference": reference, "times_better_than_reference": ratio,
            })
    return rows


def show(rows):
    print(f"{'workload':<24}{'contestant':<12}{'metric':<26}{'median':>12}{'spread':>8}{'runs':>6}   times better")
    for row in rows:
        print(f"{row['workload']:<24}{row['contestant']:<12}{row['metric']:<26}{row['median']:>12.4g}"
              f"{row['spread']:>8.2f}{row['runs']:>6}   {row['times_better_than_reference']:.3f} x {row['reference']}")


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=["cpython", "redis-get", "native-overhead"],
                        help="cpython, redis-get, munmap, native-overhead (default: all but munmap)")
    parser.add_argument("--runs", type=int, default=5, help="rounds, each contestant once a round (default 5)")
    parser.add_argument("--against", default="native,zram:lz4,memfold",
                        help="contestants of all but native-overhead (default native,zram:lz4,memfold)")
    parser.add_argument("--memfold", default="target/release/memfold", help="the binary (default target/release/memfold)")
    parser.add_argument("--cpython-resident", type=int, default=30, metavar="MIB")
    parser.add_argument("--redis-resident", type=int, default=200, metavar="MIB")
    parser.add_argument("--redis-keys", type=int, default=workloads.REDIS_KEYS)
    parser.add_argument("--ample", default="4G", help="--limit of native-overhead, far above need (default 4G)")
    parser.add_argument("--json", metavar="FILE", help="write the host, all runs and the summary here")
    return parser.parse_args()


def main():
    options = parse()
    host.exit_on_signals()
    names = options.against.split(",")
    if ("memfold" in names or "native-overhead" in options.cases) and not os.path.exists(options.memfold):
        raise host.HostError(f"{options.memfold} is missing: cargo build --release -p memfold-cli")
    document = {"host": host.describe(), "command": sys.argv, "rows": [], "runs": {}}
    with tempfile.TemporaryDirectory(prefix="memfold-bench-") as folder:
        for group in options.cases:
            for case in workloads.cases(group, options, folder):
                contestants = [
                    Contestant(name, options, None if name == "native" or group == "native-overhead" else case.resident)
                    for name in (["native", "memfold"] if group == "native-overhead" else names)
                ]
                results = alternate(case, contestants, options)
                document["runs"][case.name] = results
                document["rows"] += summarise(case, results)
    show(document["rows"])
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)


if __name__ == "__main__":
    try:
        main()
    except host.HostError as error:
        sys.exit(f"compare.py: {error}")
    except workloads.WrongResult as error:
        print(f"compare.py: WRONG RESULT: {error}", file=sys.stderr)
        sys.exit(1)
