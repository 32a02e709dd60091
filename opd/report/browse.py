"""Find rollouts in the store of a run: for `opd rollouts` and for the live page.

Rollouts are chosen and sorted by the columns of the store's index. The log is read only for the rows that are shown, and for
what only it has: the text of prompts and answers, and who wrote each token. Then it is read in the order of the result, and no
further than needed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from opd.common.errors import RunDirectoryError, UserError
from opd.common.text import plain, split_pieces, whole_pieces
from opd.models.load import tokenizer_file
from opd.recipe.paths import read_resolved
from opd.recipe.stage import MERGED
from opd.records import Author, Rollout, Signal
from opd.report.facts import require_run
from opd.store import RolloutStore
from opd.store.rollouts import STOPS, Selection

PREVIEW = 48  # tokens of a prompt and an answer in the list
AROUND = 12  # tokens before and after the one of the largest log-ratio
SHOWN = 4096  # tokens of one rollout
MOST = 200  # rows of a page
REST = 10.0  # wait between reads of the store, as a multiple of the time of one read
SORTS: dict[str, tuple[str, bool]] = {  # column, largest first
    "newest": ("", True),
    "oldest": ("", False),
    "length": ("length", True),
    "shortest": ("length", False),
    "reward": ("reward", True),
    "worst": ("reward", False),
    "kl": ("kl", True),
    "log_ratio": ("log_ratio", True),
    "largest_ratio": ("largest_ratio", True),  # by its size
}
CODED = ("domain", "teacher", "source")
RATIOS = ("kl", "log_ratio", "largest_ratio")


class RolloutBrowser:
    """A store that may be growing. Requests are answered from the newest snapshot, which `refresh` renews."""

    def __init__(self, directory: Path) -> None:
        self._root = directory
        self._lock = threading.Lock()
        self._size, self._next = -1, 0.0
        self._store: RolloutStore | None = None
        self._decode: Callable[[list[int]], str] | None = None
        self._searched = False  # whether a tokenizer was looked for since the store has grown
        self.refresh()

    def refresh(self) -> None:
        """Open the store again if it has grown, but not so often that the writer slows down."""
        folder = self._root / "rollouts"
        size = sum(path.stat().st_size for path in folder.glob("*") if path.is_file()) if folder.is_dir() else 0
        if not size or size == self._size or time.monotonic() < self._next:
            return
        start = time.monotonic()
        store = RolloutStore(folder, read_only=True)
        with self._lock:
            self._store, self._size, self._searched = store, size, False
        self._next = time.monotonic() + REST * (time.monotonic() - start)

    def page(self, asked: Mapping[str, str]) -> dict[str, Any]:
        """Some rows that match. `asked` may have

        domain, teacher, source, stop, stage, prompt (its id)   reward: right, wrong or none
        length_from, length_to, version_from, version_to        sort: one of `SORTS`; offset, limit
        text (in a prompt or an answer), author (of any token)

        `total`: how many match. With `text` or `author` only as many as were looked for, and `more` says whether there are others.
        """
        with self._lock:
            store = self._store
        if store is None:
            values: dict[str, list[str]] = {name: [] for name in (*CODED, "stop", "stage")}
            return {"total": 0, "all": 0, "more": False, "values": values, "rows": []}
        index, finished = store.index, store.readable()
        order = asked.get("sort") or "newest"
        if order not in SORTS:
            raise UserError(f"sort {order!r}: expected one of {', '.join(SORTS)}.")
        values = {name: _present(index, finished, name) for name in CODED}
        values["stop"] = [
            str(name) for code, name in enumerate(STOPS) if code and (index["stop"][finished] == code).any()
        ]
        values["stage"] = [str(stage["name"]) for stage in read_resolved(self._root)["stages"]]
        _require_known(asked, values)
        rows = _named(store, finished[_mask(index, finished, asked)], asked, values["stage"])
        rows = _sorted(index, rows, *SORTS[order])
        offset, limit = _whole(asked, "offset", 0), min(_whole(asked, "limit", 50), MOST)
        total, more = len(rows), False
        if (wanted := self._reader(asked)) is not None:
            found = list(islice(_read(store, rows, wanted), offset + limit + 1))
            more, rows = len(found) > offset + limit, np.array(found[: offset + limit], dtype=np.int64)
            total = len(rows)
        chosen = rows[offset : offset + limit].tolist()
        described = [self._row(store, row) for row in chosen]
        return {"total": total, "all": len(finished), "more": more, "values": values, "rows": described}

    def _row(self, store: RolloutStore, row: int) -> dict[str, Any]:
        index, (rollout,) = store.index, store.load_rows([row])
        at = int(index["ratio_at"][row])
        return {
            "row": row,
            "id": rollout.id,
            "stage": _stage(rollout.id),
            "prompt_id": rollout.prompt_id,
            "domain": rollout.domain,
            "source": rollout.source,
            "teacher": index.text("teacher", row),
            "reward": _known(index["reward"][row]),
            "length": int(rollout.response_ids.size),
            "stop": rollout.stop,
            "version": int(index["version_max"][row]),
            **{name: _known(index[name][row]) for name in RATIOS},
            "ratio_at": at if at >= 0 else None,
            "strip": self._strip(rollout.response_ids.tolist(), at),
            "prompt": self.text(rollout.prompt_ids[-PREVIEW:]),
            "response": self.text(rollout.response_ids[:PREVIEW]),
        }

    def _strip(self, ids: list[int], at: int) -> list[str] | None:
        """The text before the token of the largest log-ratio, of the token, and after it."""
        if not 0 <= at < len(ids):
            return None
        first = max(0, at - AROUND)
        texts = whole_pieces(ids[first : at + AROUND + 1], self.text)
        place = next(number for number in range(at - first, len(texts)) if texts[number] or number == len(texts) - 1)
        return ["".join(texts[:place]), texts[place], "".join(texts[place + 1 :])]

    def one(self, row: int) -> dict[str, Any]:
        """A rollout with its tokens, and its teacher's scores if the store has them."""
        with self._lock:
            store = self._store
        if store is None or row not in store.readable():
            raise UserError(f"row {row}: there is no such rollout.")
        (rollout,) = store.load_rows([row])
        scored = store.signals([rollout.id], "teacher", "logprobs_at").get(rollout.id)
        return {
            **self._row(store, row),
            "prompt": self.text(rollout.prompt_ids),
            "tokens": self._tokens(rollout, scored),
        }

    def _tokens(self, rollout: Rollout, scored: Signal | None) -> dict[str, Any]:
        ids = rollout.response_ids[:SHOWN].tolist()
        student = rollout.logprob[:SHOWN].astype(float)
        teacher = np.full(len(ids), np.nan)
        if scored is not None:
            teacher = np.where(scored.mask, np.asarray(scored.values, dtype=float), np.nan)[:SHOWN]
        return {
            "id": rollout.id,
            "ids": ids,
            "author": rollout.author[:SHOWN].tolist(),
            **self._texts(ids),
            "teacher": scored.teacher if scored is not None else "",
            "student": student.tolist(),
            "teacher_logprob": teacher.tolist(),
            "ratio": (student - teacher).tolist(),
            "left_out": max(rollout.response_ids.size - SHOWN, 0),
        }

    def _texts(self, ids: list[int]) -> dict[str, Any]:
        texts = {str(index): self.text([index]) for index in set(ids)}
        return {"texts": texts, "pieces": split_pieces(ids, texts, self.text)}

    def _reader(self, asked: Mapping[str, str]) -> Callable[[Rollout], bool] | None:
        """A test of what only the log has; None: nothing of it was asked for."""
        words, author = asked.get("text", "").casefold(), asked.get("author", "").upper()
        if author and author not in Author.__members__:
            known = ", ".join(name.lower() for name in Author.__members__)
            raise UserError(f"author {asked['author']!r}: expected one of {known}.")
        if not words and not author:
            return None

        def matches(rollout: Rollout) -> bool:
            if author and not (rollout.author == Author[author]).any():
                return False
            return not words or any(
                words in self.text(ids).casefold() for ids in (rollout.response_ids, rollout.prompt_ids)
            )

        return matches

    # Tokenizer

    def text(self, ids: Any) -> str:
        decode = self._decoder()
        numbers = [int(index) for index in ids]
        return " ".join(map(str, numbers)) if decode is None else decode(numbers)

    def _decoder(self) -> Callable[[list[int]], str] | None:
        """The tokenizer. None: neither the run nor the first student has a tokenizer file; ids are shown until one is saved."""
        if self._decode is None and not self._searched:
            self._searched, path = True, self._tokenizer()
            if path is not None:
                from tokenizers import Tokenizer

                found = Tokenizer.from_file(str(path))
                self._decode = lambda ids: str(found.decode(ids, skip_special_tokens=False))
        return self._decode

    def _tokenizer(self) -> Path | None:
        """The student's tokenizer file, in a checkpoint or in the model that it started from."""
        saved = sorted((self._root / "checkpoints").glob("*/step-*/tokenizer.json"))
        if saved:
            return saved[-1]
        student = read_resolved(self._root)["stages"][0].get("student")
        if not isinstance(student, dict) or "model" not in student:
            raise RunDirectoryError(f"{self._root / 'resolved.yaml'} was altered: it does not name the student.")
        model = str(student["model"])
        if model.startswith(MERGED):  # created at the start of the stage
            model = str(self._root / "merged" / model.removeprefix(MERGED))
        return tokenizer_file(model, student.get("revision"))


def _mask(index: Any, rows: np.ndarray, asked: Mapping[str, str]) -> np.ndarray:
    mask = np.ones(rows.size, dtype=bool)
    for name in CODED:
        if asked.get(name):
            mask &= index[name][rows] == index.vocabularies[name].get(asked[name], -1)
    if asked.get("stop"):
        mask &= index["stop"][rows] == STOPS.index(asked["stop"])
    reward = index["reward"][rows]
    known = ~np.isnan(reward)
    full = known & (np.nan_to_num(reward) >= 1 - 1e-9)
    kinds = {"right": full, "wrong": known & ~full, "none": ~known}
    if asked.get("reward"):
        if asked["reward"] not in kinds:
            raise UserError(f"reward {asked['reward']!r}: expected one of {', '.join(kinds)}.")
        mask &= kinds[asked["reward"]]
    for name, column in (("length", "length"), ("version", "version_max")):
        if asked.get(f"{name}_from"):
            mask &= index[column][rows] >= _whole(asked, f"{name}_from", 0)
        if asked.get(f"{name}_to"):
            mask &= index[column][rows] <= _whole(asked, f"{name}_to", 0)
    return mask


def _named(store: RolloutStore, rows: np.ndarray, asked: Mapping[str, str], stages: Sequence[str]) -> np.ndarray:
    """The rows of a stage and of a prompt. Their names are texts of the index."""
    stage, prompt = asked.get("stage", ""), asked.get("prompt", "")
    if not prompt and (not stage or stages == [stage]):
        return rows
    found = Selection(store, rows)
    if prompt:
        found = found.where(prompt_id=prompt)
    return (found.where(id=lambda id: _stage(id) == stage) if stage else found).rows


def _stage(id: str) -> str:
    return id.partition("/")[0]


def _read(store: RolloutStore, rows: np.ndarray, wanted: Callable[[Rollout], bool]) -> Iterator[int]:
    """The rows whose rollouts match, in their order."""
    for row in rows.tolist():
        (rollout,) = store.load_rows([row])
        if wanted(rollout):
            yield row


def _sorted(index: Any, rows: np.ndarray, column: str, largest: bool) -> np.ndarray:
    """Unknown values come last."""
    if not column:
        return rows[::-1] if largest else rows
    values = index[column][rows].astype(float)
    values = np.abs(values) if column == "largest_ratio" else values
    return rows[np.argsort(-values if largest else values, kind="stable")]


def _present(index: Any, rows: np.ndarray, name: str) -> list[str]:
    used = np.bincount(index[name][rows], minlength=1)
    return [
        text for code, text in enumerate(index.vocabularies[name].texts) if text and code < used.size and used[code]
    ]


def _require_known(asked: Mapping[str, str], values: Mapping[str, Sequence[str]]) -> None:
    for name, known in values.items():
        if (value := asked.get(name)) and value not in known:
            there = f"known: {', '.join(map(plain, known))}" if known else "no rollout has one"
            raise UserError(f"{name} {value!r}: no rollout of this run has it; {there}.")


def _known(value: Any) -> float | None:
    return None if np.isnan(value) else float(value)


def _whole(asked: Mapping[str, str], name: str, usual: int) -> int:
    try:
        return int(asked.get(name) or usual)
    except ValueError:
        raise UserError(f"{name} {asked[name]!r}: expected a whole number.") from None


# --- `opd rollouts`: the same in a terminal ---


def find_rollouts(run: Path, asked: Mapping[str, str]) -> dict[str, Any]:
    """A page of a run's rollouts, as `RolloutBrowser.page` gives it, and `notes` about it."""
    require_run(run)
    browser = RolloutBrowser(run)
    found = browser.page(asked)
    if not found["all"]:
        raise UserError(f"{str(run)!r}: no rollout is finished yet, or the tokens of all were deleted (store.retain).")
    column = SORTS[asked.get("sort") or "newest"][0]
    notes = []
    if column in RATIOS and found["rows"] and all(row[column] is None for row in found["rows"]):
        others = [name for name in RATIOS if found["rows"][0][name] is not None]
        why = (
            "the teacher gave log-probs of the sampled tokens only"
            if others
            else "they were not scored, or by an older opd"
        )
        notes = [f"none of these rollouts has a {column}: {why}" + (f". Try --sort {others[0]}" if others else "")]
    return {**found, "notes": notes}


def rollout_lines(row: Mapping[str, Any]) -> tuple[str, list[tuple[str, str]]]:
    """A rollout as a line of facts, and a strip: parts of text and whether each is `before`, `token` or `after` the largest log-ratio."""
    reward = row["reward"]
    facts = [
        plain(row["domain"], 40),
        f"{row['stage']} step {row['version'] + 1}",
        "no reward" if reward is None else f"reward {reward:.3g}",
        f"{row['length']:,} tokens ({row['stop']})",
        *(f"{name} {row[name]:.3f}" for name in ("kl", "log_ratio") if row[name] is not None),
    ]
    if row["strip"] is None:
        return " · ".join(facts), [("after", plain(row["response"]))]
    facts.append(f"largest {row['largest_ratio']:+.2f} at token {row['ratio_at']:,}")
    before, token, after = map(plain, row["strip"])
    return " · ".join(facts), [("before", before), ("token", f"»{token}«"), ("after", after)]
