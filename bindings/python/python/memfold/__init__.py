"""NumPy under a memory limit: cold pages are compressed and come back when they are touched.

    import memfold

    with memfold.Limit("2G").allocating():              # NumPy's own arrays and temporaries
        result = numpy.sqrt(a * b + c)

    memfold.limit("2G")
    a = memfold.zeros((40_000, 40_000), dtype="f4")     # one array of 6.4 GB

Arrays are ordinary ``numpy.ndarray``. System calls work on them (``file.readinto(a)``,
``a.tofile(f)``) where the host allows thread mode (``memfold.stats()["mode"] == "thread"``). Elsewhere,
wrap such calls in ``with memfold.pin(a):``.

A forked child does not inherit arrays: with ``multiprocessing``, use the ``spawn`` or
``forkserver`` start method and pass what a child needs. A ``Pool`` with ``fork`` raises
:class:`ForkError` while there are arrays.
"""

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Optional, TypeVar, Union

from . import _fork, _signals
from ._fork import ForkError, ForkWarning, allow_forked_pools
from ._limit import Limit, Shape, SignalModeWarning, memory_under as _memory_under
from ._memfold import STATS, ModeUnavailableError, __version__
from ._remote import Remote
from ._sizes import Size

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike, NDArray

    from ._memfold import Stats

__all__ = [
    "Limit", "Memfold", "ModeUnavailableError", "ForkError", "ForkWarning", "SignalModeWarning",
    "Remote", "STATS", "Size", "Shape", "allow_forked_pools", "limit", "zeros", "ones", "empty", "full",
    "array", "zeros_like", "ones_like", "empty_like", "full_like", "pin", "page_out", "prefetch", "mark_cold",
    "stats", "__version__",
]

_Array = TypeVar("_Array", bound="NDArray[Any]")

#: Another name of :class:`Limit`.
Memfold = Limit

_fork.install()
_signals.install()
_lock = threading.Lock()
_default: Optional[Limit] = None


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


# Another thread may hold it at a fork, and is not in the child.
os.register_at_fork(after_in_child=_renew_lock)


def limit(
    size: Optional[Size] = None,
    *,
    resident_limit: Optional[Size] = None,
    mode: Optional[str] = None,
    algorithm: str = "lz4",
    remote: Union[Remote, str, None] = None,
) -> Limit:
    """Makes the :class:`Limit` that new arrays are under from now on, and returns it."""
    global _default
    new = Limit(
        size, resident_limit=resident_limit, mode=mode, algorithm=algorithm, remote=remote
    )
    with _lock:
        _default = new
    return new


def _limit_of(given: Union[Limit, Size, None]) -> Limit:
    global _default
    if isinstance(given, Limit):
        return given
    if given is not None:
        return Limit(given)
    found = _default
    if found is not None and not found._native.is_inherited():
        return found
    # Outside the lock, which a finalizer or a handler of a signal may ask for meanwhile in the same thread.
    new = Limit()
    with _lock:
        if _default is found:
            _default = new
        assert _default is not None
        return _default


def zeros(
    shape: Shape,
    dtype: "DTypeLike" = float,
    order: str = "C",
    *,
    limit: Union[Limit, Size, None] = None,
) -> "NDArray[Any]":
    """A new array of zeros: under ``limit`` (a :class:`Limit`, or the size of a new one), else under
    the one that :func:`limit` made, else under half of the memory that the host allows."""
    return _limit_of(limit).zeros(shape, dtype, order)


def empty(
    shape: Shape,
    dtype: "DTypeLike" = float,
    order: str = "C",
    *,
    limit: Union[Limit, Size, None] = None,
) -> "NDArray[Any]":
    """The same as :func:`zeros`."""
    return _limit_of(limit).zeros(shape, dtype, order)


def ones(
    shape: Shape,
    dtype: "DTypeLike" = float,
    order: str = "C",
    *,
    limit: Union[Limit, Size, None] = None,
) -> "NDArray[Any]":
    """A new array of ones."""
    return _limit_of(limit).ones(shape, dtype, order)


def full(
    shape: Shape,
    value: "ArrayLike",
    dtype: "Optional[DTypeLike]" = None,
    order: str = "C",
    *,
    limit: Union[Limit, Size, None] = None,
) -> "NDArray[Any]":
    """A new array that is filled with ``value``."""
    return _limit_of(limit).full(shape, value, dtype, order)


def array(
    values: "ArrayLike",
    dtype: "Optional[DTypeLike]" = None,
    order: str = "K",
    *,
    limit: Union[Limit, Size, None] = None,
) -> "NDArray[Any]":
    """A copy of ``values``."""
    return _limit_of(limit).array(values, dtype, order)


def zeros_like(
    values: "ArrayLike",
    dtype: "Optional[DTypeLike]" = None,
    order: str = "K",
    shape: Optional[Shape] = None,
    *,
    limit: Union[Limit, Size, None] = None,
) -> "NDArray[Any]":
    """A new array of zeros with the shape and the type of another."""
    return _limit_of(limit).zeros_like(values, dtype, order, shape)


def empty_like(
    values: "ArrayLike",
    dtype: "Optional[DTypeLike]" = None,
    order: str = "K",
    shape: Optional[Shape] = None,
    *,
    limit: Union[Limit, Size, None] = None,
) -> "NDArray[Any]":
    """The same as :func:`zeros_like`."""
    return _limit_of(limit).zeros_like(values, dtype, order, shape)


def ones_like(
    values: "ArrayLike",
    dtype: "Optional[DTypeLike]" = None,
    order: str = "K",
    shape: Optional[Shape] = None,
    *,
    limit: Union[Limit, Size, None] = None,
) -> "NDArray[Any]":
    """A new array of ones with the shape and the type of another."""
    return _limit_of(limit).ones_like(values, dtype, order, shape)


def full_like(
    values: "ArrayLike",
    value: "ArrayLike",
    dtype: "Optional[DTypeLike]" = None,
    order: str = "K",
    shape: Optional[Shape] = None,
    *,
    limit: Union[Limit, Size, None] = None,
) -> "NDArray[Any]":
    """A new array that is filled with ``value``, with the shape and the type of another."""
    return _limit_of(limit).full_like(values, value, dtype, order, shape)


def stats() -> "Stats":
    """Statistics of the limit that :func:`limit` made."""
    return _limit_of(None).stats()


@contextlib.contextmanager
def pin(values: _Array) -> Iterator[_Array]:
    """Keeps an array (or a slice of one) resident: for devices, and for system calls where the mode is
    not ``thread``."""
    spanned = _memory_under(values)
    pinned = spanned and spanned[0].pin(*spanned[1:])
    try:
        yield values
    finally:
        del pinned


def page_out(values: "NDArray[Any]") -> int:
    """Moves an array (or a slice of one) out now. Returns how many bytes were moved out."""
    spanned = _memory_under(values)
    return spanned[0].page_out(*spanned[1:]) if spanned else 0


def prefetch(values: "NDArray[Any]") -> None:
    """Swaps an array (or a slice of one) in before it is touched, as far as there is room.

    Pages on other machines stay there."""
    spanned = _memory_under(values)
    if spanned:
        spanned[0].prefetch(*spanned[1:])


def mark_cold(values: "NDArray[Any]") -> None:
    """Marks an array (or a slice of one) as cold: reclaim moves it out first."""
    spanned = _memory_under(values)
    if spanned:
        spanned[0].mark_cold(*spanned[1:])
