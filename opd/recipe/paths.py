"""Make the paths of a recipe absolute. They are relative to the recipe; paths in overrides, to the working directory.

A text is a path if it begins with ./, ../, ~ or /, has a known suffix (.gguf, .jsonl, .py:function, …), or names an existing
file or directory. Every other text stays as it is: `org/name` on the hub, `tiny/NAME`, `smol/NAME`, `task:NAME`, `stage:NAME`.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from opd.common.errors import RecipeError, RunDirectoryError
from opd.common.files import SEALS, is_directory, is_file, read_sealed, reading
from opd.recipe.places import Place, below, key_of_text
from opd.recipe.plain_data import shown
from opd.recipe.run_changes import RESOLVED

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
BUILT_IN = ("tiny/", "smol/", "stage:", "merge:", "task:", "reasoning_gym:", "episodes:")
RUN = "run:"
Names = tuple[str, ...]  # keys and numbers of list entries, from the top of a recipe


def with_absolute_paths(value: Any, base: Path, stage: Place, names: Names = ()) -> Any:
    """`value`, found at `names` in a recipe, with its paths absolute. Values of the wrong type are left to validation.

    `stage`: what a stage accepts.
    """
    if names[:1] == ("stages",):
        if len(names) < 2:
            return _each(value, base, stage, names)
        return with_absolute_paths(value, base, stage, names[2:])
    if isinstance(value, str):
        return _text(value, base, _long(value, stage, names))
    if not names or names[0] in (
        "student",
        "teachers",
        "prompts",
        "modules",
        "eval",
        "rewards",
        "stages",
        "plugins",
    ):
        return _each(value, base, stage, names)
    return value


def _each(value: Any, base: Path, stage: Place, names: Names) -> Any:
    if isinstance(value, Mapping):
        return {key: with_absolute_paths(item, base, stage, (*names, str(key))) for key, item in value.items()}
    if isinstance(value, list):
        return [with_absolute_paths(item, base, stage, (*names, str(index))) for index, item in enumerate(value)]
    return value


def _long(value: str, stage: Place, names: Names) -> Names:
    """The place of a text in the long form."""
    place = stage
    for name in names:
        place = place if name.isdigit() and not below(place, name) else below(place, name)
    while (key := key_of_text(place, value)) is not None:
        names, place = (*names, key), below(place, key)
    return names


def _text(value: str, base: Path, names: Names) -> str:
    match names:
        case (
            ("student", "model")
            | ("student", "merge", "base")
            | ("student", "merge", "models", _)
            | ("teachers", _, "model" | "models", *_)
            | ("teachers", _, "toward" | "away", "model")
            | ("teachers", _, "parts", _, "model")
            | ("teachers", _, "weights" | "tokenizer")
            | ("modules", _, "model" | "weights")
        ):
            return _model(value, base)
        case ("teachers", _, "run"):
            return _run(value, base)
        case ("prompts", *rest) | ("eval", "further", *rest) if _is_source(tuple(rest)):
            return _prompts(value, base)
        case ("plugins", *_) if value.endswith(".py"):
            return _absolute(value, base, (".py",))
        case ("rewards", *_, last) if not set(names) & _REWARD_TEXTS or (last == "kind" and value.endswith(".py")):
            return _function(value, base)
    return value


def _model(value: str, base: Path) -> str:
    """A path, or what a stage of another run saved: `run:DIR`, `run:DIR#STAGE`."""
    if not value.startswith(RUN):
        return _absolute(value, base, MODEL_FILES)
    directory, _, stage = value.removeprefix(RUN).partition("#")
    return model_of_run(Path(_run(directory, base)), stage or None)


def _is_source(names: Names) -> bool:
    """Whether this is an entry of `prompts`, alone or in a list."""
    return (names[1:] if names[0].isdigit() else names) in (("source",), ("eval_source",))


_REWARD_TEXTS = {"endpoint", "template", "kind", "field", "extract", "pattern", "sandbox", "json_schema", "ignore"}


def _prompts(value: str, base: Path) -> str:
    """`NAME:rows.jsonl` of a plugin's class: the path after its name."""
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
        return os.path.abspath(base / path)  # keeps symbolic links
    return value


def _function(value: str, base: Path) -> str:
    """`rewards.py:brevity`, and `rewards:brevity` if rewards.py is next to the recipe: the absolute path of the file."""
    module, separator, function = value.rpartition(":")
    if value.endswith(".py"):  # without a function; the error lists those of the file
        return os.path.abspath(base / os.path.expanduser(value))
    if not separator or not module:
        return value
    if module.endswith(".py"):
        return f"{os.path.abspath(base / os.path.expanduser(module))}:{function}"
    module_file = base / f"{module}.py"
    return f"{os.path.abspath(module_file)}:{function}" if is_file(module_file) else value


# Names of runs and stages, which become directories


RULE = (
    "letters, digits, and _ . + @ - or spaces between them, at most 64, beginning with a letter or digit; not `latest`"
)
NAME_PATTERN = r"[^\W_]([\w .+@-]{0,62}[\w+@-])?"
_NAME = re.compile(NAME_PATTERN)
_RESERVED = "latest"  # checkpoints/latest links to the newest checkpoint


def check_name(name: str) -> str:
    """Return a valid name, or raise an error with the rule."""
    if _NAME.fullmatch(name) and folded(name) != _RESERVED and len(name.encode()) <= 128:
        return name
    raise ValueError(f"not a name that a directory can have. Use {RULE}")


def name_of_file(stem: str) -> str:
    """The default name of a run: the file name of its recipe, with invalid characters replaced."""
    name = re.sub(r"[^\w .+@-]", "-", stem)[:40].strip(" .+@-_")
    return name if _NAME.fullmatch(name) and folded(name) != _RESERVED else "run"


def folded(name: str) -> str:
    """Equal for names that some file systems do not distinguish."""
    return unicodedata.normalize("NFC", name).casefold()


def check_output(wanted: str | Path) -> Path:
    """Check the path of a run directory."""
    try:
        path = Path(wanted).expanduser()
    except RuntimeError:  # an unknown user
        raise RunDirectoryError(
            f"run directory {shown(str(wanted))}: there is no such user. Write the whole path."
        ) from None
    for part in path.parts:
        if any(unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") for character in part):
            raise RunDirectoryError(
                f"run directory {shown(str(path))}: control characters in {shown(part)}. Choose another name."
            )
        if len(part.encode(errors="surrogatepass")) > 200:
            raise RunDirectoryError(
                f"run directory {shown(str(path))}: a part of {len(part)} characters. Choose a shorter name."
            )
    if not str(wanted) or path.name in ("", ".."):
        raise RunDirectoryError(f"run directory {shown(str(path))}: name a directory, for example --out runs/first.")
    if os.path.exists(path) and not os.path.isdir(path):  # False if it may not be read
        raise RunDirectoryError(f"run directory {shown(str(path))}: a file with this name exists. Choose another name.")
    return path


# Models of other runs: `run:DIR#STAGE` is replaced by the checkpoint of a finished stage, so `resolved.yaml` names the checkpoint


RESULT = "result.json"  # what the runner writes when a stage has ended


def read_resolved(directory: Path, name: str = RESOLVED) -> dict[str, Any]:
    """`resolved.yaml` of a run as plain data, or the file of a later part. One that was altered or cut, so that it names no stages,
    is an error.
    """
    path = directory / name
    with reading(path):
        text = path.read_bytes()
    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):  # not YAML, not UTF-8, or a date that does not exist
        found = None
    stages = found.get("stages") if isinstance(found, dict) else None
    named = isinstance(stages, list) and all(
        isinstance(one, dict) and isinstance(one.get("name"), str) for one in stages
    )
    if not isinstance(found, dict) or not stages or not named:
        raise RunDirectoryError(
            f"{path} was altered or cut off: it does not name the run's stages. Restore it, or try `opd resume {directory}`, which "
            "can write it again where recipe.yaml is intact."
        )
    return found


def model_of_run(directory: Path, stage: str | None) -> str:
    """The model that a stage ended with; by default the last one of the run's recipe."""
    what = f"model {shown(f'run:{directory}' + (f'#{stage}' if stage else ''))}"
    if not (directory / SEALS).is_file() or not (directory / "resolved.yaml").is_file():
        raise RecipeError(f"{what}: not a run directory. Name one that `opd run` made.")
    try:
        names = [one["name"] for one in read_resolved(directory)["stages"]]
    except RunDirectoryError as error:
        raise RecipeError(f"{what}: {error}") from None
    name = names[-1] if stage is None else stage
    if name not in names:
        raise RecipeError(f"{what}: the run has no stage {name!r}; it has {', '.join(names)}.")
    folder = directory / "checkpoints" / name
    if not (folder / RESULT).is_file():
        raise RecipeError(f"{what}: stage {name!r} is not finished. Finish it: opd resume {directory}")
    try:
        return output_of(directory, name)
    except RunDirectoryError as error:
        raise RecipeError(f"{what}: {error}") from None


def output_of(directory: Path, stage: str) -> str:
    """The last checkpoint of a finished stage. If the stage was skipped: the model that it would have started from."""
    folder = directory / "checkpoints" / stage
    ended = read_sealed(folder / RESULT)
    if ended["checkpoint"] is not None:
        return str(folder / ended["checkpoint"])
    start: str = ended["passed_over"]
    if start.startswith("stage:"):
        return output_of(directory, start.removeprefix("stage:"))
    return str(directory / "merged" / start.removeprefix("merge:")) if start.startswith("merge:") else start
