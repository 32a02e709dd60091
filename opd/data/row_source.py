"""Prompts that are rows: of files, folders, datasets on the hub, or of a class of your own.

Every row is looked at when they are opened.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from opd.data.folders import open_hub
from opd.data.parse import BadRow
from opd.data.prompts import CHECKABLE, renamed, row_prompt
from opd.data.rows import ListRows, Row, Rows, kind_of, local_files, open_local, open_rows
from opd.data.scan import PROGRESS, SHOWN, Scan, ScannedSource, refusal, scan_rows
from opd.data.source import Opening, PromptSource, Source, Split, Told, Wanted, anything
from opd.errors import DataError
from opd.settings import Address, Positive, Word
from opd.types import Prompt

HELD_OUT_ROWS = 0.1  # without other held-out rows, taken from the end
EXAMPLES = 8  # prompts that stand for others of their domain


class RowPrompts(PromptSource):
    """Rows, each a prompt. A class of your own says which: `rows`."""

    limit: Positive | None = Field(None, description="use at most this many rows")
    columns: dict[Word, Word] = Field(
        default_factory=dict, description="our names for a file's columns: {prompt: question, answer: solution}"
    )

    def rows(self) -> Rows | list[Mapping[str, Any]]:
        raise NotImplementedError

    def held_out_rows(self) -> Rows | list[Mapping[str, Any]] | None:
        """Rows to evaluate on. None: the last of the others."""
        return None

    @property
    def held_out_name(self) -> str:
        return f"{self.source} (held out)"

    def default_domain(self) -> str:
        return self.name

    def fingerprint(self) -> str | None:
        """Of rows without files: their content."""
        return None if self.files() else as_rows(self.rows()).fingerprint

    def open(self, opening: Opening) -> RowSource:
        return RowSource(self, opening)


class StoredPrompts(RowPrompts):
    """What files and datasets have in common."""

    prefixed = False
    split: Word = Field("train", description="split of a folder or a Hugging Face dataset")
    eval_source: Address | None = Field(None, description="held-out prompts; default: the last rows")

    def held_out_rows(self) -> Rows | None:
        if self.eval_source is None:
            return None
        return open_rows(self.eval_source, "train" if kind_of(Path(self.eval_source)) else self.split)

    @property
    def held_out_name(self) -> str:
        return str(self.eval_source)

    def default_domain(self) -> str:
        path = Path(self.source)
        return Path(path.stem).stem if path.suffix == ".gz" else path.stem

    def files(self) -> list[Path]:
        return [] if self.eval_source is None else local_files(self.eval_source)


class FilePrompts(StoredPrompts):
    """A file, or a folder: what `save_to_disk` wrote, or the files of one split."""

    name = "file"

    def rows(self) -> Rows:
        return open_local(self.source, self.split)

    def files(self) -> list[Path]:
        return list(dict.fromkeys([*local_files(self.source), *super().files()]))

    def fingerprint(self) -> str | None:
        return None


class DatasetPrompts(StoredPrompts):
    """A dataset on the Hugging Face hub."""

    name = "dataset"

    def rows(self) -> Rows:
        return open_hub(self.source, self.split)

    def fingerprint(self) -> str | None:
        return self.rows().fingerprint


def as_rows(rows: Rows | list[Mapping[str, Any]]) -> Rows:
    return ListRows(rows) if isinstance(rows, list) else rows


class Survey:
    """What one pass over rows tells: which can be used, which have a completion, and rows that stand for all."""

    def __init__(self, rows: Rows, count: int, spec: RowPrompts, name: str, told: Told) -> None:
        self.usable, self.complete = np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)
        self.checkable = False
        self.reasons: list[str] = []  # of the first bad rows
        self.examples: dict[tuple[str, bool], list[int]] = {}  # (domain, has a verifier) -> the first such rows
        unseen, columns = set(spec.columns.values()), dict[str, None]()
        domain = spec.domain or spec.default_domain()
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
                f"prompts {name!r}: columns: there is no column {min(unseen)!r}; there are "
                f"{', '.join(map(str, columns))}."
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
    """Open rows. Where none are held out apart, the last tenth is kept back where answers can be checked."""

    def __init__(self, spec: RowPrompts, opening: Opening) -> None:
        self.spec, self.name, self._label = spec, spec.source, opening.label
        self._domain = spec.domain or spec.default_domain()
        self._rows = as_rows(spec.rows())
        count = min(len(self._rows), spec.limit or len(self._rows))
        self.survey = _checked(self._rows, count, spec, spec.source, opening)
        self._held, self._held_survey, self._held_from = self._rows, self.survey, count
        apart = spec.held_out_rows()
        if apart is not None:
            self._held, self._held_from = as_rows(apart), 0
            self._held_survey = _checked(self._held, len(self._held), spec, spec.held_out_name, opening)
        elif (self.survey.checkable or opening.rewarded) and count > 1:
            self._held_from = count - max(1, int(count * HELD_OUT_ROWS))
            count = self._held_from
        self.size: int | None = count
        self.contents = (self._rows.fingerprint, list(dict.fromkeys([*self._rows.files, *self._held.files])))

    def scan(self, scan: Scan) -> ScannedSource:
        return scan_rows(self, scan)

    def keep_apart(self, others: list[Source]) -> None:
        pass

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


def _checked(rows: Rows, count: int, spec: RowPrompts, name: str, opening: Opening) -> Survey:
    if not count:
        raise DataError(f"prompts {name!r}: there are no rows in it.")
    survey = Survey(rows, count, spec, name, opening.told)
    bad = count - int(survey.usable.sum())
    if bad and (opening.bad_rows == "stop" or bad == count):
        raise refusal(name, bad, count, survey.reasons)
    return survey
