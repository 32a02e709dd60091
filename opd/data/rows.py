"""Rows of files and datasets, read when asked for: what is kept is where each begins, not what is in it.

.jsonl .json .csv .tsv    UTF-8 text, with or without a BOM, also as .gz; a .json file is an array or one row a line;
                          cells may be separated by commas, semicolons, tabs or bars
.parquet                  through pyarrow
a folder                  what `save_to_disk` wrote, or the files of one split
anything else             a dataset on the Hugging Face hub

A row that cannot be read is a `BadRow`; those around it are none the worse for it.
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
import weakref
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from opd.data.layouts import ASKED
from opd.data.parse import BadRow, csv_cells, csv_row, json_row, json_value, object_of, require_text, text_of
from opd.errors import DataError
from opd.files import is_directory, is_file

Row = Mapping[str, Any]
BLOCK = 1024  # rows of a table turned into Python at a time
BOM = b"\xef\xbb\xbf"
DELIMITERS = ",;\t|"  # between the cells of a .csv or .tsv file


class Rows(Protocol):
    files: list[Path]  # what is read, on this disk
    fingerprint: str | None  # of a hub dataset

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...

    def each(self) -> Iterator[Row | BadRow]:
        """All of them, in order; faster than one by one."""

    def place(self, index: int) -> str:
        """Where a row stands, as an editor counts."""


def one_by_one(rows: Rows) -> Iterator[Row | BadRow]:
    for index in range(len(rows)):
        try:
            yield rows[index]
        except BadRow as bad:
            yield bad


class TextRows:
    """A file with a row per line (or per CSV record): byte offsets and line numbers are kept."""

    fingerprint: str | None = None

    def __init__(self, path: Path, parse: Callable[[bytes], Row], bounds: array[int], lines: array[int]) -> None:
        """`bounds`: where each row begins and ends, one after the other."""
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
            raise DataError(f"prompts {str(self.files[0])!r}: the file was changed while it was in use. Start again.")
        return self._parse(data)

    def each(self) -> Iterator[Row | BadRow]:
        return one_by_one(self)

    def place(self, index: int) -> str:
        return f"line {self._lines[index]}"


def _facts(handle: int) -> tuple[int, int]:
    found = os.fstat(handle)
    return found.st_size, found.st_mtime_ns


class ListRows:
    """Rows that are all in memory: of a JSON array, or made by a program. The latter are known by their content."""

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
    """An Arrow table: compact in memory, turned into Python row by row. NaN is how tables say: nothing there."""

    def __init__(self, files: list[Path], table: Any, fingerprint: str | None = None) -> None:
        self.files, self._table, self.fingerprint = files, table, fingerprint
        names = table.column_names
        if len(set(names)) < len(names):
            raise DataError(f"prompts {_names(files)}: a column name comes twice: {', '.join(names)}.")

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


# Opening


def on_disk(name: str) -> bool:
    path = Path(os.path.expanduser(name))
    return is_file(path) or is_directory(path)


def looks_local(name: str) -> bool:
    """Whether a name is that of a file or folder, there or not. Else it is one on the hub: `name` or `owner/name`."""
    path = Path(os.path.expanduser(name))
    written = path.is_absolute() or name.startswith(("~", "./", "../")) or name.count("/") > 1
    return written or kind_of(path) is not None or on_disk(name)


def open_rows(name: str, split: str) -> Rows:
    """Of a file, a folder, or a dataset on the hub."""
    if looks_local(name):
        return open_local(name, split)
    from opd.data.folders import open_hub

    return open_hub(name, split)


def open_local(name: str, split: str) -> Rows:
    path = Path(os.path.expanduser(name))
    if is_directory(path):
        from opd.data.folders import open_folder

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
    """The file itself, or every file of a folder; none for what is not on this disk."""
    path = Path(os.path.expanduser(name))
    if is_file(path):
        return [path]
    return sorted(file for file in path.rglob("*") if file.is_file()) if is_directory(path) else []


def kind_of(path: Path) -> str | None:
    """`.jsonl` for rows.jsonl and rows.jsonl.gz; None: not a kind of file with rows."""
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
    """At the first byte behind a BOM."""
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
    """One object that holds the rows under a key is not one row a line."""
    line = file.readline()
    rest = file.read() if line.strip() == b"{" else file.read(1)  # an object written over several lines
    try:
        first = json_row(line + rest)
    except BadRow:
        return  # one row a line, or told when it is read
    inner = [key for key, value in first.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if inner and not {*ASKED} & first.keys():
        raise BadRow(f"one object, with rows under {inner[0]!r}; save that list alone, or one row a line")


def _csv(path: Path, usual: str) -> TextRows:
    """Records may span lines: the reader says where one ends.

    Bytes that are not UTF-8 do not hide quotes or line ends. `usual`: the delimiter, unless the header shows another.
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
            raise BadRow(f"a column name comes twice in the header: {', '.join(header)}")
        keep = [index for index in range(1, len(numbers)) if _filled(file, bounds, index)]
    parse = partial(csv_row, delimiter=delimiter, header=header)
    return TextRows(
        path,
        parse,
        array("q", [bound for index in keep for bound in bounds[2 * index : 2 * index + 2]]),
        array("q", [numbers[index] for index in keep]),
    )


def _delimiter(file: BinaryIO, usual: str) -> str:
    """The usual one, unless it leaves the header in one piece, or hides the column of the prompts, and another does not."""
    line = next((line for line in file if line.strip()), b"").decode("utf-8", errors="replace").strip("\r\n")
    found = {}
    for delimiter in dict.fromkeys(usual + DELIMITERS):
        try:
            found[delimiter] = csv_cells(line.encode(), delimiter)
        except BadRow:  # cells that go on in the next line, for one
            return usual
    naming = [delimiter for delimiter, cells in found.items() if {*ASKED} & {*cells}]
    if naming:
        return naming[0]
    return max(found, key=lambda delimiter: len(found[delimiter])) if len(found[usual]) < 2 else usual


def _filled(file: BinaryIO, bounds: array[int], index: int) -> bool:
    """Whether anything stands in a record; only short ones can be blank lines."""
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
