"""A student, its objective and its optimiser in one object, for the pipeline and for custom loops.

trainer = opd.Trainer(student, opd.Objective({"divergence": "jsd"}, teacher, sampler), {"lr": 2e-4})
result = trainer.step(trainer.batch(sampler.sample(prompts)))
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from opd.common.errors import ModelError, RecipeError, TrainingError, UserError
from opd.common.text import shortened
from opd.loop.metrics import StepResult
from opd.loop.oom_retry import MicroBudget, micro_batches, once
from opd.loop.ranks import Ranks
from opd.loop.step import train_step
from opd.models.cuda_graphs import PassGraphs
from opd.models.language_model import LanguageModel, Pack
from opd.models.modules import AnyModule, Module, ModuleKind, OwnModule, by_student, open_modules
from opd.models.optimisers import OptimisedWeights
from opd.models.sharded import SHARD, gather_full, shard_of
from opd.objective.batch import Batch, RewardsById
from opd.objective.objective import Objective
from opd.objective.term import module_mistakes, objective_mistakes, vocabulary_mistakes
from opd.recipe import Rollouts, Train
from opd.recipe.stage import WEIGHTS
from opd.records import Rollout, Signal, SignalKind
from opd.registry import StageView, validate_settings
from opd.teachers.kinds import by_teacher


class Trainer:
    """`train`: a recipe's `train` keys. `teacher_of`: domain -> teacher, so that micro-batches hold one teacher's rollouts.

    `on_smaller`: called with the new size of micro-batches after memory ran out.
    """

    def __init__(
        self,
        student: LanguageModel,
        objective: Objective,
        train: Train | Mapping[str, Any] | None = None,
        *,
        seed: int = 0,
        teacher_of: Mapping[str, str] | None = None,
        check_stop: Callable[[], None] = lambda: None,
        ranks: Ranks | None = None,
        on_smaller: Callable[[int], None] = lambda tokens: None,
        modules: Mapping[str, ModuleKind | Mapping[str, Any]] | None = None,
    ) -> None:
        self.ranks = ranks or Ranks()
        self.student, self.objective = student, objective
        self.train: Train = validate_settings("train", Train, train if train is not None else {})
        self._kinds: dict[str, ModuleKind] = validate_settings("modules", dict[str, AnyModule], modules or {})
        self._require_precision()
        self._reject_terms()
        self.modules = open_modules(self._kinds, student, seed, objective.teachers)
        objective.modules = {name: module for name, module in self.modules.items() if not self._kinds[name].own}
        student.has_modules = bool(objective.modules)
        trained = {
            name: (OwnUpdates if kind.own else ModuleUpdates)(self.modules[name], kind, self.train, self.ranks)
            for name, kind in self._kinds.items()
        }
        self.learner = Learner(self.ranks.optimiser(student, self.train), trained)
        if self.ranks.size == 1:
            student.graphs = PassGraphs.of(student)
        self.steps = 0  # the newest step
        self._budget = MicroBudget(self.train.micro_budget, on_smaller)
        self._seed, self._teacher_of, self._check_stop = seed, teacher_of or {}, check_stop

    def __repr__(self) -> str:
        return f"Trainer({self.student.name!r}, {self.objective!r}, lr={self.train.lr:g}, steps={self.steps})"

    def _require_precision(self) -> None:
        """Reject a precision that differs from the one the student was loaded in."""
        half = any(parameter.dtype == torch.bfloat16 for parameter in self.student.module.parameters())
        wanted = WEIGHTS.get(self.train.precision)
        if wanted is not None and (wanted == "bfloat16") != half:
            raise UserError(
                f"train.precision {self.train.precision} computes with {wanted} weights, and the student has others. "
                f"Load it with dtype={wanted!r}, or leave precision out."
            )

    def _reject_terms(self) -> None:
        """Reject terms that cannot work with rollouts sampled like this.

        The writers and the number of answers per prompt are known only in a batch, so only what is a mistake in every case is rejected.
        """
        drawing = self.objective.drawing
        drawn = {
            "samples": 2,
            "max_new_tokens": drawing.max_new_tokens,
            "temperature": drawing.temperature,
            "top_p": drawing.top_p,
            "top_k": drawing.top_k,
            "teacher_mix": drawing.teacher_mix,
        }
        roles = frozenset(teacher.role for teacher in self.objective.teachers.values())
        found: list[list[str]] = []
        some = [{"kind": "rejected", "samples": 1}, {"kind": "teacher", "samples": 1}]
        others = {"samples": 3, "data_share": 0.25, "teacher_share": 0.25, "writers": some}
        for writers in ({}, others, {"data_share": 1.0}):
            rollout: Rollouts = validate_settings("drawing", Rollouts, {**drawn, **writers})
            lora = self.student.adapter is not None
            turns = [None]  # rollouts may have some
            view = StageView(rollout, self.train, self.objective.terms, roles, lora=lora, environments=turns)
            found.append(objective_mistakes(view))
        mistakes = [mistake for mistake in found[0] if all(mistake in some for some in found[1:])]
        mistakes += module_mistakes(self.objective.terms, self._kinds)
        mistakes += vocabulary_mistakes(self.objective.terms, self.student.size)
        if mistakes:
            raise RecipeError("\n".join(mistakes))

    @property
    def optimiser(self) -> Optimiser:
        """The student's optimiser."""
        return self.learner.student

    def batch(self, rollouts: Sequence[Rollout], rewards: RewardsById | None = None) -> Batch:
        """Rollouts with the teacher scores that the objective's terms need. `rewards`: by rollout id."""
        if not rewards and any(term.needs().rewards for term in self.objective.terms):
            raise UserError("the objective uses rewards. Give them: trainer.batch(rollouts, {rollout.id: reward, …})")
        signals: dict[tuple[str, SignalKind], dict[str, Signal]] = {}
        for role, kind in self.objective.needs(self.steps + 1, self.train.updates):
            table = {rollout.domain: self._teacher(role, rollout.domain) for rollout in rollouts}
            answers = signals[role, kind] = {}
            for name, asked in by_teacher(rollouts, table).items():
                found = self.objective.teachers[name].score(asked, self.objective.need_given(signals, role, kind))
                answers |= {rollout.id: signal for rollout, signal in zip(asked, found, strict=True)}
        return Batch(rollouts, signals, rewards or {})

    def _teacher(self, role: str, domain: str) -> str:
        """The only teacher of its role, or the one named after the domain."""
        names = [name for name, teacher in self.objective.teachers.items() if teacher.role == role]
        if len(names) != 1 and domain not in names:
            known = ", ".join(names) or "none"
            raise UserError(f"domain {domain!r} has no teacher of the role {role!r}; there are: {known}.")
        return names[0] if len(names) == 1 else domain

    def step(self, batch: Batch, step: int | None = None) -> StepResult:
        """Train on one scored batch and return a result with `.loss`, `.metrics` and more. `step` counts from 1, for schedules; by default it increases by one per call."""
        if not isinstance(batch, Batch):
            raise UserError(f"trainer.step: expected trainer.batch(rollouts), got {shortened(batch)}.")
        self.steps = self.steps + 1 if step is None else step
        scored = self._score(batch) if self.learner.own else {}
        result = StepResult({}, step=self.steps)
        if self.objective.terms:  # otherwise only modules learn
            result = train_step(
                self.student,
                batch,
                self.objective,
                self.learner,
                step=self.steps,
                train=self.train,
                seed=self._seed,
                teacher_of=self._teacher_of,
                check_stop=self._check_stop,
                ranks=self.ranks,
                budget=self._budget,
            )
        for module in self.learner.own.values():
            module.step(self.steps)
        result.measured |= scored
        result.measured |= {f"grad_norm/{name}": module.norm for name, module in self.learner.modules.items()}
        return result

    def _score(self, batch: Batch) -> dict[str, float]:
        """Modules with their own passes score the batch, and get their gradients. They are updated once the student is: no part
        moves unless all gradients are finite.
        """
        own, metrics = self.learner.own, dict[str, float]()
        batch.first_pass.scores.clear()
        mine, device = self.ranks.deal(batch.rollouts), self.student.device

        def cut() -> list[Pack]:
            return micro_batches(mine, self._budget.tokens, device, {})

        repeat = self._budget.repeat if self.ranks.size == 1 else once
        with torch.autocast(device.type, torch.bfloat16, enabled=self.train.precision == "autocast"):
            for name, module in own.items():
                attempt = partial(module.backward, batch, self.steps, cut, self._check_stop)
                metrics |= repeat(attempt, module.discard, batch.rollouts)
                if not math.isfinite(module.norm):
                    for other in own.values():
                        other.discard()
                    raise not_finite(self.steps, name)
        return metrics


class Learner:
    """Everything that a step trains: the student, and optional modules by name. `train_step` uses student and heads as one optimiser.

    Each part has its own optimiser, learning rate and clipping. No part is updated unless all gradients are finite.
    """

    def __init__(self, student: Optimiser, modules: Mapping[str, ModuleUpdates] | None = None) -> None:
        self.student, self.modules = student, dict(modules or {})
        self.own = {name: module for name, module in self.modules.items() if isinstance(module, OwnUpdates)}
        self.heads = {name: module for name, module in self.modules.items() if name not in self.own}

    @property
    def updates(self) -> int:
        return self.student.updates

    def clip(self) -> float:
        """Clip all gradients. Returns the norm of the student's; those of heads are kept until `step`."""
        for module in self.heads.values():
            module.clip()
        return self.student.clip()

    def step(self, step: int) -> float:
        """Apply all gradients; returns the student's learning rate."""
        for name, module in self.heads.items():
            if not math.isfinite(module.norm):
                self.discard()
                raise not_finite(step, name)
        for module in self.heads.values():
            module.step(step)
        return self.student.step(step)

    def discard(self) -> None:
        self.student.discard()
        for module in self.heads.values():
            module.discard()

    def finite(self) -> bool:
        """Whether all weights of modules are finite."""
        tensors = (tensor for module in self.modules.values() for tensor in module.module.parameters().values())
        return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


class ModuleUpdates:
    """The update of one module. Every rank holds the whole module and applies the same sum of gradients."""

    def __init__(self, module: Module, kind: ModuleKind, train: Train, ranks: Ranks) -> None:
        self.module, self._every, self._ranks = module, kind.every, ranks
        own = {"warmup": kind.warmup, "schedule": kind.schedule, "weight_decay": kind.weight_decay}
        given = {name: value for name, value in own.items() if value is not None}
        spec = train.model_copy(update={**given, "lr": kind.lr, "clip": kind.clip, "optimiser": kind.optimiser})
        weights = {name: weight for name, weight in module.parameters().items() if weight.requires_grad}
        self.optimiser = Optimiser(weights, spec, module.outer())
        self.norm = 0.0  # norm of the newest gradient before clipping

    def clip(self) -> float:
        masters = self.optimiser.masters
        self._ranks.add_gradients(masters)
        known = any(weight.grad is not None for weight in masters)
        self.norm = self.optimiser.clip() if known else 0.0
        return self.norm

    def step(self, step: int) -> float:
        if step % self._every:
            self.optimiser.discard()
            return 0.0
        return self.optimiser.step(step)

    def discard(self) -> None:
        self.optimiser.discard()


class OwnUpdates(ModuleUpdates):
    """The update of a module with its own passes. `backward` gives it gradients; `step` applies them."""

    module: OwnModule

    def backward(
        self, batch: Batch, step: int, cut: Callable[[], list[Pack]], check_stop: Callable[[], None]
    ) -> dict[str, float]:
        """Score every answer. Then pass those answers again for which the loss has a slope, and back-propagate it. Returns metrics.

        `cut`: this rank's answers in micro-batches. Scores are those before the update.
        """
        module, rollouts, packs = self.module, batch.rollouts, cut()
        known = batch.first_pass.scores[module.name] = dict[str, float]()
        with torch.no_grad():
            for pack in packs:
                known |= zip((rollout.id for rollout in pack.rollouts), self._scores(pack).tolist(), strict=True)
                check_stop()
        self._ranks.complete(batch)
        scores = torch.tensor([known[rollout.id] for rollout in rollouts], dtype=torch.float64, requires_grad=True)
        if not bool(torch.isfinite(scores).all()):
            self.norm = math.nan
            return {}
        with torch.autocast("cpu", enabled=False):
            loss = module.loss(scores, rollouts, batch.rewards)
        self.discard()
        if loss is not None and step % self._every == 0:
            (slopes,) = torch.autograd.grad(loss, scores)
            by_id = {rollout.id: slope for rollout, slope in zip(rollouts, slopes.tolist(), strict=True)}
            for pack in packs:
                weights = [by_id[rollout.id] for rollout in pack.rollouts]
                if any(weights):
                    found = self._scores(pack)
                    (found * found.new_tensor(weights)).sum().backward()
                check_stop()
        self.clip()
        return self._metrics(scores.detach(), rollouts, loss)

    def _scores(self, pack: Pack) -> Tensor:
        found = self.module.scores(pack)
        if found.shape != (len(pack.rollouts),):
            raise TrainingError(
                f"module {self.module.name!r} gave scores of shape {tuple(found.shape)} for {len(pack.rollouts)} answers. `scores` has to "
                "return one number per rollout of the pack."
            )
        return found

    def _metrics(self, scores: Tensor, rollouts: Sequence[Rollout], loss: Tensor | None) -> dict[str, float]:
        name, own = self.module.name, torch.tensor([by_student(rollout) for rollout in rollouts])
        found = {} if loss is None else {f"loss/{name}": float(loss.detach())}
        for key, which in ((f"score/{name}", own), (f"score/{name}/others", ~own)):
            if bool(which.any()):
                found[key] = float(scores[which].mean())
        return found | self.module.measure(scores, rollouts)

    def step(self, step: int) -> float:
        """Apply the gradients of this step's batch, if it had any."""
        known = any(master.grad is not None for master in self.optimiser.masters)
        return super().step(step) if known else 0.0


def not_finite(step: int, module: str) -> TrainingError:
    return TrainingError(
        f"step {step}: the gradient of module {module!r} is not finite. The update was not applied. Lower modules.{module}.lr, or set "
        f"modules.{module}.clip."
    )


# --- Optimisers, with fp32 masters, warm-up, a schedule and gradient clipping ---


MASTER = "master"  # suffix of a checkpoint's tensors: NAME.master next to NAME.exp_avg
_HOOKS = WeakIdKeyDictionary()  # half-precision weight -> hook that passes its gradients to the newest optimiser


class Optimiser:
    """Computes with half-precision weights and trains their fp32 masters.

    Gradients of each micro-batch are moved to the masters and summed in fp32. Weights that are fp32 already, such as LoRA's, are their
    own masters. `train.precision: bfloat16` trains half-precision weights directly. `outer`: names of embeddings and the head, which
    some kinds of optimiser update differently.
    """

    sharded: ClassVar[bool] = False

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], spec: Train, outer: Collection[str] = frozenset()
    ) -> None:
        self._spec, self._parameters = spec, dict(parameters)
        self._halves = {
            name: parameter
            for name, parameter in parameters.items()
            if parameter.dtype != torch.float32 and spec.precision != "bfloat16"
        }
        self._masters = {
            name: nn.Parameter(self._here(parameter.detach()).float()) if name in self._halves else self._own(parameter)
            for name, parameter in parameters.items()
        }
        self._hooks = {name: self._hook(parameter, self._masters[name]) for name, parameter in self._halves.items()}
        self.updates = 0  # updates applied so far
        self.kind = spec.optimiser
        self._rules = self.kind.open(self._weights(frozenset(outer)))  # of torch; together they update every weight
        owners = {id(master): name for name, master in self._masters.items()}
        updated = [id(master) for rule in self._rules for group in rule.param_groups for master in group["params"]]
        if sorted(updated) != sorted(owners):
            raise UserError(
                f"optimiser {self.kind.name} updates {len(updated)} of {len(owners)} weights, and `open` has to give optimisers "
                "that together update every weight once."
            )
        self._rule_of = {
            owners[id(master)]: rule
            for rule in self._rules
            for group in rule.param_groups
            for master in group["params"]
        }

    @property
    def masters(self) -> list[nn.Parameter]:
        return list(self._masters.values())

    def _weights(self, outer: frozenset[str]) -> OptimisedWeights:
        spec, shapes = self._spec, {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}
        return OptimisedWeights(
            self._masters, shapes, outer, spec.lr, spec.betas, spec.eps, spec.weight_decay, self.sharded,
            whole=self._whole,
            rows=lambda name, tensor: self._part(tensor, self._parameters[name]),
        )  # fmt: skip

    def clip(self) -> float:
        """Clip the gradients to norm `clip`; returns the norm before."""
        if any(_HOOKS[parameter] is not self._hooks[name] for name, parameter in self._halves.items()):
            raise UserError(
                "another optimiser has been made for these weights, and it gets their gradients now. Continue with that one, "
                "or make a new one."
            )
        return self._clip(math.inf if self._spec.clip is None else self._spec.clip)

    def _clip(self, limit: float) -> float:
        masters = list(self._masters.values())
        total = nn.utils.get_total_norm([master.grad for master in masters if master.grad is not None])
        return scale_to_norm(masters, limit, total)

    def _own(self, parameter: nn.Parameter) -> nn.Parameter:
        """A weight that is its own master."""
        return parameter

    @staticmethod
    def _here(tensor: torch.Tensor) -> torch.Tensor:
        """This process's part of a weight: all of it, unless weights are sharded."""
        return tensor

    def _whole(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """The whole tensor, from this process's rows of it. All ranks must call this."""
        return rows

    def _part(self, tensor: torch.Tensor, owner: nn.Parameter) -> torch.Tensor:
        """This process's part of a whole tensor that belongs to a weight."""
        return tensor

    def use(self, spec: Train) -> None:
        """Update with other AdamW settings and another clip from now on. The kind of optimiser stays."""
        self._spec = spec
        for rule in self._rules:
            for group in rule.param_groups:
                decayed = group["params"][0].ndim > 1  # see OptimisedWeights.groups
                group |= {"betas": spec.betas, "eps": spec.eps, "weight_decay": spec.weight_decay if decayed else 0.0}

    def step(self, step: int) -> float:
        """Apply the gradients of step `step` (counted from 1); returns the learning rate used."""
        rate = learning_rate(step, self._spec)
        for rule in self._rules:
            for group in rule.param_groups:
                if isinstance(group["lr"], torch.Tensor):  # torchao's learning rates are tensors
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
            rule.step()
        self._round()
        self.updates += 1
        self.discard()
        return rate

    @torch.no_grad()
    def _round(self) -> None:
        """Round the masters into the weights that compute, in place, so that a sampler keeps sharing them."""
        if self._halves:
            halves = [self._here(half) for half in self._halves.values()]
            torch._foreach_copy_(halves, [self._masters[name] for name in self._halves])

    def gradients(self, names: Iterable[str]) -> list[torch.Tensor]:
        """The current gradients of these weights: this process's part of each."""
        owners = [self._masters[name] if name in self._halves else self._parameters[name] for name in names]
        return [
            torch.zeros_like(self._here(owner)) if owner.grad is None else self._here(owner.grad) for owner in owners
        ]

    def discard(self) -> None:
        """Drop the gradients of an update that must not be applied, including those not yet moved to a master."""
        for rule in self._rules:
            rule.zero_grad(set_to_none=True)
        for parameter in self._parameters.values():
            parameter.grad = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Moments by parameter name, and masters, for a checkpoint."""
        found = {f"{name}.{MASTER}": self._masters[name].detach() for name in self._halves}
        for name, master in self._masters.items():
            state = self._rule_of[name].state.get(master, {})
            for key, value in self.kind.to_plain(state):
                found[f"{name}.{key}"] = value if isinstance(value, torch.Tensor) else torch.tensor(float(value))
        return found

    def restore(self, tensors: Mapping[str, torch.Tensor], updates: int) -> None:
        """Restore the result of `tensors`, bit for bit."""
        keys = self._owners(tensors)
        with torch.no_grad():
            for name, half in self._halves.items():  # a checkpoint of another precision has no masters
                self._masters[name].copy_(self._here(half))
            states: dict[str, dict[str, torch.Tensor]] = {}
            for name, (owner, key) in keys.items():
                master, part = self._masters[owner], self._part(tensors[name], self._parameters[owner])
                if key == MASTER:
                    master.copy_(part)
                else:
                    states.setdefault(owner, {})[key] = part.to(master.device, copy=True)
            for owner, state in states.items():
                master = self._masters[owner]
                self._rule_of[owner].state[master] = self.kind.from_plain(state, master)
        self._round()
        self.updates = updates

    def _owners(self, names: Iterable[str]) -> dict[str, tuple[str, str]]:
        """Name of a checkpoint's tensor -> (weight, kind of tensor). A moment may have several tensors."""
        found = {}
        for name in names:
            owner, _, key = name.rpartition(".")
            if owner not in self._parameters and owner.rpartition(".")[0] in self._parameters:
                owner, _, outer = owner.rpartition(".")
                key = f"{outer}.{key}"
            if owner not in self._parameters:
                raise ModelError(
                    f"optimiser state of {owner!r}, which the student does not train. Is it another model?"
                )
            found[name] = owner, key
        return found

    @classmethod
    def _hook(cls, half: nn.Parameter, master: nn.Parameter) -> RemovableHandle:
        """Pass gradients to this master only. An optimiser created earlier loses the weight."""
        if half in _HOOKS:
            _HOOKS[half].remove()
        handle = half.register_post_accumulate_grad_hook(partial(_move_gradient, weakref.ref(master), cls._here))
        _HOOKS[half] = handle
        return handle


def _move_gradient(
    master: weakref.ref[nn.Parameter], here: Callable[[torch.Tensor], torch.Tensor], half: nn.Parameter
) -> None:
    """Move a weight's new gradient to its master, while the master exists."""
    owner = master()
    if owner is None or half.grad is None:
        return
    grad = here(half.grad)
    owner.grad = grad.float() if owner.grad is None else owner.grad.add_(grad)
    half.grad = None


def scale_to_norm(parameters: list[nn.Parameter], limit: float, total: torch.Tensor) -> float:
    """Scale gradients of norm `total` down to norm `limit`. Smaller ones are not multiplied at all; torch would multiply them by 1."""
    if limit / (total + 1e-6) < 1:
        nn.utils.clip_grads_with_norm_(parameters, limit, total)
    return float(total)


def learning_rate(step: int, spec: Train) -> float:
    """Linear warm-up, then constant, linear to zero, or half a cosine to zero.

    >>> [learning_rate(step, Train(steps=4, lr=1.0, warmup=2, schedule="linear")) for step in (1, 2, 3, 4)]
    [0.5, 1.0, 0.6666666666666667, 0.33333333333333337]
    """
    if step <= spec.warmup:
        return spec.lr * step / spec.warmup
    done = (step - max(spec.warmup, 1)) / max(spec.steps - max(spec.warmup, 1) + 1, 1)
    if spec.schedule == "linear":
        return spec.lr * (1 - done)
    if spec.schedule == "cosine":
        return spec.lr * 0.5 * (1 + math.cos(math.pi * done))
    return spec.lr


# --- The same over sharded weights: each rank keeps masters and moments of its own part only ---
#
# Masters are plain tensors: the rank's rows of each weight. For hundreds of weights, the bookkeeping of distributed tensors would
# cost more than the arithmetic.


class ShardedOptimiser(Optimiser):
    sharded = True

    @staticmethod
    def _here(tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def _own(self, parameter: nn.Parameter) -> nn.Parameter:
        """The same memory as a plain tensor."""
        return nn.Parameter(self._here(parameter.detach()))

    @torch.no_grad()
    def _clip(self, limit: float) -> float:
        """Clip by the norm over all ranks of a group. Other groups have the same gradients."""
        for name, parameter in self._parameters.items():
            if name not in self._halves:
                self._take_gradient(name, parameter)
        masters = list(self._masters.values())
        squared = nn.utils.get_total_norm([master.grad for master in masters if master.grad is not None]).float() ** 2
        squared = squared.to(masters[0].device)
        dist.all_reduce(squared, group=self._mesh().get_group(SHARD))
        return scale_to_norm(masters, limit, squared.sqrt())

    def _take_gradient(self, name: str, parameter: nn.Parameter) -> None:
        """For a weight that is its own master: take this rank's rows of the gradient."""
        master, rows = self._masters[name], self._here(parameter.detach())
        if rows.numel() and rows.data_ptr() != master.data_ptr():
            raise RuntimeError(f"the rows of {name} have moved since its optimiser was created")
        master.grad = None if parameter.grad is None else self._here(parameter.grad)

    def _part(self, tensor: Tensor, owner: nn.Parameter) -> Tensor:
        return self._here(shard_of(tensor.to(owner.device), owner)) if tensor.ndim else tensor

    def tensors(self) -> dict[str, Tensor]:
        """Distributed tensors, for the caller to gather."""
        found = super().tensors()
        return {key: self._distributed(owner, found[key]) for key, (owner, _) in self._owners(found).items()}

    def _whole(self, name: str, rows: Tensor) -> Tensor:
        return gather_full(self._distributed(name, rows))

    def _distributed(self, name: str, tensor: Tensor) -> Tensor:
        owner = self._parameters[name]
        if not tensor.ndim:
            return tensor
        assert isinstance(owner, DTensor)
        shape = torch.Size((owner.shape[0], *tensor.shape[1:]))  # a rank's rows may be shorter than the weight's
        return DTensor.from_local(
            tensor, owner.device_mesh, owner.placements, run_check=False, shape=shape, stride=_stride(shape)
        )

    def _mesh(self) -> dist.DeviceMesh:
        owner = next(iter(self._parameters.values()))
        assert isinstance(owner, DTensor)
        return owner.device_mesh


def _stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))
