"""Rows that a program has in memory, as the text of `.jsonl` files: a run keeps them in its directory, so resuming
needs no more.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from opd.errors import DataError
from opd.types import Prompt


def jsonl(rows: Any, what: str = "prompts") -> str:
    """One line a row.

    Rows are mappings with a `prompt`, plain texts, or `Prompt`s; a `datasets.Dataset` is such rows, too.
    """
    if isinstance(rows, (str, bytes, Mapping, Prompt)) or not isinstance(rows, Iterable):
        raise DataError(f"{what}: expected a list of rows, got {type(rows).__name__}. Give [{{'prompt': …}}, …].")
    lines = [_line(row, f"{what}, row {number}") for number, row in enumerate(rows, 1)]
    if not lines:
        raise DataError(f"{what}: there are no rows in it.")
    return "".join(lines)


def by_domain(prompts: Any) -> Iterator[tuple[str | None, str]]:
    """(domain, the text of its file) of a list of rows, which has no domain of its own, or of `{domain: rows}`."""
    if not isinstance(prompts, Mapping):
        yield None, jsonl(prompts)
        return
    if "datasets" in sys.modules:  # else it is none
        from datasets import DatasetDict

        if isinstance(prompts, DatasetDict):
            raise DataError(
                f"prompts: a dataset with splits ({', '.join(prompts)}). Give one of them: prompts=dataset['train']."
            )
    if not prompts:
        raise DataError("prompts: there are no rows in it.")
    for domain, rows in prompts.items():
        if not isinstance(domain, str) or not domain:
            raise DataError(f"prompts: domains are words, got {domain!r}. Give {{'maths': [{{'prompt': …}}, …]}}.")
        if isinstance(rows, str):
            raise DataError(f"prompts: {domain!r} looks like a column. Rows are given in a list: [{{'prompt': …}}, …].")
        yield domain, jsonl(rows, f"prompts of {domain!r}")


def _line(row: Any, place: str) -> str:
    if isinstance(row, Prompt):
        row = {"prompt": row.text if row.messages is None else list(row.messages), "domain": row.domain, **row.fields}
    elif isinstance(row, str):
        row = {"prompt": row}
    elif not isinstance(row, Mapping):
        raise DataError(f"{place}: expected a mapping with a `prompt`, or text, got {type(row).__name__}.")
    known = {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in row.items()}
    try:
        return json.dumps(known, allow_nan=False, default=_plain) + "\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"{place}: a value that JSON cannot hold ({error}). Give text, numbers and lists of them."
        ) from None


def _plain(value: Any) -> Any:
    """What tables hold in place of Python's own numbers and lists."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__}")
