"""Probes that monitors run after a step: gradients of single domains, and teachers that continue the student's answers.

They read weights and change nothing, so a run trains to the same bits with or without them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from opd.common.text import first_line
from opd.engines.draws import request_key
from opd.evaluation import is_right
from opd.loop.metrics import Clock, calibration_error
from opd.loop.oom_retry import micro_batches
from opd.models.language_model import Pack
from opd.objective.batch import Batch
from opd.records import Author, Rollout, Sample, SampleRequest, SignalNeed
from opd.rollouts.rollouter import answers
from opd.teachers.views import texts_for

if TYPE_CHECKING:
    from opd.loop.parts import StageParts


log = logging.getLogger(__name__)

VISIT = -4  # keys draws that nothing else uses
PHASE = "probe"
COMPARED = 1_000_000  # the most numbers of a gradient that are compared
LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class TrainedStep:
    """A step that has just been trained."""

    parts: StageParts
    step: int
    batch: Batch
    clock: Clock

    @property
    def evaluates(self) -> bool:
        return bool(self.parts.spec.eval.every and self.parts.spec.eval.prompts)

    # --- Gradients ---

    def cosines(self, answers: int) -> dict[str, float]:
        if len(set(self.batch.owners.values())) < 2:
            return {}
        with self.clock(PHASE):
            if self.parts.ranks.sharded:
                return self._cosines_on_ranks(answers)
            found = {domain: self._gradient(chosen) for domain, chosen in self._by_domain(answers).items()}
            known = {domain: gradient for domain, gradient in found.items() if bool(gradient.any())}
            if len(known) < 2:
                return {}
            whole = torch.stack(list(known.values())).sum(0)
            return {
                domain: float(torch.cosine_similarity(gradient, whole - gradient, dim=0))
                for domain, gradient in known.items()
            }

    def _cosines_on_ranks(self, answers: int) -> dict[str, float]:
        """Each rank holds rows of the gradient, and dot products add up. Replica groups add the same values, which cancel in the cosine."""
        found = {domain: self._rows(chosen) for domain, chosen in self._by_domain(answers).items()}
        whole = torch.stack(list(found.values())).sum(0)
        pairs = {domain: (rows, whole - rows) for domain, rows in found.items()}
        products = {name: [float(a @ b), float(a @ a), float(b @ b)] for name, (a, b) in pairs.items()}
        total = {name: np.sum([part[name] for part in self.parts.ranks.gather(products)], 0) for name in products}
        known = {name: values for name, values in total.items() if values[1]}
        if len(known) < 2:
            return {}
        return {name: float(both / max((own * other) ** 0.5, 1e-30)) for name, (both, own, other) in known.items()}

    def _rows(self, rollouts: Sequence[Rollout]) -> Tensor:
        """This rank's rows of the same gradient. Teachers' hidden states are on the rank that trained on them."""
        parts, train, student = self.parts, self.parts.spec.train, self.parts.student
        mine = {rollout.id for rollout in parts.ranks.deal(self.batch.rollouts)}
        batch = Batch(rollouts, self.batch.signals, self.batch.rewards, owners=self.batch.owners)
        autocast = partial(torch.autocast, student.device.type, torch.bfloat16, enabled=train.precision == "autocast")

        def cut(part: Sequence[Rollout]) -> list[Pack]:
            here = [rollout for rollout in part if rollout.id in mine]
            return micro_batches(here, train.micro_budget, student.device, self.batch.owners)

        with autocast():
            prepared = parts.objective.prepare(student, batch, self.step, cut, train.updates, parts.ranks.complete)
        weights = prepared.weights(rollouts)
        for micro in student.passes(cut(rollouts)):
            with autocast():
                loss, _ = student.inside(partial(parts.objective, student, micro, prepared, weights))
            if loss.requires_grad:
                loss.backward()
        rows = torch.cat(
            [part.float().flatten() for part in parts.optimiser.gradients(last_layer(student.trainable()))]
        )
        parts.trainer.learner.discard()
        return rows[:: -(-rows.numel() // COMPARED) or 1]

    def _by_domain(self, answers: int) -> dict[str, list[Rollout]]:
        """The first answers of each domain, in whole groups."""
        found: dict[str, dict[str, list[Rollout]]] = {}
        for rollout in self.batch.rollouts:
            found.setdefault(rollout.domain, {}).setdefault(rollout.pair or rollout.group, []).append(rollout)
        chosen: dict[str, list[Rollout]] = {}
        for domain, groups in found.items():
            for members in groups.values():
                if len(chosen.setdefault(domain, [])) < answers:
                    chosen[domain] += members
        return chosen

    def _gradient(self, rollouts: Sequence[Rollout]) -> Tensor:
        """The gradient of the objective on these rollouts alone, with respect to the last layer, subsampled if it is large."""
        parts, train = self.parts, self.parts.spec.train
        student, weights = parts.student, list(last_layer(parts.student.trainable()).values())
        stride = -(-sum(weight.numel() for weight in weights) // COMPARED)
        batch = Batch(rollouts, self.batch.signals, self.batch.rewards, owners=self.batch.owners)
        autocast = partial(torch.autocast, student.device.type, torch.bfloat16, enabled=train.precision == "autocast")

        def cut(part: Sequence[Rollout]) -> list[Pack]:
            return micro_batches(part, train.micro_budget, student.device, self.batch.owners)

        total = torch.zeros((), device=student.device)
        with autocast():
            prepared = parts.objective.prepare(student, batch, self.step, cut, train.updates)
        for micro in cut(rollouts):
            with autocast():
                loss, _ = parts.objective(student, micro, prepared, prepared.weights(rollouts))
            if loss.requires_grad:
                gradients = torch.autograd.grad(loss, weights, allow_unused=True)
                flat = [_flat(gradient, weight) for gradient, weight in zip(gradients, weights, strict=True)]
                total = total + torch.cat(flat)[::stride]
            parts.context.check_stop()
        return total

    # --- What teachers say about the answers ---

    def teachers_calibration(self, answers: int) -> dict[str, float]:
        known = self._rewarded(answers)
        if not known or self.parts.scorer.pager is not None:  # their heads are no longer in memory
            return {}
        with self.clock(PHASE):
            said = self._logprobs(known)
        whole = [replace(rollout, logprob=said[rollout.id]) for rollout in known if rollout.id in said]
        return {f"{name}/teacher": value for name, value in calibration_error(whole, self.batch.rewards).items()}

    def _logprobs(self, rollouts: Sequence[Rollout]) -> dict[str, np.ndarray]:
        """The teacher's log-probs of the response tokens, if it has read all of them with the student's tokenizer."""
        said = self.batch.signals.get(("teacher", "logprobs_at"))
        if said is not None:
            values = {rollout.id: np.asarray(said[rollout.id].values, dtype=np.float32) for rollout in rollouts}
            return {name: value for name, value in values.items() if not np.isnan(value).any()}
        hidden = self.batch.signals.get(("teacher", "hidden"), {})
        by_teacher: dict[str, list[Rollout]] = {}
        for rollout in (rollout for rollout in rollouts if rollout.id in hidden):
            signal = hidden[rollout.id]
            if signal.values is None:  # the values are on another rank
                continue
            offered = "logprobs_at" in self.parts.teachers[signal.teacher].offers
            if offered and signal.crossed is None and signal.mask.all():
                by_teacher.setdefault(signal.teacher, []).append(rollout)
        found: dict[str, np.ndarray] = {}
        for name, mine in by_teacher.items():  # log-probs follow from hidden states, without reading again
            signals = self.parts.teachers[name].score(mine, SignalNeed("logprobs_at", hidden=hidden))
            found |= {rollout.id: np.asarray(one.values) for rollout, one in zip(mine, signals, strict=True)}
        told = {name: value for part in self.parts.ranks.gather(found) for name, value in part.items()}
        return {rollout.id: told[rollout.id] for rollout in rollouts if rollout.id in told}

    # --- Teachers that take over an answer ---

    def taken_over(self, answers: int, depth: float) -> dict[str, float]:
        asked = self._taken(answers)
        if not asked:
            return {}
        with self.clock(PHASE):
            first = self._gain(asked, 0.0)
            late = self._gain(asked, depth)
        return {"takeover/first": first, "takeover/late": late} if not np.isnan(first + late) else {}

    def _taken(self, answers: int) -> list[tuple[Rollout, np.ndarray]]:
        """Each answer with the prompt that its teacher reads."""
        found = [(rollout, self._read(rollout)) for rollout in self._rewarded(answers)]
        return [(rollout, ids) for rollout, ids in found if ids is not None]

    def _rewarded(self, answers: int) -> list[Rollout]:
        """Answers of the student that have a teacher and a reward, spread evenly over the step."""
        known = [
            rollout
            for rollout in self.batch.rollouts
            if self.batch.owners.get(rollout.id)
            and self.batch.rewards.get(rollout.id) is not None
            and (rollout.author == Author.STUDENT).all()
        ]
        return known[:: max(1, len(known) // answers)][:answers]

    def _read(self, rollout: Rollout) -> np.ndarray | None:
        """The prompt that the teacher reads. None if it reads nothing, uses another tokenizer, or would not fit."""
        parts, prompts = self.parts, self.batch.prompts
        name = parts.scorer.teacher_for(prompts[rollout.prompt_id])
        groups = parts.scorer.groups_for(name, {rollout.group: self.batch.groups[rollout.group]})
        teacher = parts.teachers[name]
        (text,) = texts_for(parts.spec.teachers[name].view, [rollout], prompts, groups, teacher.context)
        if text is None or text.crossed or len(text.spans) != 1 or text.spans[0][0] != 0:
            return None
        ids = text.ids[: text.spans[0][2]]
        return (
            ids
            if ids.size + parts.rollouter.sampling.max_new_tokens <= min(parts.samplers.max_length, teacher.context)
            else None
        )

    def _gain(self, asked: Sequence[tuple[Rollout, np.ndarray]], depth: float) -> float:
        """How much more often teachers are right than the student was, when they continue after this part of the student's answers."""
        parts, prompts = self.parts, self.batch.prompts
        by_teacher: dict[str, list[SampleRequest]] = {}
        for rollout, ids in asked:
            kept = rollout.response_ids[: int(depth * rollout.response_ids.size)]
            key = request_key(parts.spec.seed, rollout.id, VISIT, kept.size)
            request = SampleRequest(rollout.id, ids, key, parts.rollouter.sampling, kept if kept.size else None)
            by_teacher.setdefault(parts.scorer.teacher_for(prompts[rollout.prompt_id]), []).append(request)
        rollouts = {rollout.id: rollout for rollout, _ in asked}
        texts = {
            answer.id: parts.text(answer)
            for name, requests in by_teacher.items()
            for answer in answers(parts.samplers.teacher(name), requests, parts.context.check_stop)
        }
        samples = [Sample(prompts[rollouts[name].prompt_id], text) for name, text in texts.items()]
        with parts.rewards.lock:
            results = parts.ranks.share(lambda: list(parts.rewards.rewarder(samples)))
        gains = [
            is_right(result) - is_right(replace(result, reward=self.batch.rewards[name]))
            for name, result in zip(texts, results, strict=True)
        ]
        return float(np.nanmean(gains)) if not np.isnan(gains).all() else float("nan")


def take_probes(probe: TrainedStep) -> dict[str, float]:
    """Measurements that the monitors of a stage need beyond its metrics. Either all ranks measure, or none."""
    parts = probe.parts
    graphs, parts.student.graphs = parts.student.graphs, None  # only training decides which passes are recorded
    try:
        return {name: value for monitor in parts.spec.monitors.watch for name, value in monitor.measure(probe).items()}
    except torch.OutOfMemoryError as error:
        if parts.ranks.size > 1:
            raise
        log.warning(
            "step %s: no memory for the monitors' probes, which are left out (%s)", probe.step, first_line(error)
        )
        return {}
    finally:
        parts.student.graphs = graphs


def last_layer(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """The parameters that a backward pass reaches first; all of them if layers have no numbers."""
    numbers = {name: int(found[0]) for name in parameters if (found := LAYER.findall(name))}
    last = max(numbers.values(), default=None)
    return {name: parameter for name, parameter in parameters.items() if numbers.get(name) == last}


def _flat(gradient: Tensor | None, weight: nn.Parameter) -> Tensor:
    found = torch.zeros_like(weight) if gradient is None else gradient
    return found.detach().float().flatten()
