"""Choices from outside: Python files that a recipe names under `plugins`, and installed packages.

A plugin is a module that registers classes (`@opd.register`); its choices then stand in recipes, the schema and the
plan beside ours. A package announces its modules as entry points of the group `opd.plugins`, or a recipe names one:
`plugins: [package.module]`. A run copies the files into its directory and goes on with those copies; of packages it
records the version.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from opd.errors import RecipeError

GROUP = "opd.plugins"
FOLDER = "plugins"  # of a run directory
NAMES = "opd_plugins"  # files are modules below this name
_loaded: dict[str, str] = {}  # module -> sha256 of the file it was made from
_files: dict[str, str] = {}  # module -> the file it was last asked for as: a run's own copy, once there is one
_announced = False


def load_plugins(plugins: Sequence[str]) -> None:
    """Import what a recipe names: `.py` files by their absolute path, modules of packages by their name."""
    load_announced()
    files = [Path(name) for name in plugins if name.endswith(".py")]
    names = [path.name for path in files]
    if len(set(names)) < len(names):
        raise RecipeError(f"plugins: two files have the same name: {', '.join(names)}. Rename one.")
    for name in plugins:
        if name.endswith(".py"):
            _load_file(Path(name))
        else:
            _load_module(name)


def load_announced() -> None:
    """Import the modules that installed packages announce; once."""
    global _announced  # noqa: PLW0603
    if _announced:
        return
    for point in importlib.metadata.entry_points(group=GROUP):
        _load_module(point.module)
    _announced = True


def versions(plugins: Sequence[str]) -> dict[str, str]:
    """Package -> version, of the modules that a recipe names."""
    packages = [name.split(".")[0] for name in plugins if not name.endswith(".py")]
    owners = importlib.metadata.packages_distributions() if packages else {}  # reads about every package there is
    return {
        package: importlib.metadata.version(owners[package][0]) if package in owners else "unknown"
        for package in packages
    }


def origin(kind: type) -> str | None:
    """What `load` imports the class's plugin by in another process; None: it is one of ours."""
    module = kind.__module__
    return _files.get(module) or (None if module.split(".")[0] == "opd" else module)


def moved(path: Path) -> None:
    """The run has its own copy of a file that is loaded: from now on other processes import that."""
    _files[f"{NAMES}.{path.stem}"] = str(path)


def _load_file(path: Path) -> None:
    """A file is run again only if it has changed: its classes stay the same objects from one recipe to the next."""
    try:
        source = path.read_bytes()
    except OSError as error:
        raise RecipeError(
            f"plugins: {path} cannot be read: {error.strerror}. Paths are relative to the recipe."
        ) from None
    if not re.fullmatch(r"[A-Za-z_]\w*", path.stem):
        raise RecipeError(f"plugins: {path.name} is not the name of a Python module. Use letters, digits and `_`.")
    name, digest = f"{NAMES}.{path.stem}", hashlib.sha256(source).hexdigest()
    _files[name] = str(path)
    if _loaded.get(name) == digest:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a user's own file may raise anything
        sys.modules.pop(name)
        raise RecipeError(f"plugins: {path} cannot be imported: {_told(error, path)}") from None
    _loaded[name] = digest


def _load_module(name: str) -> None:
    try:
        importlib.import_module(name)
    except Exception as error:  # likewise
        raise RecipeError(f"plugins: {name!r} cannot be imported: {_told(error)}. Is its package installed?") from None


def _told(error: Exception, path: Path | None = None) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{type(error).__name__}: {error}" + (f" (line {lines[-1]})" if lines else "")
