"""What a stage that only scores leaves behind, so that others train from it without the teachers: `teachers/STAGE.json`.

Scores themselves are signals in the store. This file, sealed, says whose they are: every teacher's settings, view and weights hash,
the tokenizer, and the stop ids that count as one event. Heads, which turn hidden states into distributions, lie beside it as
safetensors, each once, under the hash of its content. No torch here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from opd.errors import DataError
from opd.files import read_sealed, write_sealed
from opd.types import Rendered, TeacherLike

if TYPE_CHECKING:
    from opd.teachers.kinds import TeacherKind

FOLDER = "teachers"  # of a run directory
FORMAT = 1
HEADS = "heads"


def text_key(text: Rendered) -> str:
    """Of what a teacher read: exact ids, and which of them it scored."""
    digest = hashlib.blake2b(np.ascontiguousarray(text.ids, dtype="<i4").tobytes(), digest_size=16)
    digest.update(np.asarray(text.spans, dtype="<i8").tobytes())
    return digest.hexdigest()


def scored_by(kind: TeacherKind, teacher: TeacherLike, weights: Mapping[str, str]) -> dict[str, Any]:
    """Whose scores they are. `weights`: model -> hash."""
    settings = kind.model_dump(mode="json")
    about = {"role": kind.role, "kind": settings, "weights": dict(weights), "context": teacher.context}
    return {**about, "head": None, "signals": []}


@dataclass
class ScoredStage:
    """The facts of one stage. `teachers`: name -> role, kind (its settings), weights (model -> hash), context, head."""

    path: Path
    tokenizer: str
    stop_ids: tuple[int, ...]
    size: int
    teachers: dict[str, dict[str, Any]]

    @classmethod
    def read(cls, directory: Path, stage: str) -> ScoredStage:
        path = directory / FOLDER / f"{stage}.json"
        if not path.is_file():
            raise DataError(
                f"{directory}: stage {stage!r} kept no scores for others to train from. Score its rollouts: a stage with "
                f'`train: {{learn: false}}` and `prompts: [{{source: "run:{directory}", stage: {stage}}}]`.'
            )
        facts = read_sealed(path)
        return cls(path, facts["tokenizer"], tuple(facts["stop_ids"]), facts["size"], facts["teachers"])

    def begin(self) -> None:
        """A stage that is taken up again keeps what it has."""
        if self.path.is_file():
            before = read_sealed(self.path)["teachers"]
            for name, facts in self.teachers.items():
                facts |= {key: before[name][key] for key in ("head", "signals")}
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(exist_ok=True)
        facts = {"format": FORMAT, "tokenizer": self.tokenizer, "stop_ids": list(self.stop_ids), "size": self.size}
        write_sealed(self.path, {**facts, "teachers": self.teachers})

    def teacher(self, wanted: str | None, name: str) -> tuple[str, Mapping[str, Any]]:
        """The teacher that is meant: the one named, or the only one."""
        known = wanted or (name if name in self.teachers else next(iter(self.teachers), ""))
        if known not in self.teachers or (wanted is None and name not in self.teachers and len(self.teachers) > 1):
            raise DataError(
                f"{self.path} has scores of {', '.join(self.teachers)}. Say whose are meant: `teacher: NAME`."
            )
        return known, self.teachers[known]

    def head_file(self, head: Mapping[str, Any]) -> Path:
        return self.path.parent / HEADS / f"{head['sha256']}.safetensors"
