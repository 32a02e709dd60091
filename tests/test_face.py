"""`import opd`: everything a person needs, flat, and loaded only when used."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from types import ModuleType

import pytest

import opd


def test_importing_loads_nothing_heavy() -> None:
    code = (
        "import sys, opd; opd.RecipeError, opd.Rollout; assert not {'torch', 'transformers', 'yaml'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_name_is_what_its_module_holds() -> None:
    for module in pkgutil.walk_packages(opd.__path__, "opd."):
        if module.name.count(".") == 1:
            importlib.import_module(module.name)  # a module of the same name would hide what is flat
    assert set(opd.__all__) == {*opd.LAZY, "Run", "__version__", "resume", "run"}
    for name, place in opd.LAZY.items():
        assert getattr(opd, name) is getattr(importlib.import_module(place), name)
    assert not [name for name in opd.__all__ if isinstance(getattr(opd, name), ModuleType)]
    assert set(dir(opd)) == set(opd.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = opd.nothing
