"""The store of a rank that does not keep it: the leader writes every token, and shares what is read from there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from opd.store.rollouts import Fsync, RolloutStore
from opd.types import Author, SampledToken, StopReason, TokenColumns


class StoreElsewhere(RolloutStore):
    """Takes what every rank is told, and keeps nothing. To read from it is a mistake in the program."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __len__(self) -> int:
        return 0

    def configure(self, *, commit_ms: int, fsync: Fsync, hidden: bool) -> None:
        pass

    def append(self, token: SampledToken, author: Author = Author.STUDENT) -> None:
        pass

    def append_many(self, tokens: TokenColumns, author: Author | np.ndarray = Author.STUDENT) -> None:
        pass

    def finish(self, id: str, stop: StopReason) -> None:
        pass

    def record_signal(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def commit(self, sync: bool = False) -> None:
        pass

    def close(self) -> None:
        pass
