"""Every prompt is looked at before the first token is sampled: how long it is, and whether it can be used at all.

Lengths are remembered in the user's cache (`$XDG_CACHE_HOME/opd/scans`, else `~/.cache/opd/scans`), by the content of the
files and of the tokenizer; delete it at will. Sources without end are probed, and what turns out too long later is skipped.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from opd.config import PromptSource
from opd.data.render import render_prompts
from opd.data.sources import PROGRESS, SHOWN, BadRows, RowSource, Source, Told, refusal, silent
from opd.errors import DataError, RunDirectoryError
from opd.files import cache_directory, content_hash, read_sealed, write_sealed

PROBE = 256  # prompts looked at of a source without end
SLACK = 1.25  # room for the later prompts of such a source, beyond the longest of those
BATCH = 512
FORMAT = 1  # of the cache; goes up when lengths are counted differently


@dataclass(frozen=True)
class Scanned:
    """What all sources of a stage hold."""

    longest: int  # tokens of the longest prompt that is used
    open_ended: bool  # later prompts may be longer: a source has no end, or the template prints the date
    mean: float  # tokens of a prompt, weighted by the sources' shares
    unusable: tuple[np.ndarray | None, ...]  # per source: which training rows are skipped; None: it has no end
    notes: tuple[str, ...]  # what was skipped, in words

    def room(self, others: int, limit: int, max_prompt_tokens: int | None) -> int:
        """Tokens that a prompt may have in a sampler's slot: the longest of all, held-out ones too, and slack where it takes some."""
        longest = max(self.longest, others)
        return max(longest, min(limit, max_prompt_tokens or int(longest * SLACK) + 8)) if self.open_ended else longest


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
    longest, means, notes = 0, [], []
    unusable: list[np.ndarray | None] = []
    for source, spec in zip(sources, specs, strict=True):
        if isinstance(source, RowSource):
            lengths, reasons = row_lengths(source, spec, tokenizer, told)
            bad = _judge(source, lengths, reasons, limit, why, completions)
            skipped = int(bad.sum())
            if skipped and (bad_rows == "stop" or skipped == len(bad)):
                raise refusal(source.name, skipped, len(bad), list(reasons.values())[:SHOWN])
            if skipped:
                first = "; ".join(list(reasons.values())[:SHOWN] or source.survey.reasons)
                notes.append(f"prompts {source.name}: {skipped:,} of {len(bad):,} rows are skipped ({first})")
            unusable.append(bad)
            lengths = lengths[~bad]
        else:
            lengths = _probe(source, spec, tokenizer, limit, why)
            unusable.append(None)
        longest = max(longest, int(lengths.max()))
        means.append(float(lengths.mean()))
    shares = np.asarray([spec.share for spec in specs])
    open_ended = any(source.size is None for source in sources) or prints_the_date(tokenizer)
    return Scanned(longest, open_ended, float(np.average(means, weights=shares)), tuple(unusable), tuple(notes))


def prints_the_date(tokenizer: Any) -> bool:
    return "strftime_now" in json.dumps(tokenizer.chat_template)


def _judge(
    source: RowSource, lengths: np.ndarray, reasons: dict[int, str], limit: int, why: str, completions: bool
) -> np.ndarray:
    """Which training rows cannot be used. `reasons` gets the first few; those of malformed rows the survey has."""
    bad = lengths < 0
    for index in np.flatnonzero(lengths > limit)[:SHOWN]:
        reasons[int(index)] = (
            f"{source.place(int(index))}: {int(lengths[index]):,} tokens, and at most {max(limit, 0):,} fit ({why})"
        )
    bad |= lengths > limit
    if completions:
        missing = ~source.survey.complete[: source.size] & ~bad
        for index in np.flatnonzero(missing)[:SHOWN]:
            reasons[int(index)] = f"{source.place(int(index))}: no `completion`, which rollout.data_share needs"
        bad |= missing
    return bad


def _probe(source: Source, spec: PromptSource, tokenizer: Any, limit: int, why: str) -> np.ndarray:
    prompts = [source.train(index) for index in range(PROBE)]
    found = render_prompts(prompts, tokenizer, spec.chat_template_kwargs)
    for ids in found:
        if isinstance(ids, DataError):
            raise ids
    lengths = np.asarray([len(ids) for ids in found if not isinstance(ids, DataError)])
    if lengths.min() > limit:
        raise DataError(
            f"prompts {source.name!r}: the shortest of {PROBE} prompts has {lengths.min():,} tokens, and at most {max(limit, 0):,} fit ({why})."
        )
    return lengths[lengths <= limit]


def row_lengths(
    source: RowSource, spec: PromptSource, tokenizer: Any, told: Told = silent
) -> tuple[np.ndarray, dict[int, str]]:
    """Tokens of every training row, -1 where it cannot be used; and why not, for the first that cannot be rendered."""
    place = _cache_file(source, spec, tokenizer)
    known = _remembered(place, source.size or 0) if place is not None else None
    if known is not None:
        return known
    lengths = np.full(source.size or 0, -1, dtype=np.int32)
    reasons: dict[int, str] = {}
    usable, done = source.usable(), 0
    while batch := list(islice(usable, BATCH)):
        found = render_prompts([source.train(index) for index in batch], tokenizer, spec.chat_template_kwargs)
        for index, ids in zip(batch, found, strict=True):
            if not isinstance(ids, DataError):
                lengths[index] = len(ids)
            elif len(reasons) < SHOWN:
                reasons[index] = f"{source.place(index)}: {ids}"
        done += len(batch)
        if done % PROGRESS < BATCH:
            told(source.name, done, len(lengths))
    if place is not None:
        _remember(place, lengths, reasons)
    return lengths, reasons


# The cache


def _cache_file(source: RowSource, spec: PromptSource, tokenizer: Any) -> Path | None:
    """Named after everything that lengths depend on; None where that cannot be told."""
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast) or prints_the_date(tokenizer):
        return None
    contents = [source.fingerprint, *(content_hash(path) for path in source.files())]
    facts = [
        FORMAT,
        contents,
        spec.model_dump(mode="json", exclude={"share"}),
        source.size,
        tokenizer.backend_tokenizer.to_str(),
        tokenizer.eos_token_id,
        tokenizer.special_tokens_map,
        tokenizer.chat_template,
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
