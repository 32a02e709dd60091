"""The prompts of a recipe, opened: all its sources together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opd.data.parse import BadRow
from opd.data.prompts import DOMAIN, route_value
from opd.data.row_source import RowSource
from opd.data.scan import PROBE
from opd.data.source import BadRows, Opening, PromptSource, Source, Split, Told, prompt_source, silent
from opd.errors import DataError
from opd.types import Prompt


def prompts(
    source: str, count: int | None = None, *, start: int = 0, split: Split = "train", **settings: Any
) -> list[Prompt]:
    """Prompts of any source that a recipe can name, for a loop of one's own; `settings` are the recipe's keys beside
    it.

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
    told: Told = silent,
) -> list[Source]:
    """All of a recipe's sources. `rewarded`: its rewards need no answer, so rows without one can be evaluated on too.
    `route`: the column that says who scores a row.

    Every row is looked at. Ids of a source listed again, say with other options, say which time this is:
    `task:sort#2/…`.
    """
    sources: list[Source] = []
    labels: list[str] = []
    for number, spec in enumerate(specs):
        if any(spec == earlier.model_copy(update={"share": spec.share}) for earlier in specs[:number]):
            raise DataError(
                f"prompts: {spec.source!r} comes twice with the same settings. List it once, with the `share` of both."
            )
        labels.append(spec.label)
        again = labels.count(spec.label)
        label = f"{spec.label}#{again}" if again > 1 else spec.label
        sources.append(spec.open(Opening(label, bad_rows, rewarded, route, told)))
    for source in sources:
        source.keep_apart(sources)
    return sources


def routed(sources: Sequence[Source], column: str) -> dict[tuple[str, str], str]:
    """Every (domain, value of the column) among the training prompts, and where it first stands.

    All rows were looked at when they were opened; of prompts without end the first ones stand for the rest.
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
