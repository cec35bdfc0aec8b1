"""Run by ../run-tests.sh, or, where the package is installed:

    python -m unittest discover bindings/python/tests
"""

import errno
import importlib.metadata
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
import warnings

import numpy
import memfold
import programs

MIB = 1 << 20
EXAMPLE = os.path.join(os.path.dirname(__file__), "..", "examples", "ten_gigabytes.py")


class Arrays(unittest.TestCase):
    def test_more_than_the_limit_is_kept(self):
        limit = memfold.Memfold(resident_limit="4M")
        values = limit.zeros((16, MIB // 8), dtype="i8")
        for row in range(16):
            values[row] = numpy.arange(MIB // 8) // 50 + row
        for row in reversed(range(16)):
            self.assertTrue((values[row] == numpy.arange(MIB // 8) // 50 + row).all())
        stats = limit.stats()
        self.assertGreater(stats["pages_out"], 3000)
        self.assertLessEqual(stats["peak_resident_bytes"], 4 * MIB)
        del values
        self.assertEqual(limit.stats()["mapped_bytes"], 0)

    def test_they_are_ordinary_arrays(self):
        values = memfold.Memfold("8M").array(numpy.arange(3000.0).reshape(30, 100))
        self.assertIs(type(values), numpy.ndarray)
        self.assertTrue(values.flags.writeable and values.flags.c_contiguous)
        numpy.testing.assert_array_equal(pickle.loads(pickle.dumps(values)), values)
        self.assertEqual(values[::3, ::-7].sum(), values.copy()[::3, ::-7].sum())
        numpy.multiply(values, 2, out=values)
        self.assertEqual(values[29, 99], 2 * 2999)
        slice_ = values[3:5]
        del values
        self.assertEqual(slice_[0, 0], 600)

    def test_system_calls_work_on_what_is_out(self):
        limit = memfold.Memfold("8M")
        if limit.stats()["mode"] != "thread":
            self.fail("this host does not serve the kernel's faults: run the tests as root, on Linux 6.8 or newer")
        values = limit.array(numpy.arange(MIB // 8))
        with tempfile.TemporaryFile() as file:
            memfold.page_out(values)
            values.tofile(file)
            file.seek(0)
            back = limit.zeros(MIB // 8, dtype=values.dtype)
            memfold.page_out(back)
            self.assertEqual(file.readinto(back), MIB)
            numpy.testing.assert_array_equal(back, values)

    def test_a_pin_serves_system_calls_in_every_mode(self):
        for mode in ("signal", "thread", "protection"):
            values = memfold.Memfold("8M", mode=mode).full((512,), 7, dtype="i8")
            reader, writer = os.pipe()
            memfold.page_out(values)
            with memfold.pin(values):
                self.assertEqual(os.write(writer, values), 4096)
                self.assertEqual(memfold.page_out(values), 0)
            self.assertEqual(os.read(reader, 4096), values.tobytes())
            os.close(reader)
            os.close(writer)

    def test_views_through_buffers_are_paged_and_pinned(self):
        values = memfold.Memfold("8M").full((1024,), 7, dtype="i8")
        for view in (
            numpy.frombuffer(values, "i8"),
            numpy.asarray(memoryview(values)),
            numpy.frombuffer(memoryview(values)[512:], "u1")[::2],
        ):
            memfold.page_out(values)
            memfold.mark_cold(view)
            memfold.prefetch(view)
            self.assertGreater(memfold.page_out(view), 0)
            with memfold.pin(view):
                self.assertLess(memfold.page_out(values), 8192)
            self.assertEqual(view[0], 7)
        with self.assertRaisesRegex(ValueError, "memory is not memfold's"):
            memfold.page_out(numpy.frombuffer(b"12345678"))

    def test_empty_arrays_need_nothing(self):
        limit = memfold.Memfold("8M")
        for values in (limit.zeros(0), limit.zeros((3, 0)), limit.zeros(8)[8:], numpy.zeros(0)):
            self.assertEqual(memfold.page_out(values), 0)
            memfold.mark_cold(values)
            memfold.prefetch(values)
            with memfold.pin(values) as pinned:
                self.assertIs(pinned, values)

    def test_kinds_of_arrays(self):
        limit = memfold.Memfold("8M")
        record = numpy.dtype([("x", "f8"), ("y", "i4")])
        records = limit.zeros(100, record)
        records["y"][5] = 3
        self.assertEqual((records.dtype, records[5]["y"]), (record, 3))
        self.assertEqual(limit.zeros((0, 5)).shape, (0, 5))
        self.assertEqual(limit.zeros(()).shape, ())
        self.assertEqual(memfold.full((2, 3), 1.5, limit="8M").sum(), 9)
        self.assertEqual(memfold.zeros(7, "u1", limit=limit).sum(), 0)

    def test_types_are_numpys(self):
        limit = memfold.Memfold("8M")
        for dtype in ("f4", ">i4", "?", "c16", "U5", "S3", "M8[ns]", [("x", "f8"), ("y", "i4", 2)],
                      ("f4", (3,)), ("u2", (2, 2)), [("v", "V7")]):
            own, expected = limit.zeros((5, 2), dtype), numpy.zeros((5, 2), dtype)
            self.assertEqual((own.dtype, own.shape), (expected.dtype, expected.shape))
            numpy.testing.assert_array_equal(own, expected)
            with memfold.pin(own[1:]):
                memfold.page_out(own)
            numpy.testing.assert_array_equal(own, expected)
        self.assertEqual(limit.zeros(()).shape, ())

    def test_bad_requests(self):
        with self.assertRaises(ValueError):
            memfold.Memfold("many")
        for size in ("", "5X", "101%", "-1G"):
            with self.assertRaisesRegex(ValueError, "size"):
                memfold.Memfold(size)
        with self.assertRaises(ValueError):
            memfold.Memfold(100)

    def test_bad_requests_of_arrays(self):
        with self.assertRaises(ValueError):
            memfold.Memfold("8M", mode="magic")
        with self.assertRaises(TypeError):
            memfold.Memfold("8M").zeros(5, dtype=object)
        with self.assertRaises(ValueError):
            memfold.page_out(numpy.zeros(5))

    def test_sizes_are_those_of_the_command_line(self):
        def limit_of(size):
            return memfold.Limit(size, mode="signal").stats()["limit_bytes"]

        for size in (200 << 20, "200M", "200m", "200MB", "200MiB", "200Mi", " 200 M ", "204800K"):
            self.assertEqual(limit_of(size), 200 << 20, size)
        self.assertEqual(limit_of("1.5G"), 3 << 29)
        self.assertEqual(limit_of(numpy.int64(16 << 20)), 16 << 20)
        self.assertAlmostEqual(limit_of("50%") / limit_of("25%"), 2, places=4)

    def test_errors_name_the_argument_and_what_it_may_be(self):
        for make, words in (
            (lambda: memfold.Limit(-1), "limit must be between 1 and"),
            (lambda: memfold.Limit(resident_limit=0), "resident_limit must be between"),
            (lambda: memfold.Limit("2X"), "limit: not a size: .2X.; a size is a number"),
            (lambda: memfold.Limit("99999999T"), "limit: not a size: .99999999T.; more bytes"),
            (lambda: memfold.Limit(mode="foo"), "mode is 'thread' or 'signal' or 'protection', not"),
            (lambda: memfold.Limit(algorithm="gzip"), "algorithm is 'lz4' or 'zstd', not 'gzip'"),
            (lambda: memfold.zeros(-5), "negative dimensions"),
            (lambda: memfold.zeros(5, order="X"), "order is 'C' or 'F', not 'X'"),
        ):
            with self.assertRaisesRegex(ValueError, words):
                make()
        with self.assertRaisesRegex(TypeError, "limit is a number of bytes or a size"):
            memfold.Limit(1.5)
        with self.assertRaisesRegex(TypeError, "a shape is an integer or a tuple of integers"):
            memfold.zeros(2.5)
        with self.assertRaisesRegex(MemoryError, "1152921504606846976 bytes"):
            memfold.zeros(1 << 60, "u1")
        with self.assertRaisesRegex(MemoryError, r"takes 70368744177665 bytes; the most is 2\*\*46"):
            memfold.zeros((1 << 46) + 1, "u1")

    def test_a_shape_may_be_of_numpys_integers(self):
        limit = memfold.Limit("8M")
        self.assertEqual(limit.zeros(numpy.int64(10)).shape, (10,))
        self.assertEqual(limit.zeros((numpy.int32(3), 4)).shape, (3, 4))
        self.assertEqual(limit.zeros([5]).shape, (5,))

    def test_the_functions_are_numpys(self):
        like = numpy.asfortranarray(numpy.arange(12, dtype="i2").reshape(3, 4))
        calls = (
            ("ones", (3,), {}),
            ("ones", ((3, 4), "f4", "F"), {}),
            ("full", ((2, 5), 7), {"order": "F"}),
            ("zeros", ((2, 5),), {"order": "F", "dtype": "c8"}),
            ("array", (like,), {}),
            ("array", (like,), {"order": "C"}),
            ("zeros_like", (like,), {}),
            ("ones_like", (like,), {"dtype": "f8"}),
            ("ones_like", ([1, 2],), {"shape": (2, 2)}),
            ("full_like", (like, 9), {"order": "C"}),
        )
        for name, given, named in calls:
            own = getattr(memfold, name)(*given, **named, limit="8M")
            expected = getattr(numpy, name)(*given, **named)
            numpy.testing.assert_array_equal(own, expected)
            for attribute in ("dtype", "shape", "strides"):
                self.assertEqual(getattr(own, attribute), getattr(expected, attribute), name)
        empty = memfold.empty_like(like, limit="8M")
        self.assertEqual((empty.shape, empty.strides), (like.shape, like.strides))
        self.assertEqual(memfold.empty(5, "i4", limit="8M").dtype, numpy.dtype("i4"))

    def test_a_limit_shows_what_it_holds(self):
        limit = memfold.Limit("64M", mode="signal")
        values = limit.zeros(1 << 20, "u1")
        values[:] = 1
        self.assertEqual(
            repr(limit).partition(", 0 B in the pool")[0],
            "<memfold.Limit of 64.0 MiB: 1.0 MiB in arrays, 1.0 MiB resident",
        )
        self.assertIn("8.0 MiB resident:", repr(memfold.Limit(resident_limit="8M")))
        self.assertEqual(limit.mode, "signal")
        self.assertIs(memfold.Memfold, memfold.Limit)

    def test_only_an_unavailable_mode_is_replaced(self):
        native = memfold._memfold.Memfold

        def refuse(error):
            def make(limit, resident_limit, mode, algorithm, store):
                if mode == "thread":
                    raise error
                return native(limit, resident_limit, mode, algorithm, store)

            return unittest.mock.patch.object(memfold._memfold, "Memfold", make)

        with refuse(memfold.ModeUnavailableError("refused")):
            with self.assertWarnsRegex(memfold.SignalModeWarning, "memfold.pin.*refused") as warned:
                self.assertIn(memfold.limit("8M").mode, ("signal", "protection"))
            self.assertEqual(warned.filename, __file__)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                memfold.Limit("8M")
            with self.assertRaises(memfold.ModeUnavailableError):
                memfold.Memfold("8M", mode="thread")
        with refuse(OSError("too many open files")), self.assertRaises(OSError):
            memfold.Memfold("8M")

    def test_no_python_function_needs_to_make_the_limit(self):
        ran = programs.run(
            "import atexit, memfold\n",
            """
            native = memfold._memfold.Memfold

            def make(limit, resident_limit, mode, *others):
                if mode == "thread":
                    raise memfold.ModeUnavailableError("refused")
                return native(limit, resident_limit, mode, *others)

            memfold._memfold.Memfold = make
            atexit.register(memfold.Limit, "8M")
            """,
        )
        self.assertIn("SignalModeWarning: memfold works in", ran.stderr)
        self.assertNotIn("ValueError", ran.stderr)

    def test_out_of_descriptors_is_no_reason_for_another_mode(self):
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.open(os.devnull, os.O_RDONLY)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
        try:
            with self.assertRaises(OSError) as caught:
                memfold.Memfold("8M")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        self.assertNotIsInstance(caught.exception, memfold.ModeUnavailableError)
        self.assertEqual(caught.exception.errno, errno.EMFILE)

    def test_the_first_arrays_of_two_threads_are_under_one_limit(self):
        found = programs.run(
            "import memfold, sys, threading\n",
            """
            native = memfold._memfold.Memfold
            both = threading.Barrier(2)
            def make(*arguments):
                made = native(*arguments)
                both.wait()
                return made
            memfold._memfold.Memfold = make
            arrays = []
            threads = [threading.Thread(target=lambda: arrays.append(memfold.zeros(4096, "u1"))) for _ in "ab"]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            sys.exit(memfold.stats()["mapped_bytes"] != 8192)
            """,
        )
        self.assertEqual(found.returncode, 0, found)

    def test_what_cannot_be_mapped_is_a_memory_error(self):
        found = programs.run(
            "import memfold, resource\n",
            """
            limit = memfold.Limit("8M")
            with open("/proc/self/statm") as file:
                used = int(file.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), resource.RLIM_INFINITY))
            try:
                limit.zeros(1 << 40, "u1")
            except MemoryError as error:
                print(error)
            assert limit.zeros(1 << 20, "u1").sum() == 0
            """,
        )
        self.assertEqual(found.returncode, 0, found)
        self.assertRegex(found.stdout, "cannot map a region: .*memory")

    def test_statistics_have_the_names_that_are_described(self):
        stats = memfold.Memfold("8M").stats()
        self.assertEqual(["mode", *memfold.STATS], list(stats))
        self.assertTrue(all(memfold.STATS.values()))

    def test_the_stubs_name_all_statistics(self):
        stubs = os.path.join(os.path.dirname(__file__), "..", "python", "memfold", "_memfold.pyi")
        with open(stubs) as file:
            text = file.read()
        head, marker, _ = text.partition("class Stats(TypedDict):\n")
        names = "".join(f"    {name}: int\n" for name in memfold.STATS)
        expected = f"{head}{marker}    mode: str\n{names}"
        if os.environ.get("MEMFOLD_WRITE_STUBS"):
            with open(stubs, "w") as file:
                file.write(expected)
        else:
            self.assertEqual(text, expected)

    def test_the_version_is_the_packages(self):
        self.assertEqual(memfold.__version__, importlib.metadata.version("memfold"))

    def test_the_example_in_small(self):
        run = subprocess.run(
            [sys.executable, EXAMPLE, "--gigabytes", "0.03"], capture_output=True, text=True
        )
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertIn("right", run.stdout)


if __name__ == "__main__":
    unittest.main()
