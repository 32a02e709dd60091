"""Files that a run writes when it begins, and how they are removed if the start fails."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.common.errors import OpdError, RecipeError, RunDirectoryError
from opd.common.files import FORMAT, SEALS, partial_of, sync, this_version, write_atomic, write_sealed
from opd.common.process_identity import NAME
from opd.plugins import FOLDER as PLUGINS
from opd.plugins import moved as plugin_moved
from opd.plugins import source_of as plugin_source
from opd.plugins import versions as plugin_versions

if TYPE_CHECKING:
    from opd.recipe import Recipe
    from opd.rewards.custom import GivenRewards


# --- Prompts and rewards given to `opd.run` in memory ---
#
# Prompts become files in the run's own directory and are read like any others. `resolved.yaml` names them relative to itself, so the
# directory may move. Rewards are Python callables, which no file can hold: it names them, and resuming needs them again.


INPUTS = "inputs"  # folder in a run directory


@dataclass(frozen=True)
class GivenPrompts:
    """Text by file name, and the recipe's `prompts` that read these files."""

    files: Mapping[str, str]
    sources: list[dict[str, Any]]

    @classmethod
    def of(cls, prompts: Any) -> GivenPrompts:
        from opd.data.rows import by_domain
        from opd.recipe.paths import folded, name_of_file

        files: dict[str, str] = {}
        sources = []
        for domain, text in by_domain(prompts):
            stem = "prompts" if domain is None else name_of_file(domain)
            taken = [folded(name) for name in files]
            number = next(n for n in range(1, len(files) + 2) if folded(_numbered(stem, n)) not in taken)
            name = _numbered(stem, number)
            files[name] = text
            sources.append({"source": f"{INPUTS}/{name}", **({} if domain is None else {"domain": domain})})
        return cls(files, sources)

    def inside(self, recipe: Recipe, directory: Path) -> Recipe:
        """The recipe, reading the files in its run directory."""
        places = {f"{INPUTS}/{name}": os.path.abspath(directory / INPUTS / name) for name in self.files}

        def placed(source: Any) -> Any:
            return source.model_copy(update={"source": places.get(source.source, source.source)})

        stages = [
            stage.model_copy(update={"prompts": [placed(source) for source in stage.prompts]})
            for stage in recipe.stages
        ]
        return recipe.model_copy(update={"stages": stages})

    def require_used(self, recipe: Recipe) -> None:
        names = {source["source"] for source in self.sources}
        read = {source.source for stage in recipe.stages for source in stage.prompts}
        if not names & read:
            raise RecipeError(
                f"prompts= is not used: {', '.join(stage.name for stage in recipe.stages)} have their own prompts. "
                "Remove those from the recipe, or do not pass prompts=."
            )

    def write(self, directory: Path) -> None:
        (directory / INPUTS).mkdir(exist_ok=True)
        for name, text in self.files.items():
            write_atomic(directory / INPUTS / name, text)

    def withdraw(self, directory: Path) -> None:
        for name in self.files:
            (directory / INPUTS / name).unlink(missing_ok=True)
        if (directory / INPUTS).is_dir() and not os.listdir(directory / INPUTS):
            (directory / INPUTS).rmdir()

    def require_same(self, directory: Path) -> None:
        """Check that a resumed run gets the rows it began with."""
        for name, text in self.files.items():
            path = directory / INPUTS / name
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                raise RunDirectoryError(
                    f"{path} holds other prompts than those given now. To continue with them: opd.resume({str(directory)!r}). "
                    "To use these, choose another directory."
                )


def with_rewards(recipe: Recipe, given: GivenRewards | None) -> Recipe:
    """The recipe with these rewards in every stage. Rejects a recipe with named callables that are not given."""
    from opd.rewards.custom import callables, with_callables

    if given is not None:
        stages = [stage.model_copy(update={"rewards": with_callables(stage.rewards, given)}) for stage in recipe.stages]
        recipe = recipe.model_copy(update={"stages": stages})
    for stage in recipe.stages:
        for reward in callables(stage.rewards):
            reward.require(stage.rewards.sandbox)
    return recipe


def with_rewards_again(recipe: Recipe, given: GivenRewards | None, directory: Path) -> Recipe:
    """The recipe of a resumed run, with the callables that it began with."""
    from opd.rewards.custom import callables

    begun = list(dict.fromkeys(reward.label for stage in recipe.stages for reward in callables(stage.rewards)))
    if given is None and begun:
        raise RunDirectoryError(
            f"{directory} was begun with rewards that no file can hold: {', '.join(begun)}. Give them again, from Python: "
            f"opd.resume({str(directory)!r}, rewards=…)."
        )
    again = with_rewards(recipe, given)
    if again.stages != recipe.stages:
        found = list(dict.fromkeys(reward.label for stage in again.stages for reward in callables(stage.rewards)))
        raise RunDirectoryError(
            f"{directory} was begun with {', '.join(begun) or 'the rewards of its recipe'}, and not with {', '.join(found)}. "
            "Give the rewards that it was begun with, under the same names and domains, or start a new run."
        )
    return again


def _numbered(stem: str, number: int) -> str:
    return f"{stem}.jsonl" if number == 1 else f"{stem}-{number}.jsonl"


EARLY = {
    NAME,
    INPUTS,
    PLUGINS,
    "recipe.yaml",
    "resolved.yaml",
    "graph.mmd",
}
WRITTEN = ("rollouts", "checkpoints", "merged", "teachers", "tensorboard", "wandb", "log.txt", "summary.json", "start.json",
           "sizes.json", "metrics.jsonl", "samples.jsonl", "tokens.jsonl", "answers.jsonl", "monitors.jsonl", "report.html",
           SEALS, *sorted(EARLY - {NAME, INPUTS}), NAME)  # fmt: skip


def is_early(name: str) -> bool:
    """Whether a process killed before it wrote `run.json` may have left a file of this name."""
    return name in EARLY or partial_of(name) in {*EARLY, SEALS}


def withdraw(directory: Path, made: bool, found: set[str]) -> None:
    """Remove the files of a failed start; the lock goes last.

    Files that it `found` there stay. Then the lock stays too, as a sign of the failed start.
    """
    left = [name for name in os.listdir(directory) if partial_of(name) in WRITTEN] if directory.is_dir() else []
    for name in (*left, *WRITTEN):
        if name in found or (name == NAME and found):
            continue
        path = directory / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    if made:
        with suppress(OSError):  # it holds someone else's files
            directory.rmdir()


def _copy_plugins(directory: Path, plugins: list[str]) -> dict[str, bytes | None]:
    """Copy the files of plugins into the run, which uses the copies from now on. Returns names relative to `resolved.yaml` -> bytes.

    The bytes are those that ran when the recipe was read. None: a module of a package.
    """
    copies: dict[str, bytes | None] = {}
    for plugin in plugins:
        if plugin.endswith(".py"):
            (directory / PLUGINS).mkdir(exist_ok=True)
            name, source = f"{PLUGINS}/{Path(plugin).name}", plugin_source(plugin)
            write_atomic(directory / name, source)
            plugin_moved(plugin, directory / name)
            copies[name] = source
        else:
            copies[plugin] = None
    return copies


def recover_resolved(directory: Path, files: Mapping[str, str]) -> bool:
    """Rewrite a truncated `resolved.yaml` from `recipe.yaml`, if that gives exactly the sealed bytes.

    An edited file is left as it is. The text cannot be reproduced if the recipe has paths relative to a folder other than the current
    one, or prompts that were given in memory.
    """
    import yaml  # keeps `import opd` fast

    from opd.recipe import load_recipe

    cut = (
        (directory / "resolved.yaml").read_bytes().rstrip(b"\0")
    )  # a power failure may leave zeros in place of the rest
    began = re.match(rb"name: ([^\n]+)\n", cut)
    names = [began[1].decode("utf-8", "replace").strip("'\"")] if began else [directory.name, "run"]
    copies = [name for name in files if name.startswith(f"{PLUGINS}/")]
    try:
        text, _, comment = (directory / "recipe.yaml").read_text(encoding="utf-8").partition("\n# Overrides:\n")
        given = yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return False
    if not isinstance(given, dict):
        return False
    if copies:
        given["plugins"] = [str(directory / name) for name in copies]
    for name in names:
        try:
            found = load_recipe({"name": name, **given}, [line.removeprefix("#   ") for line in comment.splitlines()])
        except OpdError:  # the run did not begin with this text
            continue
        packages = [one for one in found.plugins if not one.endswith(".py")]
        resolved = found.model_copy(update={"plugins": [*copies, *packages]}).to_yaml().encode()
        if hashlib.sha256(resolved).hexdigest() == files["resolved.yaml"] and resolved.startswith(cut):
            write_atomic(directory / "resolved.yaml", resolved)
            return True
    return False


def write_recipe(directory: Path, given: str, resolved: Recipe, inputs: Mapping[str, Any]) -> None:
    """`recipe.yaml` is what the user wrote, `resolved.yaml` what is carried out. The run has begun once `run.json` exists."""
    from opd.recipe.graph import mermaid

    write_atomic(directory / "recipe.yaml", given)
    write_atomic(directory / "graph.mmd", mermaid(resolved))
    copies = _copy_plugins(directory, resolved.plugins)
    text = resolved.model_copy(update={"plugins": list(copies)}).to_yaml().encode()
    write_atomic(directory / "resolved.yaml", text)
    sealed = {"resolved.yaml": text, **copies}
    files = {name: hashlib.sha256(content).hexdigest() for name, content in sealed.items() if content is not None}
    facts = {"format": FORMAT, "opd": this_version(), "files": files, "inputs": inputs}
    if versions := plugin_versions(list(copies)):
        facts["packages"] = versions
    write_sealed(directory / SEALS, facts)
    sync(directory.parent)
