"""NumPy arrays larger than the memory they may use.

    import memfold
    memfold.limit("2G")
    a = memfold.zeros((40_000, 40_000), dtype="f4")     # 6.4 GB

Arrays are ordinary ``numpy.ndarray``. Their cold pages are compressed and come back when they are
touched. System calls work on them (``file.readinto(a)``, ``a.tofile(f)``) where the host lets an
engine's thread serve the kernel's faults (:meth:`Limit.stats` says ``mode: thread``). Where it does
not, give such arrays to system calls inside ``with memfold.pin(a):``.

Arrays are not inherited by forked processes: with ``multiprocessing``, use the ``spawn`` or
``forkserver`` start method and pass what a child needs.
"""

import contextlib
import re
import threading

import numpy as _numpy

from . import _memfold

__all__ = [
    "Limit", "limit", "zeros", "empty", "full", "array", "pin", "page_out", "will_need", "cold",
    "stats",
]

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def _bytes(size):
    """A number of bytes, from a number or a size such as "2G" or "512MiB"."""
    if size is None or isinstance(size, int):
        return size
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", str(size), re.IGNORECASE)
    if not found:
        raise ValueError(f"not a size: {size!r}; write it like 512M or 2G")
    return int(float(found[1]) * _UNITS[found[2].upper()])


class _Holder:
    """What NumPy keeps as the base of an array of bytes, and with it the memory."""

    def __init__(self, memory, length):
        self.memory = memory
        self.__array_interface__ = {
            "version": 3,
            "data": (memory.address, False),
            "shape": (length,),
            "typestr": "|u1",
        }


class Limit:
    """A limit on memory, and arrays under it.

    ``limit`` covers everything (resident pages, the compressed pool, records), ``resident_limit``
    resident pages alone. Sizes are numbers of bytes or texts such as ``"2G"``. ``mode`` is
    ``"thread"``, ``"signal"`` or ``"protection"``; without it, the first of these that the host
    allows.
    """

    def __init__(self, limit=None, *, resident_limit=None, mode=None, algorithm="lz4"):
        sizes = (_bytes(limit), _bytes(resident_limit))
        if mode is None:
            try:
                self._engine = _memfold.Engine(*sizes, "thread", algorithm)
            except OSError:
                self._engine = _memfold.Engine(*sizes, None, algorithm)
        else:
            self._engine = _memfold.Engine(*sizes, mode, algorithm)

    def zeros(self, shape, dtype=float):
        """A new array of zeros. It takes memory as it is written."""
        dtype = _numpy.dtype(dtype)
        if dtype.hasobject:
            raise TypeError("an array of Python objects cannot be kept outside Python's heap")
        shape = (shape,) if isinstance(shape, int) else tuple(int(side) for side in shape)
        if dtype.subdtype is not None:
            # Items that are arrays: more dimensions, as NumPy's own.
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
        memory = self._engine.map(length)
        # By way of bytes: not every type has a name in the array interface.
        return _numpy.asarray(_Holder(memory, length)).view(dtype).reshape(shape)

    #: Memory starts as zeros: there is nothing cheaper.
    empty = zeros

    def full(self, shape, value, dtype=None):
        """A new array that is filled with ``value``."""
        new = self.zeros(shape, _numpy.asarray(value).dtype if dtype is None else dtype)
        new[...] = value
        return new

    def array(self, values, dtype=None):
        """A copy of ``values``."""
        values = _numpy.asarray(values, dtype)
        new = self.zeros(values.shape, values.dtype)
        new[...] = values
        return new

    def stats(self):
        """Figures: a dictionary of bytes, pages and counts, and the mode."""
        return self._engine.stats()


_lock = threading.Lock()
_default = None


def limit(size=None, **options):
    """Sets the limit that arrays are made under from now on, and returns it."""
    global _default
    new = Limit(size, **options)
    with _lock:
        _default = new
    return new


def _limit(given):
    global _default
    if isinstance(given, Limit):
        return given
    if given is not None:
        return Limit(given)
    with _lock:
        if _default is None:
            _default = Limit()
        return _default


def zeros(shape, dtype=float, *, limit=None):
    """A new array of zeros: under ``limit`` (a :class:`Limit`, or the size of one of its own), or
    else under the one that :func:`limit` set, or else under half of the memory that there is."""
    return _limit(limit).zeros(shape, dtype)


def empty(shape, dtype=float, *, limit=None):
    """The same as :func:`zeros`."""
    return _limit(limit).zeros(shape, dtype)


def full(shape, value, dtype=None, *, limit=None):
    """A new array that is filled with ``value``."""
    return _limit(limit).full(shape, value, dtype)


def array(values, dtype=None, *, limit=None):
    """A copy of ``values``."""
    return _limit(limit).array(values, dtype)


def stats():
    """Figures of the limit that :func:`limit` set."""
    return _limit(None).stats()


def _range(values):
    """The memory under an array, and which bytes of it the array spans."""
    base = values
    while base is not None and not isinstance(base, _Holder):
        base = base.base if isinstance(base, _numpy.ndarray) else None
    if base is None:
        raise ValueError("the array is not one of memfold's")
    bounds = getattr(_numpy, "lib", None)
    bounds = getattr(bounds, "array_utils", _numpy).byte_bounds(values)
    start = base.memory.address
    return base.memory, bounds[0] - start, bounds[1] - start


@contextlib.contextmanager
def pin(values):
    """Keeps an array (or a slice of one) in memory: for devices, and for system calls where the mode
    is not ``thread``."""
    memory, start, end = _range(values)
    pinned = memory.pin(start, end)
    try:
        yield values
    finally:
        del pinned


def page_out(values):
    """Moves an array (or a slice of one) out of memory now. Returns how many bytes left."""
    memory, start, end = _range(values)
    return memory.page_out(start, end)


def will_need(values):
    """Brings an array (or a slice of one) in before it is touched, as far as there is room."""
    memory, start, end = _range(values)
    memory.will_need(start, end)


def cold(values):
    """Says that an array (or a slice of one) will not be touched soon: it goes first."""
    memory, start, end = _range(values)
    memory.cold(start, end)
