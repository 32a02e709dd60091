"""What `opd.run` was given in memory.

Prompts become files in the run's own directory, which the run reads as it reads any other. `resolved.yaml` names them relative to
itself, so that a run goes on wherever its directory lies. Rewards are Python callables, which no file can hold: it names them, and
they are given again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.errors import RecipeError, RunDirectoryError
from opd.files import write_whole

if TYPE_CHECKING:
    from opd.config import Recipe
    from opd.rewards.callables import GivenRewards

FOLDER = "inputs"  # of a run directory


@dataclass(frozen=True)
class GivenPrompts:
    """Text by file name, and the recipe's `prompts` that read them."""

    files: Mapping[str, str]
    sources: list[dict[str, Any]]

    @classmethod
    def of(cls, prompts: Any) -> GivenPrompts:
        from opd.config.names import folded, name_of_file
        from opd.data.memory import by_domain

        files: dict[str, str] = {}
        sources = []
        for domain, text in by_domain(prompts):
            stem = "prompts" if domain is None else name_of_file(domain)
            taken = [folded(name) for name in files]
            number = next(n for n in range(1, len(files) + 2) if folded(_numbered(stem, n)) not in taken)
            name = _numbered(stem, number)
            files[name] = text
            sources.append({"source": f"{FOLDER}/{name}", **({} if domain is None else {"domain": domain})})
        return cls(files, sources)

    def inside(self, recipe: Recipe, directory: Path) -> Recipe:
        """The recipe as it reads the files in its run directory."""
        places = {f"{FOLDER}/{name}": os.path.abspath(directory / FOLDER / name) for name in self.files}

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
                f"prompts= is read by no stage: {', '.join(stage.name for stage in recipe.stages)} have prompts of their own. "
                "Take them out of the recipe, or do not give any."
            )

    def write(self, directory: Path) -> None:
        (directory / FOLDER).mkdir(exist_ok=True)
        for name, text in self.files.items():
            write_whole(directory / FOLDER / name, text)

    def withdraw(self, directory: Path) -> None:
        for name in self.files:
            (directory / FOLDER / name).unlink(missing_ok=True)
        if (directory / FOLDER).is_dir() and not os.listdir(directory / FOLDER):
            (directory / FOLDER).rmdir()

    def require_same(self, directory: Path) -> None:
        """A run goes on with the rows it began with."""
        for name, text in self.files.items():
            path = directory / FOLDER / name
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                raise RunDirectoryError(
                    f"{path} holds other prompts than those given now. To continue with them: opd.resume({str(directory)!r}). "
                    "To use these, choose another directory."
                )


def with_rewards(recipe: Recipe, given: GivenRewards | None) -> Recipe:
    """The recipe with these rewards in every stage. Refuses callables that are named and not given."""
    from opd.rewards.callables import callables, with_callables

    if given is not None:
        stages = [stage.model_copy(update={"rewards": with_callables(stage.rewards, given)}) for stage in recipe.stages]
        recipe = recipe.model_copy(update={"stages": stages})
    for stage in recipe.stages:
        for reward in callables(stage.rewards):
            reward.require(stage.rewards.sandbox)
    return recipe


def with_rewards_again(recipe: Recipe, given: GivenRewards | None, directory: Path) -> Recipe:
    """The recipe of a run that goes on, with the callables that it was begun with."""
    from opd.rewards.callables import callables

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
