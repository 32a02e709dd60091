"""Small helpers of the store's tests. No torch."""

from __future__ import annotations

import numpy as np

from opd.records import SampledToken
from opd.store import RolloutStore


def begin(store: RolloutStore, name: str, prompt: tuple[int, ...] = (5, 6), domain: str = "d") -> None:
    store.begin(
        id=name, prompt_id=f"p/{name}", visit=1, sample=2, domain=domain, source="student", group="g", prompt_ids=np.array(prompt)
    )  # fmt: skip


def token(name: str, value: int) -> SampledToken:
    return SampledToken(name, value, -0.5 * value, -0.25 * value, -9.0, 3)


def write_rollout(store: RolloutStore, name: str, length: int, domain: str = "d") -> None:
    begin(store, name, domain=domain)
    for value in range(length):
        store.append(token(name, value))
    store.finish(name, "stop")
