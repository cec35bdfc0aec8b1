"""The kernel side of the comparison: a zram swap device and a memory cgroup.

`Zram` and `MemoryGroup` are context managers.  Whatever they change is put back
when they are left, also by Ctrl-C or a termination signal (see
`exit_on_signals`).  Both refuse with one line when the host lacks something.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time

GROUP_NAME = f"memfold-bench-{os.getpid()}"


class HostError(Exception):
    """Something the comparison needs is missing; the text says what."""


def exit_on_signals():
    """Turn termination signals into SystemExit, so that context managers clean up."""

    def leave(number, _frame):
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)


def read(path):
    with open(path, encoding="ascii", errors="replace") as file:
        return file.read().strip()


def write(path, text):
    with open(path, "w", encoding="ascii") as file:
        file.write(str(text))


def run_quietly(*command):
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise HostError(f"{' '.join(command)} failed: {result.stderr.strip()}")


def require_root():
    if os.geteuid() != 0:
        raise HostError("zram and memory cgroups need root: run this with sudo")


class Zram:
    """A zram device used as swap, with a given algorithm and size in bytes."""

    def __init__(self, algorithm, size):
        self.algorithm = algorithm
        self.size = size
        self.device = None
        self.added = False
        self.swapping = False
        self.fullest = {"original": 0, "compressed": 0, "used": 0}
        self.finished = threading.Event()
        self.watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self):
        require_root()
        for tool in ("mkswap", "swapon", "swapoff"):
            if not shutil.which(tool):
                raise HostError(f"{tool} is not installed (package util-linux)")
        if len(read("/proc/swaps").splitlines()) > 1:
            raise HostError("other swap is in use; swapoff it first, or the comparison is not zram's")
        try:
            self._set_up()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _set_up(self):
        if not os.path.exists("/sys/class/zram-control/hot_add") and shutil.which("modprobe"):
            subprocess.run(["modprobe", "zram"], capture_output=True, check=False)
        if not os.path.exists("/sys/class/zram-control/hot_add"):
            raise HostError("this kernel has no zram (CONFIG_ZRAM, or: modprobe zram)")
        self.device = f"zram{read('/sys/class/zram-control/hot_add')}"
        self.added = True
        if self.algorithm not in read(f"{self.sys}/comp_algorithm").replace("[", "").replace("]", "").split():
            raise HostError(f"zram here cannot compress with {self.algorithm}: {read(f'{self.sys}/comp_algorithm')}")
        write(f"{self.sys}/comp_algorithm", self.algorithm)
        write(f"{self.sys}/disksize", self.size)
        node = f"/dev/{self.device}"
        deadline = time.monotonic() + 5
        while not os.path.exists(node):
            if time.monotonic() > deadline:
                major, minor = read(f"{self.sys}/dev").split(":")
                run_quietly("mknod", node, "b", major, minor)
            time.sleep(0.05)
        run_quietly("mkswap", node)
        run_quietly("swapon", "--priority", "100", node)
        self.swapping = True
        self.watcher.start()

    def _watch(self):
        """Keeps the figures of the moment at which the device held the most."""
        while not self.finished.wait(0.05):
            now = self.statistics()
            if now["original"] > self.fullest["original"]:
                self.fullest = now

    @property
    def sys(self):
        return f"/sys/block/{self.device}"

    def statistics(self):
        """Bytes of pages stored now, what they take compressed, and all memory used."""
        original, compressed, used = (int(word) for word in read(f"{self.sys}/mm_stat").split()[:3])
        return {"original": original, "compressed": compressed, "used": used}

    def __exit__(self, *_exception):
        self.finished.set()
        if self.swapping:
            self.watcher.join()
            run_quietly("swapoff", f"/dev/{self.device}")
            self.swapping = False
        if self.added:
            for _ in range(50):
                try:
                    write(f"{self.sys}/reset", 1)
                    write("/sys/class/zram-control/hot_remove", self.device.removeprefix("zram"))
                    break
                except OSError:
                    time.sleep(0.1)
            self.added = False


class MemoryGroup:
    """A memory cgroup, v1 or v2, whatever this host has, limited to `limit` bytes."""

    def __init__(self, limit):
        self.limit = limit
        self.version, parent = self._find()
        self.path = os.path.join(parent, GROUP_NAME)

    @staticmethod
    def _find():
        if os.path.exists("/sys/fs/cgroup/memory/memory.limit_in_bytes"):
            return 1, "/sys/fs/cgroup/memory"
        for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
            controllers = os.path.join(root, "cgroup.controllers")
            if os.path.exists(controllers) and "memory" in read(controllers).split():
                return 2, root
        raise HostError("no memory cgroup is mounted")

    def __enter__(self):
        require_root()
        if self.version == 2:
            subtree = os.path.join(os.path.dirname(self.path), "cgroup.subtree_control")
            if "memory" not in read(subtree).split():
                write(subtree, "+memory")
        os.mkdir(self.path)
        try:
            name = "memory.limit_in_bytes" if self.version == 1 else "memory.max"
            write(os.path.join(self.path, name), self.limit)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def join(self):
        """Move the calling process in: for use between fork and exec."""
        write(os.path.join(self.path, "cgroup.procs"), os.getpid())

    def __exit__(self, *_exception):
        try:
            members = read(os.path.join(self.path, "cgroup.procs")).split()
        except FileNotFoundError:
            return
        for member in members:
            try:
                os.kill(int(member), signal.SIGKILL)
            except ProcessLookupError:
                pass
        for _ in range(100):
            try:
                os.rmdir(self.path)
                return
            except OSError:
                time.sleep(0.05)
        print(f"could not remove {self.path}", file=sys.stderr)


def describe():
    """What a reader needs to know about the host beside the figures."""
    model = "unknown"
    for line in read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {
        "kernel": os.uname().release,
        "cpus": os.cpu_count(),
        "cpu": model,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "page_cluster": int(read("/proc/sys/vm/page-cluster")),
        "swappiness": int(read("/proc/sys/vm/swappiness")),
        "transparent_hugepage": read("/sys/kernel/mm/transparent_hugepage/enabled")
        if os.path.exists("/sys/kernel/mm/transparent_hugepage/enabled") else "absent",
        "load_average_at_start": os.getloadavg()[0],
    }
