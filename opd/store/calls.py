"""Calls about finished rollouts, such as a model that is asked how good an answer is: logged like those of an environment."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from opd.store.rollouts import RolloutStore


class StoredCalls:
    """The calls in a store, of one stage. Those of an earlier process are found again by what was asked."""

    def __init__(self, store: RolloutStore, stage: str) -> None:
        self._store, self._stage, self._orders = store, stage, dict[str, int]()

    @cached_property
    def _known(self) -> dict[tuple[str, str], tuple[Any, Any]]:
        """Read when somebody asks: most stages have none."""
        store, known = self._store, dict[tuple[str, str], tuple[Any, Any]]()
        ids = {store.entries.number(id): id for id in store.entries if id.startswith(f"{self._stage}/")}
        for row, record in store.calls(ids):
            known[ids[row], _text(record.call)] = (record.call, record.result)
            self._orders[ids[row]] = record.order + 1
        return known

    def find(self, about: str, call: Any) -> Any:
        found = self._known.get((about, _text(call)))
        return None if found is None else found[1]

    def add(self, about: str, call: Any, result: Any) -> None:
        self._known[about, _text(call)] = (call, result)
        order = self._orders.get(about, 0)
        self._orders[about] = order + 1
        self._store.record_environment(about, order, call, result)

    def earlier(self) -> Sequence[tuple[Any, Any]]:
        return list(self._known.values())


def _text(call: Any) -> str:
    return json.dumps(call, sort_keys=True)
