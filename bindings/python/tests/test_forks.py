"""Forked children: they get an explanation, not a bare signal, and not other memory's contents."""

import os
import signal
import subprocess
import sys
import unittest

import programs

PRELUDE = (
    "import memfold, numpy, os, sys, mmap, multiprocessing, multiprocessing.pool, concurrent.futures\n"
)


def run(program):
    return programs.run(PRELUDE, program)


class Forks(unittest.TestCase):
    def test_an_access_is_explained(self):
        for mode in ("thread", "signal", "protection"):
            for make in ("limit.zeros(1 << 20)", "under()"):
                found = run(
                    f"""
                    limit = memfold.Limit("16M", mode={mode!r})
                    def under():
                        with limit.allocating():
                            return numpy.ones(1 << 20)
                    a = {make}
                    a[:] = 1
                    child = os.fork()
                    if child == 0:
                        print(a[5])
                        os._exit(0)
                    status = os.waitpid(child, 0)[1]
                    assert a.sum() == 1 << 20
                    sys.exit(os.WTERMSIG(status))
                    """
                )
                self.assertEqual(found.returncode, signal.SIGABRT, (mode, make, found))
                self.assertIn("was forked from one that has memfold", found.stderr)
                self.assertIn('set_start_method("spawn")', found.stderr)
                self.assertIn("ForkWarning", found.stderr)
                self.assertEqual(found.stdout, "")

    def test_a_child_maps_nothing_over_an_array(self):
        found = run(
            """
            a = memfold.zeros(8 << 20, limit="16M")
            start, end = a.ctypes.data, a.ctypes.data + a.nbytes
            if (child := os.fork()) == 0:
                others = [numpy.full(1 << 20, 7) for _ in range(30)]
                others.append(numpy.frombuffer(mmap.mmap(-1, 1 << 30), "u1"))
                over = [b for b in others if b.ctypes.data < end and start < b.ctypes.data + b.nbytes]
                os._exit(len(over))
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            """
        )
        self.assertEqual(found.returncode, 0, found)

    def test_a_child_may_compute_allocate_free_and_fork(self):
        found = run(
            """
            limit = memfold.Limit("16M")
            with limit.allocating():
                a = numpy.arange(1 << 20)
                if (child := os.fork()) == 0:
                    b = numpy.arange(1 << 20) * 2
                    b.resize(3 << 20, refcheck=False)
                    assert int(b.sum()) == (1 << 20) * ((1 << 20) - 1)
                    assert "forked" in repr(limit), repr(limit)
                    del a
                    c = memfold.zeros(1 << 20)
                    c[:] = 3
                    own = memfold.Limit("16M")
                    with own.allocating():
                        d = numpy.ones(1 << 20)
                    assert own.stats()["mapped_bytes"] > 0
                    try:
                        limit.zeros(5)
                    except OSError as error:
                        assert "forked" in str(error), error
                    if (grandchild := os.fork()) == 0:
                        os._exit(5)
                    assert os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]) == 5
                    os._exit(0)
                status = os.waitpid(child, 0)[1]
            assert int(a[-1]) == (1 << 20) - 1
            sys.exit(os.waitstatus_to_exitcode(status))
            """
        )
        self.assertEqual(found.returncode, 0, found)

    def test_a_child_forked_while_a_limit_is_made_makes_its_own(self):
        found = run(
            """
            import signal, threading
            native = memfold._memfold.Memfold
            begun, forked = threading.Event(), threading.Event()
            def make(*arguments):
                if threading.current_thread() is not threading.main_thread():
                    begun.set()
                    forked.wait()
                return native(*arguments)
            memfold._memfold.Memfold = make
            made = []
            thread = threading.Thread(target=lambda: made.append(memfold.zeros(1000)))
            thread.start()
            begun.wait()
            if (child := os.fork()) == 0:
                signal.alarm(20)
                memfold.zeros(1000)[:] = 1
                memfold.limit("16M")
                os._exit(memfold.stats()["limit_bytes"] != 16 << 20)
            status = os.waitpid(child, 0)[1]
            forked.set()
            thread.join()
            assert made[0].sum() == 0
            sys.exit(os.waitstatus_to_exitcode(status))
            """
        )
        self.assertEqual(found.returncode, 0, found)

    def test_arrays_that_outlive_their_limit_are_warned_of(self):
        for make in ("memfold.zeros(1000, limit='16M')", "under()"):
            found = run(
                f"""
                def under():
                    with memfold.Limit("16M").allocating():
                        return numpy.ones(1 << 20)
                a = {make}
                if (child := os.fork()) == 0:
                    os._exit(0)
                os.waitpid(child, 0)
                """
            )
            self.assertEqual((found.returncode, "ForkWarning" in found.stderr), (0, True), found)

    def test_a_fork_without_arrays_is_silent(self):
        found = run(
            """
            limit = memfold.Limit("16M")
            a = limit.zeros(1000)
            del a
            if (child := os.fork()) == 0:
                os._exit(0)
            os.waitpid(child, 0)
            """
        )
        self.assertEqual((found.returncode, "ForkWarning" in found.stderr), (0, False), found)

    def test_a_forked_worker_gives_an_explanation_and_no_result(self):
        found = run(
            """
            def work(index):
                return float(a[index])
            a = memfold.full(1 << 20, 3.0, limit="16M")
            context = multiprocessing.get_context("fork")
            with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
                try:
                    print(list(pool.map(work, range(4))))
                except concurrent.futures.process.BrokenProcessPool:
                    sys.exit(9)
            """
        )
        self.assertEqual((found.returncode, found.stdout), (9, ""), found)
        self.assertIn("was forked from one that has memfold", found.stderr)
        self.assertIn("spawn", found.stderr)

    def test_a_pool_that_would_wait_for_ever_is_refused(self):
        found = run(
            """
            def work(index):
                return float(a[index])
            a = memfold.full(1 << 20, 3.0, limit="16M")
            context = multiprocessing.get_context("fork")
            try:
                with context.Pool(2) as pool:
                    print(pool.map(work, range(4)))
            except memfold.ForkError as error:
                assert "get_context('spawn')" in str(error), error
                sys.exit(9)
            """
        )
        self.assertEqual((found.returncode, found.stdout), (9, ""), found)

    def test_a_pool_is_forked_where_there_are_no_arrays_and_where_that_is_wanted(self):
        found = run(
            """
            def work(index):
                return index * index
            squares = [0, 1, 4, 9]
            context = multiprocessing.get_context("fork")
            limit = memfold.Limit("16M")
            with context.Pool(2) as before:
                a = limit.full(1 << 20, 3.0)
                assert before.map(work, range(4)) == squares
                with multiprocessing.pool.ThreadPool(2) as threads:
                    assert threads.map(work, range(4)) == squares
                process = context.Process(target=work, args=(5,))
                process.start()
                process.join()
                assert process.exitcode == 0, process
            del a
            with context.Pool(2) as pool:
                assert pool.map(work, range(4)) == squares
            b = limit.full(1 << 20, 3.0)
            memfold.allow_forked_pools()
            with context.Pool(2) as pool:
                assert pool.map(work, range(4)) == squares
            assert b.sum() == 3 << 20
            print("right")
            """
        )
        self.assertEqual((found.returncode, found.stdout.strip()), (0, "right"), found)

    def test_spawned_workers_have_limits_of_their_own(self):
        path = os.path.join(os.path.dirname(__file__), "spawned.py")
        found = subprocess.run(
            [sys.executable, path], capture_output=True, text=True, timeout=programs.PATIENCE
        )
        self.assertEqual((found.returncode, found.stdout.strip()), (0, "right"), found)


if __name__ == "__main__":
    unittest.main()
