"""Sizes as people write them: the same as on the command line."""

from typing import Optional, SupportsIndex, Union

from . import _memfold

#: A number of bytes, or a size such as ``"512M"``, ``"2GiB"`` or ``"50%"``.
Size = Union[SupportsIndex, str]


def in_bytes(size: Size, name: str) -> int:
    """A size in bytes; the errors name the argument."""
    if not isinstance(size, str):
        try:
            number = size.__index__()
        except AttributeError:
            raise TypeError(
                f"{name} is a number of bytes or a size such as '2G', not {type(size).__name__}"
            ) from None
        if not 0 < number < 1 << 63:
            raise ValueError(f"{name} must be between 1 and 2**63 bytes, not {number}")
        return number
    try:
        number = _memfold.parse_size(size)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if not 0 < number < 1 << 63:
        raise ValueError(f"{name}: {size!r} is not between 1 and 2**63 bytes")
    return number


def shown(number: int) -> str:
    """Bytes in the largest binary unit that leaves a number of at least 1."""
    value: float = number
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value /= 1024
    else:
        unit = "TiB"
    return f"{value:.0f} {unit}" if unit == "B" or value >= 99.95 else f"{value:.1f} {unit}"


def given(size: Optional[Size], name: str) -> Optional[int]:
    """A size that may be left out."""
    return None if size is None else in_bytes(size, name)
