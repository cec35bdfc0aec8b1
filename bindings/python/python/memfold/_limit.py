"""Limits, and arrays under them."""

import contextlib
import operator
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Optional, SupportsIndex, TypeVar, Union

import numpy as _numpy

from . import _memfold, _sizes
from ._memfold import ModeUnavailableError
from ._remote import Remote
from ._sizes import Size

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike, NDArray

    from ._memfold import Stats

#: The length of an array, or its length in each dimension.
Shape = Union[SupportsIndex, "Sequence[SupportsIndex]"]
_Array = TypeVar("_Array", bound="NDArray[Any]")

_MODES = ("thread", "signal", "protection")
_ALGORITHMS = ("lz4", "zstd")
_ORDERS = ("C", "F")
#: Bytes: NumPy's smaller allocations stay in the C library's heap.
SMALLEST = 64 << 10


class SignalModeWarning(RuntimeWarning):
    """System calls fail on arrays whose pages are out."""


class Holder:
    """The base of an array of bytes; NumPy keeps it, and it keeps the memory."""

    def __init__(self, memory: _memfold.Memory, length: int) -> None:
        self.memory = memory
        self.__array_interface__ = {
            "version": 3,
            "data": (memory.address, False),
            "shape": (length,),
            "typestr": "|u1",
        }


def _choice(value: object, name: str, choices: "tuple[str, ...]") -> None:
    if value not in choices:
        raise ValueError(f"{name} is {' or '.join(map(repr, choices))}, not {value!r}")


def _shape(shape: Shape) -> "tuple[int, ...]":
    try:
        sides: "tuple[int, ...]" = (operator.index(shape),)  # type: ignore[arg-type]
    except TypeError:
        try:
            sides = tuple(operator.index(side) for side in shape)  # type: ignore[union-attr]
        except TypeError:
            raise TypeError(f"a shape is an integer or a tuple of integers, not {shape!r}") from None
    if any(side < 0 for side in sides):
        raise ValueError(f"negative dimensions are not allowed: {sides}")
    return sides


def _order_of(values: "NDArray[Any]", order: str) -> str:
    """``K`` and ``A`` of ``*_like``: as the array lies in memory."""
    if order in ("K", "A"):
        is_fortran = values.flags.f_contiguous and not values.flags.c_contiguous
        return "F" if is_fortran else "C"
    return order


# Taken by the first warning, for good: a forked child may find it so.
_warned = threading.Lock()


def _warn_of_mode(mode: str, error: Exception) -> None:
    if not _warned.acquire(blocking=False):
        return
    # The frame that made the limit, perhaps by memfold.limit(). There is none where C calls it (atexit).
    level = 1
    frame: Optional[FrameType] = sys._getframe(level)
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] == "memfold":
        frame = frame.f_back
        level += 1
    warnings.warn(
        f"memfold works in {mode} mode here, in which system calls fail on arrays whose pages are "
        f"out (a.tofile(f), f.readinto(a)): wrap them in `with memfold.pin(a):`. To get thread mode: "
        f"{error}. mode={mode!r} silences this",
        SignalModeWarning,
        stacklevel=level + 1,
    )


class Limit:
    """A limit on memory, and arrays under it.

    ``limit`` covers everything (resident pages, the compressed pool, its metadata),
    ``resident_limit`` resident pages alone. Sizes are numbers of bytes or strings such as ``"2G"`` or
    ``"50%"``. Without either, the limit is half of the memory that the host or the cgroup allows.

    ``mode`` is ``"thread"``, ``"signal"`` or ``"protection"``; :class:`ModeUnavailableError` is
    raised if the host does not allow it. Without ``mode``, the first of these that the host allows is
    used; if that is not ``thread``, :class:`SignalModeWarning` is issued once.

    ``remote`` is a :class:`Remote`, or the address of one, to which pages go that do not fit. It needs
    ``limit``, and no ``protection`` mode.
    """

    def __init__(
        self,
        limit: Optional[Size] = None,
        *,
        resident_limit: Optional[Size] = None,
        mode: Optional[str] = None,
        algorithm: str = "lz4",
        remote: Union[Remote, str, None] = None,
    ) -> None:
        sizes = (_sizes.given(limit, "limit"), _sizes.given(resident_limit, "resident_limit"))
        _choice(algorithm, "algorithm", _ALGORITHMS)
        if mode is not None:
            _choice(mode, "mode", _MODES)
        if isinstance(remote, str):
            remote = Remote(remote)
        store = None if remote is None else remote._native
        try:
            self._native = _memfold.Memfold(*sizes, mode or "thread", algorithm, store)
        except ModeUnavailableError as error:
            if mode is not None:
                raise
            # The library chooses among the other modes.
            self._native = _memfold.Memfold(*sizes, None, algorithm, store)
            _warn_of_mode(self.mode, error)

    @property
    def mode(self) -> str:
        """How faults are served: ``"thread"``, ``"signal"`` or ``"protection"``."""
        return self.stats()["mode"]

    def __repr__(self) -> str:
        if self._native.is_inherited():
            return "<memfold.Limit of the process that this one was forked from>"
        stats = self.stats()
        total, resident = stats["limit_bytes"], stats["resident_limit_bytes"]
        size = _sizes.shown(total) if total else f"{_sizes.shown(resident)} resident"
        return (
            f"<memfold.Limit of {size}: {_sizes.shown(stats['mapped_bytes'])} in arrays, "
            f"{_sizes.shown(stats['resident_bytes'])} resident, "
            f"{_sizes.shown(stats['pool_bytes'])} in the pool, {stats['mode']} mode>"
        )

    @contextlib.contextmanager
    def allocating(self, smallest: Size = SMALLEST) -> Iterator["Limit"]:
        """What NumPy allocates in this context is under the limit: temporaries, results, and the
        arrays of libraries that use NumPy.

            with memfold.Limit("2G").allocating():
                result = numpy.sqrt(a * b + c)

        Allocations below ``smallest`` stay in the C library's heap, outside the limit. The context is
        that of ``contextvars``: other threads and tasks are not affected, and enter it themselves.
        Arrays may outlive it, and stay under the limit. A forked child allocates without a limit.
        """
        handler = self._native.handler(_sizes.in_bytes(smallest, "smallest"))
        before = _memfold.set_handler(handler)
        try:
            yield self
        finally:
            _memfold.set_handler(before)

    def zeros(
        self, shape: Shape, dtype: "DTypeLike" = float, order: str = "C"
    ) -> "NDArray[Any]":
        """A new array of zeros. It takes memory as it is written."""
        dtype = _numpy.dtype(dtype)
        _choice(order, "order", _ORDERS)
        if dtype.hasobject:
            raise TypeError("an array of Python objects cannot be kept outside Python's heap")
        sides = _shape(shape)
        if dtype.subdtype is not None:
            # Items that are arrays add dimensions, as in NumPy.
            dtype, item_shape = dtype.subdtype
            sides += item_shape
        length = dtype.itemsize
        for side in sides:
            length *= side
        if length == 0:
            return _numpy.zeros(sides, dtype)
        if length > 1 << 46:
            raise MemoryError(
                f"an array of shape {sides} and type {dtype} takes {length} bytes; the most is 2**46"
            )
        memory = self._native.map(length)
        # A view of bytes: the array interface has no name for some types.
        items = _numpy.asarray(Holder(memory, length)).view(dtype)
        return items.reshape(sides, order="F" if order == "F" else "C")

    def empty(
        self, shape: Shape, dtype: "DTypeLike" = float, order: str = "C"
    ) -> "NDArray[Any]":
        """The same as :meth:`zeros`: new memory reads as zeros."""
        return self.zeros(shape, dtype, order)

    def full(
        self,
        shape: Shape,
        value: "ArrayLike",
        dtype: "Optional[DTypeLike]" = None,
        order: str = "C",
    ) -> "NDArray[Any]":
        """A new array that is filled with ``value``."""
        new = self.zeros(shape, _numpy.asarray(value).dtype if dtype is None else dtype, order)
        new[...] = value
        return new

    def ones(
        self, shape: Shape, dtype: "DTypeLike" = float, order: str = "C"
    ) -> "NDArray[Any]":
        """A new array of ones."""
        return self.full(shape, 1, dtype, order)

    def array(
        self, values: "ArrayLike", dtype: "Optional[DTypeLike]" = None, order: str = "K"
    ) -> "NDArray[Any]":
        """A copy of ``values``."""
        values = _numpy.asarray(values, dtype)
        new = self.zeros(values.shape, values.dtype, _order_of(values, order))
        new[...] = values
        return new

    def zeros_like(
        self,
        values: "ArrayLike",
        dtype: "Optional[DTypeLike]" = None,
        order: str = "K",
        shape: Optional[Shape] = None,
    ) -> "NDArray[Any]":
        """A new array of zeros with the shape and the type of another."""
        values = _numpy.asarray(values)
        return self.zeros(
            values.shape if shape is None else shape,
            values.dtype if dtype is None else dtype,
            _order_of(values, order),
        )

    empty_like = zeros_like

    def full_like(
        self,
        values: "ArrayLike",
        value: "ArrayLike",
        dtype: "Optional[DTypeLike]" = None,
        order: str = "K",
        shape: Optional[Shape] = None,
    ) -> "NDArray[Any]":
        """A new array that is filled with ``value``, with the shape and the type of another."""
        new = self.zeros_like(values, dtype, order, shape)
        new[...] = value
        return new

    def ones_like(
        self,
        values: "ArrayLike",
        dtype: "Optional[DTypeLike]" = None,
        order: str = "K",
        shape: Optional[Shape] = None,
    ) -> "NDArray[Any]":
        """A new array of ones with the shape and the type of another."""
        return self.full_like(values, 1, dtype, order, shape)

    def stats(self) -> "Stats":
        """Statistics: a dictionary of the numbers that :data:`STATS` describes, and the mode."""
        return self._native.stats()


def _base_of(values: "NDArray[Any]") -> Any:
    """What has the memory of an array, below views, also those through the buffer protocol."""
    base: Any = values
    while True:
        if isinstance(base, _numpy.ndarray) and base.base is not None:
            base = base.base
        elif isinstance(base, memoryview):
            base = base.obj
        else:
            return base


def memory_under(values: "NDArray[Any]") -> "Optional[tuple[_memfold.Memory, int, int]]":
    """The memory under an array, and the offsets of the bytes that the array spans; ``None`` for an empty one."""
    if isinstance(values, _numpy.ndarray) and values.size == 0:
        return None
    base = _base_of(values)
    memory: Optional[_memfold.Memory] = None
    if isinstance(base, Holder):
        memory = base.memory
    elif isinstance(base, _numpy.ndarray):
        memory = _memfold.memory_at(base.__array_interface__["data"][0])
    if memory is None:
        raise ValueError(
            "the array's memory is not memfold's: make it with memfold.zeros or the like, or under "
            "Limit.allocating() (which leaves small arrays to the C library)"
        )
    bounds: Any = getattr(_numpy, "lib", None)
    bounds = getattr(bounds, "array_utils", _numpy).byte_bounds(values)
    start = memory.address
    return memory, bounds[0] - start, bounds[1] - start
