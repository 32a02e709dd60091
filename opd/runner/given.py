"""Prompts that `opd.run` was given in memory: files in the run's own directory, which the run reads as it reads any other.

`resolved.yaml` names them relative to itself, so that a run goes on wherever its directory lies.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.errors import RunDirectoryError
from opd.files import write_whole

if TYPE_CHECKING:
    from opd.config import Recipe

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


def _numbered(stem: str, number: int) -> str:
    return f"{stem}.jsonl" if number == 1 else f"{stem}-{number}.jsonl"
