"""Where metrics go besides `metrics.jsonl`: TensorBoard, Weights & Biases, trackio."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from opd.config import Log
from opd.errors import RecipeError
from opd.text import plain

TAG = 200  # characters of a metric's name, which holds a stage's and often a domain's


class Tracker(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def require_trackers(spec: Log) -> None:
    """Every tracker's package is there."""
    for kind in spec.to:
        if importlib.util.find_spec(kind) is None:
            raise RecipeError(f"log: {kind} is not installed. Run: pip install 'opd[{kind}]'")


def open_trackers(spec: Log, directory: Path, name: str, config: Mapping[str, Any]) -> list[Tracker]:
    require_trackers(spec)
    return [_open(kind, spec, directory, name, config) for kind in spec.to]


def _open(kind: str, spec: Log, directory: Path, name: str, config: Mapping[str, Any]) -> Tracker:
    if kind == "tensorboard":
        return TensorBoard(directory / "tensorboard")
    module = importlib.import_module(kind)  # wandb, and trackio with the same interface
    arguments = {"dir": str(directory)} if kind == "wandb" else {}
    module.init(project=spec.project, name=name, config=dict(config), **arguments)
    return WandbLike(module)


class TensorBoard:
    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(plain(name, TAG), value, step)

    def close(self) -> None:
        self._writer.close()


class WandbLike:
    def __init__(self, module: Any) -> None:
        self._module = module

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._module.log({plain(name, TAG): value for name, value in values.items()}, step=step)

    def close(self) -> None:
        self._module.finish()
