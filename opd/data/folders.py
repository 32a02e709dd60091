"""Datasets that are more than one file: folders, and the Hugging Face hub."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

from opd.data.rows import READERS, JoinedRows, Rows, TableRows, kind_of, open_file
from opd.errors import DataError
from opd.hub import errors, unreachable
from opd.text import first_line

SPLITS = {
    "train": ("train", "training"),
    "test": ("test", "testing", "eval", "evaluation"),
    "validation": ("validation", "valid", "val", "dev"),
}
MANY_FILES = 100_000
SAVED = ("dataset_info.json", "dataset_dict.json", "dataset_infos.json", "state.json")  # facts about rows, not rows


def open_folder(path: Path, split: str) -> Rows:
    """What `save_to_disk` wrote, or every file of one split: train.jsonl, data/train-00000-of-00002.parquet,
    test/a.csv.
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
    """Of one kind: two kinds side by side are likely the same rows twice."""
    found: dict[str, list[Path]] = {}
    for file in sorted(_visible_files(path)):
        kind = kind_of(file)
        if kind is not None and file.is_file() and file.name not in SAVED:
            found.setdefault(kind, []).append(file)
    if len(found) > 1:
        found.pop(".json", None)  # beside other files most likely settings
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
    """All below the folder that is not hidden; a whole disk is no dataset."""

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
    """By the words of its path, the file's own name first; "" where there is none."""
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
        if not _cached(datasets, name) and (why := unreachable()) is not None:
            raise ConnectionError(why)
        loaded = datasets.load_dataset(name, split=split)
    except errors(KeyError, RuntimeError) as error:
        raise DataError(
            f"prompts {name!r}: not a task, a file ({', '.join(READERS)}), a folder, or a dataset that could be loaded "
            f"({first_line(error)}). Check the spelling."
        ) from None
    return TableRows([], _table(loaded), fingerprint=loaded._fingerprint)


def _cached(datasets: Any, name: str) -> bool:
    """Something of it is here already."""
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
    """The Arrow table beneath, memory-mapped; a dataset that was shuffled or filtered is put in its order first."""
    return (dataset.flatten_indices() if dataset._indices is not None else dataset).data.table
