"""Start runs, and resume interrupted ones.

run = opd.run("quickstart", overrides=["train.steps=20"])
run = opd.resume("runs/quickstart")
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from opd.common.errors import Preempted, RunDirectoryError, Stopped
from opd.common.files import SEALS, disk_errors, read_sealed, sha256
from opd.common.process_identity import NAME
from opd.common.text import plain
from opd.engines import prefork
from opd.plugins import plugin_errors, sealed_files
from opd.plugins import versions as plugin_versions
from opd.runner.directory import CallbackRaised, Hooks, Run
from opd.runner.lock import ATTEMPTS, DirectoryRemoved, RunLock, claim, make
from opd.runner.run_files import (
    GivenPrompts,
    is_early,
    recover_resolved,
    with_rewards,
    with_rewards_again,
    withdraw,
    write_recipe,
)

if TYPE_CHECKING:
    from rich.console import Console

    from opd.loop.ranks import Ranks
    from opd.recipe import Recipe
    from opd.recipe.graph import ChosenStages
    from opd.rewards.custom import GivenRewards
    from opd.runner.directory import OnCheckpoint, OnRollouts, OnStep
    from opd.runner.pipeline import Pipeline


RUNS = Path("runs")
LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # set by torchrun and other launchers
Mode = Literal["prefill", "exact"]


def run(
    recipe: str | Path | Mapping[str, Any] | Recipe,
    *,
    prompts: Any = None,
    rewards: GivenRewards | None = None,
    overrides: Iterable[str] = (),
    out: str | Path | None = None,
    resume: bool = False,
    only: str | None = None,
    start: str | None = None,
    until: str | None = None,
    reuse: Iterable[str | Path] = (),
    on_step: OnStep | None = None,
    on_rollouts: OnRollouts | None = None,
    on_checkpoint: OnCheckpoint | None = None,
    quiet: bool = True,
    console: Console | None = None,
    join: Callable[[], AbstractContextManager[Ranks]] | None = None,
) -> Run:
    """Carry out a recipe (file, shipped name, mapping or `Recipe`) and return the run.

    If the run directory is in use, the run goes into `NAME-2`, `NAME-3`, … With `resume`, it always goes into `out` and continues a run
    that has begun there, so a job script can repeat the same call.
    Of a pipeline, `only` names the one stage to carry out, and `start` and `until` the first and the last. The stages that those need
    must be finished. `reuse` names runs whose finished stages are used again if settings and inputs are the same.
    `prompts` are rows in memory that replace the recipe's: a list of mappings or texts, a `datasets.Dataset`, or `{domain: rows}`.
    The run keeps a copy. `rewards` is a function that takes one sample and returns a number, or None for no reward; or
    `{domain: function}`. It runs in forks of this process, and `opd.resume` needs it again.

    Callbacks take the live run and one more argument: `on_step` the metrics of a finished step, `on_rollouts` its rewarded rollouts
    before they are trained on, `on_checkpoint` the directory of a durable checkpoint. In a callback, `run.stop()` ends the run as
    Ctrl-C would, and `opd.run` returns it. Exceptions of callbacks are raised here, and the run can be resumed.
    Ctrl-C raises `opd.common.errors.Stopped` after a checkpoint has been saved; SIGTERM raises `opd.common.errors.Preempted`.
    `join`: how this process joins the others of the run; by default, those that torchrun or another launcher started.
    """
    from rich.console import Console

    from opd.recipe import load_recipe, recipe_text
    from opd.recipe.graph import ChosenStages
    from opd.recipe.paths import check_output

    hooks, overrides = Hooks(on_step, on_rollouts, on_checkpoint), tuple(overrides)
    with (join or joined)() as ranks, prefork.none_left():
        if not ranks.leads:
            return _follow(ranks, rewards)
        given = None if prompts is None else GivenPrompts.of(prompts)
        loaded = with_rewards(load_recipe(recipe, overrides, prompts=None if given is None else given.sources), rewards)
        if given is not None:
            given.require_used(loaded)
        selection, earlier = ChosenStages(only, start, until), [Path(path) for path in reuse]
        selection.require(loaded, elsewhere=resume or bool(earlier))
        wanted, shown = check_output(RUNS / loaded.name if out is None else out), console or Console()
        text, how = recipe_text(recipe, overrides), (hooks, quiet, shown, ranks, selection)
        with _directory(wanted, resume, None if quiet else shown) as (lock, made):
            if (lock.directory / SEALS).exists():
                require_same_recipe(lock.directory, loaded, given)
                _continue_run(lock, None, rewards, *how)
            else:
                _start(lock, made, text, loaded, given, *how, earlier)
        return Run(lock.directory)


@contextmanager
def _directory(wanted: Path, resume: bool, console: Console | None) -> Iterator[tuple[RunLock, bool]]:
    """Lock a run directory; gives the lock and whether it is new. Prints the path at the end, and at the start if the name differs."""
    lock, made = _claim_or_return(wanted) if resume else claim(wanted)

    def say(line: str) -> None:
        if console is not None:
            console.print(plain(line), highlight=False, markup=False, emoji=False, soft_wrap=True)

    taken = f"{wanted} is taken" if lock.directory != wanted else ""
    if taken:
        say(f"{taken}, so this run goes into {lock.directory}. To continue the run there: opd resume {wanted}")
    try:
        yield lock, made
    finally:
        lock.release()
        if lock.directory.is_dir():
            say(f"run directory: {lock.directory}" + (f" ({taken})" if taken else ""))


def _start(
    lock: RunLock,
    made: bool,
    text: str,
    recipe: Recipe,
    given: GivenPrompts | None,
    hooks: Hooks,
    quiet: bool,
    console: Console,
    ranks: Ranks,
    selection: ChosenStages,
    earlier: list[Path],
) -> None:
    """Record what will be carried out, and do it. A start that fails before the first step leaves no files."""
    began, found = False, set(os.listdir(lock.directory)) - {NAME}
    try:
        from opd.runner.inputs import inputs_of, require_merges
        from opd.runner.results import require_selections

        if not (earlier or selection.runs_named):  # otherwise the first stage may use other runs' stages
            prefork.start_interpreters(*recipe.stages[0].sampler_processes)
        placed = recipe
        if given is not None:
            placed = given.inside(recipe, lock.directory)
            with disk_errors(lock.directory, lambda: "start again."):
                given.write(lock.directory)

        def say(line: str) -> None:
            None if quiet else console.print(line, highlight=False)

        with plugin_errors():
            require_selections(placed)
            require_merges(placed)
            inputs = inputs_of(placed.stages, say, lock.directory)
        with disk_errors(lock.directory, lambda: "start again."):
            write_recipe(lock.directory, text, recipe, inputs)
            taken = []
            if earlier:
                from opd.runner.reuse import reuse_stages

                without = selection.names(placed) if selection.runs_named else []
                taken = reuse_stages(placed, inputs, lock.directory, earlier, without, say)
        from opd.runner.pipeline import Pipeline

        _call_others(ranks, lock.directory, bool(taken), selection=selection)
        pipeline = Pipeline(placed, lock, inputs, console, quiet, hooks, ranks, selection)
        try:
            _carry_out(pipeline, bool(taken))
        finally:
            began = pipeline.began
    except Stopped:
        raise
    except Exception:
        if not began:
            if given is not None:
                given.withdraw(lock.directory)
            withdraw(lock.directory, made, found)
        raise


def resume(
    directory: str | Path,
    *,
    overrides: Iterable[str] = (),
    mode: Mode | None = None,
    rewards: GivenRewards | None = None,
    only: str | None = None,
    start: str | None = None,
    until: str | None = None,
    on_step: OnStep | None = None,
    on_rollouts: OnRollouts | None = None,
    on_checkpoint: OnCheckpoint | None = None,
    quiet: bool = True,
    console: Console | None = None,
) -> Run:
    """Resume a run that was killed, stopped, preempted or ran out of disk, and return it. A finished run is returned unchanged. If all the
    stages that `only` or `start` name are finished, the call is rejected.

    `overrides` change the run from its current step on, permanently: `["train.steps=400"]` continues a finished run. Settings that the
    steps so far depend on cannot change: student, teachers, prompts, objective, rollouts, seed. The learning-rate schedule is
    computed for the new number of steps.
    `mode` overrides the recipe's `checkpoint.resume` for unfinished rollouts. Callbacks are those of `run`; the run does not
    remember them. `rewards`: the Python callables that the run began with, if any.
    """
    from rich.console import Console

    from opd.recipe.graph import ChosenStages

    hooks, overrides = Hooks(on_step, on_rollouts, on_checkpoint), tuple(overrides)
    found = Run(directory)
    with joined() as ranks, prefork.none_left():
        if not ranks.leads:
            return _follow(ranks, rewards)
        with RunLock(found.directory) as lock:
            selection, shown = ChosenStages(only, start, until), console or Console()
            if overrides:
                _change(lock.directory, overrides, None if quiet else shown)
            if selection.runs_named:
                _require_unfinished(lock.directory, selection)
            _continue_run(lock, mode, rewards, hooks, quiet, shown, ranks, selection)
    return found


def _change(directory: Path, overrides: Iterable[str], console: Console | None) -> None:
    """Change what the run carries out from now on, and record it in the directory."""
    from opd.runner.extend import change_run, place_overrides

    def say(line: str) -> None:
        if console is not None:
            console.print(plain(line), highlight=False, markup=False, emoji=False, soft_wrap=True)

    before = verified_recipe(directory)
    placed = place_overrides(before, overrides)
    with disk_errors(directory, lambda: "resume again."):
        change_run(directory, before, verified_recipe(directory, placed), say)


def _require_unfinished(directory: Path, selection: ChosenStages) -> None:
    """Reject stages selected by name if all of them are finished: a run does nothing twice."""
    from opd.recipe.paths import RESULT
    from opd.recipe.run_changes import recipe_file

    recipe = verified_recipe(directory)
    names = selection.names(recipe)
    if all((directory / "checkpoints" / name / RESULT).is_file() for name in names):
        others = "" if recipe.plugins else f" --reuse {directory} --from {names[0]}"  # no key covers plugin code
        raise RunDirectoryError(
            f"--{'from' if selection.only is None else 'only'} {names[0]!r}: finished in {directory}: {', '.join(names)}. To run "
            f"{'it' if len(names) == 1 else 'them'} again, start a new run: opd run {recipe_file(directory)}{others}"
        )


def _continue_run(
    lock: RunLock,
    mode: Mode | None,
    rewards: GivenRewards | None,
    hooks: Hooks,
    quiet: bool,
    console: Console,
    ranks: Ranks,
    selection: ChosenStages,
) -> None:
    recipe = _recorded_recipe(lock.directory, mode, rewards)
    from opd.runner.pipeline import Pipeline

    inputs = read_sealed(lock.directory / SEALS).get("inputs")
    _call_others(ranks, lock.directory, True, mode, selection)
    _carry_out(Pipeline(recipe, lock, inputs, console, quiet, hooks, ranks, selection), resume=True)


def _recorded_recipe(directory: Path, mode: Mode | None, rewards: GivenRewards | None) -> Recipe:
    """The recipe of a run that has begun."""
    recipe = with_rewards_again(verified_recipe(directory), rewards, directory)
    if mode is None:
        return recipe
    changed = [
        stage.model_copy(update={"checkpoint": stage.checkpoint.model_copy(update={"resume": mode})})
        for stage in recipe.stages
    ]
    return recipe.model_copy(update={"stages": changed})


def launched() -> bool:
    """Whether torchrun or another launcher started this process as a rank."""
    return all(name in os.environ for name in LAUNCHED)


def joined() -> AbstractContextManager[Ranks]:
    """Either this process alone, or the launcher's ranks, of which this is one."""
    if launched():
        from opd.loop.distributed import joined_ranks

        return joined_ranks()
    from opd.loop.ranks import Ranks

    return nullcontext(Ranks())


def _call_others(
    ranks: Ranks, directory: Path, resume: bool, mode: Mode | None = None, selection: ChosenStages | None = None
) -> None:
    """Let the ranks in `_follow` begin, once everything they read is written."""
    chosen = (None, None, None) if selection is None else (selection.only, selection.start, selection.until)
    ranks.share(lambda: (str(directory), resume, mode, chosen))


def _follow(ranks: Ranks, rewards: GivenRewards | None) -> Run:
    """Run the same stages as the leader, from the files it has written. For all ranks but the leader."""
    from rich.console import Console

    from opd.recipe.graph import ChosenStages
    from opd.runner.pipeline import Pipeline

    sent: tuple[str, bool, Mode | None, tuple[str | None, ...]] = ranks.share(lambda: ("", False, None, ()))
    directory, resume, mode, selection = Path(sent[0]), sent[1], sent[2], ChosenStages(*sent[3])
    inputs = read_sealed(directory / SEALS).get("inputs")
    recipe = _recorded_recipe(directory, mode, rewards)
    pipeline = Pipeline(recipe, RunLock(directory), inputs, Console(quiet=True), True, Hooks(), ranks, selection)
    _carry_out(pipeline, resume)
    return Run(directory)


def _carry_out(pipeline: Pipeline, resume: bool = False) -> None:
    """Treat a stop requested by a callback as no error. An exception of a callback is raised unchanged, with its own traceback."""
    try:
        pipeline.run(resume=resume)
        return
    except CallbackRaised as carrier:
        raised = carrier.error
    except Stopped as stop:
        if isinstance(stop, Preempted) or not pipeline.ranks.share(lambda: pipeline.live.stopping):
            raise
        return
    raise raised  # raised here, so that no other exception becomes its context


def verified_recipe(directory: Path, overrides: Iterable[str] = (), *, begun: bool = False) -> Recipe:
    """The recipe that the run carries out, or the one it has `begun` with, after verifying that `resolved.yaml` and similar files are
    unaltered.
    """
    from opd.recipe import load_begun
    from opd.recipe.run_changes import RESOLVED, recipe_file

    if not (directory / SEALS).exists():
        raise RunDirectoryError(
            f"{directory / SEALS} is missing, so nothing shows that resolved.yaml is unchanged. Start a new run: "
            f"opd run {directory / 'resolved.yaml'}"
        )
    expected = read_sealed(directory / SEALS)
    sealed = {directory / name: digest for name, digest in expected["files"].items()}
    for path, digest in sealed.items():
        if sha256(path) != digest and not _recovered(path, directory, sealed, expected):
            keys = "" if path.suffix != ".yaml" else f". To change keys of this run: opd resume {directory} KEY=VALUE"
            raise RunDirectoryError(
                f"{path} has been altered since the run started (its sha256 does not match {SEALS}). A changed recipe is a new run: "
                f"opd run {path if path.suffix == '.yaml' else recipe_file(directory)}{keys}"
            )
    current = recipe_file(directory)
    with sealed_files(sealed):
        loaded = load_begun(directory, directory / RESOLVED if begun else current, overrides)
    recorded = expected.get("packages", {})
    for package, version in plugin_versions(loaded.plugins).items():
        if recorded.get(package) != version:
            raise RunDirectoryError(
                f"{directory} was started with {package} {recorded.get(package)}, but {version} is installed. Install the recorded version, or "
                f"start a new run: opd run {current}"
            )
    return loaded


def _recovered(path: Path, directory: Path, sealed: Mapping[Path, str], expected: Mapping[str, Any]) -> bool:
    """Rewrite a truncated recipe, if possible. Prints a message when it worked."""
    from opd.recipe.run_changes import RESOLVED
    from opd.runner.extend import recover_changed

    if path.parent != directory:  # a plugin
        return False
    with sealed_files(sealed), disk_errors(directory, lambda: f"continue: opd resume {directory}"):
        if path.name == RESOLVED:
            recovered, source = recover_resolved(directory, expected["files"]), "recipe.yaml"
        else:
            recovered, source = recover_changed(directory, path.name, expected["files"]), "the recipe before it"
    if recovered:
        from opd.common.http import to_stderr

        to_stderr(f"{path} was truncated. It was restored from {source}.")
    return recovered


def require_same_recipe(directory: Path, recipe: Recipe, given: GivenPrompts | None = None) -> None:
    """Reject a recipe that is not the one that a run was started with."""
    from opd.recipe import as_begun_in

    if given is not None:
        given.require_same(directory)
        recipe = given.inside(recipe, directory)
    current = verified_recipe(directory)
    recipe = as_begun_in(directory, recipe)
    if recipe.stages in (current.stages, verified_recipe(directory, begun=True).stages):
        return
    from opd.recipe.run_changes import recipe_file
    from opd.runner.extend import as_overrides, differences_in_words

    keys = as_overrides(current, recipe)
    change = f" To change it: {shlex.join(['opd', 'resume', str(directory), *keys])}." if keys else ""
    raise RunDirectoryError(
        f"{directory} was started with a different recipe (see {recipe_file(directory)}): {differences_in_words(current, recipe)}. "
        f"To continue that one: opd resume {directory}.{change} To run this one, choose another directory."
    )


def _claim_or_return(wanted: Path) -> tuple[RunLock, bool]:
    """Lock exactly this directory: a new one, an empty one, one whose process died at the start, or a run.

    opd locks a directory before it writes there, so files of the same names without a lock belong to the user.
    """
    lock = RunLock(wanted)
    for attempt in range(ATTEMPTS):
        made, begun = make(wanted), os.path.lexists(lock.path)
        try:
            lock.take_with_wait()
            break
        except DirectoryRemoved:  # another process made it and removed it again; or it is a dangling link
            if attempt == ATTEMPTS - 1:
                raise
    foreign = sorted(name for name in os.listdir(wanted) if not (is_early(name) if begun else name == NAME))
    if foreign and not (wanted / SEALS).exists():
        if not begun:
            lock.path.unlink()
        lock.release()
        raise RunDirectoryError(
            f"{wanted} is neither empty nor a run directory: it contains {foreign[0]!r}, but no {SEALS}. Choose another directory."
        )
    return lock, made
