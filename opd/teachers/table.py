"""Compares each teacher with its student on a few answers before training: one `Pair` each.

Only measures: nothing is trained, sampled or changed. Values that a teacher does not offer are None. Thresholds are published
where `docs/teachers.md` says so; remedies are the published ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from opd.common.errors import DataError
from opd.data.prompts import render_prompts
from opd.divergences import statistics
from opd.models.language_model import LanguageModel, Pack, stored_parts
from opd.models.tokenizers import differing_ids
from opd.objective.batch import over_spans
from opd.records import Prompt, Rendered, Rollout, Signal, SignalNeed, TeacherLike
from opd.teachers.other_servers import CompletionsTeacher
from opd.teachers.scoring import ScoringTeacher
from opd.teachers.views import Group, SameView, View, aligned_bytes, response_after, texts_for

K = 16  # of the top-K overlap
FAR, APART, LOST = 0.15, 0.7, 0.8  # nats of KL; overlap; mass of stopping where answers stop
ORIGIN = 0.5  # cosine between weights: near 1 with a common origin, else near 0
ALIGNED = 0.9  # share of the text inside spans, if tokenizers differ
SAMPLE = 65_536  # weights compared per tensor
COMPARED = 4  # tensors compared
ASK = "`opd diagnose` measures whether it helps to train on its answers first."  # a few answers do not tell


@dataclass(frozen=True)
class Samples:
    """A few answers of the student, and of the dataset if it has any."""

    rollouts: Sequence[Rollout]
    prompts: Mapping[str, Prompt]
    groups: Mapping[str, Group]
    reference: Sequence[Rollout] = ()  # from the dataset; they end where an answer ends

    def of(self, wanted: Callable[[Prompt], bool]) -> Samples:
        """The samples with wanted prompts; all if there are none."""

        def some(rollouts: Sequence[Rollout]) -> list[Rollout]:
            return [rollout for rollout in rollouts if wanted(self.prompts[rollout.prompt_id])]

        chosen = Samples(some(self.rollouts), self.prompts, self.groups, some(self.reference))
        return chosen if chosen.rollouts else self


class Finding(NamedTuple):
    """A warning."""

    what: str
    value: str
    remedy: str


@dataclass(frozen=True)
class Pair:
    """One teacher compared with the student. None: unknown, or not applicable."""

    teacher: str
    ids_differ: int | None = None  # ids with different meanings in the two tokenizers
    rows: tuple[int, int] | None = None  # of the heads: (student, teacher)
    context: tuple[int, int] | None = None  # in tokens: (student, teacher)
    template: float | None = None  # nats: mean |difference| of its log-probs under its own chat template
    stop_ids: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # (student, teacher)
    stop_mass: float | None = None  # the teacher's probability of stopping where answers stop
    kl: float | None = None  # nats per token, student to teacher, on the student's answers
    sampled: bool = False  # the KL is an estimate from log-probs
    overlap: float | None = None  # of the top K of both
    origin: float | None = None  # cosine between the weights
    aligned: float | None = None  # share of the text's bytes inside spans, if tokenizers differ
    memory: int | None = None  # bytes in addition to the student's
    plain: int = 0  # prompts of plain text, if the student has a chat template
    tokens: int = 0  # number of tokens measured

    @property
    def findings(self) -> list[Finding]:
        return list(_findings(self))

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"warnings": [f"{found.what}: {found.value}. {found.remedy}" for found in self.findings]}


@torch.no_grad()
def compare(
    student: LanguageModel, name: str, teacher: TeacherLike, view: View, probe: Samples, stop_ids: tuple[int, ...]
) -> Pair:
    """`stop_ids`: of all models together, as one event."""
    model: LanguageModel | None = teacher.model
    with nullcontext() if model is None else model.resident():  # its weights are compared as well
        return Pair(name, **_measured(student, model, teacher, view, probe, stop_ids))


def _measured(
    student: LanguageModel,
    model: LanguageModel | None,
    teacher: TeacherLike,
    view: View,
    probe: Samples,
    stop_ids: tuple[int, ...],
) -> dict[str, Any]:
    found = _of_elsewhere(student, teacher) if model is None else _of_models(student, model)
    found["plain"] = _plain_prompts(student, probe)
    rollouts = [rollout for rollout in probe.rollouts if rollout.response_ids.size]
    seen = texts_for(view, rollouts, probe.prompts, probe.groups, teacher.context)
    shown = [(rollout, text) for rollout, text in zip(rollouts, seen, strict=True) if text is not None]
    if shown:
        found |= _divergence(student, teacher, shown, stop_ids)
    if view.crosses:
        found["aligned"] = _aligned(student, rollouts, seen, stop_ids)
    if "logprobs_at" in teacher.offers:
        found["stop_mass"] = _stop_mass(teacher, view, probe, stop_ids)
        if model is not None and found["ids_differ"] == 0 and view.chat_template == "student":
            found["template"] = _template(student, model, teacher, view, probe)
    return found


def _of_models(student: LanguageModel, model: LanguageModel) -> dict[str, Any]:
    """Facts from the two models' configurations."""
    return {
        "ids_differ": len(differing_ids(student.tokenizer, model.tokenizer)),
        "rows": (student.head.weight.shape[0], model.head.weight.shape[0]),
        "context": (student.context, model.context),
        "stop_ids": (student.stop_ids, model.stop_ids),
        "origin": same_origin(student, model),
        "memory": held(model, student),
    }


def _of_elsewhere(student: LanguageModel, teacher: TeacherLike) -> dict[str, Any]:
    """Facts of a remote or composite teacher. Its tokenizer is the student's, as was checked before."""
    known = teacher.elsewhere if isinstance(teacher, ScoringTeacher | CompletionsTeacher) else None
    if known is None:
        return {}
    return {
        "ids_differ": 0,
        "rows": (student.head.weight.shape[0], known.size),
        "context": (student.context, min(teacher.context, student.context)),
        "stop_ids": (student.stop_ids, known.stop_ids),
    }


def _plain_prompts(student: LanguageModel, probe: Samples) -> int:
    """Counts plain-text prompts. Texts with a special token are already-rendered templates and do not count."""
    if not student.tokenizer.chat_template:
        return 0
    texts = [probe.prompts[rollout.prompt_id].text or "" for rollout in probe.rollouts]
    special = [token for token in student.tokenizer.all_special_tokens if token]
    return sum(bool(text) and not any(token in text for token in special) for text in texts)


def _divergence(
    student: LanguageModel,
    teacher: TeacherLike,
    shown: Sequence[tuple[Rollout, Rendered]],
    stop_ids: tuple[int, ...],
) -> dict[str, Any]:
    """KL, exact from hidden states or estimated from log-probs of the student's tokens."""
    rollouts, texts = [rollout for rollout, _ in shown], [text for _, text in shown]
    if "hidden" in teacher.offers and not any(text.crossed for text in texts):
        signals = teacher.score(rollouts, SignalNeed("hidden"), texts)
        mask = np.concatenate([signal.mask for signal in signals])
        hidden = torch.cat([signal.values.to(student.device) for signal in signals])
        rows = torch.from_numpy(np.flatnonzero(mask)).to(student.device)
        ours = student.predict(Pack.of(rollouts, student.device)).rows(rows)
        stats = statistics(ours, teacher.project(hidden[rows]), merge=(stop_ids,), overlap=K)
        assert stats.reverse_kl is not None
        assert stats.overlap is not None
        return {"kl": _mean(stats.reverse_kl), "overlap": _mean(stats.overlap), "tokens": int(mask.sum())}
    if "logprobs_at" not in teacher.offers:
        return {}
    gaps = [
        over_spans(rollout.logprob, signal) - np.asarray(signal.values)
        for rollout, signal in zip(rollouts, teacher.score(rollouts, SignalNeed("logprobs_at"), texts), strict=True)
    ]
    known = np.concatenate(gaps)
    known = known[~np.isnan(known)]
    return {"kl": float(known.mean()) if known.size else None, "sampled": True, "tokens": known.size}


def _aligned(
    student: LanguageModel, rollouts: Sequence[Rollout], texts: Sequence[Rendered | None], stop_ids: tuple[int, ...]
) -> float | None:
    """The share of the answers' bytes inside spans."""
    nothing = Rendered(np.zeros(0, dtype=np.int32), ())
    found = [
        aligned_bytes(rollout, text or nothing, student.tokenizer, stop_ids)
        for rollout, text in zip(rollouts, texts, strict=True)
    ]
    size = sum(every for _, every in found)
    return sum(inside for inside, _ in found) / size if size else None


def _stop_mass(teacher: TeacherLike, view: View, probe: Samples, stop_ids: tuple[int, ...]) -> float | None:
    """Stop probability where answers stop. Prefers answers of the dataset, since a student may stop in wrong places."""
    ended = [rollout for rollout in probe.reference or probe.rollouts if _stopped(rollout, stop_ids)]
    if not ended:
        return None
    values = [float(np.asarray(signal.values)[-1]) for signal in _plainly(teacher, view, probe, ended)]
    known = [value for value in values if not np.isnan(value)]
    return float(np.exp(known).mean()) if known else None


def _stopped(rollout: Rollout, stop_ids: tuple[int, ...]) -> bool:
    return bool(rollout.response_ids.size) and int(rollout.response_ids[-1]) in stop_ids


def _plainly(teacher: TeacherLike, view: View, probe: Samples, rollouts: Sequence[Rollout]) -> list[Signal]:
    """Log-probs after the student's prompt; in the teacher's own tokens if tokenizers differ."""
    plain = view if view.crosses else SameView()
    texts = texts_for(plain, rollouts, probe.prompts, probe.groups, teacher.context)
    shown = [(rollout, text) for rollout, text in zip(rollouts, texts, strict=True) if text is not None]
    return teacher.score([rollout for rollout, _ in shown], SignalNeed("logprobs_at"), [text for _, text in shown])


def _template(
    student: LanguageModel, model: LanguageModel, teacher: TeacherLike, view: View, probe: Samples
) -> float | None:
    """How much the teacher's own chat template would change its log-probs; 0 if both render the same ids."""
    pairs: list[tuple[Rollout, Rendered, Rendered]] = []
    same = 0
    for rollout in probe.rollouts:
        prompt, group = view.rewrite(probe.prompts[rollout.prompt_id]), probe.groups[rollout.group]
        if prompt is None or prompt.messages is None or not rollout.response_ids.size:
            continue
        ours, theirs = (
            render_prompts([prompt], tokenizer, group.template_kwargs)[0]
            for tokenizer in (student.tokenizer, model.tokenizer)
        )
        if isinstance(ours, DataError) or isinstance(theirs, DataError):
            continue
        if np.array_equal(ours, theirs):
            same += rollout.response_ids.size
        elif max(ours.size, theirs.size) + rollout.response_ids.size <= teacher.context:
            pairs.append((rollout, response_after(ours, rollout), response_after(theirs, rollout)))
    if not pairs:
        return 0.0 if same else None
    need, rollouts = SignalNeed("logprobs_at"), [rollout for rollout, _, _ in pairs]
    first, second = (
        np.concatenate([np.asarray(signal.values) for signal in teacher.score(rollouts, need, texts)])
        for texts in ([text for _, text, _ in pairs], [text for _, _, text in pairs])
    )
    return float(np.abs(first - second).sum() / (first.size + same))


def same_origin(student: LanguageModel, model: LanguageModel) -> float | None:
    """Cosine between some weights of the two models; None if no shapes match, or weights are sharded."""
    if model.sharded or not student.passes_alone:
        return None
    ours = dict((student if student.adapter is None else student.base()).module.named_parameters())
    before = {f"{layer}.weight": weight for layer, weight in model.unquantised.items()}
    plain = {key: value for key, value in model.module.named_parameters() if len(stored_parts(value)) == 1}
    theirs = plain | before
    shared = [
        key for key, value in ours.items() if value.dim() > 1 and key in theirs and theirs[key].shape == value.shape
    ]
    if not shared or len(shared) < len([value for value in ours.values() if value.dim() > 1]) / 2:
        return None
    chosen = shared[:: max(1, len(shared) // COMPARED)][:COMPARED]
    cosines = [
        torch.cosine_similarity(_part(ours[key]), _part(theirs[key]).to(ours[key].device), dim=0) for key in chosen
    ]
    return float(torch.stack(cosines).mean())


def _part(weights: Tensor) -> Tensor:
    return weights.detach().flatten()[:SAMPLE].float()


def held(model: LanguageModel, student: LanguageModel) -> int:
    """Bytes of weights that are not shared with the student."""
    shared = {parameter.data_ptr() for parameter in student.module.parameters()} if student.passes_alone else set()
    own = {part.data_ptr(): part for parameter in model.module.parameters() for part in stored_parts(parameter)}
    return sum(tensor.numel() * tensor.element_size() for place, tensor in own.items() if place not in shared)


def _mean(values: Tensor) -> float | None:
    return float(values.double().mean()) if values.numel() else None


# --- Warnings and remedies ---


def warnings(pairs: Sequence[Pair]) -> list[str]:
    """One line for each finding, with its teachers."""
    found: dict[tuple[str, str], list[str]] = {}
    for pair in pairs:
        for finding in pair.findings:
            found.setdefault((finding.what, finding.remedy), []).append(f"{pair.teacher} ({finding.value})")
    return [f"{what}: {', '.join(whose)}. {remedy}" for (what, remedy), whose in found.items()]


def _findings(pair: Pair) -> Iterator[Finding]:
    if pair.ids_differ:
        share = "" if pair.aligned is None else f", {pair.aligned:.0%} of the text aligned"
        yield Finding(
            "another tokenizer", f"{pair.ids_differ:,} ids differ{share}", "Only sums over common spans are compared."
        )
    if pair.aligned is not None and pair.aligned < ALIGNED:
        yield Finding(
            f"less than {ALIGNED:.0%} of the text aligns",
            f"{pair.aligned:.0%}",
            "Choose a teacher whose tokenizer is closer to the student's.",
        )
    if pair.rows is not None and pair.rows[0] != pair.rows[1] and not pair.ids_differ:
        yield Finding(
            "another vocabulary size",
            f"{pair.rows[1]:,} rows of the head, the student {pair.rows[0]:,}",
            "What is beyond both tokenizers is padding, and left out on both sides.",
        )
    if pair.context is not None and pair.context[1] < pair.context[0]:
        yield Finding(
            "a shorter context",
            f"{pair.context[1]:,} tokens, the student {pair.context[0]:,}",
            "Prompts and answers have to fit into the shorter: lower rollout.max_new_tokens, or show the teacher less.",
        )
    if pair.template:
        yield Finding(
            "another chat template",
            f"{pair.template:.2g} nats per token",
            "Fix the templates, or let it read its own: view: {chat_template: teacher}.",
        )
    if pair.plain:
        yield Finding(
            "prompts without the chat template",
            f"{pair.plain} of those looked at",
            "The student reads such text unchanged. If it answers in chats, give messages: [{role: user, content: …}].",
        )
    yield from _about_stops(pair)
    yield from _about_distance(pair)


def _about_stops(pair: Pair) -> Iterator[Finding]:
    if pair.stop_ids is not None and not pair.ids_differ and set(pair.stop_ids[0]) != set(pair.stop_ids[1]):
        ours, theirs = (", ".join(map(str, ids)) or "none" for ids in pair.stop_ids)
        yield Finding(
            "other stop ids",
            f"{theirs}; the student {ours}",
            "All of them are one event from now on. If answers grow too long, correct eos_token_id in generation_config.json.",
        )
    if pair.stop_mass is not None and pair.stop_mass < LOST:
        yield Finding(
            f"stops with probability below {LOST} where answers end",
            f"{pair.stop_mass:.2f}",
            "Look at stop ids and template: `opd diagnose` says what it ends with instead.",
        )


def _about_distance(pair: Pair) -> Iterator[Finding]:
    if pair.origin is not None and pair.origin < ORIGIN:
        yield Finding(
            "weights with another origin",
            f"cosine {pair.origin:.2f}",
            f"In one measurement (docs/teachers.md) such a teacher brought its student to 0.60 of its level, one with the same origin to 0.94. {ASK}",
        )
    cold, of = f"This often still works. {ASK}", f" of {pair.tokens:,} tokens" if pair.tokens else ""
    if pair.kl is not None and round(pair.kl, 2) > FAR:
        yield Finding(f"initial KL above {FAR} nats per token", f"{pair.kl:.2g}{of}", cold)
    if pair.overlap is not None and round(pair.overlap, 2) < APART:
        yield Finding(f"less than {APART:.0%} of the {K} likeliest tokens agree", f"{pair.overlap:.0%}{of}", cold)
