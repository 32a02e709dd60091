"""What a run writes down when it begins, and how that is taken back where the beginning came to nothing."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.errors import OpdError
from opd.files import FORMAT, SEALS, partial_of, sync, write_sealed, write_whole
from opd.holder import NAME
from opd.plugins import FOLDER as PLUGINS
from opd.plugins import moved as plugin_moved
from opd.plugins import source_of as plugin_source
from opd.plugins import versions as plugin_versions
from opd.runner.given import FOLDER as INPUTS
from opd.version import this_version

if TYPE_CHECKING:
    from opd.config import Recipe

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
    """Whether a process that was killed before it wrote `run.json` may have left a file of this name."""
    return name in EARLY or partial_of(name) in {*EARLY, SEALS}


def withdraw(directory: Path, made: bool, found: set[str]) -> None:
    """Take away what a start has written that came to nothing; the lock goes last.

    What it `found` there stays, and with it the lock, which says that it is left over from a start.
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
        with suppress(OSError):  # something of another's is in it
            directory.rmdir()


def _copy_plugins(directory: Path, plugins: list[str]) -> dict[str, bytes | None]:
    """The files of plugins go into the run, which goes on with them: name in `resolved.yaml`, next to it -> the bytes.

    The bytes are those that were run when the recipe was read. None: a module of a package.
    """
    copies: dict[str, bytes | None] = {}
    for plugin in plugins:
        if plugin.endswith(".py"):
            (directory / PLUGINS).mkdir(exist_ok=True)
            name, source = f"{PLUGINS}/{Path(plugin).name}", plugin_source(plugin)
            write_whole(directory / name, source)
            plugin_moved(plugin, directory / name)
            copies[name] = source
        else:
            copies[plugin] = None
    return copies


def recover_resolved(directory: Path, files: Mapping[str, str]) -> bool:
    """Write a `resolved.yaml` that was cut off again from `recipe.yaml`, if that gives exactly the bytes that were sealed.

    A file that was edited is left as it is. The text cannot be made again if the recipe has paths relative to another folder
    than the current one, or prompts that were given in memory.
    """
    import yaml  # `import opd` stays instant

    from opd.config import load_recipe

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
        except OpdError:  # this text is not the one that the run began with
            continue
        packages = [one for one in found.plugins if not one.endswith(".py")]
        resolved = found.model_copy(update={"plugins": [*copies, *packages]}).to_yaml().encode()
        if hashlib.sha256(resolved).hexdigest() == files["resolved.yaml"] and resolved.startswith(cut):
            write_whole(directory / "resolved.yaml", resolved)
            return True
    return False


def write_recipe(directory: Path, given: str, resolved: Recipe, inputs: Mapping[str, Any]) -> None:
    """`recipe.yaml` is what the user wrote, `resolved.yaml` what is carried out. With `run.json` the run has begun."""
    from opd.config.graph import mermaid

    write_whole(directory / "recipe.yaml", given)
    write_whole(directory / "graph.mmd", mermaid(resolved))
    copies = _copy_plugins(directory, resolved.plugins)
    text = resolved.model_copy(update={"plugins": list(copies)}).to_yaml().encode()
    write_whole(directory / "resolved.yaml", text)
    sealed = {"resolved.yaml": text, **copies}
    files = {name: hashlib.sha256(content).hexdigest() for name, content in sealed.items() if content is not None}
    facts = {"format": FORMAT, "opd": this_version(), "files": files, "inputs": inputs}
    if versions := plugin_versions(list(copies)):
        facts["packages"] = versions
    write_sealed(directory / SEALS, facts)
    sync(directory.parent)
