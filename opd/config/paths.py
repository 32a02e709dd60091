"""Paths in a recipe are relative to the recipe, those in overrides to the working directory; both become absolute here.

A path is what begins with ./, ../, ~ or /, has the suffix of a file that is read (.gguf, .jsonl, .py:function, …), or names
something that is there. Everything else stays as it is: `org/name` on the hub, `tiny/NAME`, `smol/NAME`, `task:NAME`, `stage:NAME`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opd.config.runs import model_of_run
from opd.files import is_directory, is_file

MODEL_FILES = (".gguf",)
PROMPT_FILES = (
    ".jsonl",
    ".json",
    ".parquet",
    ".csv",
    ".tsv",
    ".txt",
    ".arrow",
    ".jsonl.gz",
    ".json.gz",
    ".csv.gz",
    ".tsv.gz",
)
BUILT_IN = ("tiny/", "smol/", "stage:", "merge:", "task:", "reasoning_gym:")
RUN = "run:"
Place = tuple[str, ...]


def anchored(value: Any, base: Path, place: Place = ()) -> Any:
    """`value`, which stands at `place` of a recipe, with its paths absolute. Values of the wrong type are left to validation."""
    if place[:1] == ("stages",):
        if len(place) < 2:
            return _each(value, base, place)
        return anchored(value, base, place[2:])
    if isinstance(value, str):
        return _text(value, base, place)
    if not place or place[0] in ("student", "teachers", "prompts", "eval", "rewards", "stages", "plugins"):
        return _each(value, base, place)
    return value


def _each(value: Any, base: Path, place: Place) -> Any:
    if isinstance(value, Mapping):
        return {key: anchored(item, base, (*place, str(key))) for key, item in value.items()}
    if isinstance(value, list):
        return [anchored(item, base, (*place, str(index))) for index, item in enumerate(value)]
    return value


def _text(value: str, base: Path, place: Place) -> str:
    match place:
        case (
            ("student",)
            | ("student", "model")
            | ("student", "merge", "base")
            | ("student", "merge", "models", _)
            | ("teachers",)
            | ("teachers", _)
            | ("teachers", _, "model" | "models", *_)
            | ("teachers", _, "toward" | "away")
            | ("teachers", _, "toward" | "away", "model")
            | ("teachers", _, "parts", _)
            | ("teachers", _, "parts", _, "model")
            | ("teachers", _, "weights" | "tokenizer")
        ):
            return _model(value, base)
        case ("teachers", _, "run"):
            return _run(value, base)
        case ("prompts", *rest) | ("eval", "further", *rest) if _is_source(tuple(rest)):
            return _prompts(value, base)
        case ("plugins", *_) if value.endswith(".py"):
            return _absolute(value, base, (".py",))
        case ("rewards", *_) if not set(place) & _REWARD_TEXTS:
            return _function(value, base)
    return value


def _model(value: str, base: Path) -> str:
    """A path, or what a stage of another run saved: `run:DIR`, `run:DIR#STAGE`."""
    if not value.startswith(RUN):
        return _absolute(value, base, MODEL_FILES)
    directory, _, stage = value.removeprefix(RUN).partition("#")
    return model_of_run(Path(_run(directory, base)), stage or None)


def _is_source(place: Place) -> bool:
    """Of `prompts`: one alone, or one of a list."""
    place = place[1:] if place and place[0].isdigit() else place
    return place in ((), ("source",), ("eval_source",))


_REWARD_TEXTS = {"endpoint", "template", "kind", "field", "extract", "pattern", "sandbox", "json_schema", "ignore"}


def _prompts(value: str, base: Path) -> str:
    """`NAME:rows.jsonl` of a class of the user's own: the path behind its name."""
    if value.startswith(RUN):
        return RUN + _run(value.removeprefix(RUN), base)
    name = re.match(r"[A-Za-z_][\w-]*:", value)
    if name is None or value.startswith(BUILT_IN) or is_file(base / value):
        return _absolute(value, base, PROMPT_FILES)
    return name[0] + _absolute(value.removeprefix(name[0]), base, PROMPT_FILES)


def _run(value: str, base: Path) -> str:
    """A run directory, whether it is there or not."""
    return value if value.startswith(BUILT_IN) else os.path.abspath(base / os.path.expanduser(value))


def _absolute(value: str, base: Path, suffixes: tuple[str, ...]) -> str:
    if value.startswith(BUILT_IN) or value in ("", "smol"):
        return value
    path = Path(os.path.expanduser(value))
    written_as_path = path.is_absolute() or value.startswith(("./", "../", "~")) or value in (".", "..")
    if written_as_path or value.endswith(suffixes) or is_directory(base / path):
        return os.path.abspath(base / path)  # links stay links
    return value


def _function(value: str, base: Path) -> str:
    """`rewards.py:brevity`, and `rewards:brevity` where rewards.py is beside the recipe: the file by its absolute path."""
    module, separator, function = value.rpartition(":")
    if value.endswith(".py"):  # the function is missing, and the error says which ones there are
        return os.path.abspath(base / os.path.expanduser(value))
    if not separator or not module:
        return value
    if module.endswith(".py"):
        return f"{os.path.abspath(base / os.path.expanduser(module))}:{function}"
    beside = base / f"{module}.py"
    return f"{os.path.abspath(beside)}:{function}" if is_file(beside) else value
