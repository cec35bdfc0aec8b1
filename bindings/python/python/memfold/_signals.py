"""Keeps the handlers by which arrays are read where ``faulthandler`` is switched on or off later."""

import faulthandler
import functools
from typing import Any, Callable

from . import _memfold


def _kept(switch: "Callable[..., Any]") -> "Callable[..., Any]":
    @functools.wraps(switch)
    def switched(*arguments: Any, **named: Any) -> Any:
        try:
            return switch(*arguments, **named)
        finally:
            _memfold.reinstall_handlers()

    return switched


def install() -> None:
    """Called once, when the package is imported. What ``faulthandler.enable`` installs would take each access to a page
    that is out for a crash, and what ``disable`` restores may be what was there before memfold."""
    faulthandler.enable = _kept(faulthandler.enable)
    faulthandler.disable = _kept(faulthandler.disable)
