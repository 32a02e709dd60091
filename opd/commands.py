"""Commands about what lies there: shipped recipes and models, the log of a run. Like `cli`, they parse and delegate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from opd.errors import UserError
from opd.text import plain, printable

recipes = typer.Typer(no_args_is_help=True, help="Recipes that come with opd.")
models = typer.Typer(no_args_is_help=True, help="Models that come with opd.")
store = typer.Typer(no_args_is_help=True, help="The rollout log of a run.")


@recipes.command("list")
def list_recipes() -> None:
    """Names of the shipped recipes, with their first line."""
    from opd.config import shipped_recipes

    for name, path in shipped_recipes().items():
        first = path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        print(plain(f"{name:32} {first}"))


@recipes.command("show")
def show_recipe(name: str) -> None:
    """Print a shipped recipe."""
    from opd.config import find_recipe

    print(printable(find_recipe(name).read_text(encoding="utf-8")), end="")


@recipes.command("copy")
def copy_recipe(name: str, to: Annotated[Path | None, typer.Argument(help="Default: NAME.yaml here.")] = None) -> None:
    """Copy a shipped recipe, to change it."""
    from opd.config import find_recipe

    source = find_recipe(name)
    target = to or Path(source.name)
    if target.is_dir():
        target = target / source.name
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(source.read_text(encoding="utf-8"))
    except FileExistsError:
        raise UserError(f"{target} exists already. Give another name: opd recipes copy {name} NEW.yaml") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{str(target)!r} cannot be written: {error}.") from None
    print(plain(f"wrote {target}; run it with: opd run {target}"))


@models.command("list")
def list_models() -> None:
    """Built-in models and how they score."""
    from opd.models.catalog import catalog

    for line in catalog():
        print(plain(line))


@models.command("export")
def export_model(name: str, to: Path) -> None:
    """Write a model as a plain Hugging Face directory."""
    from opd.models.catalog import export

    try:
        export(name, to)
    except OSError as error:
        raise UserError(f"{str(to)!r} cannot be written: {error.strerror or error}.") from None
    print(plain(f"wrote {to}"))


@models.command("build")
def build_models(
    to: Annotated[Path | None, typer.Option(help="Where to put them; default: into the package.")] = None,
) -> None:
    """Rebuild tiny/* from fixed seeds (about six minutes on one core)."""
    from opd.models.catalog import TINY_ROOT
    from opd.trainer.tiny import build

    build(to or TINY_ROOT, progress=print)


@store.command("check")
def check_store(run: Annotated[Path, typer.Argument(help="A run directory.")]) -> None:
    """Verify every byte of a run's rollout log; exit code 1 if it is damaged."""
    from opd.store.repair import check_log

    report = check_log(run)
    print("\n".join(map(plain, report.lines())))
    if report.damages:
        raise typer.Exit(1)


@store.command("repair")
def repair_store(run: Annotated[Path, typer.Argument(help="A run directory; the run must not be alive.")]) -> None:
    """Save what is whole of a damaged rollout log; the damaged one is kept beside it."""
    from opd.runner.lock import RunLock
    from opd.store.repair import find_log, repair

    with RunLock(find_log(run).parent):
        print("\n".join(map(plain, repair(run))))
