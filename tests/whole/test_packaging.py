"""What an installation holds: `import opd` finds the package from anywhere, and data files travel with it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMPORT = "import opd; assert callable(opd.run), opd; print(opd.__file__)"


def built(hook: str, directory: Path) -> Path:
    """The wheel that the build backend's hook makes of a copy of the project."""
    pytest.importorskip("setuptools", minversion="77")
    copy = directory / "clone" / "opd"  # a clone's folder has the package's name
    copy.mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "opd", copy / "opd", ignore=shutil.ignore_patterns("__pycache__"))
    code = f"import setuptools.build_meta as backend; backend.{hook}({str(directory)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=copy, check=True, capture_output=True)
    return next(directory.glob("*.whl"))


def test_a_folder_of_that_name_does_not_hide_the_package(tmp_path: Path) -> None:
    """In the folder that holds a clone, the clone's folder is an empty namespace package of the same name."""
    (tmp_path / "opd").mkdir()
    found = subprocess.run([sys.executable, "-c", IMPORT], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 0, f"{found.stderr}\nSet the environment up again: make test"


@pytest.mark.slow
def test_an_editable_installation_is_found_next_to_the_clone(tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(built("build_editable", tmp_path)) as wheel:
        wheel.extractall(site)
    code = f"import site; site.addsitedir({str(site)!r}); {IMPORT}"
    where = tmp_path / "clone"
    found = subprocess.run([sys.executable, "-S", "-c", code], cwd=where, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()) == where / "opd" / "opd" / "__init__.py"


@pytest.mark.slow
def test_data_files_are_in_the_wheel(tmp_path: Path) -> None:
    package = [path for path in (ROOT / "opd").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    wanted = {path.relative_to(ROOT).as_posix() for path in package}
    with zipfile.ZipFile(built("build_wheel", tmp_path)) as wheel:
        held = {name for name in wheel.namelist() if not name.startswith("opd-")}
    assert held == wanted
