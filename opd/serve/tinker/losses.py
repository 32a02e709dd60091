"""The loss functions of the Tinker API. A loss is a sum over tokens; nothing is averaged.

Position t of a datum predicts `target_tokens[t]`. With p its log-prob now, q the one it was sampled with and r = exp(p − q):

    cross_entropy         −w p                                           target_tokens, weights
    importance_sampling   −r A                                           target_tokens, logprobs, advantages
    ppo                   −min(r A, clip(r, low, high) A)                the same; clip_low_threshold, clip_high_threshold
    cispo                 −sg(clip(r, low, high)) A p                    the same
    dro                   −A p + β (p − q)² / 2                          the same; beta
    divergence            w D(student ‖ teacher), over all ids           weights; config: teacher, kind, …

The last one is not of the Tinker API: it is called through the SDK's own `forward_backward` and reads its settings from
`loss_fn_config`.

Shapes: N positions of all data of a pass. K columns of `target_tokens`, if it has two dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from opd.common.text import plain
from opd.divergences import Projection, divergence, token_logprobs
from opd.divergences.kinds import Formula
from opd.divergences.projection import upload
from opd.models.language_model import LanguageModel
from opd.objective.policy_gradient import cispo, importance_sampling, ppo
from opd.objective.term import k2
from opd.serve.tinker.wire import LossRow
from opd.teachers.served import WireError

LOW, HIGH = 0.8, 1.2  # ratios beyond these are clipped, unless the request says otherwise
Config = Mapping[str, float | str]
FindTeacher = Callable[[str], LanguageModel]


@dataclass(frozen=True, eq=False)
class LossPart:
    """The loss of one pass, and what comes back for every position: (N,) or (N, K) by name."""

    loss: Tensor
    outputs: dict[str, Tensor]
    metrics: dict[str, float] = field(default_factory=dict)


class TokenLoss:
    """A loss over log-probs of `target_tokens`. `inputs`: what each datum has to bring; `settings`: keys of loss_fn_config."""

    inputs: ClassVar[tuple[str, ...]] = ("target_tokens", "logprobs", "advantages")
    settings: ClassVar[tuple[str, ...]] = ()

    def __init__(self, name: str, config: Config) -> None:
        self.name = name
        unknown = sorted(set(config) - set(self.settings))
        if unknown:
            known = ", ".join(self.settings) or "none"
            raise WireError(400, f"loss_fn_config {plain(unknown[0], 60)!r}: settings of {name} are {known}")
        self.config = dict(config)

    def check(self, rows: Sequence[LossRow], size: int, context: int) -> None:
        """Reject data that cannot be trained on, before anything is computed."""
        if not rows:
            raise WireError(400, "no data")
        for number, row in enumerate(rows):
            self._check_row(f"datum {number}", row, size, context)

    def _check_row(self, what: str, row: LossRow, size: int, context: int) -> None:
        if not 1 <= row.length <= context:
            raise WireError(400, f"{what} has {row.length} tokens; the model reads 1 to {context}")
        _check_ids(f"{what}: its tokens", row.ids, size)
        odd = sorted(set(row.inputs) ^ set(self.inputs))
        if odd:
            problem = "is missing" if odd[0] in self.inputs else "is not one of them"
            raise WireError(400, f"{what}: {self.name} reads {', '.join(self.inputs)}; {plain(odd[0], 60)!r} {problem}")
        for name, array in row.inputs.items():
            if array.shape[:1] != (row.length,):
                raise WireError(400, f"{what}: {name} has shape {list(array.shape)}; there are {row.length} tokens")
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise WireError(400, f"{what}: {name} has numbers that are not finite (NaN or infinity)")
        if "target_tokens" in row.inputs:
            targets = row.inputs["target_tokens"]
            if targets.dtype.kind != "i":
                raise WireError(400, f"{what}: target_tokens are integers")
            _check_ids(f"{what}: target_tokens", targets, size)
        self._check_shapes(what, row)

    def _check_shapes(self, what: str, row: LossRow) -> None:
        shapes = {array.shape for array in row.inputs.values()}
        if shapes != {(row.length,)}:
            raise WireError(400, f"{what}: all inputs of {self.name} have one number per token, shape [{row.length}]")

    def part(self, rows: Sequence[LossRow], projection: Projection, ids_T: Tensor) -> LossPart:
        given = {name: _joined(rows, name, projection.hidden.device) for name in self.inputs}
        current = token_logprobs(projection, given["target_tokens"], trusted=True)
        loss = self.losses(current, given).sum()
        return LossPart(loss, {"logprobs": current.detach()})

    def losses(self, current: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        raise NotImplementedError

    def number(self, name: str, default: float) -> float:
        value = self.config.get(name, default)
        if isinstance(value, str) or not math.isfinite(value):
            raise WireError(400, f"loss_fn_config {name}: expected a number, not {plain(value, 40)!r}")
        return value


class WeightedCrossEntropy(TokenLoss):
    """With targets (T, K), each of K targets per position has its own weight."""

    inputs = ("target_tokens", "weights")

    def _check_shapes(self, what: str, row: LossRow) -> None:
        targets, weights = row.inputs["target_tokens"], row.inputs["weights"]
        if targets.shape != weights.shape:
            raise WireError(
                400, f"{what}: target_tokens have shape {list(targets.shape)}, weights {list(weights.shape)}"
            )
        if 0 in targets.shape:
            raise WireError(400, f"{what}: target_tokens have shape {list(targets.shape)}, without a target")

    def part(self, rows: Sequence[LossRow], projection: Projection, ids_T: Tensor) -> LossPart:
        given = {name: _joined(rows, name, projection.hidden.device) for name in self.inputs}
        targets, weights = given["target_tokens"], given["weights"].float()
        if targets.ndim == 1:
            current = token_logprobs(projection, targets, trusted=True)
        else:
            columns = [token_logprobs(projection, ids.contiguous(), trusted=True) for ids in targets.unbind(1)]
            current = torch.stack(columns, 1)
        return LossPart(-(current * weights).sum(), {"logprobs": current.detach()})


class ImportanceLoss(TokenLoss):
    def losses(self, current: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return importance_sampling(current, given["logprobs"], given["advantages"])


class ClippedLoss(TokenLoss):
    """`clip`: the loss, from log-probs now and then, advantages, and the distances of both thresholds from 1."""

    settings = ("clip_low_threshold", "clip_high_threshold")
    clip: ClassVar[Callable[..., Tensor]]

    def __init__(self, name: str, config: Config) -> None:
        super().__init__(name, config)
        self.low, self.high = self.number("clip_low_threshold", LOW), self.number("clip_high_threshold", HIGH)
        if not 0 <= self.low <= 1 <= self.high:
            raise WireError(
                400,
                f"clip_low_threshold {self.low:g} and clip_high_threshold {self.high:g}: they are ratios, "
                "0 <= low <= 1 <= high",
            )

    def losses(self, current: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return type(self).clip(current, given["logprobs"], given["advantages"], 1 - self.low, self.high - 1)


class ClippedRatio(ClippedLoss):
    clip = staticmethod(ppo)


class ClippedWeight(ClippedLoss):
    clip = staticmethod(cispo)


class DirectReward(TokenLoss):
    """The squared log-ratio keeps the policy near the one that was sampled from (arXiv 2405.19107)."""

    settings = ("beta",)

    def __init__(self, name: str, config: Config) -> None:
        super().__init__(name, config)
        if "beta" not in config:
            raise WireError(400, 'dro: its beta is missing; send loss_fn_config={"beta": 0.05}, say')
        self.beta = self.number("beta", 0.0)
        if self.beta < 0:
            raise WireError(400, f"loss_fn_config beta {self.beta:g}: at least 0")

    def losses(self, current: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return self.beta * k2(current, given["logprobs"]) - current * given["advantages"]


class DivergenceLoss(TokenLoss):
    """The exact divergence to a teacher's distribution at every position, weighted: `weights` 0 leaves a position out."""

    inputs = ("weights",)
    settings = ("teacher", "kind", "alpha", "beta")

    def __init__(self, name: str, config: Config, find: FindTeacher) -> None:
        super().__init__(name, config)
        teacher, kind = self.config.pop("teacher", None), self.config.pop("kind", "reverse_kl")
        if not isinstance(teacher, str) or not isinstance(kind, str):
            raise WireError(400, "loss_fn_config of divergence: teacher and kind are names")
        params = {key: self.number(key, 0.0) for key in self.config}
        try:
            self.formula = Formula.of(kind, params)
        except ValueError as error:
            raise WireError(400, f"loss_fn_config: {plain(error, 300)}") from None
        self.teacher = find(teacher)

    def check(self, rows: Sequence[LossRow], size: int, context: int) -> None:
        super().check(rows, min(size, self.teacher.size), min(context, self.teacher.context))

    def part(self, rows: Sequence[LossRow], projection: Projection, ids_T: Tensor) -> LossPart:
        from opd.models.attention import Packed

        weight = _joined(rows, "weights", projection.hidden.device).float()
        lengths = [row.length for row in rows]
        with torch.no_grad():
            there = ids_T.to(self.teacher.device)
            hidden = self.teacher.hidden(there, Packed.of(lengths, self.teacher.device))
        teacher = self.teacher.project(hidden.to(projection.hidden.device))
        found = divergence(self.formula, projection, teacher, weight=weight, trusted=True)
        mass = float(weight.sum())
        mean = float((found.reverse_kl * weight).sum()) / mass if mass else 0.0
        return LossPart(found.loss, {"divergence": found.value}, {"reverse_kl:mean": mean})


LOSSES: dict[str, type[TokenLoss]] = {
    "cross_entropy": WeightedCrossEntropy,
    "importance_sampling": ImportanceLoss,
    "ppo": ClippedRatio,
    "cispo": ClippedWeight,
    "dro": DirectReward,
}
WHY_NOT = {
    "gspo": "it is not served yet; ppo and cispo are",
    "stable_reinforce": "it needs what the service records while sampling",
    "custom": "losses made by create_custom_loss run in the client here; call forward_backward_custom",
}


def loss_named(name: str, config: Config, find: FindTeacher) -> TokenLoss:
    if name == "divergence":
        return DivergenceLoss(name, config, find)
    if name not in LOSSES:
        why = WHY_NOT.get(name, "nothing here has that name")
        known = ", ".join((*LOSSES, "divergence"))
        raise WireError(400, f"loss_fn {plain(name, 60)!r}: {why}. Losses: {known}")
    return LOSSES[name](name, config)


def _check_ids(what: str, ids: np.ndarray, size: int) -> None:
    outside = ids[(ids < 0) | (ids >= size)]
    if outside.size:
        raise WireError(400, f"{what}: id {outside.flat[0]} is outside the vocabulary of {size} ids")


def _joined(rows: Sequence[LossRow], name: str, device: Any) -> Tensor:
    dtype = np.int64 if name == "target_tokens" else np.float32
    return upload(np.concatenate([row.inputs[name] for row in rows]).astype(dtype), device)
