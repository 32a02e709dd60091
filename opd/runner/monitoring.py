"""The monitors of a running stage: what they see, how often they may raise an alarm, and the recipes that apply their remedies.

All their decisions follow from metrics.jsonl, so a resumed run reads it again and knows which alarms were raised.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from opd.common.errors import UserError
from opd.common.files import lines_checked, read_lines, write_atomic
from opd.common.text import plain
from opd.evaluation import Measures
from opd.monitors.monitor import Alarm, Evaluated, History, Monitor, RecipeStage, StageFacts, differences, frozen
from opd.plugins import FOLDER as PLUGINS
from opd.recipe import STAGE_PREFIX, Recipe, Stage, load_recipe
from opd.recipe.graph import edges
from opd.recipe.paths import output_of
from opd.recipe.read import validate
from opd.recipe.stage import MERGED
from opd.runner.checkpoint import checkpoint_directory, read_state, step_of, steps_in
from opd.runner.inputs import merged_directory
from opd.runner.results import StageResult

MONITORS = "monitors.jsonl"
QUIET = 20  # steps without a reason before a monitor raises its next alarm
NAME = 55  # characters of the run's name kept in the remedy's name


class StageMonitors:
    """`say`: prints a line. `stop`: ends the run at the next safe moment."""

    def __init__(
        self, recipe: Recipe, spec: Stage, directory: Path, result: StageResult, say: Callable[[str], None],
        stop: Callable[[], None],
    ) -> None:  # fmt: skip
        self._recipe, self._spec, self._directory, self._say, self._stop = recipe, spec, directory, say, stop
        taught = [kind for kind in spec.teachers.values() if kind.role == "teacher"]
        facts = StageFacts(
            self_taught=bool(taught) and all(kind.of_student for kind in taught),
            instructed=any(kind.view.instructs for kind in taught),
            followed_within=min(
                (steps for kind in taught if (steps := kind.follows_within()) is not None), default=None
            ),
            before=lambda: _evaluated(result.before),
        )
        self._history = History(facts)
        self._held: dict[str, int] = {}  # monitor -> the newest step with a reason for an alarm
        self._bases: dict[Path, tuple[dict[str, Any], Path | None]] = {}  # remedy recipe -> (its alarm, its checkpoint)
        if result.steps:
            self._catch_up()
        for monitor in spec.monitors.watch:
            if (path := self._path(monitor)) not in self._bases:
                path.unlink(missing_ok=True)  # of an alarm that will be raised again

    def step(self, metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Process the metrics of a finished step. Returns lines for monitors.jsonl."""
        lines = [self._raise(monitor, alarm, metrics) for monitor, alarm in self._look(metrics)]
        self.settle()
        return lines

    def settle(self) -> None:
        """Rewrite recipes that start from a deleted checkpoint."""
        for path, (line, base) in list(self._bases.items()):
            if base is not None and not base.is_dir():  # it was deleted for newer ones
                self._write(path, line)

    def _look(self, metrics: Mapping[str, Any]) -> list[tuple[Monitor, Alarm]]:
        """Monitors with a new alarm."""
        self._history.add(metrics)
        found, step = [], int(metrics["step"])
        for monitor in self._spec.monitors.watch:
            alarm = monitor.alarm(self._history)
            if alarm is None:
                continue
            held, self._held[monitor.name] = self._held.get(monitor.name), step
            if held is None or step - held > QUIET:
                found.append((monitor, alarm))
        return found

    def _catch_up(self) -> None:
        checked, name = lines_checked(self._directory), self._spec.name
        for line in read_lines(self._directory / "metrics.jsonl", checked=checked).whole:
            if line["stage"] == name:
                self._look(line)
        for line in read_lines(self._directory / MONITORS, checked=checked).whole:
            path = self._directory / str(line["recipe"] or "")
            if line["stage"] == name and line["recipe"] is not None and path.is_file():
                self._bases[path] = line, self._base(line["step"])

    def _raise(self, monitor: Monitor, alarm: Alarm, metrics: Mapping[str, Any]) -> dict[str, Any]:
        action = self._spec.monitors.action_of(monitor)
        line: dict[str, Any] = {
            "step": metrics["step"],
            "stage": self._spec.name,
            "monitor": monitor.name,
            "value": alarm.value,
            "threshold": alarm.threshold,
            "words": alarm.words,
            "remedy": monitor.remedy,
            "action": action,
        }
        self._write(self._path(monitor), line)
        applied = f" To continue with {_listed(line['changes'])}: {line['command']}" if line["recipe"] else ""
        self._say(
            f"{self._spec.name}: ALARM ({monitor.name}) at step {line['step']}: {alarm.words}. What helps: {monitor.remedy}.{applied}"
        )
        if action == "stop":
            self._say(
                f"{self._spec.name}: monitors.action is stop, so the run ends here; `opd resume` continues it anyway"
            )
            self._stop()
        return line

    # --- Recipes that apply a remedy ---

    def _path(self, monitor: Monitor) -> Path:
        return self._directory / f"remedy-{self._spec.name}-{monitor.name}.yaml"

    @property
    def _plugins(self) -> list[str]:
        """The run's copies of plugins, which are next to the recipe. Their choices are registered already."""
        return [f"{PLUGINS}/{Path(name).name}" if name.endswith(".py") else name for name in self._recipe.plugins]

    def _base(self, step: int) -> Path | None:
        """The last checkpoint before a step, or else the first one after it. None: the stage's own start."""
        found = steps_in(checkpoint_directory(self._directory, self._spec.name, 0).parent)
        before = [path for path in found if step_of(path) < step]
        return before[-1] if before else found[0] if found else None

    def _write(self, path: Path, line: dict[str, Any]) -> None:
        """Write the first remedy that is a valid recipe, and record what it changes in the line. If none is valid, only the text remains."""
        base = self._base(line["step"])
        (monitor,) = [one for one in self._spec.monitors.watch if one.name == line["monitor"]]
        (own,) = [stage for stage in self._recipe.stages if stage.name == self._spec.name]
        as_it_was = own.model_dump(mode="json")
        line |= {"recipe": None, "changes": None, "command": None}
        for changed in monitor.remedies(as_it_was):
            try:
                stages = self._with_needed(validate(self._continued(own, changed, base)))
                recipe = load_recipe({"name": f"{self._recipe.name[:NAME]}-remedy", "stages": stages})
            except UserError:  # not valid with these models, this objective or these prompts
                continue
            (now,) = [stage.model_dump(mode="json") for stage in recipe.stages if stage.name == own.name]
            changes = [*differences(self._continued(own, as_it_was, base), now)]
            if not changes:
                continue
            line["recipe"], line["changes"] = path.name, changes
            again = ["--reuse", str(self._directory)] if len(stages) > 1 else []  # finished ones need not run again
            line["command"] = shlex.join(["opd", "run", str(path), *again])
            text = recipe.model_copy(update={"plugins": self._plugins}).to_yaml()
            write_atomic(path, _header(line, base) + text)
            self._bases[path] = line, base
            return

    def _continued(self, own: Stage, changed: RecipeStage, base: Path | None) -> RecipeStage:
        """A stage that continues from a checkpoint for the remaining steps. Teachers that are the student's start model keep that model."""
        stage = {**changed, "seed": (own.seed + 1) % 2**63}  # other prompts and draws than before
        if base is None:
            return stage
        state = read_state(base)
        left = {"steps": max(1, own.train.steps - state["step"])}
        if own.train.tokens is not None:
            left["tokens"] = max(1, own.train.tokens - state["result"]["tokens"])
        student = {**stage["student"], "model": os.path.abspath(base), "merge": None, "revision": None}
        teachers = {name: frozen(kind, self._start(own)) for name, kind in stage["teachers"].items()}
        return {**stage, "student": student, "teachers": teachers, "train": {**stage["train"], **left}}

    def _start(self, own: Stage) -> dict[str, Any]:
        """The model that the stage began with, under a name that another run can read."""
        model, directory = own.student.model, Path(os.path.abspath(self._directory))
        if model.startswith(STAGE_PREFIX):
            return {"model": output_of(directory, model.removeprefix(STAGE_PREFIX)), "revision": None}
        if model.startswith(MERGED):
            return {"model": str(merged_directory(directory, own.name)), "revision": None}
        return {"model": model, "revision": own.student.revision}

    def _with_needed(self, changed: Stage) -> list[RecipeStage]:
        """The running stage with its changes, the stages after it, and all stages that these depend on."""
        stages = {stage.name: stage for stage in self._recipe.stages} | {changed.name: changed}
        names = list(stages)
        wanted, left = set[str](), names[names.index(changed.name) :]
        while left:
            name = left.pop()
            wanted.add(name)
            left += [edge.stage for edge in edges(stages[name]) if edge.stage in stages and edge.stage not in wanted]
        return [stages[name].model_dump(mode="json") for name in names if name in wanted]


def _header(line: Mapping[str, Any], base: Path | None) -> str:
    lines = [
        f"Stage {line['stage']}, step {line['step']}, monitor {line['monitor']}: {line['words']}.",
        f"What helps: {line['remedy']}.",
        f"Changed here: {_listed(line['changes'])}",
        f"It continues from {base or 'the beginning of the stage'}: {line['command']}",
    ]
    return "".join(f"# {plain(one)}\n" for one in lines)


def _listed(changes: Sequence[str]) -> str:
    return plain("; ".join(changes), 400)


def _evaluated(measures: Mapping[str, Measures]) -> Evaluated | None:
    """The evaluation before training, in the form of metrics.jsonl."""
    values = {domain: found.value for domain, found in measures.items() if found.value is not None}
    more: dict[str, dict[str, float]] = {name: {} for name in ("stderr", "at_k", "at_k_stderr")}
    for domain, found in measures.items():
        for name, value in (
            ("stderr", found.stderr),
            ("at_k", found.pass_at_k),
            ("at_k_stderr", found.pass_at_k_stderr),
        ):
            if value is not None:
                more[name][domain] = value
    return Evaluated(0, values, more["stderr"], more["at_k"], more["at_k_stderr"]) if values else None


def evaluation_metrics(measures: Mapping[str, Measures]) -> dict[str, float | None]:
    """The metrics that an evaluation adds to its step."""
    found: dict[str, float | None] = {f"eval/{domain}": one.value for domain, one in measures.items()}
    for domain, one in measures.items():
        more: Sequence[tuple[str, float | None]] = (
            ("eval_stderr", one.stderr), ("eval_k", one.pass_at_k), ("eval_k_stderr", one.pass_at_k_stderr),
            ("eval_loss", one.loss),
        )  # fmt: skip
        found |= {f"{name}/{domain}": value for name, value in more if value is not None}
    return found
