"""Choices from outside: Python files that a recipe names under `plugins`, and installed packages.

A plugin is a module that registers classes (`@opd.register`). Recipes, the schema and the plan then have its choices as well.
A package announces its modules as entry points of the group `opd.plugins`, or a recipe names one: `plugins: [package.module]`.
A run copies plugin files into its directory and resumes with those copies. For packages it records the version.

A file is read once: the same bytes are hashed, compiled, copied into the run directory and sent to workers. `__pycache__` is
not used, because Python checks only its time and size.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from opd.common.errors import OpdError, RecipeError, RunDirectoryError, Stopped, TrainingError

GROUP = "opd.plugins"
FOLDER = "plugins"  # of a run directory
NAMES = "opd_plugins"  # package name of the modules made from files
_loaded: dict[str, str] = {}  # module -> sha256 of the file it was made from
_files: dict[str, str] = {}  # module -> the file that it was last loaded from: the run's copy, once there is one
_sources: dict[str, bytes] = {}  # file -> the bytes that were last run from it
_sealed: dict[Path, str] | None = None  # file -> the sha256 it must have; None: any content
_modules: set[str] = set()  # of packages, named in recipes or announced
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


class SourceBytes(SourceFileLoader):
    """Runs bytes that were read before, even if the file has changed since."""

    def __init__(self, name: str, path: str, source: bytes) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self._source, self.path)
        return code


def run_source(name: str, path: str, source: bytes, submodules: list[str] | None = None) -> ModuleType:
    """A new module made of these bytes. `submodules`: where a package looks for its own."""
    loader = SourceBytes(name, path, source)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader, submodule_search_locations=submodules)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        if before is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = before
        raise
    return module


@contextmanager
def sealed_files(digests: Mapping[Path, str]) -> Iterator[None]:
    """While a run resumes, a plugin file is only run if its sha256 is the one that the run directory recorded."""
    global _sealed  # noqa: PLW0603
    _sealed = {path.resolve(): digest for path, digest in digests.items()}
    try:
        yield
    finally:
        _sealed = None


def load_announced() -> None:
    """Import the modules that installed packages announce; once."""
    global _announced  # noqa: PLW0603
    if _announced:
        return
    import importlib.metadata  # slow, and `opd --help` needs none of it

    for point in importlib.metadata.entry_points(group=GROUP):
        _load_module(point.module)
    _announced = True


def versions(plugins: Sequence[str]) -> dict[str, str]:
    """Package -> version, of the modules that a recipe names."""
    import importlib.metadata

    packages = [name.split(".")[0] for name in plugins if not name.endswith(".py")]
    owners = importlib.metadata.packages_distributions() if packages else {}  # reads the metadata of every package
    return {
        package: importlib.metadata.version(owners[package][0]) if package in owners else "unknown"
        for package in packages
    }


def origin(kind: type) -> str | None:
    """The name or path of the class's plugin for `load` in another process; None for opd's own classes."""
    module = kind.__module__
    return _files.get(module) or (None if module.split(".")[0] == "opd" else module)


def source_of(file: str) -> bytes:
    """The bytes that were run from a file. A run copies them and workers run them; the file may have changed since."""
    if file not in _sources:
        _load_file(Path(file))
    return _sources[file]


def moved(file: str, path: Path) -> None:
    """Name the run's own copy in place of the loaded file from now on."""
    _files[f"{NAMES}.{path.stem}"] = str(path)
    _sources[str(path)] = source_of(file)


def load_source(file: str, source: bytes) -> None:
    """Run the bytes of a plugin file that another process has read, unless they were run before."""
    load_announced()
    _run_file(Path(file), source)


@contextmanager
def plugin_errors() -> Iterator[None]:
    """Report an error in a plugin's own code with its file and line. The traceback is kept as its cause."""
    try:
        yield
    except (OpdError, Stopped):
        raise
    except Exception as error:  # a user's own file may raise anything
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        lines = [line for _, line in traceback.walk_tb(error.__traceback__)]
        own = [number for number, frame in enumerate(frames) if _is_plugin(frame.f_globals.get("__name__", ""))]
        if not own:
            raise
        code, line = frames[own[-1]].f_code, lines[own[-1]]
        raise TrainingError(
            f"plugin {code.co_filename}, line {line}, in {code.co_qualname}: {type(error).__name__}: {error}."
        ) from error


def _is_plugin(module: str) -> bool:
    return module.startswith(f"{NAMES}.") or any(f"{module}.".startswith(f"{name}.") for name in _modules)


def _load_file(path: Path) -> None:
    try:
        source = path.read_bytes()
    except OSError as error:
        raise RecipeError(
            f"plugins: {path} cannot be read: {error.strerror}. Paths are relative to the recipe."
        ) from None
    if not re.fullmatch(r"[A-Za-z_]\w*", path.stem):
        raise RecipeError(f"plugins: {path.name} is not the name of a Python module. Use letters, digits and `_`.")
    if _sealed is not None and _sealed.get(path.resolve()) != hashlib.sha256(source).hexdigest():
        raise RunDirectoryError(
            f"{path} has been altered since the run started: its sha256 is not the one recorded. It was not run. "
            "Restore it, or start a new run."
        )
    _run_file(path, source)


def _run_file(path: Path, source: bytes) -> None:
    """Run a file again only if it has changed, so its classes are the same objects for every recipe."""
    name, digest = f"{NAMES}.{path.stem}", hashlib.sha256(source).hexdigest()
    _files[name], _sources[str(path)] = str(path), source
    if _loaded.get(name) == digest:
        return
    try:
        run_source(name, str(path), source)
    except Exception as error:  # a user's own file may raise anything
        raise RecipeError(f"plugins: {path} cannot be imported: {_described(error, path)}") from None
    _loaded[name] = digest


def _load_module(name: str) -> None:
    try:
        importlib.import_module(name)
        _modules.add(name)
    except Exception as error:  # likewise
        raise RecipeError(
            f"plugins: {name!r} cannot be imported: {_described(error)}. Is its package installed?"
        ) from None


def _described(error: Exception, path: Path | None = None) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{type(error).__name__}: {error}" + (f" (line {lines[-1]})" if lines else "")
