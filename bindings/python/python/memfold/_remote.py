"""A store on other machines, for what no longer fits a limit."""

from datetime import timedelta
from typing import Optional, Union

from . import _memfold


def _time(seconds: Union[float, timedelta], name: str) -> timedelta:
    time = seconds if isinstance(seconds, timedelta) else timedelta(seconds=seconds)
    if not timedelta(seconds=1) <= time <= timedelta(days=31):
        raise ValueError(f"{name} is from 1 second to 31 days, not {time}")
    return time


class Remote:
    """A store in Valkey or Redis to which pages go, encrypted, once the compressed ones take half of
    the limit.

    ``address`` is ``"valkey://HOST[:PORT][,HOST...]"``, or ``valkeys://`` for TLS; any node of a cluster
    leads to all others. ``ca_certificates`` is PEM text: the authorities that the servers of
    ``valkeys://`` are checked against, in place of the host's. A page counts as stored once
    ``replicas`` replicas have it, beside the primary. The store forgets what was not renewed for
    ``time_to_live`` (seconds or a ``timedelta``), which is at least twice ``timeout``, and 10 seconds or more.

    If the store does not return a page within ``timeout``, or returns another one, **the process is
    aborted**, before it reads wrong data.
    """

    def __init__(
        self,
        address: str,
        *,
        user: Optional[str] = None,
        password: Optional[str] = None,
        ca_certificates: Optional[str] = None,
        replicas: int = 0,
        timeout: Union[float, timedelta] = 60,
        time_to_live: Union[float, timedelta] = 3600,
    ) -> None:
        if not 0 <= replicas <= 16:
            raise ValueError(f"replicas is from 0 to 16, not {replicas}")
        times = (_time(timeout, "timeout"), _time(time_to_live, "time_to_live"))
        if times[1] < max(2 * times[0], timedelta(seconds=10)):
            raise ValueError("time_to_live must be at least twice timeout, and 10 seconds or more")
        self.address = address
        self._native = _memfold.Store(
            address, (user, password), ca_certificates, replicas, times
        )

    def __repr__(self) -> str:
        return f"<memfold.Remote at {self.address}>"
