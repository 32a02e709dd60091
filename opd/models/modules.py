"""Trainable modules alongside the student: the family `module`. A kind holds its settings and creates the module.

A head reads the student's hidden states in the same forward and backward pass. An own module, such as a discriminator, makes its
own passes: it scores the answers of a batch, and learns from them before the student does. Each module has its own optimiser,
learning rate, schedule and gradient norm (`opd.loop.learner.Learner`). On several ranks, each has the full module.

    modules: {value: {kind: head, lr: 1.0e-3}}
    modules: {judge: {kind: discriminator, lr: 1.0e-6}}
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from opd.common.errors import ModelError, RecipeError
from opd.models.optimisers import AdamW, AnyOptimiser
from opd.records import Author, Rollout
from opd.registry import Choice, Count, Family, Positive, StageView, Word

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from opd.models.language_model import Pack

Start = tuple[str, str | None]  # name or directory of a model, and its revision
RevisionOf = Callable[[str, str | None], str | None]
STAGE = re.compile(r"stage:([^#]+)#([^#]+)")  # `stage:NAME#MODULE`: the weights of a module of an earlier stage
FOLDER, WEIGHTS = "modules", "weights.safetensors"  # in a checkpoint, each module has a folder


@dataclass(frozen=True)
class ModuleInputs:
    """What a module needs to know about the student."""

    width: int  # of the student's hidden states
    vocabulary: int
    device: torch.device
    dtype: torch.dtype  # of the module's weights: float32, or float64 if the student has float64
    seed: int  # from the stage's seed and the module's name, for the module's own generator of initial weights
    model: str = ""  # name or directory of the model that the student started from
    student_dtype: torch.dtype | None = None  # of the student's weights, which a model of its own may share
    teachers: Mapping[str, Any] = field(default_factory=dict)  # the stage's open teachers, by name
    head: Any = None  # (vocabulary, width) the weight of the student's output head


class Module:
    """A named trainable module. The `network` of a head maps hidden states (N, width) to (N,) or (N, K) numbers."""

    def __init__(self, name: str, network: nn.Module) -> None:
        self.name, self.network = name, network

    def __call__(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.network(hidden)
        return found

    def outer(self) -> set[str]:
        """Names of embeddings and output layers, which some optimisers update differently."""
        return set()

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.network.named_parameters())

    def state(self) -> dict[str, Tensor]:
        """Tensors to save in a checkpoint."""
        return {name: tensor.detach() for name, tensor in self.network.state_dict().items()}

    def restore(self, tensors: Mapping[str, Tensor], source: str = "the checkpoint") -> None:
        """Load the tensors from `state`, bit for bit. `source`: where they come from, for an error."""
        own = self.state()
        for name in sorted(own.keys() | tensors.keys()):
            if name not in own or name not in tensors or own[name].shape != tensors[name].shape:
                here, there = (tuple(side[name].shape) if name in side else "missing" for side in (own, tensors))
                raise ModelError(
                    f"module {self.name!r}: {name} of {source} is missing or of another shape: {there} there, and {here} here. Use "
                    "the settings and the model that it was trained with."
                )
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


class OwnModule(Module):
    """A module with its own passes. It gives each answer of a batch one score, and its loss is a function of these scores.

    The learner makes the passes: in micro-batches, on several ranks, and again with gradients where the loss has a slope.
    """

    @abstractmethod
    def scores(self, pack: Pack) -> Tensor:
        """(R,) one score per rollout of a forward pass."""
        raise NotImplementedError

    @abstractmethod
    def loss(self, scores: Tensor, rollouts: Sequence[Rollout], rewards: Mapping[str, float | None]) -> Tensor | None:
        """The loss of a whole batch, from its (B,) scores; None: there is nothing to learn. `rewards`: by rollout id."""
        raise NotImplementedError

    def measure(self, scores: Tensor, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Further metrics of a batch."""
        return {}


class ModuleKind(Choice):
    """To add your own, subclass this and define `open`. `own`: `open` returns an `OwnModule`."""

    family = "module"
    own: ClassVar[bool] = False
    reads_others: ClassVar[bool] = False  # learns from answers by others than the student, whether a term does or not
    reads_rewards: ClassVar[bool] = False  # learns from rewards, whether a term needs them or not
    projects: ClassVar[bool] = False  # maps between hidden spaces, for terms with `uses_projectors`; gives no numbers
    lr: float = Field(1e-5, gt=0, le=1e9, description="largest learning rate of the module")
    warmup: Count | None = Field(None, description="of the module, in steps; default: train.warmup")
    schedule: Literal["constant", "linear", "cosine"] | None = Field(
        None, description="of the module's learning rate; default: train.schedule"
    )
    weight_decay: float | None = Field(None, ge=0, le=1000, description="of the module; default: train.weight_decay")
    clip: float | None = Field(1.0, gt=0, description="largest gradient norm of the module; null: no clipping")
    every: Positive = Field(1, description="update it in every so many steps; gradients of the others are dropped")
    optimiser: AnyOptimiser = Field(AdamW(), description="of the module: adamw, muon, adamw8bit, or one of your own")
    weights: Word | None = Field(
        None,
        description="weights to start from: stage:NAME#MODULE, of an earlier stage, or a module's folder in a checkpoint",
    )

    @field_validator("weights")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is not None and value.startswith("stage:") and STAGE.fullmatch(value) is None:
            raise ValueError(f"{value!r} names no module of a stage: write stage:NAME#MODULE")
        return value

    @abstractmethod
    def open(self, name: str, inputs: ModuleInputs) -> Module:
        raise NotImplementedError

    @property
    def maps_to(self) -> str:
        """Role of the teacher whose hidden space it maps to; empty: none."""
        return ""

    @property
    def learns(self) -> bool:
        """Whether it is trained in this stage."""
        return True

    def size(self, width: int) -> int:
        """Number of parameters, for the plan's memory estimate; without those of a model that `reads` names."""
        return 0

    def reads(self, student: str, revision: str | None) -> list[Start]:
        """Models that it starts from, with their revisions. `student`: what the student starts from."""
        return []

    @property
    def source(self) -> tuple[str, str] | None:
        """The stage and the module that the weights come from, if they come from a stage."""
        found = None if self.weights is None else STAGE.fullmatch(self.weights)
        return None if found is None else (found[1], found[2])

    def located(self, name: str, student: Start, resolve: Callable[[str], str], revision_of: RevisionOf) -> ModuleKind:
        """The same with directories in place of addresses. `name`: of the module, for an error. `student`: what the student starts from."""
        if self.source is None:
            return self
        stage, module = self.source
        folder = Path(resolve(f"stage:{stage}")) / FOLDER / module
        if not folder.is_dir():
            raise RecipeError(
                f"modules.{name}.weights {self.weights}: stage {stage!r} has saved no module {module!r} ({folder} does not exist). It was "
                "passed over, or its checkpoint has lost files. Train that stage, or remove `weights`."
            )
        return self.model_copy(update={"weights": str(folder)})


AnyModule = Annotated[ModuleKind, Family("module")]


class ValueHead(ModuleKind):
    """One number per position: a linear layer that starts at zero."""

    name = "head"

    def open(self, name: str, inputs: ModuleInputs) -> Module:
        import torch

        class Numbers(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = torch.nn.Linear(inputs.width, 1, device="meta")
                self.linear.to_empty(device=inputs.device).to(inputs.dtype)
                torch.nn.init.zeros_(self.linear.weight)
                torch.nn.init.zeros_(self.linear.bias)

            def forward(self, hidden: Tensor) -> Tensor:
                found: Tensor = self.linear(hidden)
                return found.squeeze(-1)

        return Module(name, Numbers())

    def size(self, width: int) -> int:
        return width + 1


# --- Projectors between the hidden spaces of student and teacher (DSKD, DSKDv2) ---
#
# Axis legend: d = width of the student's hidden states, D = width of the teacher's, V = ids that both vocabularies have.


class Projectors(ModuleKind):
    """Linear maps between the hidden spaces of the student and of one teacher, for `form: dskd`."""

    name = "projectors"
    projects = True
    role: Word = Field("teacher", description="of projectors: role of the teacher, of which there may be only one")
    align: Literal["attention", "tokens"] = Field(
        "attention",
        description=(
            "of projectors: which tokens of the teacher belong to a token of the student: attention is learnt; tokens: the same "
            "token after the same text"
        ),
    )
    start: Literal["random", "heads"] = Field(
        "random",
        description=(
            "of projectors: random; heads: the least-squares map between the output heads of both models, which is recomputed "
            "at each step from student to teacher, and trained from teacher to student"
        ),
    )

    @property
    def maps_to(self) -> str:
        return self.role

    def open(self, name: str, inputs: ModuleInputs) -> Module:
        return projectors(name, self, inputs, self._teacher(name, inputs))

    def _teacher(self, name: str, inputs: ModuleInputs) -> Any:
        found = [teacher for teacher in inputs.teachers.values() if teacher.role == self.role]
        if len(found) != 1:
            known = ", ".join(teacher.name for teacher in found) or "none"
            raise RecipeError(
                f"modules.{name}: projectors map to the hidden space of one teacher, and the role {self.role!r} has {known}. Give "
                "each teacher a role of its own, with a module and a dskd term for each."
            )
        return found[0]

    def size(self, width: int) -> int:
        """As if the teacher were as wide as the student."""
        squares = 1 if self.start == "heads" else 2
        return width * width * (squares + 4 * (self.align == "attention")) + 4 * width


def projectors(name: str, kind: Projectors, inputs: ModuleInputs, teacher: Any) -> Module:
    """Opens the maps. A function, to import torch when it is needed."""
    import torch

    wide, drawn = head_of(teacher, inputs.device).shape[1], torch.Generator().manual_seed(inputs.seed)

    def linear(width: int, to: int) -> nn.Linear:
        found = torch.nn.Linear(width, to, device="meta").to_empty(device="cpu").to(inputs.dtype)
        torch.nn.init.uniform_(found.weight, -(width**-0.5), width**-0.5, generator=drawn)
        torch.nn.init.zeros_(found.bias)
        return found.to(inputs.device)

    to_student = linear(wide, inputs.width)
    maps = torch.nn.ModuleDict({"to_student": to_student})
    if kind.start == "random":
        maps["to_teacher"] = linear(inputs.width, wide)
    if kind.align == "attention":
        maps["query"] = linear(2 * inputs.width, 2 * wide)
    found = Spaces(name, maps, teacher, inputs.device)
    if kind.start == "heads":
        with torch.no_grad():
            to_student.weight.copy_(found.between(inputs.head, to_teacher=False))
    return found


def head_of(teacher: Any, device: torch.device) -> Tensor:
    """(V, D) the weight of a teacher's output head."""
    import torch

    found: Tensor = teacher.project(torch.zeros(0, 0, device=device)).weight.detach()
    return found


class Spaces(Module):
    """Maps between hidden spaces. `between`: from one output head to the other, by least squares over the shared ids."""

    network: nn.ModuleDict

    def __init__(self, name: str, maps: nn.ModuleDict, teacher: Any, device: torch.device) -> None:
        super().__init__(name, maps)
        self.attends = "query" in maps
        self._teacher, self._device = teacher, device
        self._inverse: tuple[int, Tensor] | None = None  # of the teacher's head, and which version of the teacher

    def to_student(self, states: Tensor) -> Tensor:
        """(…, D) -> (…, d)."""
        return self._through("to_student", states)

    def to_teacher(self, states: Tensor, head: Tensor) -> Tensor:
        """(…, d) -> (…, D). `head`: the student's output head."""
        if "to_teacher" in self.network:
            return self._through("to_teacher", states)
        return states @ self.between(head.detach(), to_teacher=True).to(states).T

    def query(self, embeddings: Tensor) -> Tensor:
        """(…, 2d) -> (…, 2D)."""
        return self._through("query", embeddings)

    def _through(self, part: str, states: Tensor) -> Tensor:
        found: Tensor = self.network[part](states)
        return found

    def between(self, head: Tensor, *, to_teacher: bool) -> Tensor:
        """The linear map that takes the rows of one head to those of the other as well as possible: (D, d), or (d, D)."""
        import torch

        theirs = head_of(self._teacher, self._device)
        if self._teacher.matched is None:
            size = min(len(head), len(theirs))
            ours, theirs = head[:size], theirs[:size]
        else:
            ids = [torch.from_numpy(side.astype("int64")).to(head.device) for side in self._teacher.matched]
            ours, theirs = head[ids[0]], theirs[ids[1]]
        wide = torch.float64 if head.dtype == torch.float64 else torch.float32
        if not to_teacher:
            to_student: Tensor = torch.linalg.pinv(ours.detach().to(wide)) @ theirs.detach().to(wide)
            return to_student
        version = self._teacher.version
        if self._inverse is None or self._inverse[0] != version:  # the teacher's head changes only if it is a copy
            self._inverse = version, torch.linalg.pinv(theirs.detach().to(wide))
        found: Tensor = self._inverse[1] @ ours.detach().to(wide)
        return found


# --- Models that score whole answers: discriminators (GAD) and reward models (RLHF) ---
#
# A language model with one number at the end of an answer, trained on pairs of answers to the same prompt (Bradley-Terry): the mean
# over pairs of -log sigmoid(score of the preferred - score of the other). Each answer is read alone. Kinds differ in their pairs.


Pairs = tuple[list[int], list[int]]  # places of the preferred answers in the batch, and of the others
PairsOf = Callable[[Sequence[Rollout], Mapping[str, float | None]], Pairs]


class ScoringModel(ModuleKind):
    """Base of the kinds. `pairs`: of a batch, from its rollouts and their rewards by id."""

    own = True
    reads_others = True
    model: Word | None = Field(
        None,
        description="of discriminator and reward_model: the model that it starts from; default: the one that the student starts from",
    )
    revision: Word | None = Field(None, description="of discriminator and reward_model: revision of `model` on the hub")
    gradient_checkpointing: bool = Field(
        False, description="of discriminator and reward_model: recompute layers in the backward pass, to save memory"
    )

    @abstractmethod
    def pairs(self, rollouts: Sequence[Rollout], rewards: Mapping[str, float | None]) -> Pairs:
        raise NotImplementedError

    def check(self, view: StageView) -> Iterable[str]:
        if any(environment is not None and environment.history == "split" for environment in view.environments):
            yield (
                f"a {self.name.replace('_', ' ')} with an environment whose history is split: it learns from pairs of whole rollouts. Set "
                "history to keep."
            )

    def reads(self, student: str, revision: str | None) -> list[Start]:
        return [(student, revision) if self.model is None else (self.model, self.revision)]

    def located(self, name: str, student: Start, resolve: Callable[[str], str], revision_of: RevisionOf) -> ModuleKind:
        ((model, revision),) = self.reads(*student)
        found = super().located(name, student, resolve, revision_of)
        return found.model_copy(update={"model": resolve(model), "revision": revision_of(model, revision)})

    def size(self, width: int) -> int:
        return width

    def open(self, name: str, inputs: ModuleInputs) -> Module:
        from opd.models.load import load_model

        ((model, revision),) = self.reads(inputs.model, None)
        dtype = str(inputs.student_dtype or inputs.dtype).removeprefix("torch.")
        checkpointing = self.gradient_checkpointing
        read = load_model(
            model, dtype=dtype, device=str(inputs.device), revision=revision, gradient_checkpointing=checkpointing
        )
        return scoring_model(name, read, inputs, self.pairs)


class Discriminator(ScoringModel):
    """Higher for answers by a teacher or the dataset than for the student's: every pair of a group (GAD)."""

    name = "discriminator"

    def pairs(self, rollouts: Sequence[Rollout], rewards: Mapping[str, float | None]) -> Pairs:
        return answer_pairs(rollouts)

    def check(self, view: StageView) -> Iterable[str]:
        yield from super().check(view)
        rollout = view.rollout
        if rollout.demonstrations is not None and rollout.demonstrations.cut != "none":
            yield (
                "a discriminator tells the student's answers from a teacher's, and with rollout.demonstrations.cut an answer has tokens of "
                "both. Drop one of them."
            )
        replaced = rollout.demonstrations is not None or (
            rollout.rescue is not None and rollout.rescue.trained_as == "teacher"
        )
        others = [writer for writer in rollout.by_sample if writer is not None and writer.author != "student"]
        if not (others or replaced):
            yield (
                "a discriminator compares the student's answers to a prompt with one by a teacher or the dataset, and no group has "
                "both. Add one of the dataset to each group, for example: rollout.writers: [{kind: data, samples: 1}]."
            )
        if len(others) >= rollout.samples:
            yield (
                f"all {rollout.samples} samples of a group are by others, and a discriminator compares them with the student's. "
                "Raise rollout.samples."
            )


class RewardModel(ScoringModel):
    """Higher for the better-rewarded of two answers to a prompt. A later stage can read it frozen, as its reward (RLHF)."""

    name = "reward_model"
    reads_rewards = True
    frozen: bool = Field(False, description="of reward_model: it scores and does not learn")

    def pairs(self, rollouts: Sequence[Rollout], rewards: Mapping[str, float | None]) -> Pairs:
        return ([], []) if self.frozen else reward_pairs(rollouts, rewards)

    def check(self, view: StageView) -> Iterable[str]:
        yield from super().check(view)
        if self.frozen and self.weights is None:
            yield (
                "frozen: true without `weights`: its scores would come from numbers that nobody trained. Name the stage that trains it, "
                "such as weights: stage:reward-model#judge."
            )
        if not self.frozen and view.rollout.samples == 1:
            yield (
                "a reward model learns from pairs of answers to the same prompt, but rollout.samples is 1. Set it to 2 or more, or "
                "frozen: true."
            )

    @property
    def learns(self) -> bool:
        return not self.frozen


def scoring_model(name: str, model: Any, inputs: ModuleInputs, pairs: PairsOf) -> OwnModule:
    """From a language model, of which the output head is not used. A function, to import torch when it is needed."""
    import torch

    from opd.models.attention import TakeRows

    class Judge(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width = model.head.weight.shape[1]
            self.backbone = model.backbone
            self.score = torch.nn.Linear(width, 1, bias=False, dtype=inputs.dtype)  # only differences of scores count
            drawn = torch.Generator().manual_seed(inputs.seed)
            torch.nn.init.normal_(self.score.weight, std=0.02, generator=drawn)
            self.score.to(inputs.device)

    class ModelWithScore(OwnModule):
        network: Judge
        newest: Pairs = ([], [])

        def outer(self) -> set[str]:
            embedding = self.network.backbone.get_input_embeddings()
            names = {key for key, weight in self.network.named_parameters() if weight is embedding.weight}
            return {*names, "score.weight"}

        def scores(self, pack: Pack) -> Tensor:
            hidden = model.route.hidden(self.network.backbone, pack.ids_T, pack.layout)
            ends = torch.tensor(pack.layout.lengths, device=hidden.device).cumsum(0) - 1
            with torch.autocast(hidden.device.type, enabled=False):
                found: Tensor = self.network.score(TakeRows.apply(hidden, ends).to(inputs.dtype)).squeeze(-1)
            return found

        def loss(
            self, scores: Tensor, rollouts: Sequence[Rollout], rewards: Mapping[str, float | None]
        ) -> Tensor | None:
            self.newest = preferred, others = pairs(rollouts, rewards)
            if not preferred:
                return None
            return -torch.nn.functional.logsigmoid(scores[preferred] - scores[others]).mean()

        def measure(self, scores: Tensor, rollouts: Sequence[Rollout]) -> dict[str, float]:
            """The share of the newest pairs that are in the right order. Pairs of equal answers say nothing."""
            texts = [rollout.response_ids.tolist() for rollout in rollouts]
            ranked = [pair for pair in zip(*self.newest, strict=True) if texts[pair[0]] != texts[pair[1]]]
            right = sum(float(scores[one] > scores[other]) for one, other in ranked)
            return {f"accuracy/{self.name}": right / len(ranked)} if ranked else {}

    return ModelWithScore(name, Judge())


def by_student(rollout: Rollout) -> bool:
    """Whether any token of an answer is the student's."""
    return bool((rollout.author == Author.STUDENT).any())


def answer_pairs(rollouts: Sequence[Rollout]) -> Pairs:
    """Places of two answers to the same prompt: one by a teacher or the dataset, and one by the student; all pairs of each group."""
    own: dict[str, list[int]] = {}
    for place, rollout in enumerate(rollouts):
        if by_student(rollout):
            own.setdefault(rollout.group, []).append(place)
    others = (place for place, rollout in enumerate(rollouts) if not by_student(rollout))
    pairs = [(place, mine) for place in others for mine in own.get(rollouts[place].group, [])]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def reward_pairs(rollouts: Sequence[Rollout], rewards: Mapping[str, float | None]) -> Pairs:
    """Places of every two answers to the same prompt whose rewards differ, the better one first. A missing reward makes no pair."""
    groups: dict[str, list[tuple[int, float]]] = {}
    for place, rollout in enumerate(rollouts):
        reward = rewards.get(rollout.id)
        if reward is not None:
            groups.setdefault(rollout.group, []).append((place, reward))
    found = [
        (place, other) for group in groups.values() for place, more in group for other, less in group if less < more
    ]
    return [pair[0] for pair in found], [pair[1] for pair in found]


def open_modules(
    kinds: Mapping[str, ModuleKind], student: Any, seed: int, teachers: Mapping[str, Any] | None = None
) -> dict[str, Module]:
    """Create a stage's modules. Only their own random states are used."""
    import hashlib

    import torch

    from opd.models.sharded import gather_full

    dtype = torch.float64 if student.dtype == torch.float64 else torch.float32
    found = {}
    for name, kind in kinds.items():
        own = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big") >> 1
        width = student.head.weight.shape[-1]
        inputs = ModuleInputs(
            width, student.size, student.device, dtype, own, student.name, student.dtype, teachers or {},
            gather_full(student.head.weight),
        )  # fmt: skip
        found[name] = kind.open(name, inputs)
        if kind.own != isinstance(found[name], OwnModule):
            raise ModelError(
                f"module {name!r}: kind {kind.name} says own = {kind.own}, and its `open` returns a {type(found[name]).__name__}. An own "
                "module is an OwnModule, and a head is a Module."
            )
        if not any(parameter.requires_grad for parameter in found[name].parameters().values()):
            raise ModelError(f"module {name!r}, of kind {kind.name}, has no parameter to train.")
        if kind.weights is not None:
            load_weights(found[name], kind.weights)
    return found


def load_weights(module: Module, folder: str) -> None:
    """Load what a checkpoint of another stage holds in `folder`."""
    from safetensors.torch import load_file

    path = Path(folder) / WEIGHTS
    if not path.is_file():
        raise ModelError(
            f"modules.{module.name}.weights: {path} does not exist. Name a module's folder in a checkpoint (…/modules/NAME), or "
            "stage:NAME#MODULE in a recipe."
        )
    module.restore(load_file(path), str(path))
