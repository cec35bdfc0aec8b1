"""Arrays whose pages are in a store on other machines."""

import datetime
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import unittest

import numpy
import memfold

MIB = 1 << 20


class Server:
    """A server of Redis or Valkey on this host."""

    def __init__(self, program, folder):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        arguments = ["--port", str(self.port), "--dir", folder, "--save", "", "--requirepass", "secret"]
        self.process = subprocess.Popen([program, *arguments], stdout=subprocess.DEVNULL)

    def wait(self):
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            except OSError:
                time.sleep(0.05)
        raise TimeoutError("the server does not start")

    def stop(self):
        self.process.kill()
        self.process.wait()


class Stores(unittest.TestCase):
    def larger_than_its_limit(self):
        """A server, a limit over it, and an array of 64 MiB under that."""
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        if program is None:
            self.skipTest("redis-server or valkey-server is missing")
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        server = Server(program, folder.name)
        self.addCleanup(server.stop)
        server.wait()
        store = memfold.Remote(f"valkey://127.0.0.1:{server.port}", password="secret", timeout=20)
        limit = memfold.Limit("24M", remote=store)
        random = numpy.random.default_rng(5)
        return server, limit, limit.array(random.integers(0, 1 << 32, 8 * MIB, dtype="i8"))

    def test_arrays_larger_than_a_limit_go_to_a_store(self):
        # A server without a CPU does not answer in time.
        for _ in range(3):
            failures = self.use_a_store()
            if failures == 0:
                break
        self.assertEqual(failures, 0)

    def use_a_store(self):
        """Has an array go to a store and come back. Returns how many calls to that failed."""
        server, limit, values = self.larger_than_its_limit()
        again = numpy.random.default_rng(5).integers(0, 1 << 32, 8 * MIB, dtype="i8")
        self.assertTrue((values == again).all())
        stats = limit.stats()
        for name in ("pages", "bytes", "pages_out", "pages_in", "faults"):
            self.assertGreater(stats[f"remote_{name}"], 1000, name)
        self.assertEqual(stats["remote_lost_pages"], 0)
        with self.assertRaisesRegex(OSError, "remote store"):
            memfold.Limit("24M", remote=f"valkey://127.0.0.1:{server.port}")
        del values, limit
        return stats["remote_failures"]

    def test_other_threads_go_on_while_a_limit_waits_for_its_store(self):
        # Without a CPU, the other thread does not go on either.
        for _ in range(3):
            gap, waited = self.longest_gap()
            if gap < waited / 2:
                break
        self.assertLess(gap, waited / 2)

    def longest_gap(self):
        """The longest that another thread does not go on for while a limit waits for its store, and how long that waits."""
        server, limit, values = self.larger_than_its_limit()
        self.assertGreater(limit.stats()["remote_pages_out"], 1000)
        server.process.send_signal(signal.SIGSTOP)
        beats = []

        def beat():
            while not is_over.wait(0.01):
                beats.append(time.monotonic())

        is_over = threading.Event()
        thread = threading.Thread(target=beat)
        thread.start()
        began = time.monotonic()
        # The last reference: memfold tries to remove what is in the store.
        del values, limit
        waited = time.monotonic() - began
        is_over.set()
        thread.join()
        self.assertGreater(waited, 1)
        times = sorted([began, *beats, began + waited])
        return max(after - before for before, after in zip(times, times[1:])), waited

    def test_what_cannot_be_is_an_error(self):
        for address in ("http://x", ""):
            with self.assertRaisesRegex(ValueError, "address"):
                memfold.Remote(address)
        for wrong in ({"replicas": 17}, {"timeout": 0}, {"time_to_live": datetime.timedelta(days=99)},
                      {"time_to_live": 60}, {"timeout": 1, "time_to_live": 5}):
            with self.assertRaisesRegex(ValueError, next(iter(wrong))):
                memfold.Remote("valkey://x", **wrong)
        with self.assertRaisesRegex(OSError, "a limit for everything|userfaultfd|connect"):
            memfold.Limit(resident_limit="24M", remote="valkey://127.0.0.1:1")
        shown = repr(memfold.Remote("valkey://x", password="secret"))
        self.assertEqual(shown, "<memfold.Remote at valkey://x>")


if __name__ == "__main__":
    unittest.main()
