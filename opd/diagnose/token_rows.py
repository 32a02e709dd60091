"""What student and teacher say about every token of some rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from opd.diagnose.bench import Bench
from opd.divergences import Projection, likeliest_ids, statistics
from opd.models.packing import Pack, pack
from opd.objective.batch import beside
from opd.teachers.table import K
from opd.teachers.views import texts_for
from opd.types import Rendered, Rollout, SignalNeed, TeacherLike

BUDGET = 8192  # tokens of one pass


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Of one rollout, (T,) each; NaN: not known. Stop ids are one event."""

    student: np.ndarray  # log-prob of the token
    teacher: np.ndarray
    kl: np.ndarray  # student to teacher, nats
    entropy: np.ndarray  # of the student
    teacher_entropy: np.ndarray
    overlap: np.ndarray  # of the two top K
    mass: np.ndarray  # of the teacher's probability, what lies on the student's top K
    teacher_stop: np.ndarray  # its probability of ending here

    @classmethod
    def unknown(cls, size: int) -> TokenRows:
        return cls(*(np.full(size, np.nan) for _ in fields(cls)))

    @property
    def ratio(self) -> np.ndarray:
        """The teacher's advantage for the token."""
        found: np.ndarray = self.teacher - self.student
        return found


@torch.no_grad()
def token_rows(
    bench: Bench, name: str, rollouts: Sequence[Rollout], rewards: Mapping[str, float | None]
) -> list[TokenRows]:
    """One for each rollout; of an answer that the teacher's view shows nothing of, nothing is known."""
    teacher, view = bench.teachers[name], bench.kinds[name].view
    groups = bench.groups(rollouts, name, rewards)
    found = {rollout.id: TokenRows.unknown(rollout.response_ids.size) for rollout in rollouts}
    for batch in pack(rollouts, BUDGET):
        seen = texts_for(view, batch, bench.prompts, groups, teacher.context)
        shown = [
            (rollout, text)
            for rollout, text in zip(batch, seen, strict=True)
            if text is not None and rollout.response_ids.size
        ]
        if shown and "hidden" in teacher.offers and not view.crosses:
            found |= _exact(bench, teacher, shown)
        elif shown:
            found |= _at_tokens(teacher, shown)
    return [found[rollout.id] for rollout in rollouts]


def _exact(bench: Bench, teacher: TeacherLike, shown: Sequence[tuple[Rollout, Rendered]]) -> dict[str, TokenRows]:
    """From hidden states: both distributions are whole."""
    rollouts, student = [rollout for rollout, _ in shown], bench.student
    signals = teacher.score(rollouts, SignalNeed("hidden"), [text for _, text in shown])
    mask = np.concatenate([signal.mask for signal in signals])
    hidden = torch.cat([signal.values.to(student.device) for signal in signals])
    rows = torch.from_numpy(np.flatnonzero(mask)).to(student.device)
    ours, theirs = student.predict(Pack.of(rollouts, student.device)).rows(rows), teacher.project(hidden[rows])
    ids = np.concatenate([rollout.response_ids for rollout in rollouts])[mask].astype(np.int64)
    stats = statistics(
        ours, theirs, merge=(bench.stop_ids,), tokens=torch.from_numpy(ids).to(student.device), overlap=K
    )
    mass = _mass(ours, theirs, bench.stop_ids) if isinstance(theirs, Projection) else None
    columns = (
        stats.logprob,
        stats.teacher_logprob,
        stats.reverse_kl,
        stats.entropy,
        stats.teacher_entropy,
        stats.overlap,
        mass,
        stats.teacher_stop,
    )
    whole = [_spread(column, mask) for column in columns]
    ends = np.cumsum([rollout.response_ids.size for rollout in rollouts])[:-1]
    parts = [np.split(column, ends) for column in whole]
    return {rollout.id: TokenRows(*(part[at] for part in parts)) for at, rollout in enumerate(rollouts)}


def _mass(student: Projection, teacher: Projection, stop_ids: tuple[int, ...]) -> Tensor:
    """Of the teacher's K likeliest ids, the probability of those that are among the student's; stops are one id."""
    (ours, _, _, _), (theirs, logprobs, _, _) = (likeliest_ids(side, K) for side in (student, teacher))
    stops = torch.tensor(stop_ids, device=ours.device)
    ours, theirs = (torch.where(torch.isin(ids, stops), stops[0], ids) for ids in (ours, theirs))
    shared = (theirs[:, :, None] == ours[:, None, :]).any(-1)
    return (logprobs.exp() * shared).sum(-1)


def _spread(values: Tensor | None, mask: np.ndarray) -> np.ndarray:
    found = np.full(mask.size, np.nan)
    if values is not None:
        found[mask] = values.double().cpu().numpy()
    return found


def _at_tokens(teacher: TeacherLike, shown: Sequence[tuple[Rollout, Rendered]]) -> dict[str, TokenRows]:
    """From log-probs of the tokens alone, or of spans where tokenizers differ; the student's are the sampler's."""
    found = {}
    signals = teacher.score([rollout for rollout, _ in shown], SignalNeed("logprobs_at"), [text for _, text in shown])
    for (rollout, _), signal in zip(shown, signals, strict=True):
        nothing = TokenRows.unknown(rollout.response_ids.size)
        theirs = np.where(signal.mask, np.asarray(signal.values, dtype=np.float64), np.nan)
        ours = np.asarray(beside(rollout.logprob, signal), dtype=np.float64)
        values = vars(nothing) | {"student": ours, "teacher": theirs, "kl": ours - theirs}  # an estimate of it
        found[rollout.id] = TokenRows(**values)
    return found
