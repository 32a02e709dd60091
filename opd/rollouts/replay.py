"""Prompts that come with answers: rollouts of an earlier run or stage, used as they are. No torch here.

`source: "run:DIR"` uses that run's prompts. Each answer is the stored one, token by token, with its author and the log-probs of the
policy that drew it. `source: "stage:NAME"` does the same for an earlier stage of this run. A group is one prompt of the source.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from pydantic import Field

from opd.common.errors import DataError, RecipeError
from opd.common.files import SEALS, read_sealed, sha256
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
    refusal,
)
from opd.records import Prompt, Rollout
from opd.registry import StageView, Word
from opd.store import RolloutStore

if TYPE_CHECKING:
    from opd.rollouts.settings import Rollouts


STAGE = "stage:"
EXAMPLES = 8  # example prompts per domain
WRITING = ("data_share", "teacher_share", "teacher_mix", "writers", "rescue", "experience")  # they have answers written
BESIDE = ("hint:", "experience:")  # sources of texts written for others to read
DRAWN = ("samples", "temperature", "top_p", "top_k")  # settings that the stored answers must match


class ReplayedPrompts(PromptSource):
    """Settings shared by both sources."""

    def refuse(self, view: StageView) -> Iterable[str]:
        rollout = view.rollout
        others = [key for key in WRITING if getattr(rollout, key)]
        if others:
            yield f"source {self.source!r} brings its answers, so rollout.{others[0]} has nothing to write. Drop it."


class RunPrompts(ReplayedPrompts):
    """Uses the rollouts of another run: `run:DIR`."""

    name = "run"
    stage: Word | None = Field(None, description="of run: the stage whose rollouts are taken; default: the only one")

    def open(self, opening: Opening) -> RunSource:
        return RunSource(self, opening)

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
            f"prompts {self.source!r}: these are the rollouts of a stage, which only a run of its recipe has."
        )


class EarlierRun:
    """A run directory with rollouts to read: one of its stages, and its recipe."""

    def __init__(self, directory: Path, stage: str | None = None) -> None:
        self.directory = directory
        if not (directory / SEALS).is_file() or not (directory / "rollouts").is_dir():
            raise DataError(f"{directory} is no run directory with rollouts. Name one that `opd run` made.")
        if sha256(directory / "resolved.yaml") != read_sealed(directory / SEALS)["files"]["resolved.yaml"]:
            raise DataError(f"{directory / 'resolved.yaml'} has been altered since that run began. Put it back.")
        self._recipe = yaml.safe_load((directory / "resolved.yaml").read_text(encoding="utf-8"))
        names = [one["name"] for one in self._recipe["stages"]]
        self.store = RolloutStore(directory / "rollouts", read_only=True)
        if stage is None and len(names) > 1:
            raise DataError(
                f"{directory} has the stages {', '.join(names)}. Say which one is meant: `stage: {names[-1]}`."
            )
        self.stage = names[0] if stage is None else stage
        if self.stage not in names:
            raise DataError(f"{directory} has no stage {self.stage!r}; it has {', '.join(names)}.")
        self.settings: Mapping[str, Any] = next(one for one in self._recipe["stages"] if one["name"] == self.stage)

    @cached_property
    def rows(self) -> np.ndarray:
        """Rows of the store: finished rollouts of the stage, oldest first."""
        found = self.store.where(id=lambda id: id.startswith(f"{self.stage}/")).rows
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
        self._sources = open_sources(self.run.prompts(), bad_rows="skip", rewarded=opening.rewarded, told=opening.told)
        groups: dict[str, list[int]] = {}
        for row in self.run.rows:
            if self.run.store.index.text("source", int(row)).startswith(BESIDE):
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
                f"prompts {self.name!r}: prompt {prompt_id!r} is no longer to be found in the sources of that run. Put them back."
            )
        name = prompt_id if visit == 0 else f"{prompt_id}#visit-{visit}"  # each later pass is another group of answers
        self._by_prompt[name] = rows
        return replace(found, id=name, domain=self._spec.domain or found.domain)

    def prompt(self, prompt_id: str) -> Prompt | None:
        """The prompt with the id that its rollouts have."""
        for source in self._sources:
            if isinstance(source, RunSource):
                found = source.prompt(prompt_id)
            else:
                number = prompt_id.rpartition("/")[2]
                found = _numbered(source, int(number)) if number.isdecimal() else None
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
            advice = "Let that run come to its end: opd resume"
            if len(short) > rollout.samples:
                advice = "Answers were written in place of others there (demonstrations, rescue). Use a run without."
            raise DataError(
                f"prompts {self.name!r}: group {group!r} has {len(short)} finished rollouts of {rollout.samples}. {advice}"
            )

    def held_out(self, count: int, wanted: Wanted = anything) -> list[Prompt]:
        found = (prompt for source in self._sources for prompt in source.held_out(count, wanted))
        return [replace(prompt, domain=self._spec.domain or prompt.domain) for prompt in found]

    def prompts(self, split: Split, count: int | None, wanted: Wanted = anything) -> list[Prompt]:
        if split != "train":
            raise DataError(f"prompts {self.name!r}: only what that run trained on is known. Name its source instead.")
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
            raise refusal(self.name, int(long.sum()), len(lengths), reasons)
        note = f"prompts {self.name}: {int(long.sum()):,} of {len(lengths):,} groups are skipped" if long.any() else ""
        return ScannedSource(lengths[~long], long, note)

    def keep_apart(self, others: list[Source]) -> None:
        pass


def _numbered(source: Source, number: int) -> Prompt | None:
    """The training prompt with an id that ends in this number. Numbers of rows include rows that are held out now."""
    if isinstance(source, RowSource):
        return source.row(number) if number < len(source.facts.usable) else None
    return source.train(number) if source.size is None or number < source.size else None


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
