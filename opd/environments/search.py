"""Search over a local corpus: the student looks for passages, reads documents, and answers.

    rollout: {environment: {kind: search, corpus: articles.jsonl}}

The corpus has a row {title, text} per document; without one, a prompt brings its own `documents`. Ranking is BM25.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import Field

from opd.common.errors import DataError
from opd.records import Prompt
from opd.registry import Positive, StageView
from opd.rollouts.environments import ToolEnvironment

K1, B = 1.2, 0.75  # of BM25: saturation of repeated words, and of long documents
SNIPPET = 200  # characters of a document in a list of results


class Search(ToolEnvironment):
    """Two tools: `search` and `read`."""

    name = "search"
    corpus: str | None = Field(
        None, description="of search: a JSONL file of {title, text}; default: the prompt's `documents`"
    )
    results: Positive = Field(3, le=100, description="of search: documents that a search lists")

    def check(self, view: StageView) -> Iterable[str]:
        yield from super().check(view)
        if self.corpus is not None and not Path(self.corpus).is_file():
            yield f"environment search: corpus {self.corpus!r} is no file. Give a JSONL file of {{title, text}}."

    def functions(self, prompt: Prompt | None) -> Sequence[Callable[..., Any]]:
        index = SearchIndex({}) if prompt is None else self._index(prompt)

        def search(query: str) -> str:
            """The titles and beginnings of the documents that fit a query best."""
            found = index.search(query, self.results)
            return "\n".join(f"{title}: {index.documents[title][:SNIPPET]}" for title in found) or "nothing found"

        def read(title: str) -> str:
            """The whole text of a document, by its title."""
            if title not in index.documents:
                raise LookupError(f"there is no document {title!r}")
            return index.documents[title]

        return [search, read]

    def _index(self, prompt: Prompt) -> SearchIndex:
        if self.corpus is not None:
            return corpus_index(self.corpus)
        documents = prompt.fields.get("documents")
        rows = json.loads(documents) if isinstance(documents, str) else documents
        return SearchIndex(_by_title(rows, f"prompt {prompt.id!r}: documents"))


@lru_cache(maxsize=4)
def corpus_index(path: str) -> SearchIndex:
    with open(path, encoding="utf-8") as file:
        return SearchIndex(_by_title([json.loads(line) for line in file if line.strip()], path))


def _by_title(rows: Any, where: str) -> dict[str, str]:
    good = isinstance(rows, Sequence) and all(
        isinstance(row, Mapping) and {"title", "text"} <= row.keys() for row in rows
    )
    if not good:
        raise DataError(f"{where}: environment search needs a list of {{title, text}}, got {rows!r:.100}.")
    return {str(row["title"]): str(row["text"]) for row in rows}


class SearchIndex:
    """BM25 over documents by title.

    >>> SearchIndex({"a": "red apples", "b": "green pears and apples"}).search("green apples", 1)
    ['b']
    """

    def __init__(self, documents: Mapping[str, str]) -> None:
        self.documents = documents
        self._counts = {title: Counter(_words(f"{title} {text}")) for title, text in documents.items()}
        self._mean = sum(map(Counter.total, self._counts.values())) / max(1, len(documents))
        self._holding = Counter(word for counts in self._counts.values() for word in counts)

    def search(self, query: str, count: int) -> list[str]:
        """The titles of the best documents; those without any of the words are left out."""
        scores = {title: self._score(_words(query), counts) for title, counts in self._counts.items()}
        best = sorted(scores, key=lambda title: (-scores[title], title))
        return [title for title in best[:count] if scores[title] > 0]

    def _score(self, words: Sequence[str], counts: Counter[str]) -> float:
        length = K1 * (1 - B + B * counts.total() / self._mean)
        rarity = {
            word: math.log(1 + (len(self.documents) - n + 0.5) / (n + 0.5))
            for word in words
            if (n := self._holding[word])
        }
        return sum(rarity[word] * counts[word] * (K1 + 1) / (counts[word] + length) for word in words if counts[word])


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
