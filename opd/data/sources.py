"""The prompts of a recipe, opened: all its sources together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
    specs: Sequence[PromptSource], *, bad_rows: BadRows = "stop", rewarded: bool = False, told: Told = silent
) -> list[Source]:
    """All of a recipe's sources. `rewarded`: its rewards need no answer, so rows without one can be evaluated on too.

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
        sources.append(spec.open(Opening(label, bad_rows, rewarded, told)))
    for source in sources:
        source.keep_apart(sources)
    return sources
