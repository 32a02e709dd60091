"""Read a recipe: shipped names, overrides, stages, and errors that name the most similar known key."""

from __future__ import annotations

import difflib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from opd.common.errors import RecipeError
from opd.common.files import is_directory, is_file
from opd.common.http import UNSAFE
from opd.common.peer_keys import translate_below
from opd.common.short_forms import SHORT_FORMS
from opd.data.sources import PromptSource
from opd.plugins import load_announced, load_plugins
from opd.recipe.checks import require_valid_recipe, require_valid_stage
from opd.recipe.graph import STAGE_PREFIX, in_order
from opd.recipe.overrides import STAGE, apply_overrides, merge
from opd.recipe.paths import NAME_PATTERN, folded, name_of_file, read_resolved, with_absolute_paths
from opd.recipe.places import Place, below, fields_at
from opd.recipe.plain_data import LONGEST, cut, parse_yaml, plain_data, shown
from opd.recipe.stage import Recipe, Stage
from opd.registry import Family, nearest

MISTAKES = 10  # per message
ELSEWHERE = 3  # a hint lists at most so many places of a key
_BRANCH = re.compile(r"constrained-\w+|\w+\[.*\]")  # pydantic's name for one of several types, not a key
SECRET = "token_env"  # its value is not shown, in case it is the token itself
EXPECTED = {  # pydantic's error type -> our words
    "dict_type": "expected a mapping of keys", "model_type": "expected a mapping of keys", "list_type": "expected a list",
    "int_type": "expected a whole number", "int_parsing": "expected a whole number", "int_from_float": "expected a whole number",
    "float_type": "expected a number", "float_parsing": "expected a number", "string_type": "expected text",
    "bool_type": "expected true or false", "bool_parsing": "expected true or false",
}  # fmt: skip
IGNORED = "x-"  # top-level keys that only hold anchors
CLEARED = ("teachers", "rewards", "modules")  # mappings whose keys are the user's own: `{}` in a stage clears them


def load_recipe(
    recipe: str | Path | Mapping[str, Any] | Recipe,
    overrides: Iterable[str] = (),
    *,
    prompts: Sequence[Mapping[str, Any]] | None = None,
) -> Recipe:
    """Read a recipe from a file, a shipped name or a mapping, apply `key=value` overrides, and validate it.

    Paths in a file are relative to it; paths in overrides and in a mapping, to the working directory. `prompts` replaces the
    prompts of the recipe.
    """
    here, overrides = Path.cwd(), tuple(overrides)
    if isinstance(recipe, Recipe):
        if overrides:
            raise RecipeError(
                f"overrides {shown(list(overrides))} are for recipes that are read: give a file, a name or a mapping."
            )
        if prompts is not None:
            raise RecipeError("prompts= is for recipes that are read: give a file, a name or a mapping, not a Recipe.")
        return recipe
    if isinstance(recipe, Mapping):
        name, base, raw = "run", here, plain_data(recipe)
    else:
        path = find_recipe(str(recipe))
        name, base = name_of_file(path.stem), here / path.parent
        raw = plain_data(parse_yaml(read_text(path), str(path)))
    raw = with_absolute_paths(raw, base, STAGE)
    if prompts is not None:
        raw["prompts"] = [dict(source) for source in prompts]
    ignored = next((override for override in overrides if override.startswith(IGNORED)), None)
    if ignored is not None:
        raise RecipeError(
            f"override {shown(ignored)}: keys that begin with {IGNORED} are ignored. Set the key that uses it."
        )
    apply_overrides(raw, overrides, here)
    return resolve(raw, name)


def load_begun(directory: Path, resolved: Path | None = None, overrides: Iterable[str] = ()) -> Recipe:
    """A recipe that a run carries out; `resolved`: its file, by default the one that the run began with."""
    return as_begun_in(directory, load_recipe(resolved or directory / "resolved.yaml", overrides))


def as_begun_in(directory: Path, recipe: Recipe) -> Recipe:
    """A recipe as a run of it, which an older version may have begun, carries it out (`PromptSource.as_begun`)."""
    written = {stage["name"]: stage for stage in read_resolved(directory)["stages"]}
    return recipe.model_copy(
        update={"stages": [_stage_as_begun(stage, written.get(stage.name, {})) for stage in recipe.stages]}
    )


def _stage_as_begun(stage: Stage, written: Mapping[str, Any]) -> Stage:
    def begun(sources: Sequence[PromptSource], settings: Sequence[Mapping[str, Any]]) -> list[PromptSource]:
        known = [*settings, *({} for _ in sources)]
        return [source.as_begun(written) for source, written in zip(sources, known, strict=False)]

    further = begun(stage.eval.further, (written.get("eval") or {}).get("further") or [])
    prompts = begun(stage.prompts, written.get("prompts") or [])
    return stage.model_copy(update={"prompts": prompts, "eval": stage.eval.model_copy(update={"further": further})})


def recipe_text(recipe: str | Path | Mapping[str, Any] | Recipe, overrides: Iterable[str] = ()) -> str:
    """The recipe as the user gave it: the text of the file, followed by the overrides in a comment."""
    if isinstance(recipe, Recipe):
        return recipe.to_yaml()
    if isinstance(recipe, Mapping):
        text = yaml.safe_dump(plain_data(recipe), sort_keys=False, allow_unicode=True)
    else:
        text = read_text(find_recipe(str(recipe)))
    lines = ["".join(char if char.isprintable() else repr(char)[1:-1] for char in override) for override in overrides]
    return text + "".join(["\n# Overrides:\n", *(f"#   {line}\n" for line in lines)] if lines else [])


def read_text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8-sig") as file:
            return file.read(LONGEST + 1)
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: byte {error.start} is not UTF-8. Save the recipe as UTF-8.") from None
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror}.") from None


def resolve(raw: Mapping[str, Any], name: str) -> Recipe:
    """Apply the top-level defaults to every stage. A later stage without its own student continues the stage before."""
    raw = {key: value for key, value in raw.items() if not key.startswith(IGNORED)}
    defaults = {key: value for key, value in raw.items() if key not in ("stages", "name", "plugins")}
    plugins = SHORT_FORMS["plugins"].long(raw.get("plugins") or [])
    if not all(isinstance(name, str) and name for name in plugins):
        raise RecipeError(
            f"plugins: expected Python files or modules, got {shown(plugins)}. Write `plugins: [mine.py]`."
        )
    load_plugins(plugins)
    staged = raw.get("stages") is not None
    overrides = raw["stages"] if staged else [{}]
    if not isinstance(overrides, list) or not all(isinstance(stage, Mapping) for stage in overrides) or not overrides:
        raise RecipeError(
            f"stages: expected a list of mappings, got {shown(overrides)}. Write `stages: [{{name: warm-up, …}}, …]`."
        )
    if staged and any(stage.get("name") is None for stage in overrides):
        raise RecipeError("stages: every stage needs a name. Write `stages: [{name: warm-up, train: {steps: 50}}, …]`.")
    stages: list[Stage] = []
    for override in overrides:
        merged = _merged(defaults, override)
        if stages and not _has_model(override.get("student")):
            start = _student(merged.get("student"))
            rest = {key: value for key, value in start.items() if key != "merge"} if isinstance(start, Mapping) else {}
            merged["student"] = {**rest, "model": STAGE_PREFIX + stages[-1].name}
        stages.append(validate(merged, f"stages.{cut(str(override['name']), 80)}." if staged else ""))
    names = [stage.name for stage in stages]
    if len({folded(name) for name in names}) < len(names):
        raise RecipeError(f"stages: names must differ, got {cut(', '.join(names), 400)}.")
    try:
        title = raw["name"] if raw.get("name") is not None else name
        recipe = Recipe(name=title, stages=in_order(stages), plugins=plugins)
    except ValidationError as error:
        raise RecipeError(_explain_all(error, raw, "")) from None
    require_valid_recipe(recipe)
    return recipe


def _merged(defaults: Mapping[str, Any], stage: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a stage over the defaults. Null resets a key to its built-in default, unless null is a value of the key. `{}` clears
    teachers and rewards.
    """
    base = dict(defaults)
    for key in CLEARED:
        if key in stage and stage[key] in ({}, []):
            base.pop(key, None)
    start = _student(base.get("student"))
    if _has_model(stage.get("student")) and isinstance(start, Mapping):  # the stage names another start
        base["student"] = {key: value for key, value in start.items() if key not in ("model", "merge")}
    merged = merge(base, stage)
    merged = {
        key: _without_nulls(Stage.model_fields[key], value) if key in stage and key in Stage.model_fields else value
        for key, value in merged.items()
        if value is not None
    }
    if isinstance(merged.get("teachers"), Mapping):  # `NAME: null` removes a teacher
        known = SHORT_FORMS["teachers"].long(base.get("teachers"))
        for name in (name for name, spec in merged["teachers"].items() if spec is None):
            _require_teacher(name, known if isinstance(known, Mapping) else {}, stage)
        merged["teachers"] = {name: spec for name, spec in merged["teachers"].items() if spec is not None}
    return merged


def _without_nulls(section: FieldInfo, given: Any) -> Any:
    """The keys of a section, without nulls that are not a value of the key (`train.clip` may be null, `train.lr` may not)."""
    kind = section.annotation
    if not isinstance(given, Mapping) or not isinstance(kind, type) or not issubclass(kind, BaseModel):
        return given
    without = {name for name, field in kind.model_fields.items() if NoneType not in get_args(field.annotation)}
    return {name: value for name, value in given.items() if value is not None or name not in without}


def _require_teacher(name: Any, known: Mapping[str, Any], stage: Mapping[str, Any]) -> None:
    """`NAME: null` in a stage must name a teacher of the defaults."""
    if name not in known:
        hint = nearest(str(name), [str(one) for one in known]) if known else "they have none"
        raise RecipeError(
            f"stages.{cut(str(stage['name']), 80)}.teachers.{cut(str(name), 80)}: null removes a teacher of the defaults, and none "
            f"has this name; {hint}"
        )


def _student(given: Any) -> Any:
    return SHORT_FORMS["student"].long(given)


def _has_model(student: Any) -> bool:
    """Whether a student section names a model or a merge."""
    given = _student(student)
    return isinstance(given, Mapping) and (given.get("model") is not None or given.get("merge") is not None)


def validate(raw: Mapping[str, Any], where: str = "") -> Stage:
    try:
        stage = Stage.model_validate(raw).with_defaults()
    except ValidationError as error:
        raise RecipeError(_explain_all(error, raw, where)) from None
    for path in _booleans(raw, stage.model_dump(), ""):
        raise RecipeError(f"{where}{path}: expected a number, got true or false.")
    require_valid_stage(stage, where)
    return stage


def _booleans(given: Any, read: Any, path: str) -> list[str]:
    """Paths where true or false was given for a number. They would be read as 1 or 0."""
    if isinstance(given, bool) and isinstance(read, (int, float)) and not isinstance(read, bool):
        return [path]
    if isinstance(given, Mapping) and isinstance(read, list) and len(read) == 1:
        read = read[0]  # a list entry without brackets
    pairs: Iterable[tuple[Any, Any, Any]] = ()
    if isinstance(given, Mapping) and isinstance(read, Mapping):
        pairs = ((key, given[key], read[key]) for key in given.keys() & read.keys())
    elif isinstance(given, list) and isinstance(read, (list, tuple)):
        pairs = ((index, *pair) for index, pair in enumerate(zip(given, read, strict=False)))
    return [found for key, one, other in pairs for found in _booleans(one, other, f"{path}.{key}".lstrip("."))]


def _explain_all(error: ValidationError, raw: Mapping[str, Any], where: str) -> str:
    details = error.errors(include_url=False)
    lines = list(dict.fromkeys(_explain(detail, raw, where) for detail in details[:MISTAKES]))
    return "\n".join([*lines, *([f"… and {len(details) - MISTAKES} more."] if len(details) > MISTAKES else [])])


def _explain(detail: Any, raw: Mapping[str, Any], where: str) -> str:
    location = [part for part in detail["loc"] if not _BRANCH.fullmatch(str(part))]
    parts = [str(part) for part in location]
    path = cut(where + ".".join(_as_written(location, raw, detail["type"] == "missing")), 200)
    if detail["type"] == "extra_forbidden":
        return f"{path}: unknown key. {_hint(detail, location)}"
    if detail["type"] == "unknown_key":  # from a choice, which adds its own hint
        return f"{path}: {detail['msg']}"
    if detail["type"] == "missing":
        return f"{path}: missing, and the recipe needs it."
    message = EXPECTED.get(detail["type"]) or cut(detail["msg"].removeprefix("Value error, "), 400)
    if detail["type"] == "string_pattern_mismatch":
        field = fields_at(_place(location[:-1])).get(parts[-1])
        message = f"expected {(field and field.description) or 'something else'}"
    if not detail["loc"]:  # about the whole stage
        return f"{where}{message}."
    got = UNSAFE.sub("//…@", shown(detail["input"]))
    return f"{path}: {message[0].lower() + message[1:]}" + ("." if parts[-1:] == [SECRET] else f"; got {got}.")


def _as_written(location: Sequence[str | int], raw: Any, missing: bool) -> Iterator[str]:
    """The keys of a place that the recipe has. `rewards: numeric` has no `rewards.domains.default.0`, which it is short for."""
    node = raw
    for number, part in enumerate(location, 1):
        inside = dict(enumerate(node)) if isinstance(node, list) else node
        if isinstance(inside, Mapping) and part in inside:
            node = inside[part]
        elif isinstance(part, int) or number < len(location) or not (missing or isinstance(node, Mapping)):
            continue
        yield str(part)


def _hint(detail: Any, location: Sequence[str | int]) -> str:
    """A hint for an unknown key: a key of another framework, a key of another section, or a misspelt key."""
    if translated := translate_below([str(part) for part in location], detail["input"]):
        return f"{translated}."
    *parents, key = location
    if elsewhere := _places_of(str(key)):
        return f"Did you mean {' or '.join(map(repr, elsewhere))}?"
    known = list(fields_at(_place(parents)))
    near = difflib.get_close_matches(str(key)[:100], known, n=1, cutoff=0.6)
    return f"Did you mean {near[0]!r}?" if near else f"Known keys here: {', '.join(known)}."


def _places_of(key: str) -> list[str]:
    """Sections of a recipe that have this key."""
    sections = [(name,) for name in Stage.model_fields if name not in CLEARED]  # which have keys of the user's own
    found = []
    for section in (*sections, ("student", "lora"), ("teachers", "NAME")):
        if below(_place(section), key):
            found.append(".".join((*section, key)))
    return found if len(found) <= ELSEWHERE else []


def _place(location: Iterable[str | int]) -> Place:
    """What is accepted at a location such as ("prompts", 0)."""
    place = STAGE
    for part in location:
        place = place if isinstance(part, int) else below(place, part)
    return place


# Shipped recipes


def shipped_recipes() -> dict[str, Path]:
    """Name -> file of every recipe in the package: `quickstart`, `methods/gkd`, …"""
    root = Path(str(resources.files("opd") / "recipes"))
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in sorted(root.rglob("*.yaml"))}


# What a method's comment says in lines such as `# family: rl | source: arXiv 2604.03128 | evidence: code`

FAMILIES = {
    "white-box": "White-box: the teacher's probabilities are known",
    "black-box": "Black-box: only the teacher's texts or scores are known",
    "self": "Self-distillation: the teacher is the student itself, and reads more",
    "bootstrapping": "Iterative self-bootstrapping: an earlier student is the opponent or the filter",
    "rl": "Distillation with reinforcement learning, and RL alone",
    "drafting": "Drafters: the student drafts for a larger model",
}
FACTS = ("family", "source", "evidence", "published", "measured")


def recipe_facts(text: str) -> dict[str, str]:
    """The facts in the comment that opens a recipe, and its first sentence as `title`.

    >>> recipe_facts("# GKD: a mixture. More.\\n# family: white-box | source: arXiv 2306.13649\\nstudent: smol\\n")
    {'title': 'GKD: a mixture.', 'family': 'white-box', 'source': 'arXiv 2306.13649'}
    """
    comment = [line.lstrip("# ") for line in itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())]
    facts: dict[str, str] = {}
    prose: list[str] = []
    for line in comment:
        parts = [part.partition(": ") for part in line.split(" | ")]
        if all(name in FACTS for name, _, _ in parts):
            facts |= {name: value.strip() for name, _, value in parts}
        else:
            prose.append(line)
    title = re.split(r"(?<=[.!?])\s(?=[A-Z`])", " ".join(prose), maxsplit=1)[0]
    return {"title": title, **facts}


def find_recipe(name: str) -> Path:
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if is_file(path):
            return path
        what = "a directory" if is_directory(path) else "no such file"
        raise RecipeError(f"recipe {shown(name)}: {what}. `opd recipes list` names the shipped ones.")
    shipped = shipped_recipes()
    if name in shipped:
        return shipped[name]
    near = difflib.get_close_matches(name[:100], shipped, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise RecipeError(
        f"recipe {shown(name)}: neither a .yaml file nor a shipped recipe.{hint} `opd recipes list` shows all."
    )


# --- The JSON schema of a recipe file, for editors, with all short forms ---
#
# The settings define the keys of a resolved stage; their marks add the short forms. A file may leave keys out, because the
# defaults of all stages supply them.


Schema = dict[str, Any]
NULL: Schema = {"type": "null"}


def recipe_schema() -> Schema:
    """A stage's keys, plus `name`, `stages` and `plugins`. It includes the choices of loaded plugins."""
    load_announced()
    schema = Stage.model_json_schema()
    teachers = [choice.__name__ for choice in Family("teacher").classes().values()]
    for partial in ("Student", "Hub", *teachers):  # a stage may give some of the keys, and the defaults the others
        schema["$defs"][partial].pop("required", None)
    properties = schema["properties"]
    for option in properties["teachers"]["anyOf"]:
        if "additionalProperties" in option:
            option["additionalProperties"] = _or(NULL, option["additionalProperties"])
    keys = {key: _or(NULL, value) for key, value in properties.items()}
    name = {"type": "string", "pattern": f"^{NAME_PATTERN}$"}
    stage = {"type": "object", "additionalProperties": False, "properties": keys | {"name": name}, "required": ["name"]}
    stages = {"type": "array", "items": {"$ref": "#/$defs/StageInFile"}, "minItems": 1}
    schema["$defs"]["StageInFile"] = stage
    schema["properties"] = keys | {"name": _or(NULL, name), "stages": _or(NULL, stages)}
    schema["properties"]["plugins"] = _or(NULL, Recipe.model_json_schema()["properties"]["plugins"])
    schema["patternProperties"] = {f"^{IGNORED}": {}}
    schema["title"] = "opd recipe"
    schema["description"] = "Top-level keys are the defaults of every stage."
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema.pop("required", None)
    return json.loads(json.dumps(schema))


def _or(*options: Schema) -> Schema:
    """One of several, flat."""
    found: list[Schema] = []
    for option in options:
        plain = option.keys() <= {"anyOf", "default", "description", "title"} and "anyOf" in option
        found += [item for item in (option["anyOf"] if plain else [option]) if item not in found]
    notes = {key: option[key] for option in options for key in ("description", "title") if key in option}
    return notes | {"anyOf": found}
