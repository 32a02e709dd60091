"""Where prompts come from. Every source offers training prompts and held-out prompts that do not overlap.

task:NAME             built-in generators with verifiers (`data.tasks`)
reasoning_gym:NAME    a reasoning-gym generator with its own scorer
anything else         rows of a file, a folder or a Hugging Face dataset (`data.rows`), each a prompt (`data.prompts`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from opd.config import PromptSource
from opd.data.generators import GYM, TASK, GymSource, Split, TaskSource, Wanted, anything
from opd.data.parse import BadRow
from opd.data.prompts import CHECKABLE, renamed, row_prompt
from opd.data.rows import Row, Rows, kind_of, open_rows
from opd.data.tasks import get_task
from opd.errors import DataError
from opd.types import Prompt

HELD_OUT_ROWS = 0.1  # of a file without an eval_source, taken from its end
EXAMPLES = 8  # prompts that stand for others of their domain
SHOWN = 5  # bad rows that a message names
PROGRESS = 5000  # rows between two signs of life

BadRows = Literal["stop", "skip"]
Told = Callable[[str, int, int], None]  # name of a source, rows done, rows in all


def silent(name: str, done: int, total: int) -> None:
    pass


class Source(Protocol):
    name: str
    size: int | None  # training prompts; None: without end
    fingerprint: str | None  # of a hub dataset, which is no file of the user's

    def files(self) -> list[Path]:
        """Every file it reads; none for generators and hub datasets."""

    def train(self, index: int) -> Prompt: ...

    def held_out(self, count: int, wanted: Wanted = anything) -> list[Prompt]:
        """At most this many of each domain, of those that are wanted."""

    def prompts(self, split: Split, count: int | None, wanted: Wanted = anything) -> list[Prompt]:
        """Of a split, at most `count` of each domain (None: all there are)."""

    def examples(self) -> list[Prompt]:
        """A few training prompts of every domain, with something to check answers by and without."""


def open_source(spec: PromptSource) -> Source:
    return open_sources([spec])[0]


def open_sources(
    specs: Sequence[PromptSource], *, bad_rows: BadRows = "stop", rewarded: bool = False, told: Told = silent
) -> list[Source]:
    """All of a recipe's sources. `rewarded`: its rewards need no answer, so rows without one can be evaluated on too.

    Every row is looked at. Ids of a source listed again, say with other options, say which time this is: `task:sort#2/…`.
    """
    sources: list[Source] = []
    labels: list[str] = []
    for number, spec in enumerate(specs):
        _refuse_misplaced(spec)
        if any(spec == earlier.model_copy(update={"share": spec.share}) for earlier in specs[:number]):
            raise DataError(
                f"prompts: {spec.source!r} comes twice with the same settings. List it once, with the `share` of both."
            )
        label = _label(spec.source)
        labels.append(label)
        suffix = f"#{labels.count(label)}" if labels.count(label) > 1 else ""
        if spec.source.startswith(TASK):
            sources.append(TaskSource(get_task(spec.source.removeprefix(TASK), **spec.options), spec.domain, suffix))
        elif spec.source.startswith(GYM):
            sources.append(GymSource(spec.source.removeprefix(GYM), spec.options, spec.domain, suffix))
        else:
            sources.append(RowSource(spec, label + suffix, bad_rows=bad_rows, rewarded=rewarded, told=told))
    _hold_out_together([source for source in sources if isinstance(source, GymSource)])
    return sources


def _label(name: str) -> str:
    """What ids begin with: they key the draws, which must not depend on where a file lies."""
    return Path(name).name if Path(name).is_absolute() else name


def _refuse_misplaced(spec: PromptSource) -> None:
    """A key that would do nothing is a mistake."""
    generator = spec.source.startswith((TASK, GYM))
    kind = spec.source.split(":")[0]
    given = {
        "split": spec.split != "train",
        "limit": spec.limit is not None,
        "eval_source": spec.eval_source is not None,
        "columns": bool(spec.columns),
    }
    for key, present in given.items():
        if present and generator:
            raise DataError(
                f"prompts {spec.source!r}: {key} is for files and datasets; {kind} makes prompts without end and has its own held-out split."
            )
    if spec.options and not generator:
        raise DataError(f"prompts {spec.source!r}: options {spec.options} are for task: and reasoning_gym: sources.")


def _hold_out_together(sources: Sequence[GymSource]) -> None:
    """One generator with different options: none trains on what another holds out."""
    for source in sources:
        source.held_questions = set().union(*(other.held_questions for other in sources if other.name == source.name))


class Survey:
    """What one pass over rows tells: which can be used, which have a completion, and rows that stand for all."""

    def __init__(self, rows: Rows, count: int, spec: PromptSource, name: str, told: Told) -> None:
        self.usable, self.complete = np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)
        self.checkable = False
        self.reasons: list[str] = []  # of the first bad rows
        self.examples: dict[tuple[str, bool], list[int]] = {}  # (domain, has a verifier) -> the first such rows
        unseen, columns = set(spec.columns.values()), dict[str, None]()
        domain = default_domain(spec)
        for index, row in zip(range(count), rows.each(), strict=False):
            if index % PROGRESS == 0:
                told(name, index, count)
            try:
                if isinstance(row, BadRow):
                    raise row
                unseen -= row.keys()
                columns |= dict.fromkeys(row)
                self._note(index, renamed(row, spec.columns), domain)
            except BadRow as bad:
                if len(self.reasons) < SHOWN:
                    self.reasons.append(f"{rows.place(index)}: {bad}")
        if unseen and columns:
            raise DataError(
                f"prompts {name!r}: columns: there is no column {min(unseen)!r}; there are {', '.join(map(str, columns))}."
            )
        if not self.usable.any() and columns and not {"prompt", "messages"} & {*columns, *spec.columns}:
            raise DataError(
                f"prompts {name!r}: no `prompt` column; it has {', '.join(map(str, columns))}. "
                f"Say which one holds the prompt: `columns: {{prompt: {next(iter(columns))}}}`."
            )

    def _note(self, index: int, row: Row, domain: str) -> None:
        prompt = row_prompt(row, f"{index}", domain)
        self.usable[index] = True
        self.complete[index] = bool(prompt.fields.get("completion"))
        self.checkable = self.checkable or any(key in prompt.fields for key in CHECKABLE)
        alike = self.examples.setdefault((prompt.domain, "verifier" in prompt.fields), [])
        if len(alike) < EXAMPLES:
            alike.append(index)


class RowSource:
    """Rows of a file or dataset. Without an eval_source, the last tenth is kept back where answers can be checked."""

    def __init__(self, spec: PromptSource, label: str, *, bad_rows: BadRows, rewarded: bool, told: Told) -> None:
        self.spec, self.name, self._label, self._domain = spec, spec.source, label, default_domain(spec)
        self._rows = open_rows(spec.source, spec.split)
        count = min(len(self._rows), spec.limit or len(self._rows))
        self.survey = _checked(self._rows, count, spec, spec.source, bad_rows, told)
        self._held, self._held_survey, self._held_from = self._rows, self.survey, count
        if spec.eval_source:
            self._held, self._held_from = (
                open_rows(spec.eval_source, "train" if kind_of(Path(spec.eval_source)) else spec.split),
                0,
            )
            self._held_survey = _checked(self._held, len(self._held), spec, spec.eval_source, bad_rows, told)
        elif (self.survey.checkable or rewarded) and count > 1:
            self._held_from = count - max(1, int(count * HELD_OUT_ROWS))
            count = self._held_from
        self.size: int | None = count
        self.fingerprint = self._rows.fingerprint

    def files(self) -> list[Path]:
        return list(dict.fromkeys([*self._rows.files, *self._held.files]))

    def place(self, index: int) -> str:
        return self._rows.place(index)

    def train(self, index: int) -> Prompt:
        return self._prompt(self._rows, index, f"train/{index}")

    def usable(self) -> Iterator[int]:
        """Indices of the training rows that are prompts."""
        return (int(index) for index in np.flatnonzero(self.survey.usable[: self.size]))

    def held_out(self, count: int, wanted: Wanted = anything) -> list[Prompt]:
        return self.prompts("heldout", count, wanted)

    def prompts(self, split: Split, count: int | None, wanted: Wanted = anything) -> list[Prompt]:
        """In order; unusable rows are left out."""
        found: list[Prompt] = []
        domains: dict[str, int] = {}
        for prompt in chain(*(self._split(part) for part in ("train", "heldout") if split in (part, "all"))):
            taken = domains.get(prompt.domain, 0)
            if (count is None or taken < count) and wanted(prompt):
                domains[prompt.domain] = taken + 1
                found.append(prompt)
        return found

    def _split(self, split: str) -> Iterator[Prompt]:
        if split == "train":
            yield from map(self.train, self.usable())
        else:
            for index in np.flatnonzero(self._held_survey.usable[self._held_from :]):
                yield self._prompt(self._held, self._held_from + int(index), f"heldout/{index}")

    def examples(self) -> list[Prompt]:
        found = (index for alike in self.survey.examples.values() for index in alike)
        return [self.train(index) for index in found if index < (self.size or 0)]

    def _prompt(self, rows: Rows, index: int, where: str) -> Prompt:
        try:
            return row_prompt(renamed(rows[index], self.spec.columns), f"{self._label}/{where}", self._domain)
        except BadRow as bad:
            raise DataError(f"prompts {self.name!r}, {rows.place(index)}: {bad}.") from None


def default_domain(spec: PromptSource) -> str:
    if spec.domain:
        return spec.domain
    path = Path(spec.source)
    return Path(path.stem).stem if path.suffix == ".gz" else path.stem


def _checked(rows: Rows, count: int, spec: PromptSource, name: str, bad_rows: BadRows, told: Told) -> Survey:
    if not count:
        raise DataError(f"prompts {name!r}: there are no rows in it.")
    survey = Survey(rows, count, spec, name, told)
    bad = count - int(survey.usable.sum())
    if bad and (bad_rows == "stop" or bad == count):
        raise refusal(name, bad, count, survey.reasons)
    return survey


def refusal(name: str, bad: int, count: int, reasons: Sequence[str]) -> DataError:
    """The first few by line and reason, and how many there are."""
    more = [f"… and {bad - len(reasons):,} more"] if bad > len(reasons) else []
    remedy = "" if bad == count else " Mend them, or leave them out: `data: {bad_rows: skip}`."
    return DataError(
        f"prompts {name!r}: {bad:,} of {count:,} rows cannot be used.{remedy}\n  " + "\n  ".join([*reasons, *more])
    )
