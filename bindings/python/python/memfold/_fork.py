"""What happens at ``os.fork``: a child does not inherit arrays, and is told so."""

import os
import sys
import warnings
from typing import Any

from . import _memfold

_pools_allowed = False


class ForkWarning(RuntimeWarning):
    """A process that has arrays was forked: its child cannot access them."""


class ForkError(RuntimeError):
    """A ``multiprocessing.Pool`` was to fork its workers while the process has arrays."""


def allow_forked_pools() -> None:
    """Has a ``multiprocessing.Pool`` fork its workers although the process has arrays: for pools whose
    workers access none of them. If one does, it is ended with a message, and the pool waits for ever for
    its result, as for that of any worker that is killed."""
    global _pools_allowed
    _pools_allowed = True


def _starts_a_pool() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        is_pools = frame.f_globals.get("__name__") == "multiprocessing.pool"
        if is_pools and frame.f_code.co_name == "__init__":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _audit(event: str, _arguments: "tuple[Any, ...]") -> None:
    """Refuses the fork of a pool: unlike an error of ``before``, one of an audit hook is raised by
    ``os.fork``."""
    if event == "os.fork" and not _pools_allowed and _starts_a_pool() and _memfold.has_arrays():
        raise ForkError(
            "this process has memfold arrays, which forked workers cannot access: a worker that tries is "
            "ended, and multiprocessing.Pool waits for its result for ever. Use "
            "multiprocessing.get_context('spawn').Pool() or 'forkserver', or "
            "concurrent.futures.ProcessPoolExecutor, which notices; or call memfold.allow_forked_pools() "
            "if the workers access no array of this process"
        )


def _before() -> None:
    if _memfold.has_arrays():
        warnings.warn(
            "this process forks while it has memfold arrays; the child does not inherit them and is "
            "ended with a message if it accesses one: use "
            "multiprocessing.set_start_method('spawn') or 'forkserver'",
            ForkWarning,
            stacklevel=3,
        )


def _in_child() -> None:
    _memfold.guard_inherited()


def install() -> None:
    """Called once, when the package is imported."""
    sys.addaudithook(_audit)
    os.register_at_fork(before=_before, after_in_child=_in_child)
