"""The models that come with the package: what there is, how good it is, and how to take one along."""

from __future__ import annotations

import json
import shutil
from importlib import resources
from pathlib import Path

from opd.errors import UserError
from opd.models.adapters import smol_models
from opd.models.load import load_model, read_config, tiny_models
from opd.models.wrappers import inner_text_config

TINY_ROOT = Path(str(resources.files("opd") / "models" / "tiny"))


def catalog() -> list[str]:
    """One line per model, with the scores measured when it was built."""
    manifest = json.loads((TINY_ROOT / "manifest.json").read_text(encoding="utf-8"))["models"]
    lines = []
    for name in tiny_models():
        scores = manifest[name.removeprefix("tiny/")]["scores"]
        lines.append(f"{name:18} " + "  ".join(f"{domain} {score:.0%}" for domain, score in scores.items()))
    lines.append("smol               SmolLM2-135M-Instruct; needs `make smol`")
    for name, directory in smol_models().items():
        evals = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))["evals"]
        lines.append(f"{name:18} " + "  ".join(f"{domain} {found['after']:.0%}" for domain, found in evals.items()))
    return lines


def export(name: str, to: Path) -> None:
    """The model as a directory; of a wrapper, its text model."""
    if to.exists() and any(to.iterdir()):
        raise UserError(f"{to} exists and is not empty. Choose another directory.")
    known = tiny_models()
    if name in known:
        shutil.copytree(known[name], to, dirs_exist_ok=True)
    elif inner_text_config(read_config(name)) is not None:
        from opd.models.extract import extract_text_model

        extract_text_model(name, to)
    else:
        load_model(name).save(to)
