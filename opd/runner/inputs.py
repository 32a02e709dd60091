"""What a run reads from outside its directory, by content: prompts, models, reward functions.

The checksums are sealed in `run.json` when the run begins. They are checked whenever a stage begins or resumes, because a run must not
mix two sets of prompts or teachers. Hub models are loaded by the commit found at the start.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from pathlib import Path

from opd.common.errors import DataError, ModelError, RunDirectoryError
from opd.common.files import content_hash, fresh_directory, sync
from opd.models.load import Location, hub_commit, locate, model_files, require_hub
from opd.models.merging import same_directory
from opd.models.modules import WEIGHTS
from opd.recipe import STAGE_PREFIX, Recipe, Stage
from opd.recipe.paths import RESULT
from opd.recipe.run_changes import recipe_file
from opd.recipe.stage import MERGED
from opd.rewards.reward import RewardKind

HUB = "hub:"
DECIDES = "demonstrations: reward"  # the record's name for the reward of `rollout.demonstrations.by`
THREADS = 8  # threads that read and hash: a dozen large teachers would take minutes on one
LONG, EVERY = 1 << 30, 5.0  # bytes from which reading is announced; seconds between progress messages
Inputs = dict[str, dict[str, str]]  # name of the input -> {"for": …, "sha256" | "commit" | "fingerprint": …}


def inputs_of(
    stages: Sequence[Stage], say: Callable[[str], None], directory: Path | None = None, *, hub: bool = True
) -> dict[str, Inputs]:
    """The current inputs of every stage. `hub`: whether to include the commits of hub models.

    Inputs in the run's own directory are named relative to it, because the directory may move.
    """
    files = {
        stage.name: [(path, _inside(name, directory), what) for path, name, what in _files(stage)] for stage in stages
    }
    reader = _Reader({path for found in files.values() for path, *_ in found}, say)
    found: dict[str, Inputs] = {}
    for stage in stages:
        here = found[stage.name] = {
            name: {"for": what, "sha256": reader.hash(path)} for path, name, what in files[stage.name]
        }
        for reward, what in _rewards(stage):  # workers run exactly the bytes that are hashed here
            if (file := reward.file()) is not None and (code := reward.read_code()) is not None:
                name = _inside(str(file.absolute()), directory)
                here[name] = {"for": what, "sha256": hashlib.sha256(code).hexdigest()}
        for model, revision, what in _models(stage):
            if hub and (location := locate(model, revision)).on_hub:
                require_hub(model, location)
                here[_hub_name(location)] = {"for": what, "commit": hub_commit(model, location)}
        asked = (*stage.prompts, *stage.eval.further)
        for number, source in enumerate(asked):
            if (fingerprint := source.fingerprint()) is not None:
                again = source.source in [later.source for later in asked[number + 1 :]]  # with another split, say
                name = f"{source.source}#{number + 1}" if again else source.source
                here[name] = {"for": "prompts", "fingerprint": fingerprint}
    return found


def check_inputs(stage: str, recorded: Inputs, now: Inputs, directory: Path, plugins: Sequence[str] = ()) -> None:
    """Reject a stage if its inputs have changed since the run began. With plugins, finished stages cannot be reused by another run."""
    recorded = {_inside(name, directory): facts for name, facts in recorded.items()}
    changed = [
        f"{name} ({facts['for']}) {_difference(facts, now.get(name))}"
        for name, facts in recorded.items()
        if now.get(name) != facts and not name.startswith(HUB)  # hub models are loaded by their commit
    ]
    changed += [
        f"{name} ({facts['for']}) did not exist then"
        for name, facts in now.items()
        if name not in recorded and not _recorded_later(facts)
    ]
    if changed:
        reuse = f" --reuse {directory}" if not plugins and any(directory.glob(f"checkpoints/*/{RESULT}")) else ""
        raise RunDirectoryError(
            f"stage {stage!r}: these inputs have changed since {directory} was started: {'; '.join(changed[:5])}"
            f"{f'; and {len(changed) - 5} more' if len(changed) > 5 else ''}. Restore them, or start a new run: "
            f"opd run {recipe_file(directory)}{reuse}"
        )


def revision_begun_with(recorded: Inputs, model: str, revision: str | None) -> str | None:
    """The revision to load a model at. For a hub model, this is the commit that the run began with."""
    if model.startswith((STAGE_PREFIX, MERGED)):
        return revision
    location = locate(model, revision)
    found = recorded.get(_hub_name(location)) or recorded.get(HUB + location.path)
    return found["commit"] if found else revision


def revision_read(
    recipe: Recipe,
    outputs: Mapping[str, Path],
    inputs: Mapping[str, Inputs],
    stage: str,
    model: str,
    revision: str | None,
) -> str | None:
    """The revision of a model that a stage reads. `outputs`: of earlier stages. A stage that was passed over hands on the model that it would
    have started from, at that model's revision.
    """
    starts = {other.name: other.student for other in recipe.stages}
    while model.startswith(STAGE_PREFIX):
        stage = model.removeprefix(STAGE_PREFIX)
        if outputs[stage].parent.parts[-2:] == ("checkpoints", stage):  # the stage was trained
            return revision
        model, revision = starts[stage].model, starts[stage].revision
    return revision_begun_with(inputs.get(stage, {}), model, revision)


def _recorded_later(facts: Mapping[str, str]) -> bool:
    """Whether earlier runs did not record this input: fingerprints of some datasets, and the reward of demonstrations."""
    return "fingerprint" in facts or facts["for"].startswith(DECIDES)


def _difference(then: Mapping[str, str], now: Mapping[str, str] | None) -> str:
    if now is None:
        return "is missing"
    kind = next(key for key in then if key != "for")
    return f"has changed: {kind} {then[kind][:12]}… then, {now.get(kind, 'none')[:12]}… now"


# --- The inputs of a stage ---


def _inside(name: str, directory: Path | None) -> str:
    """The name relative to the directory, however it is spelled: `../run` and `/home/me/run` may be the same."""
    if directory is None or not os.path.isabs(name):
        return name
    inside = os.path.abspath(name).removeprefix(f"{os.path.abspath(directory)}{os.sep}")
    return name if os.path.isabs(inside) else inside


def _files(stage: Stage) -> Iterator[tuple[Path, str, str]]:
    """(file, its name in the record, what it is for)."""
    for source in (*stage.prompts, *stage.eval.further):
        for path in source.files():
            if not path.is_file():
                raise DataError(f"{source.source}: {path} is not a file. Correct the source's address.")
            yield path, str(path.absolute()), "prompts"
    for name, kind in stage.teachers.items():
        yield from ((path, str(path.absolute()), f"teacher {name}") for path in kind.files())
    for model, _, what in _models(stage):
        yield from ((path, name, what) for path, name in model_files(model))
    for name, module in stage.modules.items():
        if module.weights is not None and module.source is None:
            path = Path(module.weights) / WEIGHTS
            if not path.is_file():
                raise ModelError(
                    f"modules.{name}.weights: {path} is not a file. Name a module's folder in a checkpoint."
                )
            yield path, str(path.absolute()), f"module {name}"
    for reward, what in _rewards(stage):
        if (file := reward.file()) is not None:
            yield file, str(file.absolute()), what


def _rewards(stage: Stage) -> Iterator[tuple[RewardKind, str]]:
    """(reward, what it is for)."""
    found = [(reward, "reward") for rewards in stage.rewards.domains.values() for reward in rewards]
    if stage.rollout.demonstrations is not None and stage.rollout.demonstrations.by is not None:
        found.append((stage.rollout.demonstrations.by, DECIDES))
    yield from ((reward, f"{what} {reward.label.rpartition(':')[2]}") for reward, what in found)


def _models(stage: Stage) -> Iterator[tuple[str, str | None, str]]:
    """(name, revision, role) of every model that does not come from an earlier stage of the run."""
    found = [(start, stage.student.revision, "student") for start in stage.starts]
    if stage.student.merge is not None:
        found += [(path, None, "student") for path in stage.student.merge.extra_directories()]
    found += [
        (ref.model, ref.revision, f"teacher {name}") for name, kind in stage.teachers.items() for ref in kind.reads()
    ]
    found += [
        (model, revision, f"module {name}")
        for name, module in stage.modules.items()
        for model, revision in module.reads("", None)
        if model
    ]
    yield from (model for model in found if not model[0].startswith(STAGE_PREFIX))


def _hub_name(location: Location) -> str:
    """The recorded name of a hub model, which may be used at two revisions."""
    return f"{HUB}{location.path}" + (f"@{location.revision}" if location.revision else "")


def _place(path: Path) -> Hashable:
    """The location of the file's bytes. Some file systems give files no number, or several files the same one."""
    facts = path.stat()
    return (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns) if facts.st_ino else path


class _Reader:
    """Hashes files in parallel, each once, and reports progress if that takes long."""

    def __init__(self, files: Iterable[Path], say: Callable[[str], None]) -> None:
        self._files = {path: _place(path) for path in files}
        self._total = sum({place: path.stat().st_size for path, place in self._files.items()}.values())
        self._say, self._done, self._given_up = say, 0, False
        self._lock = threading.Lock()
        self._known: dict[Hashable, str] | None = None  # by location: one file may have several names

    def hash(self, path: Path) -> str:
        if self._known is None:
            self._known = self._read()
        return self._known[self._files[path]]

    def _read(self) -> dict[Hashable, str]:
        paths = {place: path for path, place in self._files.items()}
        pool = ThreadPoolExecutor(THREADS, "opd-hash")
        try:
            waiting = {place: pool.submit(content_hash, path, self._advance) for place, path in paths.items()}
            while wait(waiting.values(), EVERY).not_done:
                if self._total > LONG:
                    self._say(
                        f"checksums of models and data: {self._done / 2**30:.1f} of {self._total / 2**30:.1f} GiB"
                    )
            return {place: self._result(paths[place], found) for place, found in waiting.items()}
        finally:
            self._given_up = True  # Ctrl-C: threads stop reading large files
            pool.shutdown(cancel_futures=True)

    def _result(self, path: Path, found: Future[str]) -> str:
        try:
            return found.result()
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}.") from None

    def _advance(self, size: int) -> None:
        if self._given_up:
            raise CancelledError
        with self._lock:
            self._done += size


# --- Merged models that stages start from: each is created once and kept in the run directory ---


MERGED_FOLDER = "merged"


def merged_directory(directory: Path, stage: str) -> Path:
    return directory / MERGED_FOLDER / stage


class PlannedModels:
    """The models that stages will start from and save, before any stage has run. Existing models of the same shapes stand for them."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, str | None]] = {}  # stage:NAME, merge:NAME -> a model and its revision
        self._bases: dict[str, str | None] = {}  # stage:NAME -> the base of its adapters; None: it has none

    def resolve(self, name: str) -> str:
        return self._named(name)[0]

    def add(self, stage: Stage) -> None:
        """Add the next stage, in the order of the recipe. Rejects merges with parts that do not fit each other."""
        student, saved = stage.student, STAGE_PREFIX + stage.name
        if student.merge is not None:
            student.merge.require_planned(self._named, self._bases)
            self._known[student.model] = self._named(student.merge.reads()[0])
        self._known[saved] = self._known.get(student.model, (student.model, student.revision))
        self._bases[saved] = None if student.lora is None else self._base(student.model, student.revision)

    def _named(self, name: str) -> tuple[str, str | None]:
        return self._known.get(name, (name, None))

    def _base(self, start: str, revision: str | None) -> str:
        return start if start in self._known else same_directory(locate(start, revision).path)


def require_merges(recipe: Recipe) -> None:
    """Reject impossible merges before the first stage begins. The shapes of all parts are known."""
    if any(stage.student.merge is not None for stage in recipe.stages):
        planned = PlannedModels()
        for stage in recipe.stages:
            planned.add(stage)


def merge_start(stage: Stage, directory: Path, resolve: Callable[[str], str], recorded: Inputs) -> None:
    """Create the merged model, or use the one of an earlier process. A directory with the final name is complete."""
    where, merge = merged_directory(directory, stage.name), stage.student.merge
    if merge is None or where.is_dir():
        return

    def named(name: str) -> tuple[str, str | None]:
        return resolve(name), revision_begun_with(recorded, name, None)

    merge.require(named)
    partial = fresh_directory(where.with_name(f".{where.name}.partial"))
    merge.make(named).save(partial)
    for path in partial.rglob("*"):
        sync(path)
    partial.rename(where)
    sync(where.parent)
