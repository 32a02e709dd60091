"""`opd diagnose`: parse and delegate."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opd.errors import UserError
from opd.text import plain

if TYPE_CHECKING:
    from opd.config import Stage
    from opd.diagnose.diagnosis import Diagnosis

LARGEST = 2**63 - 1  # seed
MAX_NEW_TOKENS = 128  # of an answer, without a recipe


def diagnose_command(
    recipe: Annotated[str | None, typer.Argument(help="A .yaml file, or the name of a shipped recipe.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="With a recipe or without, for example rewards=numeric"),
    ] = None,
    student: Annotated[str | None, typer.Option(help="Without a recipe: the model that is to learn.")] = None,
    teacher: Annotated[
        list[str] | None, typer.Option(metavar="MODEL|NAME=MODEL", help="Its teacher; repeat to compare several.")
    ] = None,
    prompts: Annotated[
        list[str] | None, typer.Option(help="A file, a folder, a task or a dataset; repeat for several.")
    ] = None,
    stage: Annotated[str | None, typer.Option(help="Of a recipe with several; default: the first.")] = None,
    n: Annotated[int, typer.Option(min=2, max=10_000, help="Prompts of each domain.")] = 32,
    samples: Annotated[int, typer.Option(min=2, max=1024, help="Answers of the student to each.")] = 8,
    target: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="The accuracy that you want, for example 0.9.")
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Without a recipe; default 128.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N")] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=LARGEST)] = None,
    write: Annotated[Path | None, typer.Option(help="Write the recommended recipe to this file.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write a page that needs nothing else to this .html file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Before you train: is there a gap, do the models think alike, is the teacher reliable, does on-policy pay?"""
    for place in (write, page):
        _require_free(place)
    changes = list(overrides or ())
    if (
        recipe is not None and "=" in recipe and (student or teacher or prompts)
    ):  # no recipe: the first of the overrides
        changes, recipe = [recipe, *changes], None
    changes += _options(changes, device=device, seed=seed)
    if recipe is not None:
        if student or teacher or prompts or max_new_tokens:
            raise UserError(
                "a recipe names its models, prompts and lengths itself: give either RECIPE or --student, --teacher and --prompts."
            )
        spec = _stage_of(recipe, changes, stage)
    else:
        lengths = {} if max_new_tokens is None else {"rollout.max_new_tokens": max_new_tokens}
        changes += _options(changes, **lengths)
        spec = _stage_around(student, teacher or [], prompts or [], changes)
    from opd.diagnose.diagnosis import diagnose
    from opd.diagnose.words import diagnosis_lines
    from opd.files import json_text

    given = recipe is not None or any(change.startswith("objective") for change in changes)
    found = diagnose(spec, prompts=n, samples=samples, target=target, given=given, say=_to_stderr)
    print(json_text(found.to_json(), indent=1) if as_json else "\n".join(diagnosis_lines(found)))
    _write(found, write, page)


def _options(changes: Sequence[str], **options: int | str | None) -> list[str]:
    """Options as the overrides that they stand for. A value that is given both ways is refused."""
    found = [f"{key}={value}" for key, value in options.items() if value is not None]
    for option in found:
        key, _, value = option.partition("=")
        if twice := [change for change in changes if change.partition("=")[0] == key]:
            name = key.rpartition(".")[2].replace("_", "-")
            raise UserError(f"--{name} {value} and {twice[0]}: both set {key}. Give one of them.")
    return found


def _to_stderr(line: str) -> None:
    print(plain(line), file=sys.stderr, flush=True)


def _write(found: Diagnosis, recipe: Path | None, page: Path | None) -> None:
    from opd.files import write_whole
    from opd.report.page import diagnosis_page

    if page is not None:
        write_whole(page, diagnosis_page(found.to_json()))
        _to_stderr(f"wrote {page}")
    if recipe is not None and found.recommendation.settings is None:
        _to_stderr("no recipe was written: there is none to recommend")
    elif recipe is not None:
        write_whole(recipe, found.recommendation.text())
        _to_stderr(f"wrote {recipe}; look at it with: opd run {recipe} --dry-run")


def _require_free(place: Path | None) -> None:
    """Before anything is spent."""
    if place is None:
        return
    if place.exists():
        raise UserError(f"{place} exists already. Give another name.")
    if not place.absolute().parent.is_dir():
        raise UserError(
            f"{str(place)!r} cannot be written: there is no directory {str(place.absolute().parent)!r}. Make it first."
        )


def _stage_of(recipe: str, overrides: list[str], name: str | None) -> Stage:
    from opd.config import load_recipe

    loaded = load_recipe(recipe, overrides)
    known = {stage.name: stage for stage in loaded.stages}
    if name is not None and name not in known:
        raise UserError(f"--stage {name!r}: the recipe has {', '.join(known)}.")
    return known[name] if name is not None else loaded.stages[0]


def _stage_around(student: str | None, teachers: list[str], prompts: list[str], overrides: list[str]) -> Stage:
    from opd.config import load_recipe

    missing = [
        name for name, value in (("--student", student), ("--teacher", teachers), ("--prompts", prompts)) if not value
    ]
    if missing:
        raise UserError(f"{', '.join(missing)}: missing. Give a recipe, or a student, a teacher and prompts.")
    named: dict[str, Any] = {}
    for given in teachers:
        name, model = _named(given)
        if name in named:
            raise UserError(f"--teacher {given!r}: there are two of the name {name!r}. Write NAME={model}.")
        named[name] = {"model": model}
    settings = {
        "student": student,
        "teachers": named,
        "prompts": [{"source": source} for source in prompts],
        "rollout": {"max_new_tokens": MAX_NEW_TOKENS},
    }
    return load_recipe(settings, overrides).stages[0]


def _named(given: str) -> tuple[str, str]:
    """NAME=MODEL, or a name made of the model's."""
    name, sign, model = given.partition("=")
    if sign and name and re.fullmatch(r"[\w.-]+", name):
        return name, model
    return re.sub(r"[^\w.-]+", "-", Path(given).name).strip("-") or "teacher", given
