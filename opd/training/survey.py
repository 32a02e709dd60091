"""The pass without gradients that some terms need first: proximal log-probs, and statistics that gates rank a batch by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from opd.config import Term, Train
from opd.config.gates import EntropyGate, SelectKD, SoftOrGate, TeacherEntropyGate
from opd.divergence import Projection, statistics, token_logprobs
from opd.divergence.projection import MergeGroups, log_probs
from opd.models.language_model import LanguageModel
from opd.models.packing import Pack
from opd.teachers.local import LocalTeacher
from opd.training.judged import ByRollout, Judged, autocast_head, by_teacher, token_ids

CHUNK = 512  # rows whose logits are held at once when ranking


@dataclass
class SurveyNeed:
    proximal: bool = False
    entropy: bool = False
    teachers: set[str] = field(default_factory=set)  # roles whose divergence and entropy are wanted
    accepted: set[tuple[str, int]] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.proximal or self.entropy or self.teachers or self.accepted)


def survey_need(terms: Iterable[Term], train: Train) -> SurveyNeed:
    """With one update per batch the proximal policy is the current one, and costs nothing."""
    need = SurveyNeed()
    several = train.epochs * train.minibatches > 1
    for term in terms:
        need.proximal |= several and term.correction is not None  # a policy's own movement is not a mismatch
        if term.form == "policy_gradient":
            proximal = term.surrogate.against == "proximal" or term.advantage.student == "proximal"
            need.proximal |= proximal and several
            need.proximal |= term.advantage.whiten and term.advantage.student != "behaviour"
        for gate in term.gate:
            if isinstance(gate, EntropyGate):
                need.entropy = True
            elif isinstance(gate, (SoftOrGate, TeacherEntropyGate)):
                need.teachers.add(term.role)
            elif isinstance(gate, SelectKD) and gate.accept == "greedy":
                need.accepted.add((term.role, gate.k))
    return need


@torch.no_grad()
def take_survey(
    student: LanguageModel, batches: Iterable[Pack], judged: Judged, need: SurveyNeed,
    teachers: Mapping[str, LocalTeacher], merge: MergeGroups, temperature: float,
) -> None:  # fmt: skip
    """Fill `judged.survey` for every rollout of the batches."""
    found = judged.survey
    for batch in batches:
        projection = autocast_head(student.project(student.hidden(batch.ids_T, batch.layout)[batch.predicting_N]))
        device = projection.hidden.device
        if need.proximal:
            ids = token_ids(batch, device)
            plain = token_logprobs(projection, ids, merge=merge)
            _spread(found.plain, batch, plain)
            tempered = plain if temperature == 1.0 else token_logprobs(projection, ids, temperature=temperature)
            _spread(found.proximal, batch, tempered)
        if need.entropy and not need.teachers:
            _spread(found.entropy, batch, statistics(projection, merge=merge).entropy)
        for role in need.teachers | {role for role, _ in need.accepted}:
            _compare(projection, batch, judged, role, need, teachers, merge)


def _compare(
    projection: Projection, batch: Pack, judged: Judged, role: str, need: SurveyNeed,
    teachers: Mapping[str, LocalTeacher], merge: MergeGroups,
) -> None:  # fmt: skip
    found, count, device = judged.survey, projection.count, projection.hidden.device
    names = ("entropy", "reverse_kl", "teacher_entropy")
    columns = {name: torch.full((count,), float("nan")) for name in names}
    ranks = {k: torch.zeros(count) for asked, k in need.accepted if asked == role}
    everything = np.ones(count, dtype=bool)
    for rows, teacher in by_teacher(batch, judged.signals[role, "hidden"], teachers, everything, device):
        index = torch.from_numpy(rows).to(device)
        own = projection.rows(index)
        if role in need.teachers:
            values = statistics(own, teacher, merge=merge)
            for name in names:
                columns[name][rows] = getattr(values, name).cpu().float()
        for k, accepted in ranks.items():
            accepted[rows] = proposal_accepted(own, teacher, k, merge).cpu().float()
    if role in need.teachers:
        _spread(found.entropy, batch, columns["entropy"])
        _spread(found.reverse_kl.setdefault(role, {}), batch, columns["reverse_kl"])
        _spread(found.teacher_entropy.setdefault(role, {}), batch, columns["teacher_entropy"])
    for k, accepted in ranks.items():
        _spread(found.accepted.setdefault((role, k), {}), batch, accepted)


def proposal_accepted(student: Projection, teacher: Projection, k: int, merge: MergeGroups = ()) -> Tensor:
    """(N,) bool: the student's likeliest event is among the teacher's k likeliest."""
    size = min(student.vocabulary, teacher.vocabulary)
    parts = []
    for start in range(0, student.count, CHUNK):
        rows = slice(start, start + CHUNK)
        proposal = log_probs(student.rows(rows), size, merge).argmax(-1, keepdim=True)
        judged = log_probs(teacher.rows(rows), size, merge)
        parts.append((judged > judged.gather(-1, proposal)).sum(-1) < k)
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.bool)


def _spread(into: ByRollout, batch: Pack, values_N: Tensor) -> None:
    for rollout, values in zip(batch.rollouts, values_N.cpu().double().split(batch.response_lengths), strict=True):
        into[rollout.id] = values.numpy()
