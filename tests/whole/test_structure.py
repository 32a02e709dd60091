"""House rules that a test can hold: imports point one way, functions stay small, every command is documented."""

from __future__ import annotations

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import pytest
from pydantic import BaseModel

from opd import recipe, registry
from opd.objective.advantages import Advantage
from opd.objective.term import Schedule
from opd.registry import Choice
from opd.teachers.mixture import PartWeight

ROOT = Path(recipe.__file__).parent.parent
REPOSITORY = ROOT.parent
LAYERS = [
    {"common", "records", "registry", "plugins"},
    {"divergences"},
    {"data"},
    {"models"},
    {"objective"},
    {"store"},
    {"engines"},
    {"sandbox"},
    {"rollouts"},
    {"rewards"},
    {"environments"},
    {"teachers"},
    {"monitors"},
    {"recipe"},
    {"evaluation"},
    {"loop"},
    {"report"},
    {"runner"},
    {"serve"},
    {"cluster"},
    {"diagnose"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def imports_of(path: Path) -> set[str]:
    """Names under `opd` this file imports, wherever it does so; imports for type checkers count as well."""
    found = set()
    for node in parsed(path)[1]:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "opd":
            found |= {node.module} if node.module != "opd" else {f"opd.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "opd"}
    return found


@cache
def parsed(path: Path) -> tuple[ast.Module, list[ast.AST]]:
    """A file's tree, and all its nodes."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return tree, list(ast.walk(tree))


def files() -> list[Path]:
    return [path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"]


@pytest.mark.parametrize("path", files(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_point_one_way(path: Path) -> None:
    own = path.relative_to(ROOT).parts[0].removesuffix(".py")
    for module in imports_of(path):
        other = module.split(".")[1]
        if other in (own, "__version__"):
            continue
        assert LEVEL[other] < LEVEL[own] or LEVEL[own] == LEVEL[other] == 0, (
            f"{path.name} imports {module}, which is not below it"
        )


def test_tests_mirror_the_rooms() -> None:
    tests = REPOSITORY / "tests"
    folders = {path.name for path in tests.iterdir() if (path / "__init__.py").exists()} - {"support", "whole"}
    assert folders <= {path.name for path in ROOT.iterdir() if path.is_dir()}
    assert not list(tests.glob("test_*.py")), "a test stands in the folder of its room, or in tests/whole"
    for path in (tests / "support").glob("*.py"):  # `make` looks for the files of a mark by its name
        assert "pytest.mark." not in path.read_text("utf-8"), path
    for path in tests.rglob("*.py"):
        shared = re.findall(
            r"(?m)^ *(?:from|import) (tests\.(?!support\b|losses\b|walk\b)\S+)", path.read_text("utf-8")
        )
        assert not shared, f"{path}: what tests share stands in tests/support"


def settings() -> list[type[BaseModel]]:
    """Every settings model, whether `opd.recipe` exports it or not."""
    modules = [importlib.import_module(f"opd.recipe.{path.stem}") for path in (ROOT / "recipe").glob("[!_]*.py")]
    found = {item for module in modules for item in vars(module).values() if isinstance(item, type)}
    found |= {registry.find(*entry.split(".")) for entry in registry.CHOICES} | {Schedule, Advantage, PartWeight}
    return sorted((item for item in found if issubclass(item, BaseModel) and item is not BaseModel), key=str)


def test_functions_fit_on_a_screen() -> None:
    for path in files():
        for node in parsed(path)[1]:
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 60, f"{path.name}:{node.name}"


def definitions() -> dict[str, list[str]]:
    """Public classes and functions of modules -> where they are defined. Commands are called after what they call."""
    found: dict[str, list[str]] = {}
    for path in files():
        name = path.relative_to(ROOT).as_posix()
        for node in parsed(path)[0].body:
            public = isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_")
            if public and name != "cli.py" and node.name != "main":
                found.setdefault(node.name, []).append(name)
    return found


def test_a_name_has_one_meaning() -> None:
    assert not {name: where for name, where in definitions().items() if len(where) > 1}


def test_no_code_asks_a_choice_what_it_is() -> None:
    """A choice says itself what it needs and does; others assert its type at most, for the type checker."""
    chosen = {kind.__name__ for entry in registry.CHOICES for kind in registry.find(*entry.split(".")).__mro__}
    chosen -= {kind.__name__ for kind in Choice.__mro__}
    named = {entry.split(".")[1] for entry in registry.CHOICES} | {f"{kind}.name" for kind in chosen}
    for path in files():
        nodes = parsed(path)[1]
        others = chosen - {node.name for node in nodes if isinstance(node, ast.ClassDef)}
        asserted = {id(call) for node in nodes if isinstance(node, ast.Assert) for call in ast.walk(node)}
        for node in nodes:
            asks = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance"
            if isinstance(node, ast.Call) and asks and id(node) not in asserted:
                assert not others & set(re.findall(r"\w+", ast.unparse(node.args[1]))), f"{path}:{node.lineno}"
            if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute) and node.left.attr == "name":
                sides = {ast.unparse(side).strip("'") for side in node.comparators}
                assert not sides & named, f"{path}:{node.lineno}"


def test_the_step_fits_on_a_few_screens() -> None:
    assert len((ROOT / "loop" / "step.py").read_text(encoding="utf-8").splitlines()) <= 150


def test_nothing_unpickles() -> None:
    for path in files():
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"\bpickle\b(?!d)|torch\.load\(|trust_remote_code=True", text), path


def test_pages_say_something_and_links_lead_somewhere() -> None:
    pages = {path: path.read_text(encoding="utf-8") for path in REPOSITORY.glob("*.md")}
    pages |= {path: path.read_text(encoding="utf-8") for path in REPOSITORY.glob("docs/**/*.md")}
    headings = {
        path: {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in re.findall(r"(?m)^#+ (.*)$", text)}
        for path, text in pages.items()
    }
    for path, text in pages.items():
        assert len(text) > 200, path
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)#?([^):\s]*)\)", text):
            other = (path.parent / target).resolve() if target else path
            assert other.exists(), f"{path.name}: {target}"
            assert not anchor or anchor in headings[other], f"{path.name}: {target}#{anchor}"
        for name in re.findall(r"`((?:opd|benchmarks|examples|tests)/[\w/.-]+\.(?:py|yaml|json))`", text):
            assert (REPOSITORY / name).exists(), f"{path.name}: {name}"


def test_every_command_and_recipe_is_documented() -> None:
    import typer.main

    from opd import cli

    pages = "\n".join(
        path.read_text(encoding="utf-8") for path in [REPOSITORY / "README.md", *REPOSITORY.glob("docs/**/*.md")]
    )
    group = typer.main.get_command(cli.app)
    names = []
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        names += (
            [f"opd {name} {inner}" for inner in command.commands] if hasattr(command, "commands") else [f"opd {name}"]
        )
    assert not [name for name in names if name not in pages]
    assert not [name for name in recipe.shipped_recipes() if name not in pages]


def test_recipe_keys_are_documented() -> None:
    page = (REPOSITORY / "docs" / "recipes.md").read_text(encoding="utf-8")
    missing = [
        field
        for model in settings()
        if model is not recipe.Recipe
        for field in model.model_fields
        if f"`{field}`" not in page and field != "parts"
    ]
    assert not missing
