"""NumPy arrays larger than the memory they may use.

    import memfold
    memfold.limit("2G")
    a = memfold.zeros((40_000, 40_000), dtype="f4")     # 6.4 GB

Arrays are ordinary ``numpy.ndarray``. Their cold pages are compressed and come back when they are
touched. System calls work on them (``file.readinto(a)``, ``a.tofile(f)``) where the host allows
thread mode (``memfold.stats()["mode"] == "thread"``). Elsewhere, wrap such calls in
``with memfold.pin(a):``.

A forked child does not inherit arrays: with ``multiprocessing``, use the ``spawn`` or
``forkserver`` start method and pass what a child needs.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Optional, TypeVar, Union

import numpy as _numpy

from . import _memfold
from ._memfold import STATS, ModeUnavailableError, __version__

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike, NDArray

    from ._memfold import Stats

__all__ = [
    "Memfold", "ModeUnavailableError", "STATS", "limit", "zeros", "empty", "full", "array", "pin",
    "page_out", "prefetch", "mark_cold", "stats", "__version__",
]

#: A number of bytes, or a size such as ``"512M"``, ``"2GB"`` or ``"50%"`` (of what the host allows).
Size = Union[int, str]
#: The length of an array, or its length in each dimension.
Shape = Union[int, "tuple[int, ...]", "list[int]"]
_Array = TypeVar("_Array", bound="NDArray[Any]")


def _bytes(size: Optional[Size]) -> Optional[int]:
    if size is None or isinstance(size, int):
        return size
    return _memfold.parse_size(str(size))


class _Holder:
    """The base of an array of bytes; NumPy keeps it, and it keeps the memory."""

    def __init__(self, memory: _memfold.Memory, length: int) -> None:
        self.memory = memory
        self.__array_interface__ = {
            "version": 3,
            "data": (memory.address, False),
            "shape": (length,),
            "typestr": "|u1",
        }


class Memfold:
    """A limit on memory, and arrays under it.

    ``limit`` covers everything (resident pages, the compressed pool, its metadata),
    ``resident_limit`` resident pages alone. Sizes are numbers of bytes or strings such as ``"2G"``.
    Without either, the limit is half of the memory that the host or the cgroup allows.

    ``mode`` is ``"thread"``, ``"signal"`` or ``"protection"``; :class:`ModeUnavailableError` is
    raised if the host does not allow it. Without ``mode``, the first of these that the host allows is
    used.
    """

    def __init__(
        self,
        limit: Optional[Size] = None,
        *,
        resident_limit: Optional[Size] = None,
        mode: Optional[str] = None,
        algorithm: str = "lz4",
    ) -> None:
        sizes = (_bytes(limit), _bytes(resident_limit))
        try:
            self._native = _memfold.Memfold(*sizes, mode or "thread", algorithm)
        except ModeUnavailableError:
            if mode is not None:
                raise
            # The library chooses among the other modes.
            self._native = _memfold.Memfold(*sizes, None, algorithm)

    def zeros(self, shape: Shape, dtype: "DTypeLike" = float) -> "NDArray[Any]":
        """A new array of zeros. It takes memory as it is written."""
        dtype = _numpy.dtype(dtype)
        if dtype.hasobject:
            raise TypeError("an array of Python objects cannot be kept outside Python's heap")
        shape = (shape,) if isinstance(shape, int) else tuple(int(side) for side in shape)
        if dtype.subdtype is not None:
            # Items that are arrays add dimensions, as in NumPy.
            dtype, item_shape = dtype.subdtype
            shape += item_shape
        items = 1
        for side in shape:
            if side < 0:
                raise ValueError("negative dimensions are not allowed")
            items *= side
        if items * dtype.itemsize == 0:
            return _numpy.zeros(shape, dtype)
        length = items * dtype.itemsize
        memory = self._native.map(length)
        # A view of bytes: the array interface has no name for some types.
        return _numpy.asarray(_Holder(memory, length)).view(dtype).reshape(shape)

    def empty(self, shape: Shape, dtype: "DTypeLike" = float) -> "NDArray[Any]":
        """The same as :meth:`zeros`: new memory reads as zeros."""
        return self.zeros(shape, dtype)

    def full(
        self, shape: Shape, value: "ArrayLike", dtype: "Optional[DTypeLike]" = None
    ) -> "NDArray[Any]":
        """A new array that is filled with ``value``."""
        new = self.zeros(shape, _numpy.asarray(value).dtype if dtype is None else dtype)
        new[...] = value
        return new

    def array(
        self, values: "ArrayLike", dtype: "Optional[DTypeLike]" = None
    ) -> "NDArray[Any]":
        """A copy of ``values``."""
        values = _numpy.asarray(values, dtype)
        new = self.zeros(values.shape, values.dtype)
        new[...] = values
        return new

    def stats(self) -> "Stats":
        """Statistics: a dictionary of the numbers that :data:`STATS` describes, and the mode."""
        return self._native.stats()


_lock = threading.Lock()
_default: Optional[Memfold] = None


def limit(
    size: Optional[Size] = None,
    *,
    resident_limit: Optional[Size] = None,
    mode: Optional[str] = None,
    algorithm: str = "lz4",
) -> Memfold:
    """Makes the :class:`Memfold` that new arrays are under from now on, and returns it."""
    global _default
    new = Memfold(size, resident_limit=resident_limit, mode=mode, algorithm=algorithm)
    with _lock:
        _default = new
    return new


def _memfold_of(given: Union[Memfold, Size, None]) -> Memfold:
    global _default
    if isinstance(given, Memfold):
        return given
    if given is not None:
        return Memfold(given)
    with _lock:
        if _default is None:
            _default = Memfold()
        return _default


def zeros(
    shape: Shape, dtype: "DTypeLike" = float, *, limit: Union[Memfold, Size, None] = None
) -> "NDArray[Any]":
    """A new array of zeros: under ``limit`` (a :class:`Memfold`, or the size of a new one), else under
    the one that :func:`limit` made, else under half of the memory that the host allows."""
    return _memfold_of(limit).zeros(shape, dtype)


def empty(
    shape: Shape, dtype: "DTypeLike" = float, *, limit: Union[Memfold, Size, None] = None
) -> "NDArray[Any]":
    """The same as :func:`zeros`."""
    return _memfold_of(limit).zeros(shape, dtype)


def full(
    shape: Shape,
    value: "ArrayLike",
    dtype: "Optional[DTypeLike]" = None,
    *,
    limit: Union[Memfold, Size, None] = None,
) -> "NDArray[Any]":
    """A new array that is filled with ``value``."""
    return _memfold_of(limit).full(shape, value, dtype)


def array(
    values: "ArrayLike",
    dtype: "Optional[DTypeLike]" = None,
    *,
    limit: Union[Memfold, Size, None] = None,
) -> "NDArray[Any]":
    """A copy of ``values``."""
    return _memfold_of(limit).array(values, dtype)


def stats() -> "Stats":
    """Statistics of the limit that :func:`limit` made."""
    return _memfold_of(None).stats()


def _range(values: "NDArray[Any]") -> "tuple[_memfold.Memory, int, int]":
    """The memory under an array, and the offsets of the bytes that the array spans."""
    base: Any = values
    while base is not None and not isinstance(base, _Holder):
        base = base.base if isinstance(base, _numpy.ndarray) else None
    if base is None:
        raise ValueError("the array was not made by memfold")
    bounds: Any = getattr(_numpy, "lib", None)
    bounds = getattr(bounds, "array_utils", _numpy).byte_bounds(values)
    start = base.memory.address
    return base.memory, bounds[0] - start, bounds[1] - start


@contextlib.contextmanager
def pin(values: _Array) -> Iterator[_Array]:
    """Keeps an array (or a slice of one) resident: for devices, and for system calls where the mode is
    not ``thread``."""
    memory, start, end = _range(values)
    pinned = memory.pin(start, end)
    try:
        yield values
    finally:
        del pinned


def page_out(values: "NDArray[Any]") -> int:
    """Moves an array (or a slice of one) out now. Returns how many bytes were moved out."""
    memory, start, end = _range(values)
    return memory.page_out(start, end)


def prefetch(values: "NDArray[Any]") -> None:
    """Swaps an array (or a slice of one) in before it is touched, as far as there is room."""
    memory, start, end = _range(values)
    memory.prefetch(start, end)


def mark_cold(values: "NDArray[Any]") -> None:
    """Marks an array (or a slice of one) as cold: reclaim moves it out first."""
    memory, start, end = _range(values)
    memory.mark_cold(start, end)
