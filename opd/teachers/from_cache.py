"""Signals of a teacher that is not here, read from an earlier run; and what that run writes down for it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from opd.divergences import Projection
from opd.errors import DataError, RecipeError
from opd.files import fresh_directory, sync
from opd.sampling.replay import EarlierRun
from opd.teachers.cache import ScoredStage, text_key
from opd.teachers.kinds import Supplies
from opd.teachers.views import behind
from opd.types import Rendered, Rollout, Signal, SignalKind, SignalNeed, TeacherLike, WeightsRef

if TYPE_CHECKING:
    from opd.teachers.cached import CachedTeacher

BATCH = 256  # rollouts in memory at once


class TeacherFromCache:
    """Finds a rollout by its exact ids, whatever it is called here."""

    version = 0  # what it says does not change

    def __init__(self, name: str, kind: CachedTeacher, supplies: Supplies) -> None:
        self.name, self.role, self.offers, self._kind = name, kind.role, kind.offers, kind
        scored = kind.scored
        known, facts = scored.teacher(kind.teacher, name)
        self._role, self.context = facts["role"], facts["context"]
        if (set(supplies.stop_ids), supplies.student.size) != (set(scored.stop_ids), scored.size):
            then = f"{list(scored.stop_ids)} of {scored.size} ids"
            raise kind.stale(
                name, "what ends an answer", then, f"{list(supplies.stop_ids)} of {supplies.student.size} ids"
            )
        self._run, self._device = EarlierRun(Path(kind.run), kind.stage), supplies.student.device
        self._head = None if facts["head"] is None else _read_head(scored, facts["head"], self._device)
        self._known = known
        self._ids: dict[bytes, list[str]] = {}  # prompt and response -> the rollouts there: a group may repeat itself
        self._prompts: set[bytes] = set()
        for start in range(0, len(self._run.rows), BATCH):
            for rollout in self._run.store.load_rows(self._run.rows[start : start + BATCH]):
                self._ids.setdefault(_digest(rollout.prompt_ids, rollout.response_ids), []).append(rollout.id)
                self._prompts.add(_digest(rollout.prompt_ids))

    @property
    def model(self) -> Any:
        return None

    def score(
        self, rollouts: Sequence[Rollout], need: SignalNeed, seen: Sequence[Rendered] | None = None
    ) -> list[Signal]:
        seen = seen if seen is not None else [behind(rollout.prompt_ids, rollout) for rollout in rollouts]
        names = [self._find(rollout) for rollout in rollouts]
        found = self._run.store.signals(list(dict.fromkeys(equal[-1] for equal in names)), self._role, need.kind)
        answers = []
        for rollout, text, (*others, last) in zip(rollouts, seen, names, strict=True):
            signal = found.get(last)
            if others and not self._fits(signal, text):  # a view may have shown something else of an equal answer
                more = self._run.store.signals(others, self._role, need.kind).values()
                signal = next((one for one in more if self._fits(one, text)), signal)
            answers.append(self._signal(rollout, text, need.kind, signal))
        return answers

    def _fits(self, signal: Signal | None, text: Rendered) -> bool:
        return signal is not None and (signal.teacher, signal.key) == (self._known, text_key(text))

    def _find(self, rollout: Rollout) -> list[str]:
        names = self._ids.get(_digest(rollout.prompt_ids, rollout.response_ids))
        if names is None:
            part = "the response's ids" if _digest(rollout.prompt_ids) in self._prompts else "the prompt's ids"
            raise DataError(
                f"teachers.{self.name}: {self._kind.run} has no scores of rollout {rollout.id!r}: {part} are not among those that "
                f'were scored. Train on the rollouts of that run: `prompts: [{{source: "run:{self._kind.run}"}}]`.'
            )
        return names

    def _signal(self, rollout: Rollout, text: Rendered, kind: SignalKind, signal: Signal | None) -> Signal:
        if signal is None:
            raise DataError(
                f"teachers.{self.name}: {self._kind.run} has no {kind} of rollout {rollout.id!r}. Score again."
            )
        if signal.teacher != self._known:
            raise self._kind.stale(self.name, f"who scored rollout {rollout.id!r}", signal.teacher, self._known)
        if signal.key != (key := text_key(text)):
            raise self._kind.stale(
                self.name, f"what the view shows of rollout {rollout.id!r}", signal.key or "unknown", key
            )
        values = torch.from_numpy(np.asarray(signal.values)).to(self._device) if kind == "hidden" else signal.values
        return replace(signal, teacher=self.name, teacher_version=self.version, role=self.role, values=values)

    def project(self, hidden: Tensor) -> Projection:
        assert self._head is not None  # there are no hidden states without it
        return replace(self._head, hidden=hidden.to(self._head.weight.dtype))

    def observe(self, step: int, weights: WeightsRef) -> None:
        """It does not move."""

    def state(self) -> Mapping[str, Any]:
        return {}

    def restore(self, version: int, tensors: Mapping[str, Any]) -> None:
        """It is as it was."""


def _digest(*ids: np.ndarray) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in ids:
        digest.update(np.int64(part.size).tobytes() + np.ascontiguousarray(part, dtype="<i4").tobytes())
    return digest.digest()


# What a stage that only scores writes down


def keep_scores(scored: ScoredStage, teacher: TeacherLike, kind: SignalKind, signals: Sequence[Signal]) -> None:
    """Note what a teacher gives, and its head with the first hidden states."""
    facts = scored.teachers[teacher.name]
    if not signals or kind in facts["signals"]:
        return
    if kind == "hidden":
        facts["head"] = _write_head(scored, teacher.name, teacher.project(signals[0].values[:1]))
    facts["signals"] = [*facts["signals"], kind]
    scored.write()


def _write_head(scored: ScoredStage, name: str, head: Any) -> dict[str, Any]:
    if not isinstance(head, Projection):
        raise RecipeError(
            f"teachers.{name}: its distribution is not that of one head, so hidden states cannot be kept for others. Use a form of "
            "loss that asks for log-probs, such as policy_gradient."
        )
    tensors = {"weight": head.weight.detach().cpu().contiguous()}
    if head.bias is not None:
        tensors["bias"] = head.bias.detach().cpu().contiguous()
    facts = {"sha256": _content(tensors), "scale": head.scale, "softcap": head.softcap, "size": head.size}
    path = scored.head_file(facts)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        own = fresh_directory(path.with_name(f".{path.name}.partial"))
        save_file(tensors, own / path.name)
        sync(own / path.name)
        (own / path.name).replace(path)
        own.rmdir()
        sync(path.parent)
    return facts


def _read_head(scored: ScoredStage, facts: Mapping[str, Any], device: torch.device) -> Projection:
    path = scored.head_file(facts)
    if not path.is_file():
        raise DataError(
            f"{path} is missing: the head that hidden states in this run belong to. Put it back, or score again."
        )
    tensors = load_file(path)
    if _content(tensors) != facts["sha256"]:
        raise DataError(f"{path} was altered: its content is not what its name says. Put it back, or score again.")
    weight, bias = tensors["weight"].to(device), tensors.get("bias")
    empty = weight.new_zeros(0, weight.shape[1])
    bias = None if bias is None else bias.to(device)
    return Projection(empty, weight, bias, facts["scale"], facts["softcap"], facts["size"])


def _content(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.view(torch.uint8).numpy().data)
    return digest.hexdigest()
