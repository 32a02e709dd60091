"""Every setting does something: code reads it, and not only to check the recipe.

The type checker knows which class an attribute is read from (`tests/support/attribute_reads.py`), so a setting does not pass because
something else has its name.
"""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from opd import recipe, registry

pytestmark = pytest.mark.slow  # a whole run of the type checker

ROOT = Path(recipe.__file__).parent.parent
CHECKS = ("check", "_check", "changed")  # functions that only say no
PERMISSIONS = ("force",)  # settings whose whole work is to take a refusal back
WIRE = ("Facts", "Question")  # ends of names: what goes between a server and its client is nobody's setting
CHECKER = """[mypy]
check_untyped_defs = true
follow_imports = skip
plugins = {plugin}
"""


def settings() -> list[type[BaseModel]]:
    """Every settings class of the package, wherever it lives."""
    for path in (ROOT / "recipe").glob("[!_]*.py"):
        importlib.import_module(f"opd.recipe.{path.stem}")
    for entry in registry.CHOICES:
        registry.find(*entry.split("."))
    found, waiting = [], [BaseModel]
    while waiting:
        below = waiting.pop().__subclasses__()
        waiting += below
        found += [model for model in below if model.__module__.startswith("opd.") and not model.__name__.endswith(WIRE)]
    return found


def declared(models: list[type[BaseModel]]) -> set[str]:
    """`module.Class.field` of every field, at the class that declares it first."""
    return {
        f"{model.__module__}.{model.__qualname__}.{name}"
        for model in models
        for name in set(vars(model).get("__annotations__", ())) & set(model.model_fields)
        if not any(name in base.model_fields for base in model.__bases__ if issubclass(base, BaseModel))
    }


def checks(path: Path) -> set[int]:
    """Lines where a setting does not count as read: declarations, validators, refusals; in `recipe/` all but methods."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped: list[ast.stmt] = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and is_check(node)]
    skipped += [
        item for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for item in node.body if is_value(item)
    ]
    outside = [node for node in tree.body if "recipe" in path.parts and not isinstance(node, ast.ClassDef)]
    return {line for node in [*skipped, *outside] for line in range(node.lineno, (node.end_lineno or 0) + 1)}


def is_value(item: ast.stmt) -> bool:
    return isinstance(item, (ast.Assign, ast.AnnAssign))


def is_check(function: ast.FunctionDef) -> bool:
    decorators = " ".join(map(ast.unparse, function.decorator_list))
    return "validator" in decorators or function.name.startswith(CHECKS)


def reads(package: Path, directory: Path) -> set[str]:
    """`module.Class.attribute` of everything that the package reads outside checks."""
    plugin = Path(__file__).parents[1] / "support" / "attribute_reads.py"
    (directory / "mypy.ini").write_text(CHECKER.format(plugin=plugin), encoding="utf-8")
    notes = directory / "reads"
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        str(directory / "mypy.ini"),
        "--cache-dir",
        os.devnull,
        str(package),
    ]
    subprocess.run(
        command, cwd=package.parent, env=os.environ | {"ATTRIBUTE_READS": str(notes)}, check=False, capture_output=True
    )
    skipped: dict[str, set[int]] = {}
    found = set()
    for line in notes.read_text(encoding="utf-8").splitlines():
        name, number, attribute = line.split("\t")
        if name not in skipped:
            skipped[name] = checks(package.parent / name)
        if int(number) not in skipped[name]:
            found.add(attribute)
    return found


def test_every_setting_is_read(tmp_path: Path) -> None:
    unread = declared(settings()) - reads(ROOT, tmp_path)
    assert not [name for name in sorted(unread) if name.rpartition(".")[2] not in PERMISSIONS]


def test_a_namesake_does_not_count(tmp_path: Path) -> None:
    package = tmp_path / "opd"
    package.mkdir()
    (package / "__init__.py").write_text(
        "class Settings:\n    rate: float = 1\n    idle: int = 0\n    checked: int = 0\n\n"
        "    def check(self) -> bool:\n        return self.checked > 0\n\n\n"
        "class Other:\n    idle = 0\n    checked = 0\n\n\n"
        "def use(settings: list[Settings], other: Other) -> float:\n"
        "    return max(one.rate for one in settings) + other.idle + other.checked\n",
        encoding="utf-8",
    )
    found = reads(package, tmp_path)
    assert "opd.Settings.rate" in found
    assert not {"opd.Settings.idle", "opd.Settings.checked"} & found
