"""Environment replay: what a tool or sandbox answered is logged, and on resume it is answered from the log."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from opd.errors import StoreError
from opd.store.rollouts import RolloutStore


class Replay:
    """The calls of one rollout, in order: first those in the log, then real ones.

    replay = Replay(store, "main/task:shell/7/0/0")
    listing = replay.call({"tool": "shell", "command": "ls"}, lambda: sandbox.run("ls"))

    Calls and results are plain JSON; a result comes back as JSON gives it, whether it was executed or replayed.
    """

    def __init__(self, store: RolloutStore, id: str) -> None:
        self._store, self._id = store, id
        self._logged = store.environment(id)
        self._order = 0

    def call(self, key: Any, execute: Callable[[], Any]) -> Any:
        """The logged result of this call; or execute it, and return only when its result is durable."""
        key, order = _plain(key), self._order
        if order < len(self._logged):
            logged = self._logged[order]
            if logged.call != key:
                raise StoreError(
                    f"rollout {self._id!r}: replay diverged at environment call {order}: the log has {logged.call!r}, "
                    f"now {key!r} is asked. The environment or its settings changed; start a new run."
                )
            result = logged.result
        else:
            result = _plain(execute())
            self._store.record_environment(self._id, order, key, result)
            self._store.commit(sync=True)
        self._order += 1
        return result


def _plain(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise StoreError(f"an environment's calls and results must be plain JSON ({error}): {value!r:.200}") from None
