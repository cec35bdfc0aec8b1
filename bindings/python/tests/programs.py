"""Programs that tests run in a process of their own."""

import subprocess
import sys
import textwrap

#: Seconds after which a program hangs.
PATIENCE = 60


def run(prelude, program):
    return subprocess.run(
        [sys.executable, "-c", prelude + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
