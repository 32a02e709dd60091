"""Prompts that come with answers: rollouts of an earlier run or stage, used as they are. No torch here.

`source: "run:DIR"` uses that run's prompts. Each answer is the stored one, token by token, with its author and the log-probs of the
policy that drew it. `source: "stage:NAME"` does the same for an earlier stage of this run. A group is one prompt of the source.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import yaml
from pydantic import BaseModel, Field, field_validator, model_validator

from opd.common.errors import DataError, RecipeError
from opd.common.files import SEALS, read_sealed, sha256
from opd.data.prompts import field_texts, filled, render_prompts, well_formed
from opd.data.sources import (
    SOURCES,
    Opening,
    PromptSource,
    RowSource,
    Scan,
    ScannedSource,
    Source,
    Split,
    Wanted,
    anything,
    bad_rows_error,
)
from opd.objective.batch import own_turns
from opd.records import Prompt, Rollout
from opd.registry import SETTINGS, Count, Positive, StageView, Word, changed
from opd.rollouts.episodes import FIRST_TURNS, KEY_TURN, TAKEOVER
from opd.store import RolloutStore, Selection

if TYPE_CHECKING:
    from opd.rollouts.settings import Rollouts


STAGE = "stage:"
EXAMPLES = 8  # example prompts per domain
WRITING = (  # they have answers written, or say how
    "data_share", "teacher_share", "teacher_mix", "teacher_prefix", "writers", "rescue", "takeover", "experience", "share_schedule",
    "length_schedule", "segment",
)  # fmt: skip
REPEATED = re.compile(r"/replay-\d+$")  # ends the ids of answers that the writer `replay` stored again
AUXILIARY = ("hint:", "experience:", "prefix:")  # sources of texts written for others to read
DRAWN = ("samples", "temperature", "top_p", "top_k")  # settings that the stored answers must match


class Where(BaseModel):
    """Which stored rollouts become data. All conditions hold together."""

    model_config = SETTINGS
    least_reward: float | None = Field(None, description="rollouts with a smaller reward, or none, are left out")
    most_reward: float | None = Field(None, description="rollouts with a larger reward, or none, are left out")
    least_tokens: Count = Field(0, description="of the answer")
    most_tokens: Positive | None = Field(None, description="of the answer")
    finished: bool = Field(True, description="leave out answers that were cut off")
    author: Literal["student", "teacher", "data"] | None = Field(None, description="who wrote it; default: anybody")
    per_prompt: Positive | None = Field(
        None, description="at most so many of each prompt: the best rewarded, then the shortest"
    )

    @model_validator(mode="after")
    def _some(self) -> Where:
        if None not in (self.least_reward, self.most_reward) and self.least_reward > self.most_reward:  # type: ignore[operator]
            raise ValueError(
                f"least_reward ({self.least_reward:g}) must not be more than most_reward ({self.most_reward:g})"
            )
        if self.most_tokens is not None and self.least_tokens > self.most_tokens:
            raise ValueError(
                f"least_tokens ({self.least_tokens}) must not be more than most_tokens ({self.most_tokens})"
            )
        return self

    def rows(self, store: RolloutStore, rows: np.ndarray) -> np.ndarray:
        """The rows of the index that pass, oldest first."""
        index = store.index
        reward, tokens = index["reward"][rows], index["length"][rows]
        keep = tokens >= self.least_tokens
        if self.most_tokens is not None:
            keep &= tokens <= self.most_tokens
        if self.least_reward is not None:
            keep &= reward >= self.least_reward  # NaN, which is no reward, fails
        if self.most_reward is not None:
            keep &= reward <= self.most_reward
        if self.finished:
            keep &= Selection(store, rows).column("stop") != "length"
        found = [int(row) for row in rows[keep] if self._by_author(index.text("source", int(row)))]
        return np.array(self._best(store, found), dtype=np.int64)

    def _by_author(self, source: str) -> bool:
        kind = source.partition(":")[0]
        wrote = {"data": "data", "teacher": "teacher"}.get(kind, "student")
        return not source.startswith(AUXILIARY) and self.author in (None, wrote)

    def _best(self, store: RolloutStore, rows: list[int]) -> list[int]:
        if self.per_prompt is None:
            return rows
        index, by_prompt = store.index, dict[str, list[int]]()
        for row in rows:
            by_prompt.setdefault(_names(store, row)[1], []).append(row)
        order = {row: (-float(np.nan_to_num(index["reward"][row])), int(index["length"][row]), row) for row in rows}
        return sorted(
            row for some in by_prompt.values() for row in sorted(some, key=order.__getitem__)[: self.per_prompt]
        )


Turned = Literal["answers", "completion", "messages", "text", "turns"]


class ReplayedPrompts(PromptSource):
    """Settings shared by both sources."""

    turn_into: Turned = Field(
        "answers",
        description=(
            "what stored rollouts are used as. answers: as they are, token by token; completion: worked answers to their prompts; "
            "messages, text: prompts that continue after the answer with `ask`, as a new turn or as one text; "
            "turns: of episodes with a takeover, prompts that begin after the turns before it"
        ),
    )
    where: Where = Field(Where(), description="of turn_into: which rollouts are used")
    ask: str | None = Field(
        None, min_length=1, max_length=100_000, description="what follows an answer, with {FIELD}; of messages and text"
    )
    ask_wrong: str | None = Field(
        None, min_length=1, max_length=100_000, description="in its place, after an answer without full reward"
    )

    key_rewards: tuple[float, float, float] = Field(
        (0.5, 0.1, 0.0),
        description="of turns: what an episode earns that is not won, if its first turn is the one of the takeover, another, or the one it replaced",
    )

    @property
    def brings_answers(self) -> bool:
        return self.turn_into != "turns"

    @field_validator("ask", "ask_wrong")
    @classmethod
    def _well_formed(cls, value: str | None) -> str | None:
        return None if value is None else well_formed(value)

    @model_validator(mode="after")
    def _asks(self) -> ReplayedPrompts:
        given, goes_on = changed(self), self.turn_into in ("messages", "text")
        if self.turn_into == "answers" and given & {"where", "ask", "ask_wrong"}:
            raise ValueError("where, ask and ask_wrong belong to turn_into: completion, messages or text")
        if goes_on and self.ask is None:
            raise ValueError(f"turn_into {self.turn_into} needs `ask`, which follows the stored answer")
        if self.turn_into != "turns" and "key_rewards" in given:
            raise ValueError("key_rewards belongs to turn_into: turns")
        if not goes_on and (self.ask or self.ask_wrong):
            raise ValueError(
                f"ask follows a stored answer in a prompt, and turn_into {self.turn_into} makes none. Drop it"
            )
        return self

    def check(self, view: StageView) -> Iterable[str]:
        if self.turn_into == "turns" and self.environment is None and view.rollout.environment is None:
            yield f"source {self.source!r} with turn_into turns begins in mid-episode. Set rollout.environment."
        if self.turn_into != "answers":
            return
        rollout = view.rollout
        others = [key for key in WRITING if getattr(rollout, key)]
        if others:
            yield f"source {self.source!r} has its own answers, so rollout.{others[0]} has no effect. Drop it."


class RunPrompts(ReplayedPrompts):
    """Uses the rollouts of another run: `run:DIR`."""

    name = "run"
    stage: Word | None = Field(None, description="of run: the stage whose rollouts are taken; default: the only one")

    def open(self, opening: Opening) -> Source:
        return RunSource(self, opening) if self.turn_into == "answers" else TurnedSource(self, opening)

    def fingerprint(self) -> str | None:
        return EarlierRun(Path(self.address), self.stage).fingerprint


class StagePrompts(ReplayedPrompts):
    """Uses the rollouts of an earlier stage of this run: `stage:NAME`."""

    name = "stage"

    def inside(self, directory: Path) -> PromptSource:
        settings = self.model_dump(mode="python", exclude={"source"})
        return RunPrompts(**{**settings, "source": f"run:{directory}", "stage": self.address})

    def open(self, opening: Opening) -> Source:
        raise DataError(
            f"prompts {self.source!r}: these are rollouts of an earlier stage, which exist only in a run of this recipe."
        )


class EarlierRun:
    """A run directory with rollouts to read: one of its stages, and its recipe."""

    def __init__(self, directory: Path, stage: str | None = None) -> None:
        self.directory = directory
        if not (directory / SEALS).is_file() or not (directory / "rollouts").is_dir():
            raise DataError(f"{directory} is not a run directory with rollouts. Name one that `opd run` created.")
        if sha256(directory / "resolved.yaml") != read_sealed(directory / SEALS)["files"]["resolved.yaml"]:
            raise DataError(f"{directory / 'resolved.yaml'} has changed since that run began. Restore it.")
        self._recipe = yaml.safe_load((directory / "resolved.yaml").read_text(encoding="utf-8"))
        names = [one["name"] for one in self._recipe["stages"]]
        self.store = RolloutStore(directory / "rollouts", read_only=True)
        if stage is None and len(names) > 1:
            raise DataError(f"{directory} has the stages {', '.join(names)}. Choose one: `stage: {names[-1]}`.")
        self.stage = names[0] if stage is None else stage
        if self.stage not in names:
            raise DataError(f"{directory} has no stage {self.stage!r}; it has {', '.join(names)}.")
        self.settings: Mapping[str, Any] = next(one for one in self._recipe["stages"] if one["name"] == self.stage)

    @cached_property
    def rows(self) -> np.ndarray:
        """Rows of the store: finished rollouts of the stage, oldest first, without those that a writer repeated."""
        found = self.store.where(id=lambda id: id.startswith(f"{self.stage}/") and not REPEATED.search(id)).rows
        if not found.size:
            raise DataError(f"{self.directory}: stage {self.stage!r} has no finished rollouts.")
        return found

    @property
    def fingerprint(self) -> str:
        """A hash of its rollouts. They do not change, but a resumed run adds to them."""
        index, digest = self.store.index, hashlib.sha256()
        for row in self.rows:
            digest.update(f"{index.names[int(row)]} {index['length'][row]}\n".encode())
        return digest.hexdigest()

    def prompts(self) -> list[PromptSource]:
        """The sources of its prompts."""
        return [_source(settings).inside(self.directory) for settings in self.settings["prompts"]]


class RunSource:
    """An open run. Its groups are the training prompts, and its held-out prompts stay held out."""

    def __init__(self, spec: RunPrompts, opening: Opening) -> None:
        from opd.data.sources import open_sources

        self.name, self._spec = spec.source, spec
        self.run = EarlierRun(Path(spec.address), spec.stage)
        self._sources = open_sources(
            self.run.prompts(), bad_rows="skip", rewarded=opening.rewarded, on_progress=opening.on_progress
        )
        groups: dict[str, list[int]] = {}
        for row in self.run.rows:
            if self.run.store.index.text("source", int(row)).startswith(AUXILIARY):
                continue
            id, _, group, _ = _names(self.run.store, int(row))
            groups.setdefault(group or id, []).append(int(row))
        samples = self.run.store.index["sample"]
        self._groups = [sorted(rows, key=lambda row: int(samples[row])) for rows in groups.values()]
        self.size: int | None = len(self._groups)
        self._by_prompt: dict[str, list[int]] = {}

    def train(self, index: int) -> Prompt:
        rows = self._groups[index]
        _, prompt_id, _, _ = _names(self.run.store, rows[0])
        visit = int(self.run.store.index["visit"][rows[0]])
        found = self.prompt(prompt_id)
        if found is None:
            raise DataError(
                f"prompts {self.name!r}: prompt {prompt_id!r} is no longer in the sources of that run. Restore them."
            )
        name = prompt_id if visit == 0 else f"{prompt_id}#visit-{visit}"  # each later pass is another group of answers
        self._by_prompt[name] = rows
        return replace(found, id=name, domain=self._spec.domain or found.domain)

    def prompt(self, prompt_id: str) -> Prompt | None:
        """The prompt with the id that its rollouts have."""
        for source in self._sources:
            found = source.prompt(prompt_id) if isinstance(source, RunSource) else numbered_prompt(source, prompt_id)
            if found is not None and found.id == prompt_id:
                return found
        return None

    def rollout(self, prompt: Prompt, sample: int) -> Rollout:
        """The stored answer to a prompt from `train`."""
        (found,) = self.run.store.load_rows([self._by_prompt[prompt.id][sample]])
        return found

    def require_drawn(self, rollout: Rollouts) -> None:
        """Check that the recipe's sampling settings match the stored rollouts."""
        recorded = self.run.settings["rollout"]
        for key in DRAWN:
            if recorded[key] != getattr(rollout, key):
                raise RecipeError(
                    f"rollout.{key} is {getattr(rollout, key)}, and the rollouts of {self.name!r} were drawn with {recorded[key]}. "
                    f"Set rollout.{key}: {recorded[key]}."
                )
        if recorded["max_new_tokens"] > rollout.max_new_tokens:
            raise RecipeError(
                f"rollout.max_new_tokens is {rollout.max_new_tokens}, and the rollouts of {self.name!r} may have "
                f"{recorded['max_new_tokens']}. Raise it."
            )
        short = next((rows for rows in self._groups if len(rows) != rollout.samples), None)
        if short is not None:
            group = _names(self.run.store, short[0])[2]
            advice = "Finish that run: opd resume"
            if len(short) > rollout.samples:
                advice = "Some answers there replaced others (demonstrations, rescue). Use a run without them."
            raise DataError(
                f"prompts {self.name!r}: group {group!r} has {len(short)} finished rollouts of {rollout.samples}. {advice}"
            )

    def held_out(self, count: int, wanted: Wanted = anything) -> list[Prompt]:
        found = (prompt for source in self._sources for prompt in source.held_out(count, wanted))
        return [replace(prompt, domain=self._spec.domain or prompt.domain) for prompt in found]

    def prompts(self, split: Split, count: int | None, wanted: Wanted = anything) -> list[Prompt]:
        if split != "train":
            raise DataError(f"prompts {self.name!r}: only its training prompts are known. Name its source instead.")
        found = [prompt for index in range(self.size or 0) if wanted(prompt := self.train(index))]
        return found if count is None else found[:count]

    def examples(self) -> list[Prompt]:
        index, taken = self.run.store.index, dict[str, int]()
        found = []
        for number, rows in enumerate(self._groups):
            domain = index.text("domain", rows[0])
            if taken.get(domain, 0) < EXAMPLES:
                taken[domain] = taken.get(domain, 0) + 1
                found.append(self.train(number))
        return found

    def scan(self, scan: Scan) -> ScannedSource:
        lengths = np.array([int(self.run.store.index["prompt_length"][rows[0]]) for rows in self._groups])
        long = lengths > scan.limit
        if long.any() and (scan.bad_rows == "stop" or long.all()):
            reasons = [
                f"group {number}: {lengths[number]:,} tokens ({scan.why})" for number in np.flatnonzero(long)[:5]
            ]
            raise bad_rows_error(self.name, int(long.sum()), len(lengths), reasons)
        note = f"prompts {self.name}: {int(long.sum()):,} of {len(lengths):,} groups are skipped" if long.any() else ""
        return ScannedSource(lengths[~long], long, note)

    def keep_apart(self, others: list[Source]) -> None:
        pass


class TurnedSource:
    """Stored rollouts as prompts of their own. Held-out prompts of their run stay held out."""

    def __init__(self, spec: RunPrompts, opening: Opening) -> None:
        from opd.models import load_tokenizer

        self.name, self._spec = spec.source, spec
        self._answers = RunSource(spec, opening)
        run = self._answers.run
        self._label = f"{run.stage}.{spec.turn_into}{opening.label.removeprefix(spec.label)}"
        rows = run.rows
        if spec.turn_into == "turns":
            rows = np.array(
                [row for row in rows if run.store.index.text("source", int(row)).startswith(TAKEOVER)], dtype=np.int64
            )
        self._rows = spec.where.rows(run.store, rows)
        self._opened = opening.opened
        if not self._rows.size:
            raise DataError(
                f"prompts {self.name!r}: none of the {run.rows.size:,} rollouts of stage {run.stage!r} passes `where`. Ask for less."
            )
        saved = sorted((run.directory / "checkpoints" / run.stage).glob("step-*"))
        self._tokenizer = load_tokenizer(str(saved[-1]) if saved else run.settings["student"]["model"], None)
        self.size: int | None = len(self._rows)

    def train(self, index: int) -> Prompt:
        spec, run = self._spec, self._answers.run
        (rollout,) = run.store.load_rows([self._rows[index]])
        prompt = self._answers.prompt(rollout.prompt_id)
        if prompt is None:
            raise DataError(
                f"prompts {self.name!r}: prompt {rollout.prompt_id!r} is no longer in the sources of that run. Restore them."
            )
        answer = self._text(rollout)
        prompt = replace(prompt, id=f"{self._label}/train/{index}", domain=spec.domain or prompt.domain)
        if spec.turn_into == "turns":
            return self._before(prompt, rollout)
        if spec.turn_into == "completion":
            return replace(prompt, fields={**prompt.fields, "completion": answer})
        reward = float(run.store.index["reward"][self._rows[index]])
        wrong = spec.ask_wrong is not None and not reward >= 1
        asked = filled(
            (spec.ask_wrong if wrong else spec.ask) or "", {**field_texts(prompt.fields), "answer_given": answer}
        )
        if spec.turn_into == "text":
            return replace(prompt, messages=None, text=f"{self._read(rollout)}{answer}{asked}")
        before = prompt.messages or ({"role": "user", "content": prompt.text or ""},)
        turns = ({"role": "assistant", "content": answer}, {"role": "user", "content": asked})
        return replace(prompt, text=None, messages=(*before, *turns))

    def _before(self, prompt: Prompt, rollout: Rollout) -> Prompt:
        """The prompt with the turns before the takeover, and what was right and wrong in that turn."""
        facts = rollout.extras[TAKEOVER]
        turns = [rollout.response_ids[first:end].tolist() for first, end in own_turns(rollout)]
        key = {name: facts[name] for name in ("right", "wrong", "key") if name in facts}
        key["rewards"] = list(self._spec.key_rewards)
        prompt = replace(prompt, fields={**prompt.fields, FIRST_TURNS: turns[: facts["turn"]], KEY_TURN: key})
        return prompt if self._opened is None else self._opened(prompt)

    def _text(self, rollout: Rollout) -> str:
        ids = rollout.response_ids[:-1] if rollout.stop == "stop" else rollout.response_ids
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=True))

    def _read(self, rollout: Rollout) -> str:
        """What the writer read, without the BOS that encoding adds again."""
        text = str(self._tokenizer.decode(rollout.prompt_ids.tolist(), skip_special_tokens=False))
        return text.removeprefix(self._tokenizer.bos_token or "")

    def held_out(self, count: int, wanted: Wanted = anything) -> list[Prompt]:
        return self._answers.held_out(count, wanted)

    def prompts(self, split: Split, count: int | None, wanted: Wanted = anything) -> list[Prompt]:
        if split != "train":
            raise DataError(f"prompts {self.name!r}: only its training prompts are known. Name its source instead.")
        found = [prompt for index in range(self.size or 0) if wanted(prompt := self.train(index))]
        return found if count is None else found[:count]

    def examples(self) -> list[Prompt]:
        run, taken, found = self._answers.run, dict[str, int](), list[Prompt]()
        for number, row in enumerate(self._rows):
            domain = run.store.index.text("domain", int(row))
            if taken.get(domain, 0) < EXAMPLES:
                taken[domain] = taken.get(domain, 0) + 1
                found.append(self.train(number))
        return found

    def scan(self, scan: Scan) -> ScannedSource:
        prompts = [self.train(index) for index in range(self.size or 0)]
        rendered = render_prompts(prompts, scan.tokenizer, scan.template_kwargs)
        if self._spec.turn_into == "turns":
            self._require_rendered_alike(rendered)
        reasons = [f"rollout {number}: {ids}" for number, ids in enumerate(rendered) if isinstance(ids, DataError)]
        lengths = np.array([-1 if isinstance(ids, DataError) else len(ids) for ids in rendered])
        bad = (lengths < 0) | (lengths > scan.limit)
        reasons += [
            f"rollout {number}: {lengths[number]:,} tokens ({scan.why})"
            for number in np.flatnonzero(lengths > scan.limit)
        ]
        if bad.any() and (scan.bad_rows == "stop" or bad.all()):
            raise bad_rows_error(self.name, int(bad.sum()), len(bad), reasons[:5])
        note = f"prompts {self.name}: {int(bad.sum()):,} of {len(bad):,} rollouts are skipped" if bad.any() else ""
        return ScannedSource(lengths[~bad], bad, note)

    def _require_rendered_alike(self, rendered: Sequence[np.ndarray | DataError]) -> None:
        """Check that the prompts have the ids that their episodes began with, because the turns are copied as ids."""
        for row, ids in zip(self._rows, rendered, strict=True):
            (rollout,) = self._answers.run.store.load_rows([row])
            if not isinstance(ids, DataError) and not np.array_equal(ids, rollout.prompt_ids):
                raise DataError(
                    f"prompts {self.name!r}: prompt {rollout.prompt_id!r} is rendered to different ids than in the run that played it: it has "
                    "another tokenizer or chat template, other chat_template_kwargs, or a source that has changed. Restore them."
                )

    def keep_apart(self, others: list[Source]) -> None:
        pass


def _numbered(source: Source, number: int) -> Prompt | None:
    """The training prompt with an id that ends in this number. Numbers of rows include rows that are held out now."""
    if isinstance(source, RowSource):
        return source.row(number) if number < len(source.facts.usable) else None
    return source.train(number) if source.size is None or number < source.size else None


def numbered_prompt(source: Source, prompt_id: str) -> Prompt | None:
    """The training prompt of a source with this id; None: it is not from there."""
    number = prompt_id.rpartition("/")[2]
    found = _numbered(source, int(number)) if number.isdecimal() else None
    return found if found is not None and found.id == prompt_id else None


def require_drawn_alike(sources: Sequence[Source], rollout: Rollouts) -> None:
    for source in sources:
        if isinstance(source, RunSource):
            source.require_drawn(rollout)


def _source(settings: Mapping[str, Any]) -> PromptSource:
    found = SOURCES.read(settings)
    assert isinstance(found, PromptSource)
    return found.as_begun(settings)


def _names(store: RolloutStore, row: int) -> list[str]:
    """Id, prompt id, group and pair of a row."""
    found: list[str] = json.loads(store.index.names[row])
    return found
