"""A teacher in this process: a frozen model that scores exact token ids in packed batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opd.divergences import Projection, token_logprobs
from opd.models.language_model import LanguageModel
from opd.models.packing import Pack, pack
from opd.types import Rollout, Signal, SignalNeed, WeightsRef


class LocalTeacher:
    offers = frozenset({"logprobs_at", "hidden"})

    def __init__(
        self, name: str, role: str, model: LanguageModel, batch_tokens: int, stop_ids: tuple[int, ...]
    ) -> None:
        self.name, self.role, self.model = name, role, model
        self._batch_tokens, self._merge = batch_tokens, (stop_ids,)
        model.module.requires_grad_(False)

    def score(self, rollouts: Sequence[Rollout], need: SignalNeed) -> list[Signal]:
        """Hidden states, or log-probs of the response tokens, in the order of the rollouts."""
        if need.kind not in self.offers:
            raise ValueError(
                f"teacher {self.name!r} cannot give {need.kind!r}; it offers {', '.join(sorted(self.offers))}"
            )
        if need.ids is not None:
            raise ValueError(
                "a local teacher gives log-probs at the response tokens; other ids come from its hidden states"
            )
        found: dict[str, Signal] = {}
        for batch in pack(sorted(rollouts, key=lambda rollout: rollout.length), self._batch_tokens):
            with torch.no_grad():
                for rollout, values in self._score(Pack.of(batch, self.model.device), need):
                    found[rollout.id] = self._signal(rollout, values)
        return [found[rollout.id] for rollout in rollouts]

    def _score(self, batch: Pack, need: SignalNeed) -> list[tuple[Rollout, Any]]:
        hidden_ND = self.model.predict(batch).hidden
        if need.kind == "hidden":
            return list(zip(batch.rollouts, hidden_ND.split(batch.response_lengths), strict=True))
        ids_N = torch.from_numpy(np.concatenate([rollout.response_ids for rollout in batch.rollouts]).astype(np.int64))
        logprobs_N = token_logprobs(self.project(hidden_ND), ids_N.to(self.model.device), merge=self._merge).cpu()
        return [
            (rollout, part.numpy())
            for rollout, part in zip(batch.rollouts, logprobs_N.split(batch.response_lengths), strict=True)
        ]

    def _signal(self, rollout: Rollout, values: Any) -> Signal:
        start, length = rollout.prompt_ids.size, rollout.response_ids.size
        return Signal(
            teacher=self.name, teacher_version=0, role=self.role, view="same",
            spans=((0, length, start, start + length),), values=values, mask=np.ones(length, dtype=bool),
        )  # fmt: skip

    def project(self, hidden: Tensor) -> Projection:
        return self.model.project(hidden)

    def observe(self, step: int, weights: WeightsRef) -> None:
        """A frozen teacher does not move."""
