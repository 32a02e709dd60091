"""Whether an engine elsewhere has the weights that it was given: a fixed text, scored there and here.

An engine whose weights stayed behind answers in time and in shape. Only comparing tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from opd.errors import TrainingError
from opd.models.attention import Packed
from opd.models.language_model import LanguageModel
from opd.sampling.draws import request_key, uniforms
from opd.sampling.vllm_replica import Replica

TEXTS, LENGTH = 8, 9  # 64 tokens are compared
ROUNDING = 1e-3  # nats, on average, that two engines in fp32 stay well below
GROWTH = 4.0  # times what an engine was first off by, which is its own rounding
NEARER = 3.0  # times nearer to the weights before: it has those
SEEN = 1e-4  # nats below which nobody can tell one from the other


@dataclass(frozen=True, eq=False)
class Expected:
    """What the trainer says about the text with the weights of a version, and what it said with those before."""

    version: int
    now: np.ndarray
    before: np.ndarray
    settles: bool = (
        True  # whether it shows an engine's rounding: an adapter that adds nothing yet is not rounded either
    )

    def check(self, replica: Replica, found: Sequence[Sequence[float]], tolerance: float) -> None:
        said = np.array([value for text in found for value in text], dtype=np.float64)
        gap = float(np.abs(said - self.now).mean()) if said.shape == self.now.shape else np.inf
        allowed = tolerance if replica.noise is None else min(tolerance, max(ROUNDING, GROWTH * replica.noise))
        before = float(np.abs(said - self.before).mean()) if self.before.size and gap > SEEN else np.inf
        if gap <= allowed and before * NEARER >= gap:
            replica.noise = gap if replica.noise is None and self.settles else replica.noise
            return
        older = f"; from those it had before, by {before:.3g}" if np.isfinite(before) else ""
        raise TrainingError(
            f"sampler: vLLM at {replica.address} does not sample with the weights of version {self.version}: log-probs of a fixed text "
            f"differ by {gap:.3g} nats on average from the trainer's (allowed {allowed:.3g}){older}. Its weights stayed behind, or it "
            "computes something else. Nothing was sampled with them. Start the engines again and resume; sampler.tolerance is for "
            "engines that round more."
        )


class WeightsProbe:
    """`expect` reads the text with the model as it is now."""

    def __init__(self, model: LanguageModel, max_length: int, avoid: Sequence[int]) -> None:
        self._model = model
        known = np.setdiff1d(np.arange(model.size), np.asarray(avoid))
        length = min(LENGTH, max_length - 1)
        draws = uniforms(request_key(0, "sampler probe", 0, 0), 0, TEXTS * length)
        ids = known[(draws * known.size).astype(np.int64)].reshape(TEXTS, length)
        self.texts: list[list[int]] = ids.tolist()
        self._before = np.zeros(0)

    @torch.no_grad()
    def expect(self, version: int) -> Expected:
        model, lengths = self._model, [len(text) for text in self.texts]
        ids_T = torch.tensor(self.texts, device=model.device).flatten()
        logits = model.project(model.hidden(ids_T, Packed.of(lengths, model.device))).logits().float()
        found = logits.log_softmax(-1)[:-1].gather(-1, ids_T[1:, None])[:, 0].cpu().numpy().astype(np.float64)
        first = np.cumsum([0, *lengths])[1:-1] - 1  # what would predict another text
        now, before = np.delete(found, first), self._before
        self._before = now
        return Expected(version, now, before)
