"""Every prompt is looked at before the first token is sampled: how long it is, and whether it can be used at all.

Lengths are remembered in the user's cache (`$XDG_CACHE_HOME/opd/scans`, else `~/.cache/opd/scans`), by the content of
the files and of the tokenizer; delete it at will. Sources without end are probed, and what turns out too long later is
skipped.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from opd.data.prompts import DOMAIN
from opd.data.render import render_prompts
from opd.data.source import BadRows, PromptSource, Source, Told, silent
from opd.errors import DataError, RunDirectoryError
from opd.files import cache_directory, content_hash, read_sealed, write_sealed

if TYPE_CHECKING:
    from opd.data.row_source import RowSource

SHOWN = 5  # bad rows that a message names
PROGRESS = 5000  # rows between two signs of life
PROBE = 256  # prompts looked at of a source without end
SLACK = 1.25  # room for the later prompts of such a source, beyond the longest of those
BATCH = 512
FORMAT = 2  # of the cache; goes up when lengths are counted differently


@dataclass(frozen=True)
class Scanned:
    """What all sources of a stage hold."""

    longest: int  # tokens of the longest prompt that is used
    open_ended: bool  # later prompts may be longer: a source has no end, or the template prints the date
    mean: float  # tokens of a prompt, weighted by the sources' shares
    unusable: tuple[np.ndarray | None, ...]  # per source: which training rows are skipped; None: it has no end
    notes: tuple[str, ...]  # what was skipped, in words

    def room(self, others: int, limit: int, max_prompt_tokens: int | None) -> int:
        """Tokens that a prompt may have in a sampler's slot: the longest of all, held-out ones too, and slack where it
        takes some.
        """
        longest = max(self.longest, others)
        return max(longest, min(limit, max_prompt_tokens or int(longest * SLACK) + 8)) if self.open_ended else longest


@dataclass(frozen=True)
class Scan:
    """How the sources of a stage are looked at: what a source is given for it."""

    tokenizer: Any
    limit: int  # the most tokens a prompt may have
    why: str  # it is that many
    completions: bool = False  # every row needs one
    bad_rows: BadRows = "stop"
    told: Told = silent
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ScannedSource:
    """What one source holds."""

    lengths: np.ndarray  # of the prompts that are used
    unusable: np.ndarray | None = None  # which training rows are skipped; None: it has no end
    note: str = ""


def scan(
    sources: Sequence[Source],
    specs: Sequence[PromptSource],
    tokenizer: Any,
    *,
    limit: int,
    why: str,
    completions: bool = False,
    bad_rows: BadRows = "stop",
    told: Told = silent,
) -> Scanned:
    """`limit` is the most tokens a prompt may have, for the reason `why`; `completions`: every row needs one."""
    found = [
        source.scan(Scan(tokenizer, limit, why, completions, bad_rows, told, spec.chat_template_kwargs))
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
    """Every row is rendered and counted."""
    lengths, reasons = row_lengths(source, scan)
    bad = _unusable(source, lengths, reasons, scan)
    skipped = int(bad.sum())
    if skipped and (scan.bad_rows == "stop" or skipped == len(bad)):
        raise refusal(source.name, skipped, len(bad), list(reasons.values())[:SHOWN])
    first = "; ".join(list(reasons.values())[:SHOWN] or source.facts.reasons)
    left_out = [f"prompts {source.name}: {skipped:,} of {len(bad):,} rows are skipped ({first})"] if skipped else []
    return ScannedSource(lengths[~bad], bad, "; ".join([*left_out, *source.remarks]))


def scan_endless(source: Source, scan: Scan) -> ScannedSource:
    """The first prompts stand for the rest."""
    prompts = [source.train(index) for index in range(PROBE)]
    found = render_prompts(prompts, scan.tokenizer, scan.template_kwargs, whole=True)
    for ids in found:
        if isinstance(ids, DataError):
            raise ids
    lengths = np.asarray([len(ids) for ids in found if not isinstance(ids, DataError)])
    if lengths.min() > scan.limit:
        raise DataError(
            f"prompts {source.name!r}: the shortest of {PROBE} prompts has {lengths.min():,} tokens, and at most "
            f"{max(scan.limit, 0):,} fit ({scan.why})."
        )
    return ScannedSource(lengths[lengths <= scan.limit])


def refusal(name: str, bad: int, count: int, reasons: Sequence[str]) -> DataError:
    """The first few by line and reason, and how many there are."""
    more = [f"… and {bad - len(reasons):,} more"] if bad > len(reasons) else []
    remedy = "" if bad == count else " Fix them, or leave them out: `data: {bad_rows: skip}`."
    return DataError(
        f"prompts {name!r}: {bad:,} of {count:,} rows cannot be used.{remedy}\n  " + "\n  ".join([*reasons, *more])
    )


def prints_the_date(tokenizer: Any) -> bool:
    return "strftime_now" in json.dumps(tokenizer.chat_template)


def _unusable(source: RowSource, lengths: np.ndarray, reasons: dict[int, str], scan: Scan) -> np.ndarray:
    """Which training rows cannot be used. `reasons` gets the first few; those of malformed rows the source has."""
    limit, bad = scan.limit, lengths < 0
    for index in np.flatnonzero(lengths > limit)[:SHOWN]:
        reasons[int(index)] = (
            f"{source.place(int(index))}: {int(lengths[index]):,} tokens, and at most {max(limit, 0):,} fit "
            f"({scan.why})"
        )
    bad |= lengths > limit
    if scan.completions:
        missing = ~source.complete & ~bad
        for index in np.flatnonzero(missing)[:SHOWN]:
            reasons[int(index)] = f"{source.place(int(index))}: no `completion`, which rollout.data_share needs"
        bad |= missing
    return bad


def row_lengths(source: RowSource, scan: Scan) -> tuple[np.ndarray, dict[int, str]]:
    """Tokens of every training row, -1 where it cannot be used; and why not, for the first that cannot be rendered."""
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
            scan.told(source.name, done, len(lengths))
    if place is not None:
        _remember(place, lengths, reasons)
    return lengths, reasons


# The cache


def _cache_file(source: RowSource, tokenizer: Any) -> Path | None:
    """Named after everything that lengths depend on; None where that cannot be told."""
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast) or prints_the_date(tokenizer):
        return None
    fingerprint, files = source.contents
    facts = [
        FORMAT,
        [fingerprint, *(content_hash(path) for path in files)],
        source.spec.model_dump(mode="json", exclude={"share"}),
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
    """What an earlier scan found. Anything but a whole, unaltered entry is as good as none."""
    try:
        entry: Mapping[str, Any] = read_sealed(place)
    except (RunDirectoryError, OSError):
        return None
    lengths = np.frombuffer(base64.b64decode(entry["lengths"]), dtype="<i4").astype(np.int32)
    return (
        (lengths, {int(index): reason for index, reason in entry["reasons"].items()}) if len(lengths) == size else None
    )


def _remember(place: Path, lengths: np.ndarray, reasons: Mapping[int, str]) -> None:
    with suppress(OSError):  # a home that cannot be written to costs time, not the run
        place.parent.mkdir(parents=True, exist_ok=True)
        packed = base64.b64encode(lengths.astype("<i4").tobytes()).decode()
        write_sealed(place, {"lengths": packed, "reasons": {str(index): reason for index, reason in reasons.items()}})
