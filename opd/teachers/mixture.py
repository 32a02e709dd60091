"""Kinds of teacher made of several others, with distributions combined token by token. No torch here.

    mixture         arithmetic or geometric, or the sum of the divergences to every part
    extrapolation   past one teacher, away from another: z = z_toward + w (z_toward - z_away)

A part is any kind of teacher that gives hidden states. A weight is a number, or depends on the step, the prompt's domain, or per
token on the distance between two parts.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, Field, model_validator

from opd.common.context import RunContext
from opd.common.errors import RecipeError
from opd.common.short_forms import SHORT_FORMS
from opd.models.tokenizers import RemoteVocabulary
from opd.records import Rendered, Rollout, Signal, SignalKind, SignalNeed, TeacherLike, WeightsRef
from opd.registry import SETTINGS, Choice, Family, Positive, StageView, Word, changed
from opd.teachers.kinds import ModelRef, RemoteFacts, TeacherInputs, TeacherKind
from opd.teachers.scoring import ScoringTeacher, reached, spread
from opd.teachers.views import response_after

if TYPE_CHECKING:
    from torch import Tensor

    from opd.divergences import Mixture, Projection
    from opd.models.language_model import LanguageModel

FARTHEST = 2.0  # largest sum |p - q| of two distributions
MOST_DOMAINS = 200  # domain numbers are stored next to hidden states, exact in any of their dtypes
Number = Annotated[float, Field(ge=-1000, le=1000)]


class PartWeight(BaseModel):
    """The weight of a part. A plain number is a constant weight."""

    model_config = SETTINGS
    value: Number = 1.0
    to: Number | None = Field(None, description="where a line from `value` ends …")
    over: Positive | None = Field(None, description="… after this many steps; it stays there")
    curve: Literal["linear", "cosine"] = "linear"
    domains: dict[Word, Number] = Field(default_factory=dict, description="instead, in these domains")
    distance: Number = Field(0.0, description="added per unit of sum |p - q| between the two parts (0 to 2), per token")
    least: Number | None = Field(None, description="with `distance`: not below")
    most: Number | None = Field(None, description="with `distance`: not above")

    @model_validator(mode="after")
    def _consistent(self) -> PartWeight:
        given = changed(self)
        if (self.to is None) != (self.over is None):
            raise ValueError("`to` and `over` belong together: {value: 0.8, to: 0, over: 100}")
        if "curve" in given and self.to is None:
            raise ValueError("`curve` is how a weight gets from `value` to `to`: set `to` and `over`")
        if given & {"least", "most"} and not self.distance:
            raise ValueError("`least` and `most` bound a weight that depends on `distance`: set it")
        if self.least is not None and self.most is not None and self.least > self.most:
            raise ValueError(f"least {self.least:g} is above most {self.most:g}")
        return self

    def at(self, step: int, domain: str = "") -> float:
        """The weight at a step (from 1), without the part that `distance` adds."""
        if domain in self.domains:
            return self.domains[domain]
        if self.to is None or self.over is None:
            return self.value
        way = min((step - 1) / max(self.over - 1, 1), 1.0)
        way = (1 - math.cos(math.pi * way)) / 2 if self.curve == "cosine" else way
        return self.value + (self.to - self.value) * way

    def with_distance(self, value: float, distance: float) -> float:
        """Adds the part that depends on `distance`; `BlendedTeacher._value` does the same with tensors."""
        if not self.distance:
            return value
        found = value + self.distance * distance
        found = found if self.least is None else max(found, self.least)
        return found if self.most is None else min(found, self.most)


class PartFamily(Family):
    """Teachers that can be parts: all kinds without parts of their own. A model's name is short for a frozen teacher."""

    def names(self) -> list[str]:
        return [name for name in super().names() if name not in COMPOSITE]

    def find(self, name: object) -> type[Choice]:
        if name in COMPOSITE:
            raise ValueError(f"kind {name} has parts itself and cannot be one: list its parts here")
        return super().find(name)


COMPOSITE = ("mixture", "extrapolation")
AnyPart = Annotated[TeacherKind, PartFamily("teacher", default="frozen")]
AnyWeight = Annotated[PartWeight, SHORT_FORMS["teachers.NAME.weights.NAME"]]


class BlendKind(TeacherKind):
    """Base of the kinds made of parts."""

    offers = frozenset({"logprobs_at", "hidden"})
    blends = True
    INHERITED: ClassVar[frozenset[str]] = frozenset({"role", "domains", "view"})  # parts inherit them from the mixture

    @property
    @abstractmethod
    def members(self) -> Mapping[str, TeacherKind]:
        raise NotImplementedError

    @property
    @abstractmethod
    def knobs(self) -> Mapping[str, PartWeight]:
        """The weights that a recipe sets, by key."""
        raise NotImplementedError

    @abstractmethod
    def blend(self, parts: Sequence[Projection], values: Sequence[float | Tensor]) -> Mixture:
        """Combines the distributions of the parts. `values` of the knobs are numbers, or one per token."""
        raise NotImplementedError

    @abstractmethod
    def mistake(self, values: Sequence[float]) -> str:
        """What is wrong with these values of the knobs; empty if nothing."""
        raise NotImplementedError

    @property
    def scheduled(self) -> bool:
        return any(knob.to is not None for knob in self.knobs.values())

    @property
    def by_distance(self) -> bool:
        return any(knob.distance for knob in self.knobs.values())

    def weighted_domains(self) -> list[str]:
        return sorted({domain for knob in self.knobs.values() for domain in knob.domains})

    def reads(self) -> Sequence[ModelRef]:
        return list(dict.fromkeys(ref for kind in self.members.values() for ref in kind.reads()))

    def scored_with(self) -> Sequence[ModelRef]:
        return list(dict.fromkeys(ref for kind in self.members.values() for ref in kind.scored_with()))

    def waiting(self) -> Sequence[ModelRef]:
        """A model also read by a part that cannot wait stays in memory."""
        staying = {ref for kind in self.members.values() for ref in kind.reads() if ref not in kind.waiting()}
        return [ref for ref in self.reads() if ref not in staying]

    def inquire(self, name: str, tokenizer: Any, student: str) -> RemoteFacts:
        found = [kind.inquire(f"{name}.{key}", tokenizer, student) for key, kind in self.members.items()]
        return RemoteFacts(min(one.context for one in found), tuple(note for one in found for note in one.notes))

    def files(self) -> list[Path]:
        return [path for kind in self.members.values() for path in kind.files()]

    def require(self, name: str, tokenizer: Any, signals: Collection[SignalKind]) -> None:
        needed: tuple[SignalKind, ...] = ("hidden",)  # all signals derive from it
        for key, kind in self.members.items():
            kind.require(f"{name}.{key}", tokenizer, needed)

    def vocabulary(self, context: RunContext) -> RemoteVocabulary | None:
        found = [known for kind in self.members.values() if (known := kind.vocabulary(context)) is not None]
        stop_ids = tuple(dict.fromkeys(index for known in found for index in known.stop_ids))
        name, size = ", ".join(known.name for known in found), min((known.size for known in found), default=0)
        return found[0]._replace(name=name, stop_ids=stop_ids, size=size) if found else None

    def follows_within(self) -> int | None:
        found = [kind.follows_within() for kind in self.members.values()]
        return min((steps for steps in found if steps is not None), default=None)

    def bytes_per_weight(self, each: int, lora: bool) -> int:
        return sum(kind.bytes_per_weight(each, lora) for kind in self.members.values())

    def check(self, view: StageView) -> Iterable[str]:
        for name, kind in self.members.items():
            extra = sorted(changed(kind) & self.INHERITED)
            if extra:
                yield f"part {name}: `{extra[0]}` applies to the mixture: set it next to `kind: {self.name}`, not in a part."
            elif kind.earlier():
                yield f"part {name}: kind {kind.name} reads stored scores, which cannot be mixed. Use the teacher itself."
            elif "hidden" not in kind.offers:
                yield f"part {name}: kind {kind.name} gives no hidden states, so it cannot be mixed. Use another kind."
            else:
                own = kind.model_copy(update={"role": self.role, "view": self.view})
                yield from (f"part {name}: {text}" for text in own.check_as_part(view))
        yield from self._check_weights()
        if all(kind.is_student_now for kind in self.members.values()) and self.view.as_sampled:
            yield "every part is the student as it is now, so the two never differ. Add another part, or a `view`."

    def _check_weights(self) -> Iterable[str]:
        domains = self.weighted_domains()
        if len(domains) > MOST_DOMAINS:
            yield f"weights name {len(domains)} domains, and at most {MOST_DOMAINS} can have their own. Group them."
        if self.by_distance and len(self.members) != 2:
            yield f"`distance` is measured between two parts, and there are {len(self.members)}. Use two, or plain weights."
        steps = sorted({1, *(knob.over for knob in self.knobs.values() if knob.over is not None)})
        for step, domain, distance in product(steps, ["", *domains], [0.0, FARTHEST] if self.by_distance else [0.0]):
            values = [knob.with_distance(knob.at(step, domain), distance) for knob in self.knobs.values()]
            if mistake := self.mistake(values):
                when = f"at step {step}" + (f" in domain {domain}" if domain else "")
                when += f" where the parts are {distance:g} apart" if self.by_distance else ""
                given = ", ".join(f"{name} {value:g}" for name, value in zip(self.knobs, values, strict=True))
                yield f"{mistake}; {when} they are {given}."
                return

    def warn(self, view: StageView) -> Iterable[str]:
        for name, kind in self.members.items():
            own = kind.model_copy(update={"role": self.role, "view": self.view})
            yield from (f"part {name}: {line}" for line in own.warn(view))

    def open(self, name: str, supplies: TeacherInputs) -> TeacherLike:

        parts = {key: kind.open(f"{name}.{key}", supplies) for key, kind in self.members.items()}
        return BlendedTeacher(name, self, parts, supplies.student, supplies.stop_ids)


class MixtureTeacher(BlendKind):
    """Combines several teachers into one distribution."""

    name = "mixture"

    parts: dict[Word, AnyPart] = Field(min_length=2, max_length=100, description="teachers by name")
    combine: Literal["arithmetic", "geometric", "sum"] = Field(
        "arithmetic", description="sum w T, prod T^w, or sum w KL(student || T)"
    )
    weights: dict[Word, AnyWeight] = Field(default_factory=dict, description="of every part; default: equal, sum 1")

    @model_validator(mode="after")
    def _weights_of_parts(self) -> MixtureTeacher:
        if self.weights and self.weights.keys() != self.parts.keys():
            wanted, given = ", ".join(self.parts), ", ".join(self.weights)
            raise ValueError(f"`weights` needs one for each part ({wanted}) and no other; it names {given}")
        return self

    @property
    def members(self) -> Mapping[str, TeacherKind]:
        return self.parts

    @property
    def knobs(self) -> Mapping[str, PartWeight]:
        return {name: self.weights.get(name, PartWeight(value=1 / len(self.parts))) for name in self.parts}

    def blend(self, parts: Sequence[Projection], values: Sequence[float | Tensor]) -> Mixture:
        from opd.divergences import Mixture

        return Mixture(parts, values, self.combine)

    def mistake(self, values: Sequence[float]) -> str:
        if self.combine != "geometric" and min(values) < 0:
            return f"weights of combine: {self.combine} must not be negative (combine: geometric can subtract a part)"
        if sum(values) <= 0:
            return "weights must have a sum above 0, or the target would be flat or point away from every part"
        return ""

    def check(self, view: StageView) -> Iterable[str]:
        yield from super().check(view)
        if self.combine != "sum":
            return
        for term in view.terms:
            needs = term.needs()
            sampled = (self.role, "logprobs_at") in needs.signals
            ranks = any(len(need) > 1 and need[1] == self.role for need in needs.student)
            fits = term.minimises == "reverse_kl" and "support" not in changed(term) and not sampled and not ranks
            if self.role in term.roles and not fits:
                yield (
                    "combine: sum is a sum of reverse KLs: it needs form: direct, divergence: reverse_kl over the full vocabulary, "
                    f"and no gate that compares with the teacher; a {term.name} term does not satisfy this. Use combine: geometric, "
                    "whose gradient is the same where the weights sum to 1."
                )

    def warn(self, view: StageView) -> Iterable[str]:
        yield from super().warn(view)
        for name, kind in self.members.items():
            knob = self.knobs[name]
            last = knob.value if knob.to is None else knob.to
            if kind.is_student_now and self.combine == "geometric" and last >= 1:
                yield (
                    f"part {name} is the student itself with a final weight of {last:g}: at 1 and above the target "
                    "keeps sharpening. Let it decay: {value: 0.8, to: 0, over: STEPS}"
                )


class ExtrapolationTeacher(BlendKind):
    """Goes past one teacher, in the direction away from another."""

    name = "extrapolation"

    toward: AnyPart = Field(description="the teacher to go past")
    away: AnyPart = Field(description="the teacher to go away from")
    by: Annotated[PartWeight, SHORT_FORMS["teachers.NAME.by"]] = Field(
        PartWeight(value=0.25), description="how far past `toward`; 0 is `toward` itself"
    )
    divide: bool = Field(False, description="divide each token's loss by `by` (AlignDistil)")

    @property
    def members(self) -> Mapping[str, TeacherKind]:
        return {"toward": self.toward, "away": self.away}

    @property
    def knobs(self) -> Mapping[str, PartWeight]:
        return {"by": self.by}

    def blend(self, parts: Sequence[Projection], values: Sequence[float | Tensor]) -> Mixture:
        from opd.divergences import Mixture

        (by,) = values
        return Mixture(parts, [1 + by, -by], "geometric", 1 / by if self.divide else None)

    def mistake(self, values: Sequence[float]) -> str:
        if values[0] < 0:
            return "`by` must not be negative: a negative value lies between the two teachers. Use kind: mixture, combine: geometric"
        return "`by` must be above 0, since `divide` divides by it" if self.divide and not values[0] else ""

    def check(self, view: StageView) -> Iterable[str]:
        yield from super().check(view)
        needed = {signal for term in view.terms for role, signal in term.needs().signals if role == self.role}
        if self.divide and "logprobs_at" in needed:
            yield "`divide` weighs the loss of direct terms, and another term asks for log-probs. Set divide: false."


# --- The teacher: asks each part, and combines them where a distribution is needed ---
# One signal holds the hidden states of all parts concatenated, (T, D1 + D2 + …). If weights depend on the domain, one more column
# holds the domain's number, so that it survives the store and micro-batching.


class BlendedTeacher(ScoringTeacher):
    """`version` is the last step after which a part or a weight changed; weights are those of the step after it."""

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
        self._numbers = {domain: number for number, domain in enumerate(kind.weighted_domains(), start=1)}
        self.context = min(part.context for part in self._parts.values())
        self.elsewhere = _shared_vocabulary(name, list(self._parts.values()))

    @property
    def models(self) -> list[LanguageModel]:
        """The models of the parts that have one, in scoring order."""
        return [part.model for part in self._parts.values() if part.model is not None]

    # Scoring

    def score(
        self, rollouts: Sequence[Rollout], need: SignalNeed, seen: Sequence[Rendered] | None = None
    ) -> list[Signal]:
        self.require_offered(need)
        seen = seen if seen is not None else [response_after(rollout.prompt_ids, rollout) for rollout in rollouts]
        if need.hidden is not None and all(rollout.id in need.hidden for rollout in rollouts):
            signals = [need.hidden[rollout.id] for rollout in rollouts]
        else:
            signals = self._joined(rollouts, seen)
        return signals if need.kind == "hidden" or not rollouts else self._logprobs(rollouts, signals)

    def _joined(self, rollouts: Sequence[Rollout], seen: Sequence[Rendered]) -> list[Signal]:
        """Hidden states of all parts concatenated, masked to tokens that every part scores."""
        import torch

        scored = [part.score(rollouts, SignalNeed("hidden"), seen) for part in self._parts.values()]
        signals = []
        for rollout, text, parts in zip(rollouts, seen, zip(*scored, strict=True), strict=True):
            columns = [part.values.to(self.device) for part in parts]
            if self._numbers:
                columns.append(columns[0].new_full((len(columns[0]), 1), self._numbers.get(rollout.domain, 0)))
            mask = np.logical_and.reduce([part.mask for part in parts])
            values = torch.cat(columns, dim=-1)
            signals.append(Signal(self.name, self.version, self.role, text.view, text.spans, values, mask))
        return signals

    def _logprobs(self, rollouts: Sequence[Rollout], signals: Sequence[Signal]) -> list[Signal]:
        import torch

        from opd.divergences import statistics

        with torch.no_grad():
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
        import torch

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
        """(N,) sum |p - q| of the two parts, with stop ids as one event."""
        from opd.divergences import statistics

        found = statistics(parts[0].detach(), parts[1].detach(), kind="tvd", merge=(self.stop_ids,)).value
        assert found is not None
        return 2 * found

    def measure(self, texts: Sequence[Rendered]) -> dict[str, float]:
        return {key: value for part in self._parts.values() for key, value in part.measure(texts).items()}

    # Updates and checkpoints

    def observe(self, step: int, weights: WeightsRef) -> None:
        before = self._versions()
        for part in self._parts.values():
            part.observe(step, weights)
        if self._kind.scheduled or self._versions() != before:
            self.version = step

    def _versions(self) -> list[int]:
        return [part.version for part in self._parts.values()]

    def state(self) -> Mapping[str, Tensor]:
        import torch

        found = {f"{name}/{key}": value for name, part in self._parts.items() for key, value in part.state().items()}
        return found | ({"versions": torch.tensor(self._versions())} if any(self._versions()) else {})

    def restore(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        super().restore(version, tensors)
        versions = tensors["versions"].tolist() if "versions" in tensors else [0] * len(self._parts)
        for (name, part), own in zip(self._parts.items(), versions, strict=True):
            start = f"{name}/"
            part.restore(own, {key.removeprefix(start): tensors[key] for key in tensors if key.startswith(start)})


def _shared_vocabulary(name: str, parts: Sequence[ScoringTeacher]) -> RemoteVocabulary | None:
    """The stop ids of the parts, and the ids that all of them share. Parts that are the student add nothing."""
    found = [part.elsewhere for part in parts if part.elsewhere is not None]
    found += [
        RemoteVocabulary(name, one.stop_ids, one.head.weight.shape[0])
        for part in parts
        if (one := part.model) is not None
    ]
    stop_ids = tuple(sorted({index for one in found for index in one.stop_ids}))
    return RemoteVocabulary(name, stop_ids, min(one.size for one in found)) if found else None


def models_of(teacher: TeacherLike) -> list[LanguageModel]:
    """The models in this process that a teacher scores with, in order."""
    if isinstance(teacher, BlendedTeacher):
        return teacher.models
    return [] if teacher.model is None else [teacher.model]


def _scoring(name: str, parts: Mapping[str, TeacherLike]) -> dict[str, ScoringTeacher]:
    found = {key: part for key, part in parts.items() if isinstance(part, ScoringTeacher)}
    for key in parts:
        if key not in found:
            raise RecipeError(
                f"teachers.{name}: part {key} is not a ScoringTeacher, so the width of its hidden states is not known."
            )
    return found
