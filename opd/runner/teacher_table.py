"""The start-up table: compares every teacher with the student on a few answers before the first step.

Draws have their own seed and nothing goes into the store, so a run is the same with and without the table.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from opd.common.errors import DataError
from opd.common.files import json_text, write_whole
from opd.common.text import cell, plain
from opd.data.render import render_completion, render_prompts
from opd.data.rows import BadRow
from opd.engines.draws import request_key
from opd.loop.parts import StageParts
from opd.records import Author, Prompt, Rollout, SampleRequest
from opd.rollouts.rollouter import answers
from opd.teachers.router import chooser
from opd.teachers.table import K, Pair, Samples, compare
from opd.teachers.views import Group

NAME = "start.json"
PROMPTS, TOKENS = 4, 32  # prompts per teacher; tokens of an answer
VISIT = -2  # keys draws that no step uses


def read_start(directory: Path) -> dict[str, Any]:
    """The existing tables of stages, by name."""
    place = directory / NAME
    found: dict[str, Any] = json.loads(place.read_text(encoding="utf-8")) if place.is_file() else {}
    return found


def start_table(parts: StageParts) -> list[Pair]:
    """Compare every teacher of the stage that can be asked about answers."""
    asked = [name for name, kind in parts.spec.teachers.items() if kind.scores_any and parts.teachers[name].offers]
    probe = probe_of(parts, asked) if asked else None
    found = []
    student = (
        (parts.samplers.copy or parts.student) if parts.ranks.sharded else parts.student
    )  # not sharded, if all ranks have it so
    for name in asked if probe is not None and probe.rollouts else []:
        assert probe is not None
        kind, teacher = parts.spec.teachers[name], parts.teachers[name]
        chosen = chooser(parts.scorer.routes[kind.role], parts.spec.route)
        part = probe.of(lambda prompt, chosen=chosen, name=name: chosen(prompt) == name)  # type: ignore[misc]
        part = replace(part, groups=parts.scorer.groups_for(name, part.groups))
        found.append(student.inside(partial(compare, student, name, teacher, kind.view, part, parts.stop_ids)))
        parts.context.check_stop()
    return found


def probe_of(parts: StageParts, teachers: Sequence[str]) -> Samples:
    """The student's answers to a few prompts of every teacher."""
    prompts = dict(_prompts(parts, teachers))
    size = min(TOKENS, parts.spec.rollout.max_new_tokens)
    sampling = replace(parts.rollouter.sampling, max_new_tokens=size)
    requests = [
        SampleRequest(name, ids, request_key(parts.spec.seed, name, VISIT, 0), sampling)
        for name, (_, _, ids) in prompts.items()
    ]
    rollouts = answers(parts.engine, requests, parts.context.check_stop) if requests else []
    groups = {
        rollout.group: Group(
            [rollout], parts.student.tokenizer, {}, parts.spec.prompts[prompts[rollout.id][0]].chat_template_kwargs, parts.stop_ids
        )
        for rollout in rollouts
    }  # fmt: skip
    by_id = {name: prompt for name, (_, prompt, _) in prompts.items()}
    reference = [_reference(parts, *found, size) for found in prompts.values() if found[1].fields.get("completion")]
    return Samples(rollouts, by_id, groups, reference)


def _prompts(parts: StageParts, teachers: Sequence[str]) -> Iterator[tuple[str, tuple[int, Prompt, np.ndarray]]]:
    """The first few prompts that each teacher scores, by id: (number of the source, prompt, ids)."""
    roles = {parts.spec.teachers[name].role for name in teachers}
    wanted = [(parts.scorer.routes[role], chooser(parts.scorer.routes[role], parts.spec.route)) for role in roles]
    taken: dict[str, int] = {}
    for number, source in enumerate(parts.sources):
        kwargs = parts.spec.prompts[number].chat_template_kwargs
        examples = source.examples()
        for prompt, ids in zip(examples, render_prompts(examples, parts.student.tokenizer, kwargs), strict=True):
            if isinstance(ids, DataError) or ids.size > parts.room:
                continue
            try:
                names = [chosen(prompt) for _, chosen in wanted]
            except BadRow:  # such a row is skipped
                continue
            if any(taken.get(name, 0) < PROMPTS for name in names):
                taken |= {name: taken.get(name, 0) + 1 for name in names}
                yield prompt.id, (number, prompt, ids)


def _reference(parts: StageParts, number: int, prompt: Prompt, ids: np.ndarray, size: int) -> Rollout:
    """The dataset's own answer as a rollout."""
    kwargs = parts.spec.prompts[number].chat_template_kwargs
    response, cut = render_completion(prompt, parts.student.tokenizer, size, parts.stop_ids, kwargs)
    nothing = np.full(response.size, np.nan, dtype=np.float32)
    return Rollout(
        id=f"{prompt.id}/data", prompt_id=prompt.id, visit=VISIT, sample=0, domain=prompt.domain, source="data",
        prompt_ids=ids, response_ids=response, author=np.full(response.size, Author.DATA, dtype=np.uint8), logprob=nothing,
        logprob_sampled=nothing, logprob_stop=nothing, version=np.zeros(response.size, dtype=np.int32),
        stop="length" if cut else "stop", group=prompt.id,
    )  # fmt: skip


# --- What is shown and kept ---


def write_start(directory: Path, stage: str, pairs: Sequence[Pair], before: dict[str, Any]) -> None:
    """`start.json`: the measurements of every teacher, by stage."""
    found = before | {stage: [pair.to_json() for pair in pairs]}
    write_whole(directory / NAME, json_text(found, indent=1))


def table_of(stage: str, pairs: Sequence[Pair]) -> Table:
    table = Table(
        box=None, padding=(0, 1, 0, 0), title=plain(f"{stage}: teachers beside the student"), title_justify="left"
    )
    for column in ("teacher", "tokenizer", "template", "stop ids", "stop mass", "KL", f"top {K}", "origin", "memory"):
        table.add_column(column, justify="left" if column in ("teacher", "tokenizer") else "right")
    for pair in pairs:
        table.add_row(cell(pair.teacher), *_cells(pair))
    table.caption = (
        "template, KL: nats per token; top: agreement of the likeliest tokens; origin: cosine of the weights"
    )
    table.caption_justify = "left"
    return table


def _cells(pair: Pair) -> list[str]:
    def number(value: float | None, form: str = ".2f") -> str:
        return "–" if value is None else f"{value:{form}}"

    tokenizer = "–" if pair.ids_differ is None else "same" if not pair.ids_differ else "other"
    if pair.aligned is not None:
        tokenizer += f", {pair.aligned:.0%} aligned"
    stops = "–" if pair.stop_ids is None else "same" if set(pair.stop_ids[0]) == set(pair.stop_ids[1]) else "other"
    kl = number(pair.kl, ".3f") + ("~" if pair.sampled and pair.kl is not None else "")
    memory = "–" if pair.memory is None else f"{pair.memory / 2**20:,.0f} MiB"
    share = "–" if pair.overlap is None else f"{pair.overlap:.0%}"
    return [tokenizer, number(pair.template), stops, number(pair.stop_mass), kl, share, number(pair.origin), memory]
