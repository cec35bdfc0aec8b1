"""What happens at ``os.fork``: a child does not inherit arrays, and is told so."""

import os
import warnings
import weakref
from typing import TYPE_CHECKING

from . import _memfold

if TYPE_CHECKING:
    from ._limit import Limit

#: All limits of this process that are still in use.
limits: "weakref.WeakSet[Limit]" = weakref.WeakSet()


class ForkWarning(RuntimeWarning):
    """A process that has arrays was forked: its child cannot access them."""


def _before() -> None:
    if any(limit._has_arrays() for limit in list(limits)):
        warnings.warn(
            "this process forks while it has memfold arrays; the child does not inherit them and is "
            "ended with a message if it accesses one (a multiprocessing.Pool would then wait for "
            "ever): use multiprocessing.set_start_method('spawn') or 'forkserver'",
            ForkWarning,
            stacklevel=3,
        )


def _in_child() -> None:
    _memfold.guard_inherited()


def install() -> None:
    """Called once, when the package is imported."""
    os.register_at_fork(before=_before, after_in_child=_in_child)
