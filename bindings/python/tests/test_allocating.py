"""NumPy's own allocations under a limit."""

import gc
import os
import re
import subprocess
import sys
import tempfile
import threading
import unittest

import numpy
import memfold

MIB = 1 << 20
README = os.path.join(os.path.dirname(__file__), "..", "README.md")


def handler():
    try:
        from numpy._core.multiarray import get_handler_name
    except ImportError:
        from numpy.core.multiarray import get_handler_name
    return get_handler_name


class Allocating(unittest.TestCase):
    def test_temporaries_and_results_are_under_the_limit(self):
        limit = memfold.Limit(resident_limit="8M")
        with limit.allocating():
            a = numpy.arange(2 * MIB)  # 16 MiB
            result = (a * 3 + 1) * 2 - a
        self.assertEqual(handler()(result), "memfold")
        self.assertTrue((result[::1000] == 5 * numpy.arange(0, 2 * MIB, 1000) + 2).all())
        stats = limit.stats()
        self.assertGreater(stats["pages_out"], 4096)
        self.assertLessEqual(stats["peak_resident_bytes"], 8 * MIB)
        del a, result
        self.assertEqual(limit.stats()["mapped_bytes"], 0)

    def test_arrays_outlive_the_context_and_the_limit(self):
        limit = memfold.Limit(resident_limit="4M")
        with limit.allocating():
            values = numpy.arange(MIB)
        self.assertEqual(handler()(), "default_allocator")
        self.assertEqual(handler()(numpy.arange(MIB)), "default_allocator")
        del limit
        gc.collect()
        self.assertEqual(int(values.sum()), MIB * (MIB - 1) // 2)

    def test_arrays_are_freed_on_any_thread(self):
        limit = memfold.Limit(resident_limit="8M")
        made = []

        def make():
            with limit.allocating():
                made.extend(numpy.full(100_000, number) for number in range(20))

        def drop():
            while made:
                values = made.pop()
                assert (values == values[0]).all()

        makers = [threading.Thread(target=make) for _ in range(4)]
        for thread in makers:
            thread.start()
        for thread in makers:
            thread.join()
        droppers = [threading.Thread(target=drop) for _ in range(4)]
        for thread in droppers:
            thread.start()
        for thread in droppers:
            thread.join()
        self.assertEqual(made, [])
        self.assertEqual(limit.stats()["mapped_bytes"], 0)

    def test_other_threads_allocate_as_before(self):
        seen = []
        with memfold.Limit("8M").allocating():
            thread = threading.Thread(target=lambda: seen.append(handler()(numpy.zeros(MIB))))
            thread.start()
            thread.join()
        self.assertEqual(seen, ["default_allocator"])

    def test_contexts_nest_and_end_by_exceptions(self):
        outer, inner = memfold.Limit("8M"), memfold.Limit("8M")
        with outer.allocating() as given:
            self.assertIs(given, outer)
            with self.assertRaises(KeyError), inner.allocating():
                kept = numpy.zeros(MIB)
                raise KeyError
            self.assertEqual(outer.stats()["mapped_bytes"], 0)
            also = numpy.zeros(MIB)
            self.assertEqual(outer.stats()["mapped_bytes"], also.nbytes)
        self.assertEqual(inner.stats()["mapped_bytes"], kept.nbytes)
        self.assertEqual(handler()(), "default_allocator")

    def test_new_memory_is_zeroed_where_numpy_asks_for_zeros(self):
        limit = memfold.Limit(resident_limit="8M")
        with limit.allocating(smallest=4096):
            for _ in range(3):
                for length in (1, 100, 511, 512, 10_000, 300_000):
                    values = numpy.zeros(length, "i8")
                    self.assertFalse(values.any())
                    values[:] = -1
                    del values

    def test_resizing_keeps_the_contents(self):
        limit = memfold.Limit(resident_limit="8M")
        with limit.allocating():
            lengths = (10, 5_000, 9_000, 1_000_000, 3_000_000, 20_000, 700_000, 7, 100_000)
            values = numpy.arange(10)
            for length in lengths:
                kept = min(length, len(values))
                before = values[:kept].copy()
                values.resize(length, refcheck=False)
                self.assertTrue((values[:kept] == before).all(), length)
                self.assertFalse(values[kept:].any(), length)
                values[:] = numpy.arange(length)
            growing = numpy.fromiter((number * 7 for number in range(200_000)), "i8")
            self.assertTrue((growing == 7 * numpy.arange(200_000)).all())
        del values, before, growing
        self.assertEqual(limit.stats()["mapped_bytes"], 0)

    def test_a_resize_loses_no_write_of_another_thread(self):
        limit = memfold.Limit("256M")
        with limit.allocating():
            values = numpy.zeros(500_000, "i8")
        is_over = threading.Event()
        lost = []

        def write():
            number = 0
            while not is_over.is_set():
                # Threads change between two rounds.
                if values[0] != number:
                    lost.append(number)
                number += 1
                values[0] = number

        thread = threading.Thread(target=write)
        thread.start()
        for length in range(1_000_000, 4_000_000, 500_000):
            values.resize(length, refcheck=False)
        is_over.set()
        thread.join()
        self.assertEqual(lost, [])

    def test_small_arrays_stay_outside(self):
        limit = memfold.Limit("8M")
        with limit.allocating():
            small = [numpy.ones(8000) for _ in range(100)]
            self.assertEqual(limit.stats()["mapped_bytes"], 0)
        with limit.allocating(smallest="16K"):
            small.append(numpy.ones(8000))
        self.assertGreaterEqual(limit.stats()["mapped_bytes"], 64_000)
        self.assertEqual(sum(values.sum() for values in small), 808_000)

    def test_all_kinds_of_arrays(self):
        with memfold.Limit(resident_limit="8M").allocating():
            objects = numpy.array([[1], "two", None] * 40_000, dtype=object)
            self.assertEqual(objects[-3:].tolist(), [[1], "two", None])
            text = numpy.array(["a" * 40] * 5000)
            self.assertTrue((numpy.char.upper(text) == "A" * 40).all())
            random = numpy.random.default_rng(1).random((400, 400))
            product = random @ numpy.linalg.inv(random)
            numpy.testing.assert_allclose(product, numpy.eye(400), atol=1e-8)
            ordered = numpy.sort(random.ravel())
            self.assertTrue((numpy.diff(ordered) >= 0).all())

    def test_advice_and_pins_take_them(self):
        limit = memfold.Limit("32M", mode="signal")
        with limit.allocating():
            values = numpy.arange(MIB)
        part = values[1000:-1000:3].reshape(-1)
        self.assertGreater(memfold.page_out(values), 7 * MIB)
        with tempfile.TemporaryFile() as file, memfold.pin(values):
            values.tofile(file)
            self.assertEqual(file.tell(), 8 * MIB)
        memfold.mark_cold(values)
        memfold.prefetch(values)
        self.assertEqual(part[0], 1000)
        with self.assertRaisesRegex(ValueError, "allocating"):
            memfold.page_out(numpy.zeros(5))

    def test_what_cannot_be_mapped_is_a_memory_error(self):
        with memfold.Limit("8M").allocating():
            with self.assertRaises(MemoryError):
                numpy.empty(1 << 60, "u1")
            with self.assertRaises(MemoryError):
                numpy.zeros((1 << 23, (1 << 23) + 1), "u1")

    def test_pandas_and_scipy_where_they_are(self):
        try:
            import pandas
        except ImportError:
            self.skipTest("SKIPPED: pandas is not installed")
        limit = memfold.Limit(resident_limit="8M")
        with limit.allocating():
            frame = pandas.DataFrame({"a": numpy.arange(MIB), "b": numpy.arange(MIB) % 7})
            sums = frame.groupby("b")["a"].sum()
        self.assertEqual(int(sums.sum()), MIB * (MIB - 1) // 2)
        self.assertGreater(limit.stats()["pages_out"], 0)

    def test_the_readmes_example(self):
        with open(README) as file:
            blocks = re.findall(r"```python\n(.*?)```", file.read(), re.DOTALL)
        self.assertIn("allocating", blocks[0])
        run = subprocess.run([sys.executable, "-c", blocks[0]], capture_output=True, text=True)
        self.assertEqual(run.returncode, 0, run.stderr)
        resident = [int(found) for found in re.findall(r"(\d+) MB", run.stdout)]
        self.assertEqual(len(resident), 2, run.stdout)
        # The arrays alive at once take twice the limit.
        self.assertLessEqual(resident[0], 256, run.stdout)


if __name__ == "__main__":
    unittest.main()
