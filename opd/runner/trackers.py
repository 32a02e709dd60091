"""Where metrics go in addition to `metrics.jsonl`: TensorBoard, Weights & Biases, trackio, or your own tracker.

A tracker is a class with its settings, the package it needs, and `open`. A recipe lists them: `log: {to: [tensorboard]}`.
"""

from __future__ import annotations

import importlib
import importlib.util
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from opd.common.errors import RecipeError
from opd.common.text import plain
from opd.registry import Choice

TAG = 200  # characters of a metric's name, which includes the stage and often a domain
Write = Callable[[int, Mapping[str, float]], object]  # takes a step of the whole run and its metrics as STAGE/NAME


@dataclass(frozen=True)
class Experiment:
    """What a tracker learns about the run."""

    directory: Path
    name: str
    project: str
    config: Mapping[str, Any]  # the resolved recipe


class Tracker(Choice):
    """Settings are fields. `open` is a context manager, entered once a run has loaded, that gives a function which writes a step."""

    family = "tracker"
    package: ClassVar[str | None] = None  # package to import; None: no package is needed

    def require(self) -> None:
        """Reject a recipe that cannot be tracked here, before anything is loaded."""
        if self.package is not None and importlib.util.find_spec(self.package) is None:
            raise RecipeError(f"log: {self.package} is not installed. Run: pip install 'opd[{self.package}]'")

    @abstractmethod
    def open(self, experiment: Experiment) -> AbstractContextManager[Write]: ...


class TensorBoard(Tracker):
    """Writes event files in the run directory, under `tensorboard`."""

    name = "tensorboard"
    package = "tensorboard"

    @contextmanager
    def open(self, experiment: Experiment) -> Iterator[Write]:
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(experiment.directory / "tensorboard")) as writer:

            def write(step: int, values: Mapping[str, float]) -> None:
                for name, value in values.items():
                    writer.add_scalar(name, value, step)

            yield write


class Wandb(Tracker):
    """Logs to Weights & Biases. Its files are in the run directory."""

    name = "wandb"
    package = "wandb"

    def options(self, experiment: Experiment) -> dict[str, Any]:
        return {"dir": str(experiment.directory)}

    @contextmanager
    def open(self, experiment: Experiment) -> Iterator[Write]:
        module = importlib.import_module(str(self.package))
        config = dict(experiment.config)
        module.init(project=experiment.project, name=experiment.name, config=config, **self.options(experiment))
        try:
            yield lambda step, values: module.log(dict(values), step=step)
        finally:
            module.finish()


class Trackio(Wandb):
    """Logs to trackio, which keeps metrics on this machine."""

    name = "trackio"
    package = "trackio"

    def options(self, experiment: Experiment) -> dict[str, Any]:
        return {}


@contextmanager
def open_trackers(trackers: Sequence[Tracker], experiment: Experiment) -> Iterator[Write]:
    """All trackers as one. Names of metrics contain the user's domain names, so they are made safe to show."""
    with ExitStack() as stack:
        writers = [stack.enter_context(tracker.open(experiment)) for tracker in trackers]

        def write(step: int, values: Mapping[str, float]) -> None:
            named = {plain(name, TAG): value for name, value in values.items()}
            for writer in writers:
                writer(step, named)

        yield write
