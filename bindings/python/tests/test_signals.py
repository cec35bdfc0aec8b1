"""Handlers of SIGBUS and SIGSEGV that are installed after a limit was made."""

import unittest

import programs

PRELUDE = """
import faulthandler, memfold, numpy
def check(limit, a):
    memfold.page_out(a)
    assert (a == 7).all()
"""


def run(program):
    return programs.run(PRELUDE, program)


class Faulthandler(unittest.TestCase):
    def test_arrays_are_read_while_it_is_enabled_and_after(self):
        for mode in ("thread", "signal", "protection"):
            for before in ("", "faulthandler.enable()"):
                found = run(
                    f"""
                    {before}
                    limit = memfold.Limit("16M", mode={mode!r})
                    a = limit.full(1 << 20, 7)
                    check(limit, a)
                    faulthandler.enable()
                    check(limit, a)
                    faulthandler.disable()
                    check(limit, a)
                    """
                )
                self.assertEqual((found.returncode, found.stderr), (0, ""), (mode, before))

    def test_a_crash_is_reported_once(self):
        for mode, before in (("signal", ""), ("protection", ""), ("signal", "faulthandler.enable()")):
            found = run(
                f"""
                {before}
                limit = memfold.Limit("16M", mode={mode!r})
                a = limit.full(1 << 20, 7)
                faulthandler.enable()
                check(limit, a)
                faulthandler._sigsegv()
                """
            )
            self.assertEqual(found.returncode, -11, found.stderr)
            self.assertEqual(found.stderr.count("Fatal Python error"), 1, found.stderr)

    def test_one_that_was_not_wrapped_costs_a_report_and_no_array(self):
        found = run(
            """
            limit = memfold.Limit("16M", mode="signal")
            a = limit.full(1 << 20, 7)
            faulthandler.enable.__wrapped__()
            check(limit, a)
            """
        )
        self.assertEqual(found.returncode, 0, found.stderr)
        self.assertEqual(found.stderr.count("Fatal Python error"), 1, found.stderr)


if __name__ == "__main__":
    unittest.main()
