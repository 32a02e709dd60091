"""A teacher made of several: it asks each of them, and combines what they say where a distribution is needed.

Hidden states of the parts travel side by side in one signal, (T, D1 + D2 + …). Where weights depend on the domain, one more column
holds its number, so that what comes back from the store, or stands in a micro-batch, still knows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from opd.divergences import Mixture, Projection, statistics
from opd.errors import RecipeError
from opd.models.language_model import LanguageModel
from opd.models.tokenizers import Elsewhere
from opd.teachers.mixture import BlendKind, PartWeight
from opd.teachers.scoring import ScoringTeacher, reached, spread
from opd.teachers.views import behind
from opd.types import Rendered, Rollout, Signal, SignalNeed, TeacherLike, WeightsRef


class BlendedTeacher(ScoringTeacher):
    """Its version is the last step after which a part or a weight changed; weights are those of the step after it."""

    offers = frozenset({"logprobs_at", "hidden"})

    def __init__(
        self,
        name: str,
        kind: BlendKind,
        parts: Mapping[str, TeacherLike],
        student: LanguageModel,
        stop_ids: tuple[int, ...],
    ) -> None:
        super().__init__(name, kind.role, stop_ids, device=student.device)
        self._kind, self._parts = kind, _scoring(name, parts)
        self._numbers = {domain: number for number, domain in enumerate(kind.weighed_domains(), start=1)}
        self.context = min(part.context for part in self._parts.values())
        self.elsewhere = _together(name, list(self._parts.values()))

    @property
    def models(self) -> list[LanguageModel]:
        """Of the parts that have one, in the order in which they score."""
        return [part.model for part in self._parts.values() if part.model is not None]

    # What it says

    def score(
        self, rollouts: Sequence[Rollout], need: SignalNeed, seen: Sequence[Rendered] | None = None
    ) -> list[Signal]:
        self.require_offered(need)
        seen = seen if seen is not None else [behind(rollout.prompt_ids, rollout) for rollout in rollouts]
        if need.hidden is not None and all(rollout.id in need.hidden for rollout in rollouts):
            signals = [need.hidden[rollout.id] for rollout in rollouts]
        else:
            signals = self._joined(rollouts, seen)
        return signals if need.kind == "hidden" or not rollouts else self._logprobs(rollouts, signals)

    def _joined(self, rollouts: Sequence[Rollout], seen: Sequence[Rendered]) -> list[Signal]:
        """Hidden states of every part, side by side, where all of them say something."""
        said = [part.score(rollouts, SignalNeed("hidden"), seen) for part in self._parts.values()]
        signals = []
        for rollout, text, parts in zip(rollouts, seen, zip(*said, strict=True), strict=True):
            columns = [part.values.to(self.device) for part in parts]
            if self._numbers:
                columns.append(columns[0].new_full((len(columns[0]), 1), self._numbers.get(rollout.domain, 0)))
            mask = np.logical_and.reduce([part.mask for part in parts])
            values = torch.cat(columns, dim=-1)
            signals.append(Signal(self.name, self.version, self.role, text.view, text.spans, values, mask))
        return signals

    @torch.no_grad()
    def _logprobs(self, rollouts: Sequence[Rollout], signals: Sequence[Signal]) -> list[Signal]:
        mixture = self.project(torch.cat([reached(signal).to(self.device) for signal in signals]))
        pairs = zip(rollouts, signals, strict=True)
        ids = np.concatenate([rollout.response_ids[signal.mask] for rollout, signal in pairs]).astype(np.int64)
        tokens = torch.from_numpy(ids).to(self.device)
        found = statistics(mixture.parts[0], mixture, merge=(self.stop_ids,), tokens=tokens).teacher_logprob
        assert found is not None
        values = found.cpu().split([int(signal.mask.sum()) for signal in signals])
        return [
            replace(signal, values=part.numpy() if signal.mask.all() else spread(part.numpy(), signal.mask))
            for signal, part in zip(signals, values, strict=True)
        ]

    def project(self, hidden: Tensor) -> Mixture:
        widths = [part.width for part in self._parts.values()]
        columns = hidden.split([*widths, *([1] if self._numbers else [])], dim=-1)
        parts = [part.project(own) for part, own in zip(self._parts.values(), columns, strict=False)]
        number_N = columns[-1][:, 0].long() if self._numbers else None
        distance_N = self._distance(parts) if self._kind.by_distance else None
        knobs = self._kind.knobs.values()
        return self._kind.blend(parts, [self._value(knob, number_N, distance_N) for knob in knobs])

    def _value(self, knob: PartWeight, number_N: Tensor | None, distance_N: Tensor | None) -> float | Tensor:
        step = self.version + 1
        value: float | Tensor = knob.at(step)
        if number_N is not None and knob.domains:
            table = [value, *(knob.at(step, domain) for domain in self._numbers)]
            value = torch.tensor(table, dtype=torch.float64, device=number_N.device)[number_N]
        if distance_N is None or not knob.distance:
            return value
        found = value + knob.distance * distance_N
        return found if knob.least is None and knob.most is None else found.clamp(knob.least, knob.most)

    def _distance(self, parts: Sequence[Projection]) -> Tensor:
        """(N,) sum |p - q| of the two parts, stop ids as one event."""
        found = statistics(parts[0].detach(), parts[1].detach(), kind="tvd", merge=(self.stop_ids,)).value
        assert found is not None
        return 2 * found

    def measure(self, texts: Sequence[Rendered]) -> dict[str, float]:
        return {key: value for part in self._parts.values() for key, value in part.measure(texts).items()}

    # How it moves

    def observe(self, step: int, weights: WeightsRef) -> None:
        before = self._versions()
        for part in self._parts.values():
            part.observe(step, weights)
        if self._kind.scheduled or self._versions() != before:
            self.version = step

    def _versions(self) -> list[int]:
        return [part.version for part in self._parts.values()]

    def state(self) -> Mapping[str, Tensor]:
        found = {f"{name}/{key}": value for name, part in self._parts.items() for key, value in part.state().items()}
        return found | ({"versions": torch.tensor(self._versions())} if any(self._versions()) else {})

    def restore(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        super().restore(version, tensors)
        versions = tensors["versions"].tolist() if "versions" in tensors else [0] * len(self._parts)
        for (name, part), own in zip(self._parts.items(), versions, strict=True):
            start = f"{name}/"
            part.restore(own, {key.removeprefix(start): tensors[key] for key in tensors if key.startswith(start)})


def _together(name: str, parts: Sequence[ScoringTeacher]) -> Elsewhere | None:
    """What parts stop at, and the ids that all of them know; those that are the student differ in neither."""
    found = [part.elsewhere for part in parts if part.elsewhere is not None]
    found += [
        Elsewhere(name, one.stop_ids, one.head.weight.shape[0]) for part in parts if (one := part.model) is not None
    ]
    stop_ids = tuple(sorted({index for one in found for index in one.stop_ids}))
    return Elsewhere(name, stop_ids, min(one.size for one in found)) if found else None


def models_of(teacher: TeacherLike) -> list[LanguageModel]:
    """That it scores with in this process, in order."""
    if isinstance(teacher, BlendedTeacher):
        return teacher.models
    return [] if teacher.model is None else [teacher.model]


def _scoring(name: str, parts: Mapping[str, TeacherLike]) -> dict[str, ScoringTeacher]:
    found = {key: part for key, part in parts.items() if isinstance(part, ScoringTeacher)}
    for key in parts:
        if key not in found:
            raise RecipeError(
                f"teachers.{name}: part {key} is no ScoringTeacher, so the width of its hidden states is not known."
            )
    return found
