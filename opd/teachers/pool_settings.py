"""How many teachers are in memory at once, and where the others wait. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, Field

from opd.settings import SETTINGS, Positive
from opd.teachers.kinds import ModelRef, TeacherKind
from opd.text import bytes_in_words


def movable(kinds: Mapping[str, TeacherKind], parts: bool = False) -> list[ModelRef]:
    """Models of frozen teachers alone, which can be anywhere while others score. `parts`: those of mixtures, too."""
    waiting = {name: set(kind.waiting()) if parts or kind.can_wait else set() for name, kind in kinds.items()}
    staying = {ref for name, kind in kinds.items() for ref in kind.reads() if ref not in waiting[name]}
    coming = (ref for name, kind in kinds.items() for ref in kind.reads() if ref in waiting[name])
    return list(
        dict.fromkeys(ref for ref in coming if ref not in staying and ref.device is None and ref.quantise is None)
    )


class TeacherPool(BaseModel):
    model_config = SETTINGS
    resident: Positive | None = Field(
        None, description="frozen teachers in memory at once; 2: one scores while the next is read; default: all"
    )
    keep: Literal["memory", "disk"] | None = Field(
        None, description="where the others wait: pinned host memory, or disk; default: memory on CUDA, disk on a CPU"
    )

    def keep_on(self, device: str) -> Literal["memory", "disk"]:
        return self.keep or ("memory" if device.startswith("cuda") else "disk")

    def paged(self, kinds: Mapping[str, TeacherKind]) -> list[ModelRef]:
        """Models that come and go; none where all have room. What another kind reads, is quantised or has a `device` stays."""
        coming = movable(kinds, parts=True)
        return coming if self.resident is not None and self.resident < len(coming) else []

    def describe(self, sizes: Sequence[int], device: str) -> str:
        """In words, of models that come and go, in bytes; empty where all are resident."""
        if not sizes:
            return ""
        least, most = bytes_in_words(min(sizes)), bytes_in_words(max(sizes))
        keep = self.keep_on(device)
        where = "on disk" if keep == "disk" else "in pinned memory" if device.startswith("cuda") else "in memory"
        idle = " WARNING: on a CPU, waiting there is being resident; use keep: disk." if where == "in memory" else ""
        return (
            f"at most {self.resident} of {len(sizes)} teachers' models resident while they score, none during updates; the others "
            f"wait {where}. A page-in is {least if least == most else f'{least} to {most}'}; {len(sizes)} of them a step, at most.{idle}"
        )

    def refuse(self, kinds: Mapping[str, TeacherKind], drawn: Iterable[str]) -> Iterable[str]:
        """`drawn`: keys of the recipe that draw tokens from teachers, or read all their weights at once."""
        if self.keep is not None and self.resident is None:
            yield f"pool.keep {self.keep} says where teachers wait, but all of them are resident. Set pool.resident."
        if self.resident is not None and not any(kind.waiting() for kind in kinds.values()):
            yield f"pool.resident {self.resident}: only frozen teachers can wait outside, and there is none. Drop it."
        paged = set(self.paged(kinds))
        names = [name for name, kind in kinds.items() if kind.role == "teacher" and paged & set(kind.reads())]
        for key in drawn:
            if names:
                yield (
                    f"{key} needs the weights of teachers.{names[0]} at any moment, and with pool.resident {self.resident} they are "
                    f"here only while it scores. Drop {key}, or pool.resident."
                )
