"""Prompts that are rows: of files, folders, datasets on the hub, or of a class of your own.

Every row is looked at when they are opened.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from opd.data.folders import open_hub
from opd.data.held_out import different, held_out_rows, question_key
from opd.data.layouts import ASKED, as_ours
from opd.data.parse import BadRow
from opd.data.prompts import CHECKABLE, DOMAIN, renamed, route_value, row_prompt
from opd.data.rows import ListRows, Row, Rows, kind_of, local_files, open_local, open_rows
from opd.data.scan import PROGRESS, SHOWN, Scan, ScannedSource, refusal, scan_rows
from opd.data.source import Opening, PromptSource, Source, Split, Told, Wanted, anything
from opd.errors import DataError
from opd.settings import Address, Positive, StageView, Word
from opd.text import plain
from opd.types import Prompt

LAST_ROWS = 0.1  # held out with `held_out: last`
EXAMPLES = 8  # prompts that stand for others of their domain
DOMAINS = 20  # that are named in one remark


class RowPrompts(PromptSource):
    """Rows, each a prompt. A class of your own says which: `rows`."""

    limit: Positive | None = Field(None, description="use at most this many rows")
    columns: dict[Word, Word] = Field(
        default_factory=dict, description="our names for a file's columns: {prompt: question, answer: solution}"
    )
    held_out: Literal["questions", "last"] = Field(
        "questions",
        description="rows to evaluate on: a tenth of every domain's questions, chosen by a hash; or the last tenth of the rows",
    )

    @abstractmethod
    def rows(self) -> Rows | list[Mapping[str, Any]]:
        raise NotImplementedError

    def held_out_rows(self) -> Rows | list[Mapping[str, Any]] | None:
        """Rows to evaluate on. None: some of the others, as `held_out` says."""
        return None

    @property
    def held_out_name(self) -> str:
        return f"{self.source} (held out)"

    def default_domain(self) -> str:
        return self.name

    def prompt(self, row: Row, identity: str, domain: str) -> Prompt:
        """What a row asks. One that asks nothing is a `BadRow`. `domain`: where neither row nor settings name one."""
        ours = renamed(row, self.columns)
        return row_prompt(ours if self.older else as_ours(ours, self.domain), identity, self.domain or domain)

    def fingerprint(self) -> str | None:
        """Of rows without files: their content."""
        return None if self.files() else as_rows(self.rows()).fingerprint

    def as_begun(self, written: Mapping[str, Any]) -> PromptSource:
        """Runs of earlier versions do not say what is held out: it was the last rows."""
        if "held_out" in written:
            return self
        found = self.model_copy(update={"held_out": "last"})
        found._older = True
        return found

    def open(self, opening: Opening) -> RowSource:
        return RowSource(self, opening)


class StoredPrompts(RowPrompts):
    """What files and datasets have in common."""

    prefixed = False
    split: Word = Field("train", description="split of a folder or a Hugging Face dataset")
    eval_source: Address | None = Field(None, description="held-out prompts; default: some of the rows")

    def refuse(self, view: StageView) -> Iterable[str]:
        if self.eval_source is not None and self.held_out != "questions":
            yield (
                f"source {self.source!r}: held_out {self.held_out} chooses among its rows, and eval_source names other rows. "
                "Drop one of them."
            )

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


class RowFacts:
    """What one pass over rows tells of each: whether it can be used, its question and domain, and whether it has a completion."""

    def __init__(self, rows: Rows, count: int, spec: RowPrompts, name: str, told: Told, route: str = DOMAIN) -> None:
        self.usable, self.complete = np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)
        self.keys = np.zeros(count, dtype=np.uint64)  # of the questions
        self.kinds = np.full(count, -1, dtype=np.int32)  # numbers of what follows; -1: the row is unusable
        self.found: dict[tuple[str, bool, str], int] = {}  # (domain, has a verifier, value of the route's column)
        self.checkable = False
        self.reasons: list[str] = []  # of the first bad rows
        unseen, columns, domain = set(spec.columns.values()), dict[str, None](), spec.default_domain()
        for index, row in zip(range(count), rows.each(), strict=False):
            if index % PROGRESS == 0:
                told(name, index, count)
            try:
                if isinstance(row, BadRow):
                    raise row
                unseen -= row.keys()
                columns |= dict.fromkeys(row)
                self._note(index, spec.prompt(row, f"{index}", domain), route)
            except BadRow as bad:
                if len(self.reasons) < SHOWN:
                    self.reasons.append(f"{rows.place(index)}: {bad}")
        if unseen and columns:
            raise DataError(
                f"prompts {name!r}: columns: there is no column {min(unseen)!r}; there are "
                f"{', '.join(map(str, columns))}."
            )
        if not self.usable.any() and columns and not {*ASKED} & {*columns, *spec.columns}:
            raise DataError(
                f"prompts {name!r}: no `prompt` column; it has {', '.join(map(str, columns))}. "
                f"Say which one holds the prompt: `columns: {{prompt: {next(iter(columns))}}}`."
            )
        numbers: dict[str, int] = {}
        self._domains = np.asarray(
            [numbers.setdefault(domain, len(numbers)) for domain, *_ in self.found], dtype=np.int32
        )
        self.names = list(numbers)  # of domains, as they first come

    def _note(self, index: int, prompt: Prompt, route: str) -> None:
        kind = (prompt.domain, "verifier" in prompt.fields, route_value(prompt, route))
        self.kinds[index] = self.found.setdefault(kind, len(self.found))
        self.keys[index] = question_key(prompt)
        self.usable[index] = True
        self.complete[index] = bool(prompt.fields.get("completion"))
        self.checkable = self.checkable or any(key in prompt.fields for key in CHECKABLE)

    @property
    def domains(self) -> np.ndarray:
        """The number in `names` of each row's domain, -1 where it is unusable."""
        if not self.found:
            return self.kinds
        return np.where(self.usable, self._domains[self.kinds], -1)

    def first_rows(self, rows: np.ndarray, most: int) -> dict[tuple[str, bool, str], list[int]]:
        """The first usable ones of every kind, among these."""
        rows = rows[self.usable[rows]]
        rows = rows[np.argsort(self.kinds[rows], kind="stable")]
        bounds = np.searchsorted(self.kinds[rows], np.arange(len(self.found) + 1))
        return {
            kind: rows[start : min(end, start + most)].tolist()
            for kind, start, end in zip(self.found, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
            if start < end
        }

    def questions(self, rows: np.ndarray) -> dict[str, int]:
        """Different questions by domain, among these rows."""
        rows = rows[self.usable[rows]]
        _, domains = different(self.keys[rows], self.domains[rows])
        counts = np.bincount(domains, minlength=len(self.names)).tolist()
        return dict(zip(self.names, counts, strict=True))


class RowSource:
    """Open rows. Where none are held out apart, some are kept back where answers can be checked: `held_out` says which."""

    def __init__(self, spec: RowPrompts, opening: Opening) -> None:
        self.spec, self.name, self._label, self.route = spec, spec.source, opening.label, opening.route
        self._domain = spec.default_domain()
        self._rows = as_rows(spec.rows())
        count = min(len(self._rows), spec.limit or len(self._rows))
        self.facts = _checked(self._rows, count, spec, spec.source, opening)
        self._held, self._held_facts, self._first = self._rows, self.facts, 0  # the row whose number is 0 in ids
        self._train, self._held_out = np.arange(count), np.arange(0)  # numbers of rows
        self.size: int | None = count  # training rows; unusable ones have their place among them
        self.remarks: list[str] = []  # for those who start a run
        apart = spec.held_out_rows()
        self._apart = apart is not None
        if apart is not None:
            self._held = as_rows(apart)
            self._held_facts = _checked(
                self._held, len(self._held), spec, spec.held_out_name, replace(opening, route=DOMAIN)
            )
            self._held_out = np.arange(len(self._held))
            self._remark_on_overlap()
        elif (self.facts.checkable or opening.rewarded) and count > 1:
            self._hold_out(count)
            self.size = len(self._train)
        self.contents = (self._rows.fingerprint, list(dict.fromkeys([*self._rows.files, *self._held.files])))

    def _hold_out(self, count: int) -> None:
        if self.spec.held_out == "last":
            self._first = count - max(1, int(count * LAST_ROWS))
            self._train, self._held_out = np.arange(self._first), np.arange(self._first, count)
            return
        held = held_out_rows(self.facts.keys, self.facts.domains)
        self._train, rows = np.flatnonzero(~held), np.flatnonzero(held)
        self._held_out = rows[np.argsort(self.facts.keys[rows], kind="stable")]  # the first so many stand for all
        trained, asked = self.facts.questions(self._train), self.facts.questions(rows)
        parts = [f"{asked[name]:,} of {asked[name] + trained[name]:,} ({plain(name)})" for name in self.facts.names]
        more = f" and so on, of {len(parts):,} domains" if len(parts) > DOMAINS else ""
        self.remarks.append(f"prompts {plain(self.name)}: questions held out: {', '.join(parts[:DOMAINS])}{more}")

    def _remark_on_overlap(self) -> None:
        rows = self._held_out[self._held_facts.usable]
        twice = int(np.isin(self._held_facts.keys[rows], self.facts.keys[self.facts.usable]).sum())
        if twice:
            self.remarks.append(
                f"WARNING: prompts {plain(self.name)}: {twice:,} of {len(rows):,} prompts of "
                f"{plain(self.spec.held_out_name)} are trained on as well, so their scores say little. Remove them from either"
            )

    @property
    def complete(self) -> np.ndarray:
        """Which training rows have a completion."""
        return self.facts.complete[self._train]

    @property
    def selected(self) -> str | None:
        """Tells one selection of training rows from another. None: all up to the last one."""
        if len(self._train) == 0 or self._train[-1] == len(self._train) - 1:
            return None
        return hashlib.sha256(self._train.astype("<i8").tobytes()).hexdigest()

    def scan(self, scan: Scan) -> ScannedSource:
        return scan_rows(self, scan)

    def keep_apart(self, others: list[Source]) -> None:
        """Another file may ask what this one asks. What it holds out is not trained on here."""
        keys = [other.held_keys for other in others if isinstance(other, RowSource) and other is not self]
        if self.spec.held_out != "questions" or not keys:
            return
        facts, rows = self.facts, self._train
        twice = facts.usable[rows] & np.isin(facts.keys[rows], np.concatenate(keys))
        if not twice.any():
            return
        self._train = rows[~twice]
        self.size = len(self._train)
        if not facts.usable[self._train].any():
            raise DataError(
                f"prompts {self.name!r}: other sources of the recipe hold out every question that it trains on. Remove it, or "
                "name held-out rows there: `eval_source`."
            )
        self.remarks.append(
            f"prompts {plain(self.name)}: {int(twice.sum()):,} rows are not trained on, since another source holds out "
            "what they ask"
        )

    @property
    def held_keys(self) -> np.ndarray:
        """Of the questions that were chosen to be held out."""
        chosen = not self._apart and self.spec.held_out == "questions"
        return self.facts.keys[self._held_out] if chosen else np.zeros(0, dtype=np.uint64)

    def place(self, index: int) -> str:
        return self._rows.place(int(self._train[index]))

    def train(self, index: int) -> Prompt:
        return self.row(int(self._train[index]))

    def row(self, number: int) -> Prompt:
        """The training prompt that a row is, by its number, which stands in its id."""
        return self._prompt(self._rows, number, f"train/{number}")

    def usable(self) -> Iterator[int]:
        """Indices of the training rows that are prompts."""
        return (int(index) for index in np.flatnonzero(self.facts.usable[self._train]))

    def held_out(self, count: int, wanted: Wanted = anything) -> list[Prompt]:
        return self.prompts("heldout", count, wanted)

    def prompts(self, split: Split, count: int | None, wanted: Wanted = anything) -> list[Prompt]:
        """In order of the rows, held-out ones in an order by hash where they were chosen so; unusable rows are left out."""
        found: list[Prompt] = []
        taken: dict[str, int] = {}
        for held, number, domain in self._wanted_rows(split):
            if count is not None and taken.get(domain, 0) >= count:
                continue
            prompt = self._asked(number) if held else self.row(number)
            if wanted(prompt):
                taken[domain] = taken.get(domain, 0) + 1
                found.append(prompt)
        return found

    def _wanted_rows(self, split: Split) -> Iterator[tuple[bool, int, str]]:
        """(held out, number, domain) of usable rows."""
        parts = []
        if split in ("train", "all"):
            parts.append((False, self.facts, self._train))
        if split in ("heldout", "all"):
            parts.append((True, self._held_facts, self._held_out))
        found = (
            (held, int(number), facts.names[domain])
            for held, facts, rows in parts
            for number, domain in zip(rows, facts.domains[rows], strict=True)
            if domain >= 0
        )
        return found if self._apart or split != "all" else iter(sorted(found, key=itemgetter(1)))

    def _asked(self, number: int) -> Prompt:
        return self._prompt(self._held, number, f"heldout/{number - self._first}")

    def examples(self) -> list[Prompt]:
        alike: dict[tuple[str, bool], list[int]] = {}
        for (domain, verified, _), rows in self.facts.first_rows(self._train, EXAMPLES).items():
            alike.setdefault((domain, verified), []).extend(rows)
        return [self.row(number) for rows in alike.values() for number in sorted(rows)[:EXAMPLES]]

    def routed(self) -> dict[tuple[str, str], str]:
        """Every (domain, value of the route's column) among the training rows, and the place of the first such row."""
        first: dict[tuple[str, str], int] = {}
        for (domain, _, value), (row, *_) in self.facts.first_rows(self._train, 1).items():
            first[domain, value] = min(row, first.get((domain, value), row))
        return {key: self._rows.place(row) for key, row in first.items()}

    def _prompt(self, rows: Rows, index: int, where: str) -> Prompt:
        try:
            return self.spec.prompt(rows[index], f"{self._label}/{where}", self._domain)
        except BadRow as bad:
            raise DataError(f"prompts {self.name!r}, {rows.place(index)}: {bad}.") from None


def _checked(rows: Rows, count: int, spec: RowPrompts, name: str, opening: Opening) -> RowFacts:
    if not count:
        raise DataError(f"prompts {name!r}: there are no rows in it.")
    facts = RowFacts(rows, count, spec, name, opening.told, opening.route)
    bad = count - int(facts.usable.sum())
    if bad and (opening.bad_rows == "stop" or bad == count):
        raise refusal(name, bad, count, facts.reasons)
    return facts
