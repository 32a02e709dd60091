"""A batch with everything known about it: rollouts, verdicts, the teachers' signals, and the student's own survey."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from opd.divergence import Projection
from opd.models.packing import Pack
from opd.teachers.local import LocalTeacher
from opd.types import Rollout, Signal, SignalKind

Signals = Mapping[tuple[str, SignalKind], Mapping[str, Signal]]  # (role, kind) -> rollout id -> signal
Scores = Mapping[str, float | None]  # rollout id -> reward; None: it could not be judged; absent: nobody was asked
ByRollout = dict[str, np.ndarray]  # rollout id -> (T,)


@dataclass
class Survey:
    """What the student knew of each token at the start of this batch's updates; filled as far as a term asked for it."""

    proximal: ByRollout = field(default_factory=dict)  # log-prob, under the transform that ratios use
    plain: ByRollout = field(default_factory=dict)  # log-prob, untempered
    entropy: ByRollout = field(default_factory=dict)
    reverse_kl: dict[str, ByRollout] = field(default_factory=dict)  # by role, like those below
    teacher_entropy: dict[str, ByRollout] = field(default_factory=dict)
    accepted: dict[tuple[str, int], ByRollout] = field(
        default_factory=dict
    )  # by role and k: argmax in the teacher's top k


@dataclass
class Judged:
    rollouts: Sequence[Rollout]
    signals: Signals = field(default_factory=dict)
    scores: Scores = field(default_factory=dict)
    survey: Survey = field(default_factory=Survey)

    def logprobs(self, role: str, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
        """Of the response tokens, under the model of a role."""
        found = self.signals[role, "logprobs_at"]
        return [np.asarray(found[rollout.id].values, dtype=np.float64) for rollout in rollouts]


def autocast_head(projection: Projection) -> Projection:
    """Under bf16 autocast on a GPU the head runs on tensor cores too; logits still come out in fp32."""
    if projection.hidden.is_cuda and projection.hidden.dtype != projection.weight.dtype:
        return replace(projection, weight=projection.weight.to(projection.hidden.dtype))
    return projection


def concatenated(rollouts: Sequence[Rollout], name: str) -> np.ndarray:
    return np.concatenate([getattr(rollout, name) for rollout in rollouts])


def token_ids(batch: Pack, device: torch.device) -> Tensor:
    return torch.from_numpy(concatenated(batch.rollouts, "response_ids").astype(np.int64)).to(device)


def segments(batch: Pack) -> np.ndarray:
    """(N,) number of the rollout each response token belongs to."""
    return np.repeat(np.arange(len(batch.rollouts)), batch.response_lengths)


def by_teacher(
    batch: Pack, signals: Mapping[str, Signal], teachers: Mapping[str, LocalTeacher], open_N: np.ndarray, device: torch.device
) -> Iterator[tuple[np.ndarray, Projection]]:  # fmt: skip
    """(rows, the teacher's projection of them), teacher after teacher; rows that are not open are left out.

    Batches are ordered by teacher, so mostly there is one.
    """
    owner = np.repeat([signals[rollout.id].teacher for rollout in batch.rollouts], batch.response_lengths)
    for name in dict.fromkeys(owner.tolist()):
        rows = np.flatnonzero((owner == name) & open_N)
        hidden = torch.cat(
            [signals[rollout.id].values for rollout in batch.rollouts if signals[rollout.id].teacher == name]
        )
        chosen = torch.from_numpy(np.flatnonzero(open_N[owner == name])).to(device)
        yield rows, teachers[name].project(hidden.to(device)[chosen])
