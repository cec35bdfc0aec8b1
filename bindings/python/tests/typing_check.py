"""Checked by mypy, not run: the package's types as programs use them."""

from typing import Any

import memfold
from numpy.typing import NDArray

limit: memfold.Memfold = memfold.Memfold("64M", resident_limit=32 << 20, mode="signal")
table: NDArray[Any] = memfold.zeros((300, 4096), dtype="f4", limit=limit)
out: int = memfold.page_out(table[:10])
with memfold.pin(table) as pinned:
    pinned[0, 0] = 1
resident: int = limit.stats()["resident_bytes"]
mode: str = memfold.stats()["mode"]

with memfold.Limit("2GiB").allocating(smallest="1M") as under:
    same: memfold.Limit = under
like: NDArray[Any] = memfold.ones_like(table, order="F", shape=(3, 4))
other: NDArray[Any] = limit.full(5, 1.5, "f4", order="C")
shown: str = repr(limit)
store: memfold.Remote = memfold.Remote("valkey://10.0.0.7", password="secret", timeout=5)
far: memfold.Limit = memfold.limit("64M", remote=store)
near: memfold.Limit = memfold.Limit("64M", remote="valkeys://10.0.0.7")
memfold.allow_forked_pools()
