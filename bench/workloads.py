"""The programs that are compared, each with a check of what it computed."""

import contextlib
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time

import host
import redis_client

MIB = 1 << 20
PROGRAMS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../crates/cli/tests/programs")
REDIS_KEYS = 310_000
REDIS_VALUE_BYTES = 1000
REDIS_REQUESTS = 300_000


class WrongResult(Exception):
    """A program finished, but not with the result an unlimited run gives."""


class Killed(WrongResult):
    """The program was ended by SIGKILL, as the kernel does when a cgroup is out of memory."""


def check_exit(contestant, program, code):
    """Raises unless the program ended well."""
    if code == -9:
        raise Killed(f"{contestant.name}: {program}")
    if code != 0:
        raise WrongResult(f"{contestant.name}: {program} exited with {code}")


class CPython:
    """Builds 178 MB of objects and hashes them twice; the whole run is timed."""

    name = "cpython"
    metrics = {"seconds": "lower"}
    reference = "zram:lz4"

    def __init__(self, resident):
        self.resident = resident
        self.expected = None

    def run(self, contestant):
        command = [sys.executable, os.path.join(PROGRAMS, "objects.py")]
        started = time.monotonic()
        child = contestant.start(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        output, _ = child.communicate()
        seconds = time.monotonic() - started
        check_exit(contestant, "objects.py", child.returncode)
        self.expected = self.expected or output
        if output != self.expected:
            raise WrongResult(f"{contestant.name}: {output.strip()} but before {self.expected.strip()}")
        return {"seconds": seconds}


class RedisGet:
    """redis-benchmark GET of random keys; afterwards every key is read back and compared.

    50 connections, one redis-benchmark thread, 300,000 requests: once with one
    request in flight a connection, once with 16.  The server is filled before.
    """

    name = "redis-get"
    metrics = {"get_per_s": "higher", "get_pipelined_per_s": "higher", "get_p99_ms": "lower"}
    reference = "zram:lz4"

    def __init__(self, resident, keys, folder):
        for tool in ("redis-server", "redis-benchmark"):
            if not shutil.which(tool):
                raise host.HostError(f"{tool} is not installed (Debian: redis-server, redis-tools)")
        self.resident = resident
        self.folder = folder
        self.values = [redis_client.value(index, REDIS_VALUE_BYTES) for index in range(keys)]

    def run(self, contestant):
        port = free_port()
        child = contestant.start(
            ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
             "--dir", self.folder, "--loglevel", "warning"],
            stdout=subprocess.DEVNULL)
        try:
            client = connect(port, child)
            started = time.monotonic()
            client.fill(self.values)
            figures = {"fill_seconds": time.monotonic() - started}
            figures["used_memory_mib"] = used_memory(client) / MIB
            plain = self.benchmark(port, "1")
            figures["get_per_s"] = float(plain["rps"])
            figures["get_p50_ms"] = float(plain["p50_latency_ms"])
            figures["get_p99_ms"] = float(plain["p99_latency_ms"])
            figures["get_pipelined_per_s"] = float(self.benchmark(port, "16")["rps"])
            wrong = client.verify(self.values)
            if wrong:
                raise WrongResult(f"{contestant.name}: {wrong} of {len(self.values)} keys are not what was stored")
            client.socket.sendall(client.encode(b"SHUTDOWN", b"NOSAVE"))
            client.close()
            check_exit(contestant, "redis-server", child.wait(timeout=60))
            return figures
        except (subprocess.CalledProcessError, ConnectionError, EOFError):
            # The benchmark and the client fail when the server was killed under them.
            with contextlib.suppress(subprocess.TimeoutExpired):
                check_exit(contestant, "redis-server", child.wait(timeout=5))
            raise
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()

    def benchmark(self, port, pipeline):
        output = subprocess.run(
            ["redis-benchmark", "-p", str(port), "-t", "get", "-c", "50", "-n", str(REDIS_REQUESTS),
             "-r", str(len(self.values)), "-P", pipeline, "--csv"],
            capture_output=True, text=True, check=True).stdout.splitlines()
        header, row = ([word.strip('"') for word in line.split(",")] for line in output[-2:])
        return dict(zip(header, row))


class Munmap:
    """munmap of a range that is swapped out: the caller's time, and all processor time it costs."""

    metrics = {"munmap_ms": "lower", "munmap_cpu_ms": "lower"}
    reference = "zram:lz4"
    resident = 64 * MIB

    def __init__(self, mebibytes):
        self.name = f"munmap-{mebibytes}"
        self.mebibytes = mebibytes

    def run(self, contestant):
        program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "munmap.py")
        ballast = 2 * self.resident // MIB
        child = contestant.start([sys.executable, program, str(self.mebibytes), str(ballast)],
                                 stdout=subprocess.PIPE, text=True)
        output, _ = child.communicate()
        check_exit(contestant, "munmap.py", child.returncode)
        figures = json.loads(output)
        if figures["wrong_pages"]:
            raise WrongResult(f"{contestant.name}: {figures['wrong_pages']} pages have other contents")
        if contestant.name != "native" and figures["swapped_mib"] < 0.95 * self.mebibytes:
            raise WrongResult(f"{contestant.name}: only {figures['swapped_mib']} MiB were swapped out")
        return figures


class Compile:
    """g++ -O2 of a template-heavy source; the object file must be the same every time."""

    name = "compile"
    metrics = {"seconds": "lower"}
    reference = "native"
    resident = None

    def __init__(self, folder):
        if not shutil.which("g++"):
            raise host.HostError("g++ is not installed")
        self.object = os.path.join(folder, "templates.o")
        self.expected = None

    def run(self, contestant):
        source = os.path.join(PROGRAMS, "templates.cc")
        started = time.monotonic()
        child = contestant.start(["g++", "-std=c++17", "-O2", "-c", source, "-o", self.object])
        check_exit(contestant, "g++", child.wait())
        seconds = time.monotonic() - started
        with open(self.object, "rb") as file:
            found = hashlib.blake2b(file.read()).hexdigest()
        self.expected = self.expected or found
        if found != self.expected:
            raise WrongResult(f"{contestant.name}: the object file differs from the first run's")
        return {"seconds": seconds}


def cases(group, options, folder):
    """The cases of a group named on the command line."""
    cpython = CPython(options.cpython_resident * MIB)
    if group == "cpython":
        return [cpython]
    if group == "redis-get":
        return [RedisGet(options.redis_resident * MIB, options.redis_keys, folder)]
    munmap = [Munmap(mebibytes) for mebibytes in (64, 256)]
    if group == "munmap":
        return munmap
    if group in (case.name for case in munmap):
        return [case for case in munmap if case.name == group]
    if group != "native-overhead":
        raise host.HostError(f"no such case: {group} (cpython, redis-get, munmap, native-overhead)")
    overhead = [cpython, RedisGet(None, options.redis_keys, folder), Compile(folder)]
    for case in overhead:
        case.name += "-unlimited"
        case.reference = "native"
    return overhead


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def connect(port, child):
    """A client, as soon as the server answers."""
    deadline = time.monotonic() + 30
    while True:
        try:
            client = redis_client.Client(port)
            client.command(b"PING")
            return client
        except (ConnectionError, RuntimeError):
            if child.poll() is not None or time.monotonic() > deadline:
                raise WrongResult("redis-server does not answer") from None
            time.sleep(0.05)


def used_memory(client):
    for line in client.command(b"INFO", b"memory").splitlines():
        if line.startswith(b"used_memory_rss:"):
            return int(line.split(b":")[1])
    return 0
