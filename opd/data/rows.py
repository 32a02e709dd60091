"""Rows of files and datasets, read on demand: only the position of each row is kept in memory.

.jsonl .json .csv .tsv    UTF-8 text, with or without a BOM, also as .gz; a .json file is an array or has one row per
                          line; cells may be separated by commas, semicolons, tabs or bars
.parquet                  read with pyarrow
a folder                  the output of `save_to_disk`, or the files of one split
anything else             a dataset on the Hugging Face hub

A row that cannot be read is a `BadRow`; other rows are not affected.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import importlib.util
import io
import json
import math
import os
import re
import sys
import weakref
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from opd.common.errors import DataError
from opd.common.files import is_directory, is_file
from opd.common.http import hub_errors, hub_unreachable
from opd.common.text import first_line
from opd.records import Prompt

Row = Mapping[str, Any]
BLOCK = 1024  # table rows converted to Python at a time
BOM = b"\xef\xbb\xbf"
DELIMITERS = ",;\t|"  # between the cells of a .csv or .tsv file


class Rows(Protocol):
    files: list[Path]  # local files that are read
    fingerprint: str | None  # of a hub dataset

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...

    def each(self) -> Iterator[Row | BadRow]:
        """All rows in order; faster than indexing them."""

    def place(self, index: int) -> str:
        """Position of a row, numbered as in an editor."""


def one_by_one(rows: Rows) -> Iterator[Row | BadRow]:
    for index in range(len(rows)):
        try:
            yield rows[index]
        except BadRow as bad:
            yield bad


class TextRows:
    """A file with one row per line or CSV record. Keeps byte offsets and line numbers."""

    fingerprint: str | None = None

    def __init__(self, path: Path, parse: Callable[[bytes], Row], bounds: array[int], lines: array[int]) -> None:
        """`bounds`: start and end of each row, alternating."""
        self.files = [path]
        self._parse, self._bounds, self._lines = parse, bounds, lines
        self._unpacked = read_packed(path) if path.suffix == ".gz" else None
        self._handle = os.open(path, os.O_RDONLY)
        self._facts = _facts(self._handle)
        weakref.finalize(self, os.close, self._handle)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Row:
        start, end = self._bounds[2 * index], self._bounds[2 * index + 1]
        if self._unpacked is not None:
            return self._parse(self._unpacked[start:end])
        data = os.pread(self._handle, end - start, start)
        if _facts(self._handle) != self._facts:
            raise DataError(
                f"prompts {str(self.files[0])!r}: the file was changed while it was in use. Restart the run."
            )
        return self._parse(data)

    def each(self) -> Iterator[Row | BadRow]:
        return one_by_one(self)

    def place(self, index: int) -> str:
        return f"line {self._lines[index]}"


def _facts(handle: int) -> tuple[int, int]:
    found = os.fstat(handle)
    return found.st_size, found.st_mtime_ns


class ListRows:
    """Rows in memory: from a JSON array or a program. Rows from a program have a fingerprint of their content."""

    def __init__(self, values: Sequence[Any], path: Path | None = None) -> None:
        self.files, self._values = [] if path is None else [path], values
        self.fingerprint = None if path is not None else _digest(values)

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: int) -> Row:
        row = object_of(self._values[index])
        require_text(row)
        return row

    def each(self) -> Iterator[Row | BadRow]:
        return one_by_one(self)

    def place(self, index: int) -> str:
        return f"row {index + 1}"


class TableRows:
    """An Arrow table: compact in memory, converted to Python on access. NaN stands for a missing value."""

    def __init__(self, files: list[Path], table: Any, fingerprint: str | None = None) -> None:
        self.files, self._table, self.fingerprint = files, table, fingerprint
        names = table.column_names
        if len(set(names)) < len(names):
            raise DataError(f"prompts {_names(files)}: duplicate column name: {', '.join(names)}.")

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> Row:
        return self._read(index, 1)[0]

    def _read(self, start: int, count: int) -> list[Row]:
        import pyarrow

        try:
            rows = self._table.slice(start, count).to_pylist()
        except (UnicodeDecodeError, OverflowError, ValueError, pyarrow.ArrowException) as error:
            raise BadRow(f"cannot be read ({str(error).splitlines()[0]})") from None
        return [
            {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in row.items()}
            for row in rows
        ]

    def each(self) -> Iterator[Row | BadRow]:
        for start in range(0, len(self), BLOCK):
            try:
                yield from self._read(start, min(BLOCK, len(self) - start))
            except BadRow:
                yield from (self._one(index) for index in range(start, min(start + BLOCK, len(self))))

    def _one(self, index: int) -> Row | BadRow:
        try:
            return self[index]
        except BadRow as bad:
            return bad

    def place(self, index: int) -> str:
        return f"row {index + 1}"


class JoinedRows:
    """Several files read as one."""

    fingerprint: str | None = None

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = parts
        self._ends = list(accumulate(len(part) for part in parts))
        self.files = [path for part in parts for path in part.files]

    def __len__(self) -> int:
        return self._ends[-1]

    def _find(self, index: int) -> tuple[Rows, int]:
        number = bisect_right(self._ends, index)
        return self._parts[number], index - (self._ends[number - 1] if number else 0)

    def __getitem__(self, index: int) -> Row:
        part, inner = self._find(index)
        return part[inner]

    def each(self) -> Iterator[Row | BadRow]:
        for part in self._parts:
            yield from part.each()

    def place(self, index: int) -> str:
        part, inner = self._find(index)
        return f"{part.files[0].name}, {part.place(inner)}"


def _digest(values: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


# --- Opening files and datasets ---


def on_disk(name: str) -> bool:
    path = Path(os.path.expanduser(name))
    return is_file(path) or is_directory(path)


def looks_local(name: str) -> bool:
    """Whether a name denotes a file or folder, existing or not. Otherwise it is on the hub: `name` or `owner/name`."""
    path = Path(os.path.expanduser(name))
    written = path.is_absolute() or name.startswith(("~", "./", "../")) or name.count("/") > 1
    return written or kind_of(path) is not None or on_disk(name)


def open_rows(name: str, split: str) -> Rows:
    """Open a file, a folder, or a dataset on the hub."""
    if looks_local(name):
        return open_local(name, split)

    return open_hub(name, split)


def open_local(name: str, split: str) -> Rows:
    path = Path(os.path.expanduser(name))
    if is_directory(path):
        return open_folder(path, split)
    if not is_file(path):
        raise DataError(f"prompts {name!r}: no such file.")
    if kind_of(path) is None:
        raise DataError(
            f"prompts {name!r}: files of this kind cannot be read. Known: {', '.join(READERS)}, and .gz of text."
        )
    if split != "train":
        raise DataError(f"prompts {name!r}: a file has no split {split!r}; splits are for datasets and folders.")
    return open_file(path)


def local_files(name: str) -> list[Path]:
    """The file itself, or every file of a folder; empty if the name is not on this disk."""
    path = Path(os.path.expanduser(name))
    if is_file(path):
        return [path]
    return sorted(file for file in path.rglob("*") if file.is_file()) if is_directory(path) else []


def kind_of(path: Path) -> str | None:
    """`.jsonl` for rows.jsonl and rows.jsonl.gz; None: not a supported file type."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packed = suffixes[-1:] == [".gz"]
    kind = suffixes[-2] if packed and len(suffixes) > 1 else suffixes[-1] if suffixes else None
    return None if kind not in READERS or (packed and kind == ".parquet") else kind


def open_file(path: Path) -> Rows:
    path = path.absolute()
    try:
        return READERS[kind_of(path) or ""](path)
    except BadRow as bad:
        raise DataError(f"prompts {str(path)!r}: {bad}.") from None
    except OSError as error:
        raise DataError(f"prompts {str(path)!r} cannot be read: {error.strerror or error}.") from None


def read_packed(path: Path) -> bytes:
    try:
        return gzip.decompress(path.read_bytes())
    except (gzip.BadGzipFile, EOFError, ValueError, zlib.error) as error:
        raise BadRow(f"not a gzip file ({error})") from None


def _binary(path: Path) -> BinaryIO:
    """Open a file at the first byte after a BOM."""
    file: BinaryIO = io.BytesIO(read_packed(path)) if path.suffix == ".gz" else path.open("rb")
    head = file.read(3)
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        file.close()
        raise BadRow("the text is UTF-16; save the file as UTF-8")
    file.seek(3 if head == BOM else 0)
    return file


def _lines(path: Path) -> TextRows:
    bounds, numbers = array("q"), array("q")
    with _binary(path) as file:
        position = file.tell()
        for number, line in enumerate(file, 1):
            if line.strip():
                bounds.extend((position, position + len(line)))
                numbers.append(number)
            position += len(line)
    return TextRows(path, json_row, bounds, numbers)


def _json(path: Path) -> Rows:
    with _binary(path) as file:
        start = file.tell()
        head = file.read(1)
        while head and head.isspace():
            head = file.read(1)
        file.seek(start)
        if head == b"[":
            return ListRows(json_value(text_of(file.read())), path)
        _require_rows(file)
    return _lines(path)


def _require_rows(file: BinaryIO) -> None:
    """Reject a file that is one object with the rows under a key, instead of one row per line."""
    line = file.readline()
    rest = file.read() if line.strip() == b"{" else file.read(1)  # the object spans several lines
    try:
        first = json_row(line + rest)
    except BadRow:
        return  # one row per line; a bad row is reported when it is read
    inner = [key for key, value in first.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if inner and not {*ASKED} & first.keys():
        raise BadRow(f"one object, with rows under {inner[0]!r}; save that list alone, or one row per line")


def _csv(path: Path, usual: str) -> TextRows:
    """Records may span lines, so the CSV reader finds where each one ends.

    Bytes that are not UTF-8 do not hide quotes or line ends. `usual`: the default delimiter; the header may show another.
    """
    bounds, numbers = array("q"), array("q")
    with _binary(path) as file:
        position = file.tell()
        delimiter = _delimiter(file, usual)
        file.seek(position)
        number = 0

        def lines() -> Iterator[str]:
            nonlocal position, number
            for line in file:
                position, number = position + len(line), number + 1
                yield line.decode("utf-8", errors="surrogateescape")

        csv.field_size_limit(1 << 30)
        reader = csv.reader(lines(), delimiter=delimiter, strict=True)
        while True:
            start, first = position, number + 1
            try:
                if next(reader, None) is None:
                    break
            except csv.Error as error:
                if "unexpected end" in str(error):
                    raise BadRow(f"line {first}: a quote is opened and never closed") from None
            bounds.extend((start, position))
            numbers.append(first)
        if not numbers:
            return TextRows(path, json_row, bounds, numbers)
        file.seek(bounds[0])
        header = csv_cells(file.read(bounds[1] - bounds[0]), delimiter)
        named = [name for name in header if name]
        if len(set(named)) < len(named):
            raise BadRow(f"duplicate column name in the header: {', '.join(header)}")
        keep = [index for index in range(1, len(numbers)) if _filled(file, bounds, index)]
    parse = partial(csv_row, delimiter=delimiter, header=header)
    return TextRows(
        path,
        parse,
        array("q", [bound for index in keep for bound in bounds[2 * index : 2 * index + 2]]),
        array("q", [numbers[index] for index in keep]),
    )


def _delimiter(file: BinaryIO, usual: str) -> str:
    """The delimiter of a file, from its header.

    A delimiter that yields a prompt column wins. Otherwise it is `usual`, unless only another one splits the header.
    """
    line = next((line for line in file if line.strip()), b"").decode("utf-8", errors="replace").strip("\r\n")
    found = {}
    for delimiter in dict.fromkeys(usual + DELIMITERS):
        try:
            found[delimiter] = csv_cells(line.encode(), delimiter)
        except BadRow:  # for example, a cell that continues on the next line
            return usual
    naming = [delimiter for delimiter, cells in found.items() if {*ASKED} & {*cells}]
    if naming:
        return naming[0]
    return max(found, key=lambda delimiter: len(found[delimiter])) if len(found[usual]) < 2 else usual


def _filled(file: BinaryIO, bounds: array[int], index: int) -> bool:
    """Whether a record has content. Only short records can be blank lines."""
    start, end = bounds[2 * index], bounds[2 * index + 1]
    if end - start > 2:
        return True
    file.seek(start)
    return bool(file.read(end - start).strip())


def _parquet(path: Path) -> TableRows:
    if importlib.util.find_spec("pyarrow") is None:
        raise DataError(f"prompts {str(path)!r}: reading Parquet needs pyarrow: pip install 'opd[data]'.")
    import pyarrow
    import pyarrow.parquet

    try:
        return TableRows([path], pyarrow.parquet.ParquetFile(path, memory_map=True).read())
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"prompts {str(path)!r}: not a Parquet file ({str(error).splitlines()[0]}).") from None


def _names(files: Sequence[Path]) -> str:
    return ", ".join(repr(str(path)) for path in files[:3])


READERS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": _lines,
    ".json": _json,
    ".csv": partial(_csv, usual=","),
    ".tsv": partial(_csv, usual="\t"),
    ".parquet": _parquet,
}


# --- Datasets of several files: folders and the Hugging Face hub ---


SPLITS = {
    "train": ("train", "training"),
    "test": ("test", "testing", "eval", "evaluation"),
    "validation": ("validation", "valid", "val", "dev"),
}
MANY_FILES = 100_000
SAVED = ("dataset_info.json", "dataset_dict.json", "dataset_infos.json", "state.json")  # metadata without rows


def open_folder(path: Path, split: str) -> Rows:
    """Open the output of `save_to_disk`, or all files of one split.

    Examples of split files: train.jsonl, data/train-00000-of-00002.parquet, test/a.csv.
    """
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return _saved(path, split)
    files = _data_files(path)
    by_split: dict[str, list[Path]] = {}
    for file in files:
        by_split.setdefault(_split_of(file.relative_to(path)), []).append(file)
    wanted = by_split.get(split) or (by_split.get("") if split == "train" and len(by_split) == 1 else None)
    if not wanted:
        known = ", ".join(sorted(name or "(files without a split in their name)" for name in by_split))
        raise DataError(f"prompts {str(path)!r}: no files of the split {split!r}; there are {known}. Set `split`.")
    return JoinedRows([open_file(file) for file in wanted])


def _data_files(path: Path) -> list[Path]:
    """Files of a single type: two types in one folder are likely the same rows twice."""
    found: dict[str, list[Path]] = {}
    for file in sorted(_visible_files(path)):
        kind = kind_of(file)
        if kind is not None and file.is_file() and file.name not in SAVED:
            found.setdefault(kind, []).append(file)
    if len(found) > 1:
        found.pop(".json", None)  # next to other file types, .json files are most likely settings
    if not found:
        raise DataError(f"prompts {str(path)!r}: no files with rows in this folder ({', '.join(READERS)}).")
    if len(found) > 1:
        raise DataError(
            f"prompts {str(path)!r}: files of several kinds ({', '.join(found)}), which may be the same rows. Name one "
            "file."
        )
    (files,) = found.values()
    return files


def _visible_files(path: Path) -> list[Path]:
    """All files below the folder that are not hidden, up to `MANY_FILES`."""

    def refuse(error: OSError) -> None:
        raise DataError(f"prompts {str(path)!r}: {error.filename!r} cannot be read ({error.strerror}).") from None

    files: list[Path] = []
    for folder, inner, names in os.walk(path, onerror=refuse):
        inner[:] = [name for name in inner if not name.startswith(".")]
        files += [Path(folder, name) for name in names if not name.startswith(".")]
        if len(files) > MANY_FILES:
            raise DataError(
                f"prompts {str(path)!r}: more than {MANY_FILES:,} files in this folder. Name the folder of one dataset."
            )
    return files


def _split_of(file: Path) -> str:
    """Split named by a word of the path, starting with the file's own name; "" if there is none."""
    for part in reversed(file.parts):
        words = re.split(r"[^a-z]+", part.lower())
        for split, names in SPLITS.items():
            if any(name in words for name in names):
                return split
    return ""


def _saved(path: Path, split: str) -> Rows:
    datasets = _datasets(str(path))
    import pyarrow

    try:
        stored = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, pyarrow.ArrowException) as error:
        raise DataError(f"prompts {str(path)!r}: not a saved dataset ({first_line(error)}).") from None
    if isinstance(stored, datasets.DatasetDict):
        if split not in stored:
            raise DataError(f"prompts {str(path)!r}: no split {split!r}; there are {', '.join(stored)}.")
        stored, folder = stored[split], path / split
    else:
        folder = path
    files = sorted(file.absolute() for file in folder.rglob("*") if file.is_file())
    return TableRows(files, _table(stored))


def open_hub(name: str, split: str) -> Rows:
    datasets = _datasets(name)
    try:
        if not _cached(datasets, name) and (why := hub_unreachable()) is not None:
            raise ConnectionError(why)
        loaded = datasets.load_dataset(name, split=split)
    except hub_errors(KeyError, RuntimeError) as error:
        raise DataError(
            f"prompts {name!r}: not a task, a file ({', '.join(READERS)}), a folder, or a dataset that could be loaded "
            f"({first_line(error)}). Check the spelling."
        ) from None
    return TableRows([], _table(loaded), fingerprint=loaded._fingerprint)


def _cached(datasets: Any, name: str) -> bool:
    """Whether part of the dataset is cached locally."""
    from huggingface_hub import constants

    def letters(text: str) -> str:  # `MetaMath` is stored as meta_math
        return re.sub(r"[^a-z0-9]", "", text.lower())

    folders = [*Path(datasets.config.HF_DATASETS_CACHE).glob("*"), *Path(constants.HF_HUB_CACHE).glob("datasets--*")]
    return any(letters(folder.name.removeprefix("datasets--")) == letters(name) for folder in folders)


def _datasets(name: str) -> Any:
    if importlib.util.find_spec("datasets") is None:
        raise DataError(
            f"prompts {name!r}: not a file, and Hugging Face datasets need the datasets package: pip install "
            "'opd[data]'."
        )
    import datasets

    datasets.disable_progress_bars()  # downloads keep theirs
    return datasets


def _table(dataset: Any) -> Any:
    """The underlying Arrow table, memory-mapped. A shuffled or filtered dataset is reordered first."""
    return (dataset.flatten_indices() if dataset._indices is not None else dataset).data.table


# --- Parsing one row strictly ---
#
# A row that is ambiguous or malformed raises `BadRow` with the reason.


DEPTH = 100  # levels of nesting; later code reads rows recursively


class BadRow(DataError):
    """A row that cannot be used. Its text is the reason; the caller adds the place."""


def text_of(data: bytes) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRow(f"not UTF-8 (byte 0x{data[error.start]:02x}); save the file as UTF-8") from None
    if "\0" in text:
        raise BadRow("holds NUL bytes, so it is not text")
    return text


def json_row(data: bytes) -> Mapping[str, Any]:
    return object_of(json_value(text_of(data)))


def object_of(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BadRow(f"expected an object with a `prompt`, got {type(value).__name__}")
    return value


def json_value(text: str) -> Any:
    """Parse JSON, and reject what readers treat differently: duplicate keys, NaN, huge numbers and deep nesting."""
    try:
        value = _DECODER.decode(text)
    except BadRow:
        raise
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}" if "\n" in text else f"column {error.colno}"
        raise BadRow(f"not valid JSON ({error.msg}, {where})") from None
    except ValueError:  # int() accepts at most 4,300 digits
        raise BadRow("holds a whole number of more than 4,300 digits; write it as text") from None
    except RecursionError:
        raise BadRow(f"nested more than {DEPTH} levels deep") from None
    if text.count("[") + text.count("{") > DEPTH and _depth(value) > DEPTH:
        raise BadRow(f"nested more than {DEPTH} levels deep")
    if "\\u" in text:
        require_text(value)
    return value


def require_text(value: Any) -> None:
    """Reject half a surrogate pair: JSON can express it, but tokenizers and files cannot."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = ord(error.object[error.start])
        raise BadRow(f"holds \\u{half:04x}, half of a surrogate pair, which is not text") from None


def _depth(value: Any) -> int:
    """Levels of nesting, counted without recursion."""
    deepest, waiting = 0, [(value, 1)]
    while waiting:
        node, level = waiting.pop()
        deepest = max(deepest, level)
        inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        waiting += [(entry, level + 1) for entry in inner if isinstance(entry, (dict, list))]
    return deepest


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRow(f"duplicate key {twice!r}")
    return found


def _no_constant(name: str) -> Any:
    raise BadRow(f"{name} is not JSON; leave the key out, or write null")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise BadRow(f"the number {text[:20]} is too large")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_no_duplicates, parse_constant=_no_constant, parse_float=_finite)


def csv_cells(data: bytes, delimiter: str) -> list[str]:
    csv.field_size_limit(1 << 30)  # the default, 131,072 characters, is less than a long document
    try:
        return next(csv.reader(io.StringIO(text_of(data), newline=""), delimiter=delimiter, strict=True), [])
    except csv.Error as error:
        raise BadRow(f"not valid CSV ({error})") from None


def csv_row(data: bytes, delimiter: str, header: Sequence[str]) -> Mapping[str, Any]:
    """Cells by column; an empty cell is a missing value."""
    cells = csv_cells(data, delimiter)
    if len(cells) != len(header):
        raise BadRow(f"has {len(cells)} cells, and the header has {len(header)}")
    return {name: cell or None for name, cell in zip(header, cells, strict=True) if name}


# --- Converting rows of other frameworks to our columns: ShareGPT, Alpaca and verl ---
#
# ShareGPT    `conversations` or `messages`: a list of {from, value}
# Alpaca      `instruction`, `input`, `output`, and optionally `history`
# verl        `prompt`, and the answer in `reward_model.ground_truth`; `data_source` is the domain
# TRL         `chosen` and `rejected`: texts, or conversations that end with the answer
#
# >>> as_ours({"instruction": "Add.", "input": "2+2", "output": "4"}, None)["prompt"]
# [{'role': 'user', 'content': 'Add.\n\n2+2'}]


ASKED = ("prompt", "messages", "conversations", "instruction", "chosen")  # columns that hold the question
SPEAKERS = {  # ShareGPT's speaker -> role in chat templates
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "bot", "model"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation"), "tool"),
}


def as_ours(row: Mapping[str, Any], domain: str | None) -> Mapping[str, Any]:
    """The same row in our columns. `domain`: set by the recipe for the source; it applies to every row."""
    if row.get("prompt") is None and row.get("messages") is None:
        if row.get("conversations") is not None:
            rest = {key: value for key, value in row.items() if key not in ("conversations", "messages")}
            row = {**rest, "messages": row["conversations"]}
        elif row.get("instruction") is not None and {"input", "output"} & row.keys():
            row = {**row, **_alpaca(row)}
    if row.get("chosen") is not None and row.get("rejected") is not None:
        row = {**row, **_pair(row)}
    reward = row.get("reward_model")
    return {**row, **_verl(row, reward, domain)} if isinstance(reward, Mapping) else row


def as_message(message: Any) -> Any:
    """Convert ShareGPT's {from, value} to {role, content}; return anything else unchanged."""
    if not isinstance(message, Mapping) or "role" in message or not {"from", "value"} <= message.keys():
        return message
    speaker = message["from"]
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        raise BadRow(f"a message is from {speaker!r}; known are {', '.join(SPEAKERS)}. Rename it, or leave the row out")
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {"role": SPEAKERS[speaker], "content": message["value"], **rest}


def _alpaca(row: Mapping[str, Any]) -> dict[str, Any]:
    instruction, more = row["instruction"], row.get("input")
    if not isinstance(instruction, str) or not instruction.strip():
        raise BadRow(f"`instruction` must be text and not empty, got {str(instruction)[:80]!r}")
    if more is not None and not isinstance(more, str):
        raise BadRow(f"`input` must be text, got {str(more)[:80]!r}")
    earlier = [
        {"role": role, "content": text}
        for turn in _history(row.get("history"))
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    asked = f"{instruction}\n\n{more}" if more and more.strip() else instruction
    completion = row.get("completion") if row.get("completion") is not None else row.get("output")
    return {"prompt": [*earlier, {"role": "user", "content": asked}], "completion": completion}


def _pair(row: Mapping[str, Any]) -> dict[str, Any]:
    """A preferred and a rejected answer as texts, and their prompt. The preferred one is the completion, unless there is one."""
    answers = {column: _last_answer(row[column], column) for column in ("chosen", "rejected")}
    before = [earlier for _, earlier in answers.values() if earlier]
    if len(before) == 2 and before[0] != before[1]:
        raise BadRow("`chosen` and `rejected` answer different prompts; give both the same messages before the answer")
    found: dict[str, Any] = {column: text for column, (text, _) in answers.items()}
    if row.get("completion") is None:
        found["completion"] = found["chosen"]
    if before and row.get("prompt") is None and row.get("messages") is None:
        found["prompt"] = before[0]
    elif (
        before
        and isinstance(row.get("prompt"), str)
        and row["prompt"].strip() != str(before[0][-1].get("content")).strip()
    ):
        raise BadRow("`chosen` answers another question than `prompt`; drop one of them")
    return found


def _last_answer(value: Any, column: str) -> tuple[str, list[Any]]:
    """The answer, and the messages before it, of a text or a conversation."""
    if isinstance(value, str):
        return value, []
    messages = [as_message(message) for message in value] if isinstance(value, list) else []
    last = messages[-1] if messages and all(isinstance(message, Mapping) for message in messages) else {}
    if last.get("role") != "assistant" or not isinstance(last.get("content"), str):
        raise BadRow(f"`{column}` must be text, or messages that end with the assistant's, got {str(value)[:80]!r}")
    return last["content"], messages[:-1]


def _history(turns: Any) -> Sequence[Any]:
    """Earlier questions with their answers, validated."""
    found = turns or []
    if not isinstance(found, list) or not all(isinstance(turn, Sequence) and len(turn) == 2 for turn in found):
        raise BadRow(f"`history` must be a list of [question, answer], got {str(turns)[:80]!r}")
    return found


def _verl(row: Mapping[str, Any], reward: Mapping[str, Any], domain: str | None) -> dict[str, Any]:
    """Values of verl's columns for those of ours that are missing."""
    found: dict[str, Any] = {}
    truth, source = reward.get("ground_truth"), row.get("data_source")
    if row.get("answer") is None and isinstance(truth, (str, int, float)):
        found["answer"] = truth
    if row.get("domain") is None and domain is None and isinstance(source, str) and source:
        found["domain"] = source
    return found


# --- Writing in-memory rows as `.jsonl` text ---
#
# A run stores this text in its directory, so it can resume without the program's rows.


def jsonl(rows: Any, what: str = "prompts") -> str:
    """One line per row.

    Rows are mappings with a `prompt`, plain texts, or `Prompt`s; a `datasets.Dataset` works too.
    """
    if isinstance(rows, (str, bytes, Mapping, Prompt)) or not isinstance(rows, Iterable):
        raise DataError(f"{what}: expected a list of rows, got {type(rows).__name__}. Give [{{'prompt': …}}, …].")
    lines = [_line(row, f"{what}, row {number}") for number, row in enumerate(rows, 1)]
    if not lines:
        raise DataError(f"{what}: it has no rows.")
    return "".join(lines)


def by_domain(prompts: Any) -> Iterator[tuple[str | None, str]]:
    """(domain, `.jsonl` text) for a list of rows, which has no domain, or for each entry of `{domain: rows}`."""
    if not isinstance(prompts, Mapping):
        yield None, jsonl(prompts)
        return
    if "datasets" in sys.modules:  # otherwise it cannot be a DatasetDict
        from datasets import DatasetDict

        if isinstance(prompts, DatasetDict):
            raise DataError(
                f"prompts: a dataset with splits ({', '.join(prompts)}). Give one of them: prompts=dataset['train']."
            )
    if not prompts:
        raise DataError("prompts: they have no rows.")
    for domain, rows in prompts.items():
        if not isinstance(domain, str) or not domain:
            raise DataError(f"prompts: domains are words, got {domain!r}. Give {{'maths': [{{'prompt': …}}, …]}}.")
        if isinstance(rows, str):
            raise DataError(f"prompts: {domain!r} looks like a column. Rows are given in a list: [{{'prompt': …}}, …].")
        yield domain, jsonl(rows, f"prompts of {domain!r}")


def _line(row: Any, place: str) -> str:
    if isinstance(row, Prompt):
        row = {**row.fields, "prompt": row.text if row.messages is None else list(row.messages), "domain": row.domain}
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
    """Convert numpy numbers and arrays from tables to Python's own."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__}")
