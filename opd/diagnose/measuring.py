"""Measure: both models answer, and the teacher scores the student's answers and takes over from them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opd.common.context import RunContext
from opd.common.errors import DataError, UserError
from opd.data.prompts import render_completion, render_prompts, response_text
from opd.data.sources import Source
from opd.diagnose.measures import (
    AnswerStatistics,
    Depth,
    PairMeasures,
    StopProbe,
    Stretch,
    answers_of,
    error_places,
    excess_kl,
    fork_places,
    form_of,
    gap_between,
    inside,
    mean_of,
    stretch_edges,
    within_prompt_auroc,
)
from opd.divergences import Projection, likeliest_ids, statistics
from opd.engines.requests import request_key
from opd.evaluation import is_right
from opd.loop.parts import Samplers
from opd.loop.ranks import Ranks
from opd.models import load_config, load_tokenizer
from opd.models.language_model import LanguageModel, Pack, pack
from opd.models.tokenizers import differing_ids
from opd.objective.batch import over_spans
from opd.recipe import STAGE_PREFIX, Stage
from opd.recipe.graph import edges
from opd.records import (
    Author,
    Prompt,
    Rendered,
    Rollout,
    Sample,
    SampleRequest,
    Sampling,
    SignalNeed,
    TeacherLike,
    TokenSampler,
)
from opd.rewards import Rewarder, check_rewards
from opd.rollouts.rollouter import answers
from opd.runner.checks import as_named, open_prompts, pick_device
from opd.runner.stage import StageModels
from opd.teachers.kinds import ModelRef, TeacherKind
from opd.teachers.pool import TeacherPool, open_teachers
from opd.teachers.table import K, Pair, Samples, compare
from opd.teachers.views import BytesView, Group, texts_for

BY_TEACHER, TAKEN_OVER = 10_000, 20_000  # first draw numbers; the student's begin at 0
DEPTHS = (0.25, 0.5, 0.75)  # as shares of the usual length of the student's answers
TAKEOVERS = 128  # answers taken over at each depth
COMPARED = 8  # answers for the start table
ENDING = 0.5  # probability of ending above which the teacher would end as well
ENDS = 5  # fewest right ends that are evidence


@dataclass
class DomainAnswers:
    """The student's answers to the prompts of one domain."""

    bench: Bench
    domain: str
    asked: list[DiagnosisPrompt]
    samples: int

    @cached_property
    def rollouts(self) -> list[Rollout]:
        draws = [Draw(asking, number) for asking in self.asked for number in range(self.samples)]
        return self.bench.draw(self.bench.samplers.student, draws)

    @cached_property
    def prompt_ids(self) -> list[str]:
        return [rollout.prompt_id for rollout in self.rollouts]

    @cached_property
    def texts(self) -> list[str]:
        return [self.bench.text(rollout) for rollout in self.rollouts]

    @cached_property
    def marks(self) -> np.ndarray:
        return self.bench.right(self.prompt_ids, self.texts)

    @cached_property
    def rewards(self) -> dict[str, float | None]:
        return {
            rollout.id: None if np.isnan(mark) else float(mark)
            for rollout, mark in zip(self.rollouts, self.marks, strict=True)
        }

    @cached_property
    def answers(self) -> AnswerStatistics:
        sizes = [rollout.response_ids.size for rollout in self.rollouts]
        cut = [rollout.stop == "length" for rollout in self.rollouts]
        return answers_of(self.prompt_ids, self.marks, sizes, cut, self.samples)

    @cached_property
    def references(self) -> list[Rollout]:
        """The dataset's answers that fit, if it has any."""
        bench, found = self.bench, []
        for asking in self.asked:
            if not asking.prompt.fields.get("completion"):
                continue
            ids, cut = render_completion(
                asking.prompt, bench.student.tokenizer, bench.limit, bench.stop_ids, bench.kwargs(asking.prompt.id)
            )
            if not cut:
                found.append(_reference(asking, ids))
        return found


def _reference(asking: DiagnosisPrompt, ids: np.ndarray) -> Rollout:
    nothing = np.full(ids.size, np.nan, dtype=np.float32)
    return Rollout(
        id=f"{asking.prompt.id}/data",
        prompt_id=asking.prompt.id,
        visit=VISIT,
        sample=0,
        domain=asking.prompt.domain,
        source="data",
        prompt_ids=asking.ids,
        response_ids=ids,
        author=np.full(ids.size, Author.DATA, dtype=np.uint8),
        logprob=nothing,
        logprob_sampled=nothing,
        logprob_stop=nothing,
        version=np.zeros(ids.size, dtype=np.int32),
        stop="stop",
        group=asking.prompt.id,
    )


@dataclass
class TeacherAnswers:
    """A teacher's answers to the same prompts, if it is a model in this process whose view needs only a prompt."""

    bench: Bench
    name: str
    asked: list[DiagnosisPrompt]
    samples: int
    own_template: bool = False  # regardless of its view

    @property
    def model(self) -> LanguageModel | None:
        found: LanguageModel | None = self.bench.teachers[self.name].model
        return found

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self.model.stop_ids if self.crosses and self.model is not None else self.bench.stop_ids

    @property
    def crosses(self) -> bool:
        return self.bench.kinds[self.name].view.crosses

    @cached_property
    def read(self) -> dict[str, np.ndarray]:
        """What it reads in place of each prompt; none if its view needs answers, or if it has no model in this process."""
        kind, model = self.bench.kinds[self.name], self.model
        if model is None or not (kind.view.crosses or (kind.view.of_prompt and kind.view.reprompts)):
            return {}
        own = self.own_template or kind.view.chat_template == "teacher"
        tokenizer = model.tokenizer if own else self.bench.student.tokenizer
        found = {}
        for asking in self.asked:
            prompt = kind.view.rewrite(asking.prompt)
            (ids,) = (
                [asking.ids]
                if kind.view.as_sampled and not own
                else [DataError("nothing to show")]
                if prompt is None
                else render_prompts([prompt], tokenizer, self.bench.kwargs(asking.prompt.id))
            )
            if not isinstance(ids, DataError) and ids.size + self.bench.limit <= model.context:
                found[asking.prompt.id] = ids
        return found

    @cached_property
    def sampler(self) -> TokenSampler:
        """A sampler with room for the teacher's longest prompt, which may be longer than the student's."""
        assert self.model is not None
        length = max(ids.size for ids in self.read.values()) + self.bench.limit
        kind = self.bench.spec.sampler.for_frozen_models()
        return kind.open(self.model.inference_copy(None), length, merge_stop=self.stop_ids)

    @cached_property
    def rollouts(self) -> list[Rollout]:
        draws = [
            Draw(asking, BY_TEACHER + number, self.read[asking.prompt.id])
            for asking in self.asked
            if asking.prompt.id in self.read
            for number in range(self.samples)
        ]
        return self.bench.draw(self.sampler, draws, self.stop_ids) if draws else []

    @cached_property
    def after_student_prompts(self) -> list[Rollout]:
        """The teacher's answers after the student's prompts, in common ids. None if tokenizers differ."""
        asked = self.bench.asked
        return [] if self.crosses else [replace(one, prompt_ids=asked[one.prompt_id].ids) for one in self.rollouts]

    @cached_property
    def texts(self) -> list[str]:
        tokenizer = self.model.tokenizer if self.crosses and self.model is not None else self.bench.student.tokenizer
        return [response_text(rollout.response_ids, tokenizer, self.stop_ids) for rollout in self.rollouts]

    @cached_property
    def answers(self) -> AnswerStatistics | None:
        if not self.rollouts:
            return None
        names = [rollout.prompt_id for rollout in self.rollouts]
        sizes = [rollout.response_ids.size for rollout in self.rollouts]
        cut = [rollout.stop == "length" for rollout in self.rollouts]
        return answers_of(names, self.bench.right(names, self.texts), sizes, cut, self.samples)


def measure_pair(bench: Bench, name: str, own: DomainAnswers, samples: int, clock: Stopwatch) -> PairMeasures:
    """Everything about one teacher in one domain."""
    theirs = TeacherAnswers(bench, name, own.asked, samples)
    table = _start_table(bench, name, own)
    clock.begin()
    rows = token_rows(bench, name, own.rollouts, own.rewards)
    clock.end("score", sum(rollout.length for rollout in own.rollouts))
    scored = (
        token_rows(bench, name, theirs.after_student_prompts, {})
        if theirs.after_student_prompts
        and bench.kinds[name].view.as_sampled
        and "hidden" in bench.teachers[name].offers
        else []
    )
    ratios = [row.ratio for row in rows]
    auroc, pairs = within_prompt_auroc(own.prompt_ids, own.marks, _means(ratios))
    gap, gap_stderr = gap_between(own.answers, theirs.answers)
    kind = bench.kinds[name]
    return PairMeasures(
        teacher=name,
        domain=own.domain,
        tokens=sum(int((~np.isnan(row.teacher)).sum()) for row in rows),
        ids_differ=bench.differ[name],
        crosses=bench.spec.teachers[name].view.crosses,
        aligned=table.aligned,
        template=table.template,
        own_template=_own_template(theirs, table.template),
        stop_ids=table.stop_ids,
        origin=table.origin,
        memory=table.memory,
        answers=theirs.answers,
        gap=gap,
        gap_stderr=gap_stderr,
        auroc=auroc,
        auroc_pairs=pairs,
        likelihood=_likelihood(rows, scored),
        kl=mean_of([row.kl for row in rows]),
        sampled=kind.view.crosses or "hidden" not in bench.teachers[name].offers,
        overlap=mean_of([row.overlap for row in rows]),
        overlap_mass=mean_of([row.mass for row in rows]),
        entropy=mean_of([row.entropy for row in rows]),
        teacher_entropy=mean_of([row.teacher_entropy for row in rows]),
        form=form_of(own.texts, theirs.texts),
        stretches=_stretches(own, rows, scored),
        forks=fork_places([row.entropy for row in rows], ratios),
        errors=error_places(own.marks, ratios, [-row.teacher for row in rows]),
        takeover=_takeover(bench, own, theirs),
        excess=excess_kl([row.kl for row in rows], [row.kl for row in scored]) if scored else None,
        stops=_stop_probe(bench, name, own, rows, theirs, scored, table),
    )


def _own_template(theirs: TeacherAnswers, nats: float | None) -> float | None:
    """Its accuracy with its own chat template, if that differs. It shows which template has to be fixed."""
    if not nats:
        return None
    answers = replace(theirs, own_template=True).answers
    return None if answers is None else answers.accuracy


def _start_table(bench: Bench, name: str, own: DomainAnswers) -> Pair:
    few = own.rollouts[:: max(1, len(own.rollouts) // COMPARED)][:COMPARED]
    groups = bench.groups([*own.rollouts, *own.references], name, own.rewards)
    probe = Samples(few, bench.prompts, groups, own.references[:COMPARED])
    return compare(bench.student, name, bench.teachers[name], bench.kinds[name].view, probe, bench.stop_ids)


def _means(rows: Sequence[np.ndarray]) -> np.ndarray:
    return np.array([found if (found := mean_of([row])) is not None else np.nan for row in rows])


def _likelihood(rows: Sequence[TokenRows], scored: Sequence[TokenRows]) -> dict[str, float]:
    """Nats per token: the words of one model under another."""
    found: Mapping[str, float | None] = {
        "student's words under the student": mean_of([row.student for row in rows]),
        "student's words under the teacher": mean_of([row.teacher for row in rows]),
        "teacher's words under the student": mean_of([row.student for row in scored]),
        "teacher's words under the teacher": mean_of([row.teacher for row in scored]),
    }
    return {key: value for key, value in found.items() if value is not None}


def _stretches(own: DomainAnswers, rows: Sequence[TokenRows], scored: Sequence[TokenRows]) -> tuple[Stretch, ...]:
    edges = stretch_edges([row.teacher.size for row in rows])
    found = []
    for start, end in pairwise(edges):
        ratios = inside([row.ratio for row in rows], start, end)
        surprise = mean_of(inside([-row.teacher for row in rows], start, end))
        advantage = mean_of(ratios)
        if surprise is None or advantage is None:
            continue
        auroc, _ = within_prompt_auroc(own.prompt_ids, own.marks, _means(ratios))
        count = int(sum((~np.isnan(row)).sum() for row in ratios))
        kl, teacher_kl = (mean_of(inside([row.kl for row in some], start, end)) for some in (rows, scored))
        found.append(Stretch(start, end, count, surprise, advantage, kl, teacher_kl, auroc))
    return tuple(found)


def _takeover(bench: Bench, own: DomainAnswers, theirs: TeacherAnswers) -> tuple[Depth, ...]:
    """Take over at several depths, if answers can be rewarded and both models have the same ids."""
    if theirs.crosses or not theirs.read or np.isnan(own.marks).all():
        return ()
    usual = float(np.median([rollout.response_ids.size for rollout in own.rollouts]))
    depths = sorted({max(1, round(usual * part)) for part in DEPTHS})
    gap, stderr = gap_between(own.answers, theirs.answers)  # which is taking over at depth 0
    whole = [] if gap is None or stderr is None else [Depth(0, len(theirs.rollouts), gap, stderr)]
    deeper = [_at_depth(bench, own, theirs, depth) for depth in depths]
    return (*whole, *(found for found in deeper if found is not None))


def _at_depth(bench: Bench, own: DomainAnswers, theirs: TeacherAnswers, depth: int) -> Depth | None:
    long = [
        at
        for at, rollout in enumerate(own.rollouts)
        if rollout.response_ids.size > depth and rollout.prompt_id in theirs.read and not np.isnan(own.marks[at])
    ]
    chosen = long[:: max(1, len(long) // TAKEOVERS)][:TAKEOVERS]
    if not chosen:
        return None
    draws = [
        Draw(
            bench.asked[own.rollouts[at].prompt_id],
            TAKEN_OVER * (1 + depth) + own.rollouts[at].sample,
            theirs.read[own.rollouts[at].prompt_id],
            own.rollouts[at].response_ids[:depth],
        )
        for at in chosen
    ]
    went_on = bench.draw(theirs.sampler, draws)
    marks = bench.right([rollout.prompt_id for rollout in went_on], [bench.text(rollout) for rollout in went_on])
    gained = (marks - own.marks[chosen])[~np.isnan(marks)]
    spread = float(gained.std(ddof=1) / np.sqrt(gained.size)) if gained.size > 1 else 0.0
    return Depth(depth, gained.size, float(gained.mean()), spread) if gained.size else None


def _stop_probe(
    bench: Bench,
    name: str,
    own: DomainAnswers,
    rows: Sequence[TokenRows],
    theirs: TeacherAnswers,
    scored: Sequence[TokenRows],
    table: Pair,
) -> StopProbe:
    at_own = [
        float(row.teacher_stop[-1]) if rollout.stop == "stop" else 0.0
        for rollout, row in zip(theirs.after_student_prompts, scored, strict=False)
    ]
    right = [at for at, rollout in enumerate(own.rollouts) if rollout.stop == "stop" and own.marks[at] != 0]
    ends = [float(rows[at].teacher_stop[-1]) for at in right if rows[at].teacher_stop.size]
    known = [value for value in ends if not np.isnan(value)]
    agreed = float(np.mean([value > ENDING for value in known])) if len(known) >= ENDS else None
    ended = float(np.mean(at_own)) if at_own else None
    probe = StopProbe(ended, table.stop_mass, agreed, len(known), given=bool(own.references))
    samples = own.references or [own.rollouts[at] for at in right]
    if not samples or "topk" not in bench.teachers[name].offers or bench.kinds[name].view.crosses:
        return probe
    return replace(probe, instead=_token_instead(bench, name, samples[:COMPARED]))


def _token_instead(bench: Bench, name: str, ended: Sequence[Rollout]) -> tuple[int, str, float] | None:
    """The teacher's most frequent token where an answer ends, if it is not a stop id."""
    signals = bench.teachers[name].score(ended, SignalNeed("topk", k=1))
    likeliest: dict[int, list[float]] = {}
    for signal in signals:
        top = signal.values.rows(np.array([-1]))
        best = int(np.nanargmax(top.logprobs[0]))
        likeliest.setdefault(int(top.ids[0, best]), []).append(float(np.exp(top.logprobs[0, best])))
    token, masses = max(likeliest.items(), key=lambda item: len(item[1]))
    if token in bench.stop_ids:
        return None
    return token, str(bench.student.tokenizer.convert_ids_to_tokens(token)), float(np.mean(masses))


# The workbench: the open models of a stage and a few of its prompts. Nothing is trained or stored.


VISIT = -3  # a key for draws that differ from those of steps, evaluations and start tables
SCORED = {"hidden", "logprobs_at"}  # a teacher has to offer one of them


@dataclass(frozen=True)
class DiagnosisPrompt:
    """A prompt that both models answer."""

    prompt: Prompt
    ids: np.ndarray  # as the student reads it
    source: int  # its number in the recipe


@dataclass
class Bench:
    spec: Stage
    student: LanguageModel
    kinds: dict[str, TeacherKind]  # with the view bytes if the tokenizer differs
    teachers: dict[str, TeacherLike]
    differ: dict[str, int]  # teacher -> number of ids with another meaning
    stop_ids: tuple[int, ...]
    samplers: Samplers
    rewarder: Rewarder
    asked: dict[str, DiagnosisPrompt]  # by prompt id
    notes: list[str] = field(default_factory=list)

    @property
    def domains(self) -> dict[str, list[DiagnosisPrompt]]:
        found: dict[str, list[DiagnosisPrompt]] = {}
        for asking in self.asked.values():
            found.setdefault(asking.prompt.domain, []).append(asking)
        return found

    @property
    def prompts(self) -> dict[str, Prompt]:
        return {name: asking.prompt for name, asking in self.asked.items()}

    @property
    def limit(self) -> int:
        """Tokens of an answer."""
        return self.spec.rollout.max_new_tokens

    def sampling(self, stop_ids: tuple[int, ...] | None = None) -> Sampling:
        """Sampling at temperature 1 without truncation: the models' own distribution."""
        stops = self.stop_ids if stop_ids is None else stop_ids
        return Sampling(self.limit, stop_ids=stops, stop_strings=tuple(self.spec.rollout.stop))

    def kwargs(self, prompt_id: str) -> Mapping[str, Any]:
        return self.spec.prompts[self.asked[prompt_id].source].chat_template_kwargs

    def groups(
        self, rollouts: Sequence[Rollout], teacher: str, rewards: Mapping[str, float | None]
    ) -> dict[str, Group]:
        """Rollouts of each prompt, as the teacher's view needs them."""
        members: dict[str, list[Rollout]] = {}
        for rollout in rollouts:
            members.setdefault(rollout.group, []).append(rollout)
        tokenizer, own = self.student.tokenizer, self.kinds[teacher].view.chat_template == "teacher"
        model = self.teachers[teacher].model
        found = {
            name: Group(group, tokenizer, rewards, self.kwargs(group[0].prompt_id), self.stop_ids)
            for name, group in members.items()
        }
        if not own or model is None:
            return found
        return {name: replace(group, tokenizer=model.tokenizer, student=tokenizer) for name, group in found.items()}

    def right(self, prompt_ids: Sequence[str], texts: Sequence[str]) -> np.ndarray:
        """1 right, 0 wrong, NaN without a reward."""
        marks = np.full(len(texts), np.nan)
        covered = [at for at, name in enumerate(prompt_ids) if self.rewarder.covers(self.asked[name].prompt)]
        samples = [Sample(self.asked[prompt_ids[at]].prompt, texts[at]) for at in covered]
        for at, result in zip(covered, self.rewarder(samples) if samples else [], strict=True):
            marks[at] = is_right(result)
        return marks

    def text(self, rollout: Rollout) -> str:
        return response_text(rollout.response_ids, self.student.tokenizer, self.stop_ids)

    def draw(
        self, sampler: TokenSampler, wanted: Sequence[Draw], stop_ids: tuple[int, ...] | None = None
    ) -> list[Rollout]:
        """One rollout per answer. It belongs to its prompt, whatever was read in its place."""
        sampling = self.sampling(stop_ids)
        requests = [
            SampleRequest(
                f"{draw.asking.prompt.id}/{draw.number}",
                draw.asking.ids if draw.read is None else draw.read,
                request_key(self.spec.seed, draw.asking.prompt.id, VISIT, draw.number),
                sampling,
                draw.prefix,
            )
            for draw in wanted
        ]
        found = answers(sampler, requests) if requests else []
        return [
            replace(
                rollout,
                prompt_id=draw.asking.prompt.id,
                domain=draw.asking.prompt.domain,
                group=draw.asking.prompt.id,
                sample=draw.number,
                visit=VISIT,
            )
            for rollout, draw in zip(found, wanted, strict=True)
        ]

    def close(self) -> None:
        self.rewarder.close()
        self.samplers.close()


@dataclass(frozen=True)
class Draw:
    """An answer to sample. `number`: key of the draw; `read`: in place of the student's prompt; `prefix`: its first tokens."""

    asking: DiagnosisPrompt
    number: int
    read: np.ndarray | None = None
    prefix: np.ndarray | None = None


def open_bench(spec: Stage, count: int, scratch: Path, say: Callable[[str], None]) -> Bench:
    """Open the models. `count`: prompts per domain. Mistakes are found before weights are loaded. No teacher is paged."""
    _require_here(spec)
    for ref in (ModelRef(spec.student.model, spec.student.revision), *_read(spec)):
        load_config(ref.model, ref.revision)  # a missing server is an error before any retries
    rollout = spec.rollout.model_copy(update={"staleness": 0, "in_flight": "recompute"})
    spec = spec.model_copy(update={"pool": TeacherPool(), "rollout": rollout})  # no sampling ahead
    device = pick_device(spec.device)
    differ = {name: _differ(spec, kind) for name, kind in _teachers(spec).items()}
    kinds = {
        name: kind.model_copy(update={"view": BytesView(skip=kind.view.skip)})
        if differ[name] and not kind.view.crosses
        else kind
        for name, kind in _teachers(spec).items()
    }
    sources = open_prompts(spec)
    examples = [prompt for source in sources for prompt in source.examples()]
    rewarder = check_rewards(spec.rewards, examples, say=say)
    if spec.threads is not None:
        torch.set_num_threads(spec.threads)
    torch.manual_seed(spec.seed)
    ranks = Ranks()
    models = StageModels(spec, device, _unchanged, as_named, scratch, ranks)
    student = models.student(spec, sharded=False)
    teachers, stop_ids = open_teachers(kinds, student, models.teacher, RunContext(scratch, say=say))
    if not stop_ids:
        raise UserError(
            f"{spec.student.model!r} and its teachers name no stop id. Set eos_token_id in a generation_config.json."
        )
    context = min([student.context, *(teacher.context for teacher in teachers.values())])
    asked, notes = _asked(spec, sources, student.tokenizer, count, context - spec.rollout.max_new_tokens)
    longest = max(asking.ids.size for asking in asked.values()) + spec.rollout.max_new_tokens
    samplers = Samplers(spec, student, teachers, longest, stop_ids, ranks)
    samplers.publish(student, 0)
    return Bench(spec, student, kinds, teachers, differ, stop_ids, samplers, rewarder, asked, notes)


def _unchanged(name: str) -> str:
    return name


def _require_here(spec: Stage) -> None:
    if missing := [edge for edge in edges(spec) if edge.stage]:
        raise UserError(
            f"stage {spec.name!r} takes {missing[0].key} from {STAGE_PREFIX}{missing[0].stage}, which has not run. Diagnose the "
            "first stage, or name the directory of a trained model there."
        )
    if spec.student.merge is not None:
        raise UserError(f"stage {spec.name!r} merges its student when it starts. Merge first, and name the result.")
    if not _teachers(spec):
        raise UserError(
            "there is no teacher to measure: none of the role `teacher` gives log-probs of any text. Name one: "
            "--teacher MODEL, `teachers` in a recipe, or another stage of it (--stage NAME)."
        )


def _teachers(spec: Stage) -> dict[str, TeacherKind]:
    """Teachers that can score new answers."""
    return {
        name: kind
        for name, kind in spec.teachers.items()
        if kind.role == "teacher" and kind.scores_any and SCORED & kind.offers
    }


def _read(spec: Stage) -> list[ModelRef]:
    return [ref for kind in _teachers(spec).values() for ref in kind.reads()]


def _differ(spec: Stage, kind: TeacherKind) -> int:
    student = load_tokenizer(spec.student.model, spec.student.revision)
    return sum(len(differing_ids(student, load_tokenizer(ref.model, ref.revision))) for ref in kind.reads())


def _asked(
    spec: Stage, sources: Sequence[Source], tokenizer: Any, count: int, room: int
) -> tuple[dict[str, DiagnosisPrompt], list[str]]:
    """At most `count` training prompts per domain that leave room for an answer."""
    found: dict[str, DiagnosisPrompt] = {}
    taken: dict[str, int] = {}
    long, unreadable = 0, list[DataError]()
    for number, source in enumerate(sources):
        kwargs = spec.prompts[number].chat_template_kwargs
        prompts = source.prompts("train", count)
        for prompt, ids in zip(prompts, render_prompts(prompts, tokenizer, kwargs, whole=True), strict=True):
            if isinstance(ids, DataError):
                unreadable.append(ids)
            elif ids.size > room:
                long += 1
            elif taken.get(prompt.domain, 0) < count:
                taken[prompt.domain] = taken.get(prompt.domain, 0) + 1
                found[prompt.id] = DiagnosisPrompt(prompt, ids, number)
    if not found and unreadable:
        raise unreadable[0]
    if not found:
        raise DataError(
            f"prompts {', '.join(source.source for source in spec.prompts)}: none leaves room for {spec.rollout.max_new_tokens:,} "
            f"tokens of an answer ({max(room, 0):,} tokens are left for a prompt). Lower --max-new-tokens."
        )
    left = long + len(unreadable)
    return found, [f"{left:,} prompts are too long or cannot be rendered, and were left out"] if left else []


# Values per token from student and teacher


BUDGET = 8192  # tokens of one pass


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Values of one rollout, (T,) each. NaN: not known. Stop ids are one event."""

    student: np.ndarray  # log-prob of the token
    teacher: np.ndarray
    kl: np.ndarray  # student to teacher, nats
    entropy: np.ndarray  # of the student
    teacher_entropy: np.ndarray
    overlap: np.ndarray  # of the two top K
    mass: np.ndarray  # the teacher's probability on the student's top K
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
    """Values of every rollout. They are NaN if the teacher's view has nothing to show."""
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
    """From hidden states, with both whole distributions."""
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
    """The probability of those of the teacher's K likeliest ids that are among the student's. Stops are one id."""
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
    """From log-probs of tokens, or of spans if tokenizers differ. The student's log-probs are the sampler's."""
    found = {}
    signals = teacher.score([rollout for rollout, _ in shown], SignalNeed("logprobs_at"), [text for _, text in shown])
    for (rollout, _), signal in zip(shown, signals, strict=True):
        nothing = TokenRows.unknown(rollout.response_ids.size)
        theirs = np.where(signal.mask, np.asarray(signal.values, dtype=np.float64), np.nan)
        ours = np.asarray(over_spans(rollout.logprob, signal), dtype=np.float64)
        values = vars(nothing) | {"student": ours, "teacher": theirs, "kl": ours - theirs}  # an estimate
        found[rollout.id] = TokenRows(**values)
    return found


# Timings


class Stopwatch:
    """Measured seconds and tokens of the parts of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.tokens: dict[str, int] = {}
        self._since = time.monotonic()

    def begin(self) -> None:
        self._since = time.monotonic()

    def end(self, what: str, tokens: int) -> None:
        self.seconds[what] = self.seconds.get(what, 0.0) + time.monotonic() - self._since
        self.tokens[what] = self.tokens.get(what, 0) + tokens

    def each(self, what: str) -> float:
        """Seconds per token."""
        return self.seconds[what] / max(self.tokens[what], 1)
