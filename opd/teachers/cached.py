"""A cached teacher: its signals come from an earlier run or stage, and its model is not loaded. No torch here.

The key of a signal is its teacher (settings and weights hash), the text (view, exact ids, spans) and the vocabulary. A mismatch
is an error that names the part, never a silent cache miss.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field, field_validator, model_validator

from opd.common.errors import DataError, RecipeError
from opd.common.files import fresh_directory, read_sealed, sync, write_sealed
from opd.records import Rendered, Rollout, Signal, SignalKind, SignalNeed, TeacherLike, WeightsRef
from opd.registry import Address, Word
from opd.rollouts.replay import EarlierRun
from opd.teachers.kinds import TeacherInputs, TeacherKind
from opd.teachers.views import response_after

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from opd.common.context import RunContext
    from opd.divergences import Projection
    from opd.models.tokenizers import RemoteVocabulary

    pass


STAGE = "stage:"


class CachedTeacher(TeacherKind):
    """Reads the scores that a teacher gave in a stage with `train: {learn: false}`."""

    name = "cached"
    offers = frozenset({"logprobs_at", "hidden"})
    scores_any = False

    run: Address = Field(description="of cached: the run directory with the scores, or stage:NAME")
    stage: Word | None = Field(None, description="of cached: the stage that scored; default: the run's only one")
    teacher: Word | None = Field(
        None, description="of cached: its name in that stage; default: the same, or the only one"
    )
    model: Address | None = Field(
        None, description="of cached: the model that must have given the scores; its weights are compared"
    )
    revision: Word | None = None

    @field_validator("model")
    @classmethod
    def _is_no_stage(cls, value: str | None) -> str | None:
        if value is not None and value.startswith(STAGE):
            raise ValueError("the weights of a stage cannot be compared here: leave `model` out")
        return value

    @model_validator(mode="after")
    def _of_a_model(self) -> CachedTeacher:
        if self.revision is not None and self.model is None:
            raise ValueError("`revision` is that of `model`, whose weights are compared: set `model`, or drop it")
        return self

    def earlier(self) -> Sequence[str]:
        return (self.run,)

    def inside(self, directory: Path) -> TeacherKind:
        if not self.run.startswith(STAGE):
            return self
        return self.model_copy(update={"run": str(directory), "stage": self.run.removeprefix(STAGE)})

    @property
    def title(self) -> str:
        return f"scores kept in {self.run}"

    @cached_property
    def scored(self) -> ScoredStage:
        from opd.rollouts.replay import EarlierRun

        return ScoredStage.read(Path(self.run), EarlierRun(Path(self.run), self.stage).stage)

    def files(self) -> list[Path]:
        if self.run.startswith(STAGE):
            return []
        heads = [facts["head"] for facts in self.scored.teachers.values() if facts["head"] is not None]
        return [self.scored.path, *(self.scored.head_file(head) for head in heads)]

    def vocabulary(self, context: RunContext) -> RemoteVocabulary | None:
        from opd.models.tokenizers import RemoteVocabulary

        return RemoteVocabulary(f"{self.name} in {self.run}", self.scored.stop_ids, self.scored.size)

    def require(self, name: str, tokenizer: Any, signals: Collection[SignalKind]) -> None:
        from opd.models.load import weights_hash
        from opd.models.tokenizers import fingerprint

        if self.run.startswith(STAGE):
            return  # only planned: that stage has not scored yet
        scored = self.scored
        known, facts = scored.teacher(self.teacher, name)
        if (now := fingerprint(tokenizer)) != scored.tokenizer:
            raise self.stale(name, "the tokenizer", scored.tokenizer, now)
        view = self.view.model_dump(mode="json")
        if facts["kind"]["view"] != view:
            raise self.stale(name, "the view", facts["kind"]["view"], view)
        if self.model is not None and (now := weights_hash(self.model, self.revision)) not in facts["weights"].values():
            there = ", ".join(f"{model} ({found[:12]}…)" for model, found in facts["weights"].items()) or "no model"
            raise self.stale(name, "the weights", there, f"{self.model} ({now[:12]}…)")
        missing = [kind for kind in signals if kind not in facts["signals"]]
        if missing:
            raise DataError(
                f"teachers.{name}: {missing[0]} is needed, and teacher {known!r} stored {', '.join(facts['signals']) or 'nothing'} "
                f"in {self.run}. Score with the objective that you train with, or use another form of loss."
            )

    def stale(self, name: str, what: str, then: Any, now: Any) -> DataError:
        return DataError(
            f"teachers.{name}: the scores in {self.run} are stale: {what} differs: {then} when they were made, {now} now. "
            "Score again, or restore the earlier one."
        )

    def open(self, name: str, supplies: TeacherInputs) -> TeacherLike:

        return TeacherFromCache(name, self, supplies)


# --- Reading signals from an earlier run, and writing them ---


BATCH = 256  # rollouts in memory at once


class TeacherFromCache:
    """Looks a rollout up by its exact token ids; its name in this run does not matter."""

    version = 0  # its signals never change

    def __init__(self, name: str, kind: CachedTeacher, supplies: TeacherInputs) -> None:
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
        self._ids: dict[bytes, list[str]] = {}  # prompt and response -> rollouts (a group may have duplicates)
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
        seen = seen if seen is not None else [response_after(rollout.prompt_ids, rollout) for rollout in rollouts]
        names = [self._find(rollout) for rollout in rollouts]
        found = self._run.store.signals(list(dict.fromkeys(equal[-1] for equal in names)), self._role, need.kind)
        answers = []
        for rollout, text, (*others, last) in zip(rollouts, seen, names, strict=True):
            signal = found.get(last)
            if others and not self._fits(signal, text):  # a view may show different texts for equal answers
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
        import torch

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
        assert self._head is not None  # hidden states are only kept together with a head
        return replace(self._head, hidden=hidden.to(self._head.weight.dtype))

    def observe(self, step: int, weights: WeightsRef) -> None:
        """Does nothing: it never changes."""

    def state(self) -> Mapping[str, Any]:
        return {}

    def restore(self, version: int, tensors: Mapping[str, Any]) -> None:
        """Nothing to restore."""


def _digest(*ids: np.ndarray) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in ids:
        digest.update(np.int64(part.size).tobytes() + np.ascontiguousarray(part, dtype="<i4").tobytes())
    return digest.digest()


# --- Writing scores ---


def keep_scores(scored: ScoredStage, teacher: TeacherLike, kind: SignalKind, signals: Sequence[Signal]) -> None:
    """Records which signals a teacher gives, and saves its head with the first hidden states."""
    facts = scored.teachers[teacher.name]
    if not signals or kind in facts["signals"]:
        return
    if kind == "hidden":
        facts["head"] = _write_head(scored, teacher.name, teacher.project(signals[0].values[:1]))
    facts["signals"] = [*facts["signals"], kind]
    scored.write()


def _write_head(scored: ScoredStage, name: str, head: Any) -> dict[str, Any]:
    from safetensors.torch import save_file

    from opd.divergences import Projection

    if not isinstance(head, Projection):
        raise RecipeError(
            f"teachers.{name}: its distribution does not come from a single head, so its hidden states cannot be stored. Use a form of "
            "loss that needs log-probs, such as policy_gradient."
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
    from safetensors.torch import load_file

    from opd.divergences import Projection

    path = scored.head_file(facts)
    if not path.is_file():
        raise DataError(
            f"{path} is missing: the head that hidden states in this run belong to. Restore it, or score again."
        )
    tensors = load_file(path)
    if _content(tensors) != facts["sha256"]:
        raise DataError(f"{path} was altered: its content does not match its name. Restore it, or score again.")
    weight, bias = tensors["weight"].to(device), tensors.get("bias")
    empty = weight.new_zeros(0, weight.shape[1])
    bias = None if bias is None else bias.to(device)
    return Projection(empty, weight, bias, facts["scale"], facts["softcap"], facts["size"])


def _content(tensors: Mapping[str, Tensor]) -> str:
    import torch

    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.view(torch.uint8).numpy().data)
    return digest.hexdigest()


# --- `teachers/STAGE.json`: facts of a stage that only scores, so that other stages can train without the teachers ---
# Scores are signals in the store. This sealed file holds each teacher's settings, view and weights hash, the tokenizer, and the
# stop ids that form one event. Heads are stored next to it as safetensors, once each, under the hash of their content.


FOLDER = "teachers"  # of a run directory
FORMAT = 1
HEADS = "heads"


def text_key(text: Rendered) -> str:
    """Hash of what a teacher read: exact ids, and which of them it scored."""
    digest = hashlib.blake2b(np.ascontiguousarray(text.ids, dtype="<i4").tobytes(), digest_size=16)
    digest.update(np.asarray(text.spans, dtype="<i8").tobytes())
    digest.update(np.asarray(text.breaks, dtype="<i8").tobytes())
    return digest.hexdigest()


def scored_by(kind: TeacherKind, teacher: TeacherLike, weights: Mapping[str, str]) -> dict[str, Any]:
    """Identifies the teacher of the scores. `weights`: model -> hash."""
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
        """A resumed stage keeps its entries."""
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
        """The wanted teacher: the one named, or the only one."""
        known = wanted or (name if name in self.teachers else next(iter(self.teachers), ""))
        if known not in self.teachers or (wanted is None and name not in self.teachers and len(self.teachers) > 1):
            raise DataError(
                f"{self.path} has scores of {', '.join(self.teachers)}. Say whose are meant: `teacher: NAME`."
            )
        return known, self.teachers[known]

    def head_file(self, head: Mapping[str, Any]) -> Path:
        return self.path.parent / HEADS / f"{head['sha256']}.safetensors"
