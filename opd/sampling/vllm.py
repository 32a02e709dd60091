"""vLLM as the sampler: its settings. Sampling is faster and scales out; draws are no longer ours. No torch here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from opd.errors import RecipeError
from opd.remote import LOOPBACK, HttpAddress, Variable
from opd.sampling.samplers import BuiltInSampler, SamplerKind
from opd.settings import Address, Positive, StageView, Word
from opd.shorthand import OneOrMany
from opd.types import TokenSampler

if TYPE_CHECKING:
    from opd.models.language_model import LanguageModel
    from opd.models.settings import Lora
    from opd.sampling.graphs import Partner


ALONE = "is about all weights, and of this student the engines get the adapter alone after every update"


class VllmSampler(SamplerKind):
    """Engines in processes of their own, started here or elsewhere; they get the student's weights after every update."""

    name = "vllm"
    led = True
    beside_training = True

    python: Address | None = Field(
        None, description="of the environment that has vLLM, to start engines with; default: the one that runs opd"
    )
    replicas: int = Field(1, ge=1, le=64, description="engines started here")
    devices: list[Word] | None = Field(
        None, min_length=1, max_length=64, description="CUDA_VISIBLE_DEVICES of each replica; default: as it is here"
    )
    address: Annotated[list[HttpAddress], OneOrMany()] = Field(
        default_factory=list, max_length=64, description="of engines that run already, instead of starting any"
    )
    token_env: Variable = Field("OPD_TOKEN", description="the variable that holds their token; of `address`")
    slots: Positive = Field(256, le=65_536, description="sequences that an engine decodes side by side")
    parallel: int = Field(1, ge=1, le=64, description="GPUs of one engine (tensor_parallel_size)")
    memory: float = Field(0.4, gt=0, le=1, description="share of a GPU's memory for weights and cache of an engine")
    cache: Positive | None = Field(None, le=4096, description="GiB of an engine's cache, on CPUs; default: vLLM's")
    eager: bool = Field(False, description="neither compile nor record graphs: starts sooner, samples slower")
    lora: Literal["swap", "merge"] | None = Field(
        None,
        description="a student's adapters: given by themselves, or merged into all weights; default: swap where vLLM takes them",
    )
    weights: Literal["file", "shared"] = Field(
        "file",
        description="how engines get all weights: as a file over HTTP; or out of memory that those on this machine share with the trainer",
    )
    correct: bool = Field(
        True, description="terms that weigh by ratios and name no correction get tis: log-probs of two engines differ"
    )
    tolerance: float = Field(
        0.2, gt=0, le=10, description="nats, on average, by which an engine's log-probs may differ from the trainer's"
    )
    patience: float = Field(600.0, ge=0, le=31_536_000, description="seconds without any engine before the run ends")

    @model_validator(mode="after")
    def _one_place(self) -> VllmSampler:
        if self.address and (self.python is not None or self.replicas != 1 or self.devices is not None):
            raise ValueError("`address` names engines that run already, so python, replicas and devices do nothing")
        if self.devices is not None and len(self.devices) != self.replicas:
            raise ValueError(f"{len(self.devices)} devices for {self.replicas} replicas: name one for each")
        if len(set(self.address)) < len(self.address):
            raise ValueError("an address comes twice")
        if self.weights == "shared":
            self._shares()
        return self

    def _shares(self) -> None:
        other = next((one for one in self.address if not LOOPBACK.fullmatch(urlsplit(one).hostname or "")), None)
        if other is not None:
            raise ValueError(
                f"weights shared is for engines on this machine, and {other} may be another. Name it by 127.0.0.1, or set weights: file"
            )
        if self.parallel > 1:
            raise ValueError(
                f"weights shared is for engines of one GPU: with parallel {self.parallel} each has processes that no handle is passed "
                "to. Set parallel: 1, or weights: file"
            )
        if self.lora == "swap":
            raise ValueError(f"weights shared {ALONE}. Set lora: merge, or weights: file")

    @property
    def interpreter(self) -> str:
        return self.python or sys.executable

    @property
    def corrects(self) -> bool:
        return self.correct

    def open(
        self, model: LanguageModel, max_length: int, *, merge_stop: tuple[int, ...], partner: Partner | None = None
    ) -> TokenSampler:
        from opd.sampling.vllm_engine import VllmEngine

        return VllmEngine(model, self, max_length, merge_stop=merge_stop)

    def beside(self) -> SamplerKind:
        return BuiltInSampler(dtype=self.dtype)

    def heed(self, sampler: TokenSampler, check: Callable[[], None]) -> None:
        from opd.sampling.vllm_engine import VllmEngine

        assert isinstance(sampler, VllmEngine)
        sampler.check = check

    def close(self, sampler: TokenSampler) -> None:
        from opd.sampling.vllm_engine import VllmEngine

        assert isinstance(sampler, VllmEngine)
        sampler.close()

    def sequences(self) -> int:
        return 0  # in memory of their own

    def takes_adapters(self, config: Any, lora: Lora) -> bool:
        from opd.sampling.vllm_adapter import why_merged

        reason = "" if self.lora == "merge" else why_merged(config, lora)
        if reason and self.lora == "swap":
            raise RecipeError(f"sampler.lora swap: {reason}. Set it to merge.")
        swaps = self.lora != "merge" and not reason
        if swaps and self.weights == "shared":
            raise RecipeError(f"sampler.weights shared {ALONE}. Set sampler.lora: merge, or sampler.weights: file.")
        return swaps

    def adapter_notes(self, config: Any, lora: Lora) -> Iterable[str]:
        from opd.sampling.vllm_adapter import why_merged

        if self.takes_adapters(config, lora):
            yield "sampler.lora swap: the engines get the weights below the adapter once, and the adapter alone after every update"
        else:
            reason = "as the recipe says" if self.lora == "merge" else why_merged(config, lora)
            yield f"sampler.lora merge: the engines get all weights after every update, with the adapter added to them: {reason}"

    def notes(self) -> Iterable[str]:
        count = len(self.address) or self.replicas
        yield (
            f"sampler: {count} vLLM engine{'s' if count > 1 else ''}, given the weights after every update. Lost beside the built-in "
            "sampler: draws keyed by prompt and sample (a repeated run samples other answers) and checkpoint.resume: exact; an "
            "interrupted answer goes on behind its last token, and the log-probs under a temperature other than 1 are unknown"
        )

        if self.weights == "shared":
            yield "sampler.weights shared: the engines read a copy of the student's weights that the trainer keeps on its device beside its own"

    def inquire(self) -> Iterable[str]:
        from opd.sampling.vllm_replica import look_at, require_vllm

        if self.address:
            return look_at(self.address, self.token_env)
        require_vllm(self.interpreter)
        return ()

    def refuse(self, view: StageView) -> Iterable[str]:
        yield from super().refuse(view)
        if self.lora is not None and not view.lora:
            yield f"sampler.lora {self.lora} is about a student's adapters, and it has none. Drop it, or set student.lora."
        if view.resume == "exact":
            yield (
                "checkpoint.resume exact draws unfinished answers again, token by token, and vLLM would draw others. Set "
                "checkpoint.resume: prefill, or sampler.engine: builtin."
            )
        if view.rollout.staleness and view.rollout.in_flight == "keep":
            yield (
                "rollout.in_flight keep: vLLM reads answers under way again when its weights change. Set it to recompute, or to wait."
            )
        for term in view.terms if view.rollout.temperature != 1 else ():
            if term.compares_with_sampler:
                yield (
                    f"rollout.temperature {view.rollout.temperature:g} with sampler.engine vllm and a {term.name} term, which needs the "
                    "log-probs that tokens were drawn with: vLLM tells those at temperature 1. Set it to 1, or sampler.engine: builtin."
                )
