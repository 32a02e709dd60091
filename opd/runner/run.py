"""Runs: start one, go on with one that was interrupted, or open the directory of one that is over. Opening needs no torch.

run = opd.run("quickstart", overrides=["train.steps=20"])
run = opd.resume("runs/quickstart")
run.summary["stages"][0]["evals"], run.metrics[-1]["reverse_kl"], run.model
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from opd.errors import RunDirectoryError, Stopped
from opd.files import (
    FORMAT,
    SEALS,
    disk_errors,
    lines_checked,
    read_lines,
    read_sealed,
    reading,
    sha256,
    sync,
    write_sealed,
    write_whole,
)
from opd.plugins import FOLDER as PLUGINS
from opd.plugins import versions as plugin_versions
from opd.runner.given import FOLDER as INPUTS
from opd.runner.given import GivenPrompts
from opd.runner.lock import ATTEMPTS, NAME, Gone, RunLock, claim, make
from opd.text import plain

if TYPE_CHECKING:  # `import opd` and `opd --help` stay instant
    from rich.console import Console

    from opd.config import Recipe
    from opd.store import RolloutStore

RUNS = Path("runs")
EARLY = {
    NAME,
    INPUTS,
    PLUGINS,
    "recipe.yaml",
    "resolved.yaml",
    ".recipe.yaml.partial",
    ".resolved.yaml.partial",
    f".{SEALS}.partial",
}
WRITTEN = ("rollouts", "checkpoints", "tensorboard", "wandb", "log.txt", "summary.json", ".summary.json.partial",
           "metrics.jsonl", "samples.jsonl", SEALS, *sorted(EARLY - {NAME, INPUTS}), NAME)  # fmt: skip


class Run:
    """A run directory, dead or alive."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory).absolute()  # the program may change its folder
        with reading(self.directory):
            found = (self.directory / "resolved.yaml").is_file()
        if not found:
            raise RunDirectoryError(f"{self.directory}: not a run directory (it has no resolved.yaml).")

    def __repr__(self) -> str:
        return f"Run({str(self.directory)!r})"

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One object per step, with `eval/DOMAIN` keys where it was evaluated. A damaged line is an error that names it."""
        return self._lines("metrics.jsonl")

    @property
    def samples(self) -> list[dict[str, Any]]:
        """The completions that were written down on the way."""
        return self._lines("samples.jsonl")

    def _lines(self, name: str) -> list[dict[str, Any]]:
        path = self.directory / name
        found = read_lines(path, checked=lines_checked(self.directory))
        number = next(iter(found.damaged), None)
        if number is None and found.torn and (self.directory / "summary.json").exists():  # else: it is being written
            number = len(found.whole) + 1
        if number is not None:
            raise RunDirectoryError(
                f"{path}, line {number}: the line was altered or cut (its checksum does not match). Without it the others can be read."
            )
        return found.whole

    @property
    def summary(self) -> dict[str, Any]:
        path = self.directory / "summary.json"
        if not path.exists():
            raise RunDirectoryError(f"{self.directory}: no summary.json yet; the run has not ended.")
        with reading(path):
            data = path.read_bytes()
        try:
            return dict(json.loads(data))
        except (ValueError, TypeError, RecursionError):
            raise RunDirectoryError(f"{path} was altered or cut: it is not a JSON object.") from None

    @property
    def checkpoints(self) -> list[Path]:
        """Oldest first; each is a Hugging Face model directory."""
        import yaml

        from opd.runner.checkpoint import steps_in

        path = self.directory / "resolved.yaml"
        with reading(path):
            text = path.read_bytes()
        try:
            order = [stage["name"] for stage in yaml.safe_load(text)["stages"]]
        except (yaml.YAMLError, KeyError, TypeError, UnicodeDecodeError):
            raise RunDirectoryError(f"{path} was altered: it does not name the run's stages.") from None
        return [path for name in order for path in steps_in(self.directory / "checkpoints" / name)]

    @property
    def model(self) -> Path:
        """The newest checkpoint: what the run trained."""
        if not self.checkpoints:
            raise RunDirectoryError(f"{self.directory}: no checkpoint has been saved.")
        return self.checkpoints[-1]

    @cached_property
    def rollouts(self) -> RolloutStore:
        from opd.store import RolloutStore

        return RolloutStore(self.directory / "rollouts", read_only=True)


def run(
    recipe: str | Path | Mapping[str, Any] | Recipe,
    *,
    prompts: Any = None,
    overrides: Iterable[str] = (),
    out: str | Path | None = None,
    resume: bool = False,
    quiet: bool = True,
    console: Console | None = None,
) -> Run:
    """Carry out a recipe (file, shipped name, mapping or `Recipe`) and return the run.

    A run directory that is taken is left alone: the run goes into `NAME-2`, `NAME-3`, … With `resume` it goes into `out` and
    nowhere else, and one that has begun there goes on: what a job script calls again and again.

    `prompts` are rows in memory, in place of the recipe's: a list of mappings or texts, a `datasets.Dataset`, or `{domain: rows}`.
    The run keeps them in its directory, so `opd.resume` needs no more.

    Ctrl-C raises `opd.errors.Stopped` after a checkpoint has been saved; SIGTERM raises `opd.errors.Preempted`.
    """
    from rich.console import Console

    from opd.config import load_recipe, recipe_text
    from opd.config.names import check_output

    overrides = tuple(overrides)
    given = None if prompts is None else GivenPrompts.of(prompts)
    loaded = load_recipe(recipe, overrides, prompts=given and given.sources)
    wanted, shown = check_output(RUNS / loaded.name if out is None else out), console or Console()
    lock, made = _claim_or_return(wanted) if resume else claim(wanted)
    try:
        if (lock.directory / SEALS).exists():
            _require_same(lock.directory, loaded, given)
            _go_on(lock, None, quiet, shown)
        else:
            _start(lock, made, recipe_text(recipe, overrides), loaded, given, quiet, shown)
    finally:
        lock.release()
        if not quiet and lock.directory.is_dir():
            place = plain(f"run directory: {lock.directory}")
            shown.print(place, highlight=False, markup=False, emoji=False, soft_wrap=True)
    return Run(lock.directory)


def _start(
    lock: RunLock, made: bool, text: str, recipe: Recipe, given: GivenPrompts | None, quiet: bool, console: Console
) -> None:
    """Write down what is carried out, and do so. A start that fails before the first step leaves nothing behind."""
    began = False
    try:
        from opd.runner.inputs import inputs_of

        placed = recipe
        if given is not None:
            placed = given.inside(recipe, lock.directory)
            with disk_errors(lock.directory, lambda: "start again."):
                given.write(lock.directory)
        inputs = inputs_of(
            placed.stages, lambda line: None if quiet else console.print(line, highlight=False), lock.directory
        )
        with disk_errors(lock.directory, lambda: "start again."):
            _write_recipe(lock.directory, text, recipe, inputs)
        from opd.runner.pipeline import Pipeline

        pipeline = Pipeline(placed, lock, inputs, console, quiet)
        try:
            pipeline.run()
        finally:
            began = pipeline.began
    except Stopped:
        raise
    except Exception:
        if not began:
            if given is not None:
                given.withdraw(lock.directory)
            _withdraw(lock.directory, made)
        raise


def resume(
    directory: str | Path,
    *,
    mode: Literal["prefill", "exact"] | None = None,
    quiet: bool = True,
    console: Console | None = None,
) -> Run:
    """Go on with a run that was killed, stopped, preempted or ran out of disk, and return it. A finished one is returned as it is.

    `mode` overrides the recipe's `checkpoint.resume` for rollouts that were unfinished.
    """
    from rich.console import Console

    found = Run(directory)
    with RunLock(found.directory) as lock:
        _go_on(lock, mode, quiet, console or Console())
    return found


def _go_on(lock: RunLock, mode: Literal["prefill", "exact"] | None, quiet: bool, console: Console) -> None:
    recipe = verified_recipe(lock.directory)
    if mode is not None:
        changed = [
            stage.model_copy(update={"checkpoint": stage.checkpoint.model_copy(update={"resume": mode})})
            for stage in recipe.stages
        ]
        recipe = recipe.model_copy(update={"stages": changed})
    from opd.runner.pipeline import Pipeline

    inputs = read_sealed(lock.directory / SEALS).get("inputs")
    Pipeline(recipe, lock, inputs, console, quiet).run(resume=True)


def verified_recipe(directory: Path) -> Recipe:
    """What the run carries out, after checking that `resolved.yaml` is the file the run wrote."""
    from opd.config import load_recipe

    if not (directory / SEALS).exists():
        raise RunDirectoryError(
            f"{directory / SEALS} is missing, so nothing says that resolved.yaml is what the run began with. Start again: "
            f"opd run {directory / 'resolved.yaml'}"
        )
    expected = read_sealed(directory / SEALS)
    for name, digest in expected["files"].items():
        path = directory / name
        if sha256(path) != digest:
            raise RunDirectoryError(
                f"{path} was altered since the run began (its sha256 does not match {SEALS}). A changed recipe is a new run: "
                f"opd run {path}"
            )
    loaded = load_recipe(directory / "resolved.yaml")
    recorded = expected.get("packages", {})
    for package, version in plugin_versions(loaded.plugins).items():
        if recorded.get(package) != version:
            raise RunDirectoryError(
                f"{directory} was begun with {package} {recorded.get(package)}, and {version} is installed. Install that one, or "
                f"start a new run: opd run {directory / 'resolved.yaml'}"
            )
    return loaded


def _require_same(directory: Path, recipe: Recipe, given: GivenPrompts | None) -> None:
    if given is not None:
        given.require_same(directory)
        recipe = given.inside(recipe, directory)
    if verified_recipe(directory).stages != recipe.stages:
        raise RunDirectoryError(
            f"{directory} was begun with another recipe than this one (see {directory / 'resolved.yaml'}). Go on with its own: "
            f"opd resume {directory}. Or give this one another directory."
        )


def _claim_or_return(wanted: Path) -> tuple[RunLock, bool]:
    """The wanted directory and no other, locked: new, empty, begun by a process that died at once, or a run."""
    lock = RunLock(wanted)
    for attempt in range(ATTEMPTS):
        made = make(wanted)
        try:
            lock.take()
            break
        except Gone:  # made by another one, who took it away again; or a link to nowhere
            if attempt == ATTEMPTS - 1:
                raise
    foreign = sorted(set(os.listdir(wanted)) - EARLY)
    if foreign and not (wanted / SEALS).exists():
        lock.release()
        raise RunDirectoryError(
            f"{wanted} is neither empty nor a run directory: there is {foreign[0]!r} in it, and no {SEALS}. Choose another."
        )
    return lock, made


def _withdraw(directory: Path, made: bool) -> None:
    """Take away what a start has written that came to nothing; the lock goes last. What is not ours stays."""
    for name in WRITTEN:
        path = directory / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    if made:
        with suppress(OSError):  # something of another's is in it
            directory.rmdir()


def _copy_plugins(directory: Path, plugins: list[str]) -> list[str]:
    """The files of plugins go into the run, which goes on with them; as `resolved.yaml` names them, beside it."""
    names = []
    for plugin in plugins:
        if plugin.endswith(".py"):
            (directory / PLUGINS).mkdir(exist_ok=True)
            write_whole(directory / PLUGINS / Path(plugin).name, Path(plugin).read_text(encoding="utf-8"))
            names.append(f"{PLUGINS}/{Path(plugin).name}")
        else:
            names.append(plugin)
    return names


def _write_recipe(directory: Path, given: str, resolved: Recipe, inputs: Mapping[str, Any]) -> None:
    """`recipe.yaml` is what the user wrote, `resolved.yaml` what is carried out. With `run.json` the run has begun."""
    from opd import __version__

    write_whole(directory / "recipe.yaml", given)
    copies = _copy_plugins(directory, resolved.plugins)
    write_whole(directory / "resolved.yaml", resolved.model_copy(update={"plugins": copies}).to_yaml())
    sealed = ["resolved.yaml", *(name for name in copies if name.endswith(".py"))]
    files = {name: sha256(directory / name) for name in sealed}
    facts = {"format": FORMAT, "opd": __version__, "files": files, "inputs": inputs}
    if versions := plugin_versions(copies):
        facts["packages"] = versions
    write_sealed(directory / SEALS, facts)
    sync(directory.parent)
