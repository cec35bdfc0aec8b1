from datetime import timedelta
from typing import Final, Optional, TypedDict, final, type_check_only

__all__ = [
    "STATS",
    "__version__",
    "ModeUnavailableError",
    "set_handler",
    "memory_at",
    "guard_inherited",
    "has_arrays",
    "reinstall_handlers",
    "parse_size",
    "Store",
    "Memfold",
    "Memory",
    "Pinned",
]

__version__: Final[str]
STATS: Final[dict[str, str]]

class ModeUnavailableError(OSError): ...

def set_handler(handler: object) -> object: ...
def memory_at(address: int) -> Optional[Memory]: ...
def guard_inherited() -> None: ...
def has_arrays() -> bool: ...
def reinstall_handlers() -> None: ...
def parse_size(text: str) -> int: ...

@final
class Store:
    def __new__(
        cls,
        address: str,
        credentials: tuple[Optional[str], Optional[str]],
        ca_certificates: Optional[str],
        replicas: int,
        times: tuple[timedelta, timedelta],
    ) -> Store: ...

@final
class Memfold:
    def __new__(
        cls,
        limit: Optional[int],
        resident_limit: Optional[int],
        mode: Optional[str],
        algorithm: str,
        store: Optional[Store],
    ) -> Memfold: ...
    def map(self, length: int) -> Memory: ...
    def handler(self, smallest: int) -> object: ...
    def is_inherited(self) -> bool: ...
    def stats(self) -> Stats: ...

@final
class Memory:
    @property
    def address(self) -> int: ...
    def __len__(self) -> int: ...
    def prefetch(self, start: int, end: int) -> None: ...
    def mark_cold(self, start: int, end: int) -> None: ...
    def page_out(self, start: int, end: int) -> int: ...
    def pin(self, start: int, end: int) -> Pinned: ...

@final
class Pinned: ...

# From here on generated: MEMFOLD_WRITE_STUBS=1 bindings/python/run-tests.sh
@type_check_only
class Stats(TypedDict):
    mode: str
    limit_bytes: int
    resident_limit_bytes: int
    resident_bytes: int
    peak_resident_bytes: int
    pool_bytes: int
    metadata_bytes: int
    mapped_bytes: int
    pinned_bytes: int
    stored_pages: int
    same_filled_pages: int
    stored_bytes: int
    faults_swap_in: int
    faults_zero_fill: int
    faults_cache: int
    pages_out: int
    pages_in: int
    pages_read_ahead: int
    pages_zero_filled: int
    direct_reclaims: int
    store_failures: int
    over_limit_pages: int
    pages_remapped: int
    remote_pages: int
    remote_bytes: int
    remote_pages_out: int
    remote_pages_in: int
    remote_faults: int
    remote_waiting: int
    remote_retries: int
    remote_failures: int
    remote_lost_pages: int
    remote_room_waits: int
