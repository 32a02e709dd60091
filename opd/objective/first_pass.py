"""The pass without gradients that some terms need first: proximal log-probs, and statistics that gates rank a batch by.

What is asked for is a set of tuples (`Needs.student`):

    ("proximal",)            log-probs of the sampled tokens before the first update
    ("entropy",)             the student's
    ("comparison", role)     both sides' entropy and their reverse KL
    ("accepted", role, k)    whether the student's likeliest token is among the k likeliest of the teacher
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from opd.divergences import Projection, statistics, token_logprobs
from opd.divergences.mixture import Source, source_log_probs
from opd.divergences.projection import MergeGroups, log_probs
from opd.divergences.upload import upload
from opd.objective.batch import ByRollout, TrainingBatch
from opd.objective.micro import TeacherHead, autocast_head, teacher_projections, token_ids

if TYPE_CHECKING:
    from opd.models.language_model import LanguageModel
    from opd.models.packing import Pack

CHUNK = 512  # rows whose logits are held at once when ranking
StudentNeeds = frozenset[tuple[str | int, ...]]


@torch.no_grad()
def take_first_pass(
    student: LanguageModel,
    packs: Sequence[Pack],
    batch: TrainingBatch,
    needs: StudentNeeds,
    teachers: Mapping[str, TeacherHead],
    merge: MergeGroups,
    temperature: float,
) -> None:
    """Fill `batch.first_pass` for every rollout of the packs."""
    result = batch.first_pass
    result.entropy.clear()  # of an earlier step on the same batch
    compared = {str(need[1]) for need in needs if need[0] == "comparison"}
    ranked = {str(need[1]) for need in needs if need[0] == "accepted"}

    def look(pack: Pack) -> None:
        projection = autocast_head(student.predict(pack))
        if ("proximal",) in needs:
            ids = token_ids(pack, projection)
            untempered = token_logprobs(projection, ids, merge=merge, trusted=True)
            _spread(result.logprob, pack, untempered)
            tempered = untempered
            if temperature != 1.0:
                tempered = token_logprobs(projection, ids, temperature=temperature, trusted=True)
            _spread(result.proximal, pack, tempered)
        if ("entropy",) in needs:  # of all tokens, whatever a teacher was shown
            _spread(result.entropy, pack, statistics(projection, merge=merge).entropy)
        for role in sorted(compared | ranked):
            _compare(projection, pack, batch, role, needs, teachers, merge)

    for pack in student.passes(packs):
        student.inside(partial(look, pack))


def _compare(
    projection: Projection,
    pack: Pack,
    batch: TrainingBatch,
    role: str,
    needs: StudentNeeds,
    teachers: Mapping[str, TeacherHead],
    merge: MergeGroups,
) -> None:
    result, count, device = batch.first_pass, projection.count, projection.hidden.device
    names = ("entropy", "reverse_kl", "teacher_entropy")
    columns = {name: torch.full((count,), float("nan")) for name in names}
    ranks = {int(need[2]): torch.zeros(count) for need in needs if need[:2] == ("accepted", role)}
    everything = np.ones(count, dtype=bool)
    for rows, teacher in teacher_projections(pack, batch.signals[role, "hidden"], teachers, everything, projection):
        student = projection.rows(upload(rows, device))
        if ("comparison", role) in needs:
            values = statistics(student, teacher, merge=merge)
            for name in names:
                columns[name][rows] = getattr(values, name).cpu().float()
        for k, accepted in ranks.items():
            accepted[rows] = proposal_accepted(student, teacher, k, merge).cpu().float()
    if ("comparison", role) in needs:
        _fill(result.entropy, pack, columns["entropy"])
        _spread(result.reverse_kl.setdefault(role, {}), pack, columns["reverse_kl"])
        _spread(result.teacher_entropy.setdefault(role, {}), pack, columns["teacher_entropy"])
    for k, accepted in ranks.items():
        _spread(result.accepted.setdefault((role, k), {}), pack, accepted)


def proposal_accepted(student: Projection, teacher: Source, k: int, merge: MergeGroups = ()) -> Tensor:
    """(N,) bool: the student's likeliest event is among the teacher's k likeliest."""
    size = min(student.vocabulary, teacher.vocabulary)
    parts = []
    for start in range(0, student.count, CHUNK):
        rows = slice(start, start + CHUNK)
        proposal = log_probs(student.rows(rows), size, merge).argmax(-1, keepdim=True)
        scored = source_log_probs(teacher.rows(rows), size, merge)
        parts.append((scored > scored.gather(-1, proposal)).sum(-1) < k)
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.bool)


def _fill(into: ByRollout, pack: Pack, values_N: Tensor) -> None:
    """Where nothing is known: one role's teacher may have been shown what another's was not."""
    found: ByRollout = {}
    _spread(found, pack, values_N)
    for name, values in found.items():
        known = into.get(name, values)
        into[name] = np.where(np.isnan(known), values, known)


def _spread(into: ByRollout, pack: Pack, values_N: Tensor) -> None:
    for rollout, values in zip(pack.rollouts, values_N.cpu().double().split(pack.response_lengths), strict=True):
        into[rollout.id] = values.numpy()
