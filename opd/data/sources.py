"""Sources of prompts. Each is one class with its settings, its checks, and how to open and read it. No torch here.

`source: "task:addition"`: the prefix before the colon, or else the kind of address, chooses the class; `kind` names
it explicitly. Add your own class with `@opd.register`: subclass `opd.data.sources.RowPrompts` and give it rows, or
open whatever you like.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

import numpy as np
from pydantic import Field, GetJsonSchemaHandler, PrivateAttr, ValidationError, field_validator
from pydantic_core import CoreSchema

from opd.common.errors import DataError, RunDirectoryError
from opd.common.files import cache_directory, content_hash, read_sealed, write_sealed
from opd.common.text import plain
from opd.data.prompts import (
    CHECKABLE,
    DOMAIN,
    RESERVED_KWARGS,
    plain_prompt,
    renamed,
    render_prompts,
    route_value,
    row_prompt,
)
from opd.data.rows import (
    ASKED,
    BadRow,
    ListRows,
    Row,
    Rows,
    as_ours,
    kind_of,
    local_files,
    looks_local,
    on_disk,
    open_hub,
    open_local,
    open_rows,
)
from opd.records import Message, Prompt
from opd.registry import Address, Choice, Family, Positive, StageView, Word, nearest

if TYPE_CHECKING:
    pass


Split = Literal["all", "heldout", "train"]
BadRows = Literal["stop", "skip"]
Wanted = Callable[[Prompt], bool]
OnProgress = Callable[[str, int, int], None]  # progress callback: name of a source, rows done, total rows
PREFIX = re.compile(r"[A-Za-z_][\w-]*:")


def silent(name: str, done: int, total: int) -> None:
    pass


def anything(prompt: Prompt) -> bool:
    return True


class Source(Protocol):
    """An open source: training prompts, and held-out prompts that do not overlap with them."""

    name: str
    size: int | None  # number of training prompts; None: endless

    def train(self, index: int) -> Prompt: ...

    def held_out(self, count: int, wanted: Wanted = anything) -> list[Prompt]:
        """At most `count` held-out prompts per domain, among those that `wanted` accepts."""

    def prompts(self, split: Split, count: int | None, wanted: Wanted = anything) -> list[Prompt]:
        """Prompts of a split, at most `count` per domain (None: all)."""

    def examples(self) -> list[Prompt]:
        """A few training prompts per domain, both with and without a verifier."""

    def scan(self, scan: Scan) -> ScannedSource:
        """Measure the lengths of the training prompts and find those that cannot be used."""

    def keep_apart(self, others: list[Source]) -> None:
        """Do not train on prompts that another source of the recipe holds out.

        Sources that cannot overlap do nothing.
        """


@dataclass(frozen=True)
class Opening:
    """Arguments for opening a source."""

    label: str  # prefix of the prompt ids, which seed the random draws
    bad_rows: BadRows = "stop"
    rewarded: bool = False  # rewards need no answer, so rows without an answer can be used for evaluation too
    route: str = DOMAIN  # the column that names the teacher; every training row needs it
    on_progress: OnProgress = silent
    opened: Callable[[Prompt], Prompt] | None = None  # adds the first messages of an environment to a prompt


class PromptSource(Choice):
    """Where prompts come from: the settings that every source has. Subclasses add their own."""

    family = "source"
    by_default = True
    prefixed: ClassVar[bool] = True  # chosen by the prefix `NAME:` of the address

    source: Address
    domain: Word | None = Field(None, description="default: the row's own `domain` column, else the source's name")
    share: float = Field(1.0, ge=1e-6, le=1e6, description="relative share of the prompts of a step")
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    environment: Annotated[Any, Family("environment")] | None = Field(
        None, description="what answers between the student's turns, for these prompts; default: rollout.environment"
    )

    _older: bool = PrivateAttr(default=False)

    @property
    def brings_answers(self) -> bool:
        """Whether its prompts come with answers, so that nobody plays or writes."""
        return False

    @abstractmethod
    def open(self, opening: Opening) -> Source:
        raise NotImplementedError

    @property
    def older(self) -> bool:
        """Whether a run of an earlier version uses this source. Such a run keeps reading rows as that version did."""
        return self._older

    def files(self) -> list[Path]:
        """Every file the source reads. A run records their content and does not resume if it changed."""
        return []

    def fingerprint(self) -> str | None:
        """The same check for data that is not in local files. None: the settings determine the prompts."""
        return None

    def as_begun(self, written: Mapping[str, Any]) -> PromptSource:
        """This source for a resumed run. `written`: its settings in `resolved.yaml`, maybe from an earlier version."""
        return self

    def inside(self, directory: Path) -> PromptSource:
        """This source inside a run directory, which contains the earlier stages."""
        return self

    @property
    def gives_plain_text(self) -> bool:
        """Whether its prompts are plain text, which is trained on as it is."""
        return False

    @property
    def only_domain(self) -> str | None:
        """The domain of all prompts, if the settings fix it; None: rows may have their own."""
        return None

    @property
    def address(self) -> str:
        """The source without the prefix that chose the class."""
        return self.source.removeprefix(f"{self.name}:") if self.prefixed else self.source

    @property
    def label(self) -> str:
        """Prefix of the prompt ids. Ids seed the draws, so the prefix must not depend on a file's directory."""
        path = Path(self.address)
        return self.source.removesuffix(self.address) + path.name if path.is_absolute() else self.source

    def heading(self) -> dict[str, str]:
        return {} if SOURCES.of_address(self.source) == self.name else {self.key: self.name}

    @field_validator("chat_template_kwargs")
    @classmethod
    def _free(cls, value: dict[str, Any]) -> dict[str, Any]:
        taken = sorted(RESERVED_KWARGS & value.keys())
        if taken:
            raise ValueError(f"{taken[0]} is set by opd and cannot be given here")
        return value

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        reference = super().__get_pydantic_json_schema__(schema, handler)
        node = handler.resolve_ref_schema(reference)
        prefixes = "|".join(name for name, option in SOURCES.classes().items() if _prefixed(option))
        pattern = f"^{cls.name}:" if cls.prefixed else f"^(?!({prefixes}):)"
        node["anyOf"] = [{"required": ["kind"]}, {"properties": {"source": {"pattern": pattern}}}]
        return reference


class SourceFamily(Family):
    """The address chooses the class.

    `task:addition` is a task, a path or an existing file is a file, and any other name is a dataset on the hub.
    """

    def __init__(self) -> None:
        super().__init__("source")

    @property
    def expected(self) -> str:
        return "an address, such as task:addition or rows.jsonl, or a mapping with `source`"

    def named(self, settings: Mapping[str, Any]) -> Any:
        address = settings.get("source")
        return super().named(settings) or (self.of_address(address) if isinstance(address, str) else None)

    def choose(self, settings: dict[str, Any]) -> type[Choice]:
        named, address = settings.pop(self.key, None), settings.get("source")
        if named is None and isinstance(address, str):
            named = self.of_address(address)
            if named is None:
                prefixes = [name for name, option in self.classes().items() if _prefixed(option)]
                raise ValueError(f"unknown source; {nearest(address.partition(':')[0], prefixes)}")
        return self.find(named or "file")

    def of_address(self, address: str) -> str | None:
        """Name of the class for an address; None: the address has a prefix such as `task:` that is not known."""
        name = address.partition(":")[0]
        if PREFIX.match(address) is None or on_disk(address):
            return "file" if looks_local(address) else "dataset"
        return name if name in self.names() and _prefixed(self.find(name)) else None


def _prefixed(choice: type[Choice]) -> bool:
    return issubclass(choice, PromptSource) and choice.prefixed


SOURCES = SourceFamily()


def prompt_source(source: str, **settings: Any) -> PromptSource:
    """A source from the settings that a recipe would contain."""
    try:
        found = SOURCES.read({"source": source, **settings})
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in detail["loc"])
        raise DataError(f"prompts {source!r}: {place}: {detail['msg'].removeprefix('Value error, ')}.") from None
    except ValueError as error:
        raise DataError(f"prompts {source!r}: {error}.") from None
    assert isinstance(found, PromptSource)
    return found


# --- Scanning prompts before the first token is sampled ---
#
# Lengths are cached in `$XDG_CACHE_HOME/opd/scans` (else `~/.cache/opd/scans`) by the content of the files and the
# tokenizer; the cache can be deleted at any time. Endless sources are probed; later prompts that are too long are skipped.


SHOWN = 5  # bad rows listed in a message
PROGRESS = 5000  # rows between progress reports
PROBE = 256  # prompts sampled from an endless source
SLACK = 1.25  # room for later prompts of an endless source, relative to the longest probed one
BATCH = 512
FORMAT = 3  # of the cache; increase it when lengths are counted differently
NEEDED_BY = {"completion": "rollout.data_share", "rejected": "the writer `rejected`"}  # columns with answers


@dataclass(frozen=True)
class Scanned:
    """Scan results for all sources of a stage."""

    longest: int  # tokens of the longest usable prompt
    open_ended: bool  # later prompts may be longer: a source is endless, or the template prints the date
    mean: float  # tokens per prompt, weighted by the sources' shares
    unusable: tuple[np.ndarray | None, ...]  # per source: mask of training rows to skip; None: endless source
    notes: tuple[str, ...]  # messages about skipped rows

    def room(self, others: int, limit: int, max_prompt_tokens: int | None) -> int:
        """Prompt tokens to reserve in a sampler's slot: the longest prompt (held-out ones too), plus slack if needed."""
        longest = max(self.longest, others)
        return max(longest, min(limit, max_prompt_tokens or int(longest * SLACK) + 8)) if self.open_ended else longest


@dataclass(frozen=True)
class Scan:
    """Arguments for scanning a source."""

    tokenizer: Any
    limit: int  # maximum tokens per prompt
    why: str  # reason for the limit
    columns: tuple[str, ...] = ()  # with answers that every row needs: completion, rejected
    bad_rows: BadRows = "stop"
    on_progress: OnProgress = silent
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ScannedSource:
    """Scan results for one source."""

    lengths: np.ndarray  # of the usable prompts
    unusable: np.ndarray | None = None  # mask of training rows to skip; None: endless source
    note: str = ""


def scan(
    sources: Sequence[Source],
    specs: Sequence[PromptSource],
    tokenizer: Any,
    *,
    limit: int,
    why: str,
    columns: tuple[str, ...] = (),
    bad_rows: BadRows = "stop",
    on_progress: OnProgress = silent,
) -> Scanned:
    """`limit`: maximum tokens per prompt, for the reason `why`. `columns`: with answers that every row needs."""
    found = [
        source.scan(
            Scan(
                tokenizer,
                limit,
                why,
                () if spec.gives_plain_text else columns,
                bad_rows,
                on_progress,
                spec.chat_template_kwargs,
            )
        )
        for source, spec in zip(sources, specs, strict=True)
    ]
    return Scanned(
        longest=max(int(one.lengths.max()) for one in found),
        open_ended=any(source.size is None for source in sources) or prints_the_date(tokenizer),
        mean=float(np.average([one.lengths.mean() for one in found], weights=[spec.share for spec in specs])),
        unusable=tuple(one.unusable for one in found),
        notes=tuple(one.note for one in found if one.note),
    )


def scan_rows(source: RowSource, scan: Scan) -> ScannedSource:
    """Render every row and count its tokens."""
    lengths, reasons = row_lengths(source, scan)
    bad = _unusable(source, lengths, reasons, scan)
    skipped = int(bad.sum())
    if skipped and (scan.bad_rows == "stop" or skipped == len(bad)):
        raise bad_rows_error(source.name, skipped, len(bad), list(reasons.values())[:SHOWN])
    first = "; ".join(list(reasons.values())[:SHOWN] or source.facts.reasons)
    left_out = [f"prompts {source.name}: {skipped:,} of {len(bad):,} rows are skipped ({first})"] if skipped else []
    return ScannedSource(lengths[~bad], bad, "; ".join([*left_out, *source.remarks]))


def scan_endless(source: Source, scan: Scan) -> ScannedSource:
    """Measure the first prompts, as a sample of the rest."""
    prompts = [source.train(index) for index in range(PROBE if source.size is None else source.size)]
    for column in scan.columns:
        if not prompts[0].plain and not prompts[0].fields.get(column):
            raise DataError(
                f"prompts {source.name!r}: they have no `{column}`, which {NEEDED_BY[column]} needs. Use rows that have it."
            )
    found = render_prompts(prompts, scan.tokenizer, scan.template_kwargs, whole=True)
    for ids in found:
        if isinstance(ids, DataError):
            raise ids
    lengths = np.asarray([len(ids) for ids in found if not isinstance(ids, DataError)])
    if lengths.min() > scan.limit:
        raise DataError(
            f"prompts {source.name!r}: the shortest of {len(prompts)} prompts has {lengths.min():,} tokens, and at most "
            f"{max(scan.limit, 0):,} fit ({scan.why})."
        )
    return ScannedSource(lengths[lengths <= scan.limit], None if source.size is None else lengths > scan.limit)


def bad_rows_error(name: str, bad: int, count: int, reasons: Sequence[str]) -> DataError:
    """Error that lists the first few bad rows with line and reason, and gives their total."""
    more = [f"… and {bad - len(reasons):,} more"] if bad > len(reasons) else []
    remedy = "" if bad == count else " Fix them, or leave them out: `data: {bad_rows: skip}`."
    return DataError(
        f"prompts {name!r}: {bad:,} of {count:,} rows cannot be used.{remedy}\n  " + "\n  ".join([*reasons, *more])
    )


def prints_the_date(tokenizer: Any) -> bool:
    return "strftime_now" in json.dumps(tokenizer.chat_template)


def _unusable(source: RowSource, lengths: np.ndarray, reasons: dict[int, str], scan: Scan) -> np.ndarray:
    """(rows,) bool: training rows that cannot be used. Adds the first few reasons to `reasons`.

    The source keeps the reasons of malformed rows.
    """
    limit, bad = scan.limit, lengths < 0
    for index in np.flatnonzero(lengths > limit)[:SHOWN]:
        reasons[int(index)] = (
            f"{source.place(int(index))}: {int(lengths[index]):,} tokens, and at most {max(limit, 0):,} fit "
            f"({scan.why})"
        )
    bad |= lengths > limit
    for column in scan.columns:
        missing = ~source.answered(column) & ~bad
        for index in np.flatnonzero(missing)[:SHOWN]:
            reasons[int(index)] = f"{source.place(int(index))}: no `{column}`, which {NEEDED_BY[column]} needs"
        bad |= missing
    return bad


def row_lengths(source: RowSource, scan: Scan) -> tuple[np.ndarray, dict[int, str]]:
    """Tokens of every training row (-1: unusable), and the reasons for the first rows that cannot be rendered."""
    place = _cache_file(source, scan.tokenizer)
    known = _remembered(place, source.size or 0) if place is not None else None
    if known is not None:
        return known
    lengths = np.full(source.size or 0, -1, dtype=np.int32)
    reasons: dict[int, str] = {}
    usable, done = source.usable(), 0
    while batch := list(islice(usable, BATCH)):
        prompts = [source.train(index) for index in batch]
        found = render_prompts(prompts, scan.tokenizer, scan.template_kwargs, whole=not source.spec.older)
        for index, ids in zip(batch, found, strict=True):
            if not isinstance(ids, DataError):
                lengths[index] = len(ids)
            elif len(reasons) < SHOWN:
                reasons[index] = f"{source.place(index)}: {ids}"
        done += len(batch)
        if done % PROGRESS < BATCH:
            scan.on_progress(source.name, done, len(lengths))
    if place is not None:
        _remember(place, lengths, reasons)
    return lengths, reasons


# --- The cache of lengths ---


def _cache_file(source: RowSource, tokenizer: Any) -> Path | None:
    """A file named by a hash of everything that lengths depend on; None if that cannot be determined."""
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast) or prints_the_date(tokenizer) or source.opened is not None:
        return None
    fingerprint, files = source.contents
    facts = [
        FORMAT,
        [fingerprint, *(content_hash(path) for path in files)],
        source.spec.model_dump(mode="json", exclude={"share", "environment"}),
        source.size,
        source.selected,
        source.spec.older,
        tokenizer.backend_tokenizer.to_str(),
        tokenizer.eos_token_id,
        tokenizer.special_tokens_map,
        tokenizer.chat_template,
        *([] if source.route == DOMAIN else [source.route]),  # rows without that column cannot be used
    ]
    key = hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:32]
    root = cache_directory()
    return root / "scans" / f"{key}.json" if root is not None else None


def _remembered(place: Path, size: int) -> tuple[np.ndarray, dict[int, str]] | None:
    """Results of an earlier scan. An incomplete or altered entry is ignored."""
    try:
        entry: Mapping[str, Any] = read_sealed(place)
    except (RunDirectoryError, OSError):
        return None
    lengths = np.frombuffer(base64.b64decode(entry["lengths"]), dtype="<i4").astype(np.int32)
    return (
        (lengths, {int(index): reason for index, reason in entry["reasons"].items()}) if len(lengths) == size else None
    )


def _remember(place: Path, lengths: np.ndarray, reasons: Mapping[int, str]) -> None:
    with suppress(OSError):  # a read-only home costs time, but must not stop the run
        place.parent.mkdir(parents=True, exist_ok=True)
        packed = base64.b64encode(lengths.astype("<i4").tobytes()).decode()
        write_sealed(place, {"lengths": packed, "reasons": {str(index): reason for index, reason in reasons.items()}})


# --- Choosing held-out rows: a tenth of each domain's questions, by a hash of the question ---
#
# The choice depends only on the rows, not on their order or the machine. Rows with the same question are on the same side,
# even if answers, system prompts or whitespace differ.


PART = 10  # one question in this many is held out, and at least one per domain with two or more
ENCODER = json.JSONEncoder(sort_keys=True, default=str)
KEY = b"opd held-out questions"  # of the hash; changing it would change which rows runs hold out


def question_key(prompt: Prompt) -> int:
    """64-bit hash of a prompt's question: its text, or the roles and texts of its messages except system messages."""
    messages = [{"role": "user", "content": prompt.text or ""}] if prompt.messages is None else list(prompt.messages)
    asked = [_spoken(message) for message in messages if message["role"] != "system"]
    canonical = ENCODER.encode(asked or [_spoken(message) for message in messages])
    return int.from_bytes(hashlib.blake2b(canonical.encode(), digest_size=8, key=KEY).digest(), "big")


def _spoken(message: Message) -> list[object]:
    content, calls = message["content"], message.get("tool_calls")
    return [message["role"], " ".join(content.split()) if content else "", *([calls] if calls else [])]


def held_out_rows(keys: np.ndarray, domains: np.ndarray) -> np.ndarray:
    """Mask of held-out rows. `keys`: hashes of the questions; `domains`: number of each row's domain (-1: unusable).

    Takes the questions with the smallest hashes of each domain. A question in several domains counts in all of them.
    A domain keeps at least one question to train on, so a domain with a single question holds out none.
    """
    usable = domains >= 0
    ordered, places_of = different(keys[usable], domains[usable])
    questions = np.bincount(places_of)
    left = np.where(questions > 1, np.maximum(questions // PART, 1), 0).tolist()  # to be held out
    spare = (questions - 1).tolist()
    short = sum(count > 0 for count in left)
    chosen: list[int] = []
    for key, found in groupby(zip(ordered.tolist(), places_of.tolist(), strict=True), key=itemgetter(0)):
        if not short:
            break
        places = [domain for _, domain in found]
        if any(left[domain] > 0 for domain in places) and all(spare[domain] > 0 for domain in places):
            chosen.append(key)
            for domain in places:
                left[domain] -= 1
                spare[domain] -= 1
                short -= left[domain] == 0
    return usable & np.isin(keys, np.asarray(chosen, dtype=np.uint64))


def different(keys: np.ndarray, domains: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct (key, domain) pairs, sorted by key."""
    order = np.lexsort((domains, keys))
    keys, domains = keys[order], domains[order]
    new = np.ones(len(keys), dtype=bool)
    new[1:] = (keys[1:] != keys[:-1]) | (domains[1:] != domains[:-1])
    return keys[new], domains[new]


# --- Prompts from rows: files, folders, datasets on the hub, or your own class ---
#
# Opening a source checks every row.


LAST_ROWS = 0.1  # share of rows held out with `held_out: last`
EXAMPLES = 8  # example prompts per domain
DOMAINS = 20  # most domains named in one remark


class RowPrompts(PromptSource):
    """Prompts from rows, one prompt per row. A subclass provides the rows through `rows`."""

    limit: Positive | None = Field(None, description="use at most this many rows")
    columns: dict[Word, Word] = Field(
        default_factory=dict, description="our names for a file's columns: {prompt: question, answer: solution}"
    )
    held_out: Literal["questions", "last"] = Field(
        "questions",
        description="rows to evaluate on: a tenth of every domain's questions, chosen by a hash; or the last tenth of the rows",
    )

    plain_text: bool = Field(
        False, description="rows are plain text (`text`): every token is trained on as data, and there is no question"
    )

    @abstractmethod
    def rows(self) -> Rows | list[Mapping[str, Any]]:
        raise NotImplementedError

    @property
    def gives_plain_text(self) -> bool:
        return self.plain_text

    def held_out_rows(self) -> Rows | list[Mapping[str, Any]] | None:
        """Rows to evaluate on. None: part of `rows`, chosen by `held_out`."""
        return None

    @property
    def held_out_name(self) -> str:
        return f"{self.source} (held out)"

    def default_domain(self) -> str:
        return self.name

    def prompt(self, row: Row, identity: str, domain: str) -> Prompt:
        """The prompt of a row; `BadRow` if it has none. `domain`: the default if neither row nor settings name one."""
        ours = renamed(row, self.columns)
        if self.plain_text:
            own = ours.get("domain")
            return plain_prompt(ours.get("text"), identity, self.domain or (own if isinstance(own, str) else domain))
        return row_prompt(ours if self.older else as_ours(ours, self.domain), identity, self.domain or domain)

    def fingerprint(self) -> str | None:
        """Hash of the content, for rows that are not in files."""
        return None if self.files() else as_rows(self.rows()).fingerprint

    def as_begun(self, written: Mapping[str, Any]) -> PromptSource:
        """Runs of earlier versions do not record `held_out`; they held out the last rows."""
        if "held_out" in written:
            return self
        found = self.model_copy(update={"held_out": "last"})
        found._older = True
        return found

    def open(self, opening: Opening) -> RowSource:
        return RowSource(self, opening)


class StoredPrompts(RowPrompts):
    """Settings shared by files and datasets."""

    prefixed = False
    split: Word = Field("train", description="split of a folder or a Hugging Face dataset")
    eval_source: Address | None = Field(None, description="held-out prompts; default: some of the rows")

    def check(self, view: StageView) -> Iterable[str]:
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
    """A file, or a folder: the output of `save_to_disk`, or the files of one split."""

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
    """Facts about each row from one pass: whether it is usable, its question and domain, and which answers it has."""

    def __init__(
        self, rows: Rows, count: int, spec: RowPrompts, name: str, on_progress: OnProgress, route: str = DOMAIN
    ) -> None:
        self.usable = np.zeros(count, dtype=bool)
        self.answered = {column: np.zeros(count, dtype=bool) for column in NEEDED_BY}
        self.keys = np.zeros(count, dtype=np.uint64)  # of the questions
        self.kinds = np.full(count, -1, dtype=np.int32)  # values of `found`; -1: the row is unusable
        self.found: dict[tuple[str, bool, str], int] = {}  # (domain, has a verifier, value of the route's column)
        self.checkable = False
        self.reasons: list[str] = []  # of the first bad rows
        unseen, columns, domain = set(spec.columns.values()), dict[str, None](), spec.default_domain()
        for index, row in zip(range(count), rows.each(), strict=False):
            if index % PROGRESS == 0:
                on_progress(name, index, count)
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
        if not spec.plain_text and not self.usable.any() and columns and not {*ASKED} & {*columns, *spec.columns}:
            raise DataError(
                f"prompts {name!r}: no `prompt` column; it has {', '.join(map(str, columns))}. {_name_the_prompt(name, columns)}"
            )
        numbers: dict[str, int] = {}
        self._domains = np.asarray(
            [numbers.setdefault(domain, len(numbers)) for domain, *_ in self.found], dtype=np.int32
        )
        self.names = list(numbers)  # of domains, in order of first appearance

    def _note(self, index: int, prompt: Prompt, route: str) -> None:
        kind = (prompt.domain, "verifier" in prompt.fields, route_value(prompt, route))
        self.kinds[index] = self.found.setdefault(kind, len(self.found))
        self.keys[index] = question_key(prompt)
        self.usable[index] = True
        for column, answered in self.answered.items():
            answered[index] = bool(prompt.fields.get(column))
        self.checkable = self.checkable or any(key in prompt.fields for key in CHECKABLE)

    @property
    def domains(self) -> np.ndarray:
        """Index into `names` of each row's domain; -1: the row is unusable."""
        if not self.found:
            return self.kinds
        return np.where(self.usable, self._domains[self.kinds], -1)

    def first_rows(self, rows: np.ndarray, most: int) -> dict[tuple[str, bool, str], list[int]]:
        """The first `most` usable rows of every kind, among these rows."""
        rows = rows[self.usable[rows]]
        rows = rows[np.argsort(self.kinds[rows], kind="stable")]
        bounds = np.searchsorted(self.kinds[rows], np.arange(len(self.found) + 1))
        return {
            kind: rows[start : min(end, start + most)].tolist()
            for kind, start, end in zip(self.found, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
            if start < end
        }

    def questions(self, rows: np.ndarray) -> dict[str, int]:
        """Number of distinct questions per domain, among these rows."""
        rows = rows[self.usable[rows]]
        _, domains = different(self.keys[rows], self.domains[rows])
        counts = np.bincount(domains, minlength=len(self.names)).tolist()
        return dict(zip(self.names, counts, strict=True))


class RowSource:
    """An open source of rows.

    Without separate held-out rows, part of the rows is held out if answers can be checked; `held_out` chooses them.
    """

    def __init__(self, spec: RowPrompts, opening: Opening) -> None:
        self.spec, self.name, self._label, self.route = spec, spec.source, opening.label, opening.route
        self._domain = spec.default_domain()
        self._rows = as_rows(spec.rows())
        count = min(len(self._rows), spec.limit or len(self._rows))
        self.facts = _checked(self._rows, count, spec, spec.source, opening)
        self._held, self._held_facts, self._first = self._rows, self.facts, 0  # `_first`: the row numbered 0 in ids
        self._train, self._held_out = np.arange(count), np.arange(0)  # row numbers
        self.size: int | None = count  # training rows, including unusable ones
        self.remarks: list[str] = []  # shown when a run starts
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
        self.opened = opening.opened
        self.contents = (self._rows.fingerprint, list(dict.fromkeys([*self._rows.files, *self._held.files])))

    def _hold_out(self, count: int) -> None:
        if self.spec.held_out == "last":
            self._first = count - max(1, int(count * LAST_ROWS))
            self._train, self._held_out = np.arange(self._first), np.arange(self._first, count)
            return
        held = held_out_rows(self.facts.keys, self.facts.domains)
        self._train, rows = np.flatnonzero(~held), np.flatnonzero(held)
        self._held_out = rows[np.argsort(self.facts.keys[rows], kind="stable")]  # any prefix is a fair sample
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
                f"{plain(self.spec.held_out_name)} are also trained on, so their scores mean little. Remove them from either"
            )

    def answered(self, column: str) -> np.ndarray:
        """(rows,) bool: training rows with an answer in this column."""
        return self.facts.answered[column][self._train]

    @property
    def selected(self) -> str | None:
        """Hash that identifies the selection of training rows. None: all rows up to the last one."""
        if len(self._train) == 0 or self._train[-1] == len(self._train) - 1:
            return None
        return hashlib.sha256(self._train.astype("<i8").tobytes()).hexdigest()

    def scan(self, scan: Scan) -> ScannedSource:
        return scan_rows(self, scan)

    def keep_apart(self, others: list[Source]) -> None:
        """Another file may contain the same questions. Do not train on those it holds out."""
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
            f"prompts {plain(self.name)}: {int(twice.sum()):,} rows are not trained on, because another source holds out "
            "the same questions"
        )

    @property
    def held_keys(self) -> np.ndarray:
        """Hashes of the questions chosen as held out."""
        chosen = not self._apart and self.spec.held_out == "questions"
        return self.facts.keys[self._held_out] if chosen else np.zeros(0, dtype=np.uint64)

    def place(self, index: int) -> str:
        return self._rows.place(int(self._train[index]))

    def train(self, index: int) -> Prompt:
        return self.row(int(self._train[index]))

    def row(self, number: int) -> Prompt:
        """The training prompt of a row, by row number. The number is part of the prompt's id."""
        return self._prompt(self._rows, number, f"train/{number}")

    def usable(self) -> Iterator[int]:
        """Indices of the usable training rows."""
        return (int(index) for index in np.flatnonzero(self.facts.usable[self._train]))

    def held_out(self, count: int, wanted: Wanted = anything) -> list[Prompt]:
        return self.prompts("heldout", count, wanted)

    def prompts(self, split: Split, count: int | None, wanted: Wanted = anything) -> list[Prompt]:
        """In row order; held-out rows that were chosen by hash are in hash order. Unusable rows are left out."""
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
        """Every (domain, value of the route's column) in the training rows, with the place of the first such row."""
        first: dict[tuple[str, str], int] = {}
        for (domain, _, value), (row, *_) in self.facts.first_rows(self._train, 1).items():
            first[domain, value] = min(row, first.get((domain, value), row))
        return {key: self._rows.place(row) for key, row in first.items()}

    def _prompt(self, rows: Rows, index: int, where: str) -> Prompt:
        try:
            prompt = self.spec.prompt(rows[index], f"{self._label}/{where}", self._domain)
            return prompt if self.opened is None else self.opened(prompt)
        except BadRow as bad:
            raise DataError(f"prompts {self.name!r}, {rows.place(index)}: {bad}.") from None


def _is_table(name: str) -> bool:
    return any(name.removesuffix(".gz").endswith(end) for end in (".csv", ".tsv"))


def _name_the_prompt(name: str, columns: Collection[object]) -> str:
    """What to do about rows without a prompt."""
    say = f"Say which column holds the prompt: `columns: {{prompt: {next(iter(columns))}}}`."
    if not _is_table(name):
        return say
    return f"If its first line is a row and not a header, add a header line such as prompt,answer. Otherwise: {say[0].lower()}{say[1:]}"


def _checked(rows: Rows, count: int, spec: RowPrompts, name: str, opening: Opening) -> RowFacts:
    if not count:
        header = (
            " below its first line, which names the columns. If that line is a row, add a header such as prompt,answer"
        )
        raise DataError(f"prompts {name!r}: it has no rows{header if _is_table(name) else ''}.")
    facts = RowFacts(rows, count, spec, name, opening.on_progress, opening.route)
    bad = count - int(facts.usable.sum())
    if bad and (opening.bad_rows == "stop" or bad == count):
        raise bad_rows_error(name, bad, count, facts.reasons)
    return facts


# --- Opening all sources of a recipe ---


def prompts(
    source: str, count: int | None = None, *, start: int = 0, split: Split = "train", **settings: Any
) -> list[Prompt]:
    """Prompts of any source that a recipe can name, for your own loop. `settings`: the source's other recipe keys.

    >>> [prompt.messages[0]["content"] for prompt in prompts("task:addition", 2, start=6)]
    ['add 66+50', 'add 40+28']
    """
    opened = open_source(prompt_source(source, **settings))
    if opened.size is not None:
        found = opened.prompts(split, None)
        return found[start:] if count is None else found[start : start + count]
    if split == "train" and count is not None:
        return [opened.train(index) for index in range(start, start + count)]
    return opened.prompts(split, None if count is None else start + count)[start:]


def open_source(spec: PromptSource) -> Source:
    return open_sources([spec])[0]


def open_sources(
    specs: Sequence[PromptSource],
    *,
    bad_rows: BadRows = "stop",
    rewarded: bool = False,
    route: str = DOMAIN,
    on_progress: OnProgress = silent,
    environment: Any = None,
) -> list[Source]:
    """Open all sources of a recipe and check every row.

    `rewarded`: rewards need no answer, so rows without an answer can be used for evaluation too. `route`: the column
    that names the teacher of a row. `environment`: for prompts whose source names none. If a source is listed twice, for example with other options, the ids of the second
    begin with `task:sort#2/…`.
    """
    sources: list[Source] = []
    labels: list[str] = []
    for number, spec in enumerate(specs):
        if any(spec == earlier.model_copy(update={"share": spec.share}) for earlier in specs[:number]):
            raise DataError(
                f"prompts: {spec.source!r} is listed twice with the same settings. List it once, with the sum of both shares."
            )
        labels.append(spec.label)
        again = labels.count(spec.label)
        label = f"{spec.label}#{again}" if again > 1 else spec.label
        opened = opened_by(spec, environment)
        sources.append(spec.open(Opening(label, bad_rows, rewarded, route, on_progress, opened)))
    for source in sources:
        source.keep_apart(sources)
    return sources


def opened_by(spec: PromptSource, environment: Any = None) -> Callable[[Prompt], Prompt] | None:
    """Adds the first messages of the source's environment, or of `environment`, to a prompt. None: there is no environment."""
    played = spec.environment or environment
    return None if played is None else partial(played.opened, template_kwargs=spec.chat_template_kwargs)


def routed(sources: Sequence[Source], column: str) -> dict[tuple[str, str], str]:
    """Every (domain, value of the column) in the training prompts, with its first place.

    Rows were all read when the sources were opened; for endless sources, the first prompts are used.
    """
    if column == DOMAIN:  # examples cover every domain
        return {(prompt.domain, prompt.domain): "" for source in sources for prompt in source.examples()}
    found: dict[tuple[str, str], str] = {}
    for source in sources:
        some = source.routed() if isinstance(source, RowSource) else _probed(source, column)
        for key, place in some.items():
            found.setdefault(key, f"prompts {source.name!r}, {place}")
    return found


def _probed(source: Source, column: str) -> dict[tuple[str, str], str]:
    some: dict[tuple[str, str], str] = {}
    for index in range(PROBE if source.size is None else source.size):
        prompt = source.train(index)
        try:
            some.setdefault((prompt.domain, route_value(prompt, column)), f"prompt {index}")
        except BadRow as bad:
            raise DataError(f"prompts {source.name!r}, prompt {index}: {bad}.") from None
    return some
