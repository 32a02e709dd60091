"""Merge models in weight space, for a stage to start from. torch is imported only when a merge is made.

`combine` holds all the arithmetic of a merge, in float64. Differences to a base are called task vectors.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, model_validator

from opd.common.errors import ModelError, RecipeError
from opd.models.load import base_of, is_adapter, load_config, load_model, load_tokenizer, locate, parameter_shapes
from opd.models.tokenizers import differing_ids
from opd.registry import Address, Choice

if TYPE_CHECKING:
    from torch import Tensor

    from opd.models.language_model import LanguageModel


Weights = Mapping[str, "Tensor"]  # by their plain names
Named = Callable[[str], tuple[str, str | None]]  # address in a recipe -> (model to load, its revision)
Coefficient = Annotated[float, Field(ge=-100, le=100)]


class Merge(Choice):
    """Make one model from several that share their shapes and tokenizer."""

    family = "merge"
    models: list[Address] = Field(min_length=1, max_length=1000, description="the models to merge")

    @property
    def start(self) -> str | None:
        """The base that differences are taken from. None: there is no base."""
        return None

    def reads(self) -> list[str]:
        return list(dict.fromkeys([*([] if self.start is None else [self.start]), *self.models]))

    def extra_directories(self) -> Iterator[str]:
        """Further directories that are read, in addition to `reads`."""
        yield from ()

    def coefficients(self, given: float | Sequence[float]) -> list[float]:
        """One coefficient per model."""
        return list(given) if isinstance(given, Sequence) else [given] * len(self.models)

    def require(self, named: Named) -> None:
        """Reject models with different shapes or tokenizers, before weights are loaded."""
        first, *others = self.reads()
        shapes, tokenizer = parameter_shapes(*named(first)), load_tokenizer(*named(first))
        for other in others:
            theirs = parameter_shapes(*named(other))
            odd = next((key for key in (shapes | theirs) if shapes.get(key) != theirs.get(key)), None)
            if odd is not None:
                raise RecipeError(
                    f"student.merge: {other!r} and {first!r} do not have the same shapes: {odd} is "
                    f"{theirs.get(odd, 'missing')} and {shapes.get(odd, 'missing')}. Merge models of one shape."
                )
            if differing := differing_ids(tokenizer, load_tokenizer(*named(other))):
                raise RecipeError(
                    f"student.merge: {other!r} and {first!r} do not share a tokenizer: {len(differing)} ids differ, the "
                    f"first is {differing[0]}. Merge models with one tokenizer."
                )

    def require_planned(self, named: Named, bases: Mapping[str, str | None]) -> None:
        """The same check for models of stages that have not run yet.

        `named` gives a model with the shapes that a stage's model will have. `bases`: address of a stage -> the base of its
        adapters. None: it will have no adapters.
        """
        self.require(named)

    @abstractmethod
    def make(self, named: Named) -> LanguageModel:
        """The merged model, in float32 on the CPU."""
        raise NotImplementedError


class WeightMerge(Merge):
    """A merge of full weights: `combine` computes each weight."""

    def make(self, named: Named) -> LanguageModel:
        model = _load(named(self.reads()[0]))
        start = None if self.start is None else _weights(model)
        found = self.combine(start, (_weights(_load(named(name))) for name in self.models))
        for name, parameter in model.module.named_parameters():
            parameter.data = found[name].to(parameter.dtype)
        return model

    @abstractmethod
    def combine(self, start: Weights | None, parts: Iterable[Weights]) -> dict[str, Tensor]:
        """`start`: the weights that differences are taken from. `parts`: weights of each model, one at a time, in the order of `models`."""
        raise NotImplementedError


def _load(named: tuple[str, str | None]) -> LanguageModel:
    return load_model(named[0], revision=named[1])


def _weights(model: LanguageModel) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.module.named_parameters()}


def _sum(start: Weights | None, parts: Iterable[tuple[float, Weights]]) -> dict[str, Tensor]:
    """start + sum of coefficient * (part - start), in float64."""
    total: dict[str, Tensor] = {} if start is None else {name: tensor.double() for name, tensor in start.items()}
    for coefficient, part in parts:
        for name, tensor in part.items():
            change = coefficient * (tensor.double() if start is None else tensor.double() - start[name].double())
            total[name] = total[name] + change if name in total else change
    return {name: tensor.float() for name, tensor in total.items()}


class Average(WeightMerge):
    """The mean of the weights, plain or weighted."""

    name = "average"
    by_default = True
    weights: list[Annotated[float, Field(gt=0, le=1e6)]] | None = Field(
        None, description="relative weight of each model; default: equal"
    )

    @model_validator(mode="after")
    def _one_each(self) -> Average:
        _require_one_each(self.models, self.weights)
        return self

    def combine(self, start: Weights | None, parts: Iterable[Weights]) -> dict[str, Tensor]:
        weights = self.weights or [1.0] * len(self.models)
        return _sum(None, ((weight / sum(weights), part) for weight, part in zip(weights, parts, strict=True)))


class TaskArithmetic(WeightMerge):
    """A base plus coefficients times task vectors (Ilharco et al., arXiv 2212.04089)."""

    name = "task_arithmetic"
    base: Address = Field(description="the model that they were trained from")
    weights: Coefficient | list[Coefficient] = Field(
        0.4, description="coefficient of every task vector, or one for each"
    )

    @model_validator(mode="after")
    def _one_each(self) -> TaskArithmetic:
        _require_one_each(self.models, self.weights)
        return self

    @property
    def start(self) -> str | None:
        return self.base

    def combine(self, start: Weights | None, parts: Iterable[Weights]) -> dict[str, Tensor]:
        return _sum(start, zip(self.coefficients(self.weights), parts, strict=True))


class Ties(WeightMerge):
    """Trim, elect signs, merge (Yadav et al., arXiv 2306.01708). Keep the largest entries of each task vector. Per weight, add to
    the base the mean of the entries whose sign agrees with their sum.
    """

    name = "ties"
    base: Address = Field(description="the model that they were trained from")
    density: float = Field(0.2, gt=0, le=1, description="share of each task vector that is kept, over all its tensors")
    scale: Coefficient = Field(1.0, description="times the merged task vector")

    @property
    def start(self) -> str | None:
        return self.base

    def combine(self, start: Weights | None, parts: Iterable[Weights]) -> dict[str, Tensor]:
        import torch

        assert start is not None
        vectors = [{name: part[name].double() - start[name].double() for name in start} for part in parts]
        for vector in vectors:
            bound = _least_kept(vector, self.density)
            for name, change in vector.items():
                vector[name] = torch.where(change.abs() >= bound, change, 0.0)
        found = {}
        for name, tensor in start.items():
            changes = torch.stack([vector[name] for vector in vectors])
            agreed = torch.sign(changes) == torch.sign(changes.sum(0))
            kept = torch.where(agreed, changes, 0.0)
            counted = (kept != 0).sum(0).clamp(min=1)
            found[name] = (tensor.double() + self.scale * kept.sum(0) / counted).float()
        return found


def _least_kept(vector: Mapping[str, Tensor], density: float) -> float:
    """The smallest magnitude that is kept; never 0, so that unchanged entries are not counted."""
    import torch

    sizes = torch.cat([change.abs().flatten() for change in vector.values()])
    count = max(round(density * sizes.numel()), 1)
    found = float(sizes.kthvalue(sizes.numel() - count + 1).values)
    return max(found, torch.finfo(torch.float64).tiny)


class Stack(Merge):
    """Add several LoRA adapters of one base to it: W + sum of coefficient * (alpha / r) B A. Products are added, not factors: sums of
    factors would add cross terms between adapters.
    """

    name = "stack"
    weights: Coefficient | list[Coefficient] = Field(1.0, description="coefficient of every adapter, or one for each")

    @model_validator(mode="after")
    def _one_each(self) -> Stack:
        _require_one_each(self.models, self.weights)
        return self

    def extra_directories(self) -> Iterator[str]:
        for name in self.models:
            found = None if name.startswith("stage:") else locate(name, None)
            directory = None if found is None or found.adapter is not None else found.directory
            if directory is not None and is_adapter(directory / "adapter"):
                yield str(directory / "adapter")

    def require(self, named: Named) -> None:
        self.require_planned(named, {})

    def require_planned(self, named: Named, bases: Mapping[str, str | None]) -> None:
        from opd.models.language_model import check_adapter
        from opd.models.load import empty_model
        from opd.models.lora import require_peft

        require_peft("student.merge: stack")
        found: dict[str, str] = {}
        for name in self.models:
            if name in bases:
                found[_planned_base(name, bases[name])] = name
                continue
            directory = _adapter(name, named)
            found[_base(name, directory)] = name
            check_adapter(name, directory, empty_model(load_config(*named(name))))
        if len(found) > 1:
            listed = "; ".join(f"{name!r} has {base!r}" for base, name in found.items())
            raise RecipeError(f"student.merge: stack adds adapters of one base, and these have several: {listed}.")

    def make(self, named: Named) -> LanguageModel:
        from opd.models.language_model import AdaptedModel

        first = self.models[0]
        model = load_model(_base(first, _adapter(first, named)), revision=named(first)[1])
        changes: dict[str, Tensor] = {}
        for name, coefficient in zip(self.models, self.coefficients(self.weights), strict=True):
            for key, change in adapter_changes(AdaptedModel(model, name, _adapter(name, named))):
                changes[key] = coefficient * change.double() + changes.get(key, 0.0)
        for key, parameter in model.module.named_parameters():
            if key in changes:
                parameter.data = (parameter.detach().double() + changes[key]).to(parameter.dtype)
        return model


def adapter_changes(model: LanguageModel) -> Iterator[tuple[str, Tensor]]:
    """(name of each adapted weight, what the adapter adds to it)."""
    from opd.models.lora import ADAPTER, adapted_layers

    for name, layer in adapted_layers(model.module):
        yield name, layer.get_delta_weight(ADAPTER)


def _adapter(name: str, named: Named) -> Path:
    """The directory of an adapter, or the `adapter` subdirectory of a model that was trained with one."""
    path, revision = named(name)
    found = locate(path, revision)
    if found.adapter is not None:
        return found.adapter
    inner = None if found.directory is None else found.directory / "adapter"
    if inner is not None and is_adapter(inner):
        return inner
    raise ModelError(
        f"student.merge: stack adds LoRA adapters, and {name!r} is not one and has none in its directory. Merge full models with "
        "average, task_arithmetic or ties."
    )


def _base(name: str, directory: Path) -> str:
    return same_directory(base_of(name, directory))


def _planned_base(name: str, base: str | None) -> str:
    """The base of the adapters that a stage will train."""
    if base is None:
        raise RecipeError(
            f"student.merge: stack adds LoRA adapters, and {name!r} is trained without adapters. Set student.lora there, or merge full models "
            "with average, task_arithmetic or ties."
        )
    return base


def same_directory(base: str) -> str:
    """The resolved path if the base is a directory, so that different spellings compare equal."""
    return str(Path(base).resolve()) if Path(base).is_dir() else base


def _require_one_each(models: Sequence[str], weights: float | Sequence[float] | None) -> None:
    if isinstance(weights, Sequence) and len(weights) != len(models):
        raise ValueError(f"weights: {len(weights)} for {len(models)} models: give one for each")
