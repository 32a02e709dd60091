"""The measuring itself: both models answer, the teacher scores, and takes over where the student has begun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from opd.data.render import render_completion, render_prompts, response_text
from opd.diagnose.bench import VISIT, Asking, Bench, Draw
from opd.diagnose.measures import (
    Answering,
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
from opd.diagnose.stopwatch import Stopwatch
from opd.diagnose.token_rows import TokenRows, token_rows
from opd.errors import DataError
from opd.models.language_model import LanguageModel
from opd.teachers.table import Pair, Samples, compare
from opd.types import Author, Rollout, SignalNeed, TokenSampler

BY_TEACHER, TAKEN_OVER = 10_000, 20_000  # numbers of draws: the student's begin at 0
DEPTHS = (0.25, 0.5, 0.75)  # of the usual length of the student's answers
TAKEOVERS = 128  # answers that are taken over at each depth
COMPARED = 8  # answers that the start-up table is made of
ENDING = 0.5  # probability of ending above which the teacher would end, too
ENDS = 5  # right ends that say something


@dataclass
class DomainAnswers:
    """The student's answers to the prompts of one domain."""

    bench: Bench
    domain: str
    asked: list[Asking]
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
    def answers(self) -> Answering:
        sizes = [rollout.response_ids.size for rollout in self.rollouts]
        cut = [rollout.stop == "length" for rollout in self.rollouts]
        return answers_of(self.prompt_ids, self.marks, sizes, cut, self.samples)

    @cached_property
    def references(self) -> list[Rollout]:
        """The dataset's own answers, where it has any; those that fit."""
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


def _reference(asking: Asking, ids: np.ndarray) -> Rollout:
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
    """A teacher's own answers to the same prompts, where it can give any: a model here that can be shown a prompt."""

    bench: Bench
    name: str
    asked: list[Asking]
    samples: int
    own_template: bool = False  # whatever its view says

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
        """What it reads in place of each prompt; nothing where its view has to see answers first, or it has no model here."""
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
        """With room for the longest of what it reads, which may be more than the student does."""
        assert self.model is not None
        length = max(ids.size for ids in self.read.values()) + self.bench.limit
        kind = self.bench.spec.sampler.beside()
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
    def behind_student(self) -> list[Rollout]:
        """The same answers behind what the student reads: in ids that both know. None where tokenizers differ."""
        asked = self.bench.asked
        return [] if self.crosses else [replace(one, prompt_ids=asked[one.prompt_id].ids) for one in self.rollouts]

    @cached_property
    def texts(self) -> list[str]:
        tokenizer = self.model.tokenizer if self.crosses and self.model is not None else self.bench.student.tokenizer
        return [response_text(rollout.response_ids, tokenizer, self.stop_ids) for rollout in self.rollouts]

    @cached_property
    def answers(self) -> Answering | None:
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
        token_rows(bench, name, theirs.behind_student, {})
        if theirs.behind_student and bench.kinds[name].view.as_sampled and "hidden" in bench.teachers[name].offers
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
    """Its accuracy behind its own chat template, where that differs: which of the two is to be mended?"""
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
    """Nats per token: whose words, under whom."""
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
        kl, behind = (mean_of(inside([row.kl for row in some], start, end)) for some in (rows, scored))
        found.append(Stretch(start, end, count, surprise, advantage, kl, behind, auroc))
    return tuple(found)


def _takeover(bench: Bench, own: DomainAnswers, theirs: TeacherAnswers) -> tuple[Depth, ...]:
    """At several depths; only where answers can be told right from wrong, and both models know the same ids."""
    if theirs.crosses or not theirs.read or np.isnan(own.marks).all():
        return ()
    usual = float(np.median([rollout.response_ids.size for rollout in own.rollouts]))
    depths = sorted({max(1, round(usual * part)) for part in DEPTHS})
    gap, stderr = gap_between(own.answers, theirs.answers)  # which is taking over behind nothing
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
        for rollout, row in zip(theirs.behind_student, scored, strict=False)
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
    return replace(probe, instead=_said_instead(bench, name, samples[:COMPARED]))


def _said_instead(bench: Bench, name: str, ended: Sequence[Rollout]) -> tuple[int, str, float] | None:
    """What the teacher says most often where an answer ends, if it is no stop id."""
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
