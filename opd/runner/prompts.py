"""What a stage reads, looked at before anything is spent: every training prompt, and which held-out ones are asked.

`opd run` and `--dry-run` both call `open_prompts`, which needs no tokenizer, and then `look_at_prompts`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from opd.config import Stage
from opd.data.render import render_prompt
from opd.data.scan import Scanned, scan
from opd.data.source import BadRows, Opening, PromptSource, Source, Told, silent
from opd.data.sources import open_sources
from opd.errors import DataError
from opd.evaluation import Question
from opd.runner.results import watched_domains
from opd.sampling.replay import require_drawn_alike
from opd.text import plain
from opd.types import Prompt

SHOWN = 20  # domains that are named in a line


@dataclass(frozen=True)
class Looked:
    """What was found."""

    scanned: Scanned
    questions: dict[str, list[Question]]  # by domain
    room: int  # tokens that a prompt may have in the sampler
    notes: tuple[str, ...]  # what is skipped, in words


def open_prompts(spec: Stage, told: Told = silent) -> list[Source]:
    sources = open_sources(
        spec.prompts,
        bad_rows=spec.data.bad_rows,
        rewarded=spec.rewards.need_no_answer,
        route=spec.route,
        told=told,
    )
    require_drawn_alike(sources, spec.rollout)
    return sources


def asked_beside(spec: Stage) -> list[PromptSource]:
    """Those of `eval.further` that the stage does not train on as well."""
    own = [source.model_copy(update={"share": 1.0}) for source in spec.prompts]
    return [source for source in spec.eval.further if source.model_copy(update={"share": 1.0}) not in own]


def open_beside(spec: Stage, sources: list[Source], told: Told = silent) -> list[Source]:
    """The same, open; nothing that they hold out is trained on."""
    labels, beside = [source.label for source in spec.prompts], []
    for further in asked_beside(spec):
        labels.append(further.label)
        again = labels.count(further.label)  # with other options, say: ids differ
        label = f"{further.label}#{again}" if again > 1 else further.label
        beside.append(further.open(Opening(label, spec.data.bad_rows, spec.rewards.need_no_answer, told=told)))
    for source in sources if beside else ():
        source.keep_apart([*sources, *beside])
    return beside


def look_at_prompts(
    spec: Stage,
    sources: Sequence[Source],
    beside: Sequence[Source],
    tokenizer: Any,
    covers: Callable[[Prompt], bool],
    context: int,
    told: Told = silent,
) -> Looked:
    """`context` is the shortest of student and teachers; `covers` says whose answers can be rewarded."""
    limit, why = prompt_limit(spec, context)
    bad_rows, count = spec.data.bad_rows, spec.eval.prompts
    found = scan(
        sources,
        spec.prompts,
        tokenizer,
        limit=limit,
        why=why,
        completions=any(writer.reads_completions for writer in spec.rollout.everyone),
        bad_rows=bad_rows,
        told=told,
    )
    held = HeldOut()
    if count:
        held = choose_held_out(
            sources, spec.prompts, covers, tokenizer, count=count, limit=limit, why=why, bad_rows=bad_rows
        )
        if beside:
            further = asked_beside(spec)
            held.add(
                choose_held_out(
                    beside, further, covers, tokenizer, count=count, limit=limit, why=why, bad_rows=bad_rows
                ),
                count,
            )
    questions = {domain: asked for domain, asked in held.questions.items() if asked}
    if questions:
        watched_domains(spec.eval.metric, list(questions))
    room = found.room(held.longest, limit, spec.rollout.max_prompt_tokens)
    notes = [*found.notes, *held.notes, *asked_in_words(questions, sources)]
    return Looked(found, questions, room, tuple(notes))


def response_limit(spec: Stage) -> int:
    return max(spec.rollout.max_new_tokens, spec.eval.max_new_tokens or 0)


def prompt_limit(spec: Stage, context: int) -> tuple[int, str]:
    """The most tokens a prompt may have, and what says so."""
    response, wanted = response_limit(spec), spec.rollout.max_prompt_tokens
    if wanted is not None and wanted <= context - response:
        return wanted, f"rollout.max_prompt_tokens is {wanted:,}"
    return context - response, f"the context is {context:,} and rollout.max_new_tokens {response:,}"


# Held-out prompts


def asked_in_words(questions: Mapping[str, Sequence[Question]], sources: Sequence[Source]) -> list[str]:
    """How many prompts of each domain are asked, and which domains are trained on without."""
    if not questions:
        return []
    trained = dict.fromkeys(prompt.domain for source in sources for prompt in source.examples())
    missing = [plain(domain) for domain in trained if domain not in questions]
    asked = [f"{len(some):,} of {plain(domain)}" for domain, some in questions.items()]
    lines = [f"evaluation: held-out prompts: {_first_few(asked)}"]
    if missing:
        lines.append(
            f"WARNING: evaluation: no held-out prompts of {_first_few(missing)}, which is trained on. A domain needs two "
            "different questions, with answers that can be rewarded"
        )
    return lines


def _first_few(words: Sequence[str]) -> str:
    more = f" and {len(words) - SHOWN:,} more domains" if len(words) > SHOWN else ""
    return ", ".join(words[:SHOWN]) + more


@dataclass
class HeldOut:
    """Questions by domain, and what was left out, by source."""

    questions: dict[str, list[Question]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, beside: HeldOut, count: int) -> None:
        """Further questions, up to as many of each domain; those that are asked already are not asked twice."""
        for domain, asked in beside.questions.items():
            own = self.questions.setdefault(domain, [])
            known = {question.prompt_ids.tobytes() for question in own}
            own += [question for question in asked if question.prompt_ids.tobytes() not in known][: count - len(own)]
        self.notes += beside.notes

    @property
    def longest(self) -> int:
        return max((question.prompt_ids.size for asked in self.questions.values() for question in asked), default=0)


@dataclass
class HeldOutFilter:
    """Says of each prompt of a source whether it is asked, and remembers its ids and how many were not."""

    spec: PromptSource
    covers: Callable[[Prompt], bool]
    tokenizer: Any
    limit: int
    why: str
    remedy: str = ""  # what to do about a prompt that is too long; none: it is left out
    ids: dict[str, np.ndarray] = field(default_factory=dict)
    unrewarded: int = 0
    too_long: int = 0
    unreadable: int = 0

    def __call__(self, prompt: Prompt) -> bool:
        if not self.covers(prompt):
            self.unrewarded += 1
            return False
        try:
            ids = render_prompt(prompt, self.tokenizer, self.spec.chat_template_kwargs, whole=not self.spec.older)
        except DataError:
            if self.remedy:
                raise
            self.unreadable += 1
            return False
        if ids.size > self.limit:
            if self.remedy:
                fit = f"at most {max(self.limit, 0):,} fit ({self.why})"
                raise DataError(f"prompt {prompt.id!r} has {ids.size:,} tokens, and {fit}. {self.remedy}")
            self.too_long += 1
            return False
        self.ids[prompt.id] = ids
        return True

    def notes(self, source: str) -> list[str]:
        """What was left out, in words."""
        left = {
            "have nothing to be rewarded by": self.unrewarded,
            f"are too long ({self.why})": self.too_long,
            "cannot be rendered by the chat template": self.unreadable,
        }
        return [f"evaluation: {count:,} prompts of {plain(source)} {words}" for words, count in left.items() if count]


def choose_held_out(
    sources: Sequence[Source],
    specs: Sequence[PromptSource],
    covers: Callable[[Prompt], bool],
    tokenizer: Any,
    *,
    count: int,
    limit: int,
    why: str,
    bad_rows: BadRows,
) -> HeldOut:
    """At most `count` questions of each domain. Rows without end cannot be fixed: there, what is too long is left out."""
    found = HeldOut()
    for spec, source in zip(specs, sources, strict=True):
        fix = bad_rows == "stop" and source.size is not None
        remedy = "Shorten it, or leave such rows out: `data: {bad_rows: skip}`." if fix else ""
        chosen = HeldOutFilter(spec, covers, tokenizer, limit, why, remedy)
        for prompt in source.held_out(count, chosen):
            asked = found.questions.setdefault(prompt.domain, [])
            if len(asked) < count:
                asked.append(Question(prompt, chosen.ids[prompt.id]))
        found.notes += chosen.notes(source.name)
    if not any(found.questions.values()):
        found.notes.append(
            "evaluation: there is none, since no answer to a held-out prompt can be rewarded. Give rows an `answer`, set `rewards`, or eval.prompts: 0"
        )
    return found
