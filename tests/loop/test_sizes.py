"""Sizes that a recipe leaves open, and what happens when they are too large after all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import opd
from opd.engines.kinds import BuiltInSampler
from opd.engines.layers import writes_out
from opd.loop.learner import Trainer
from opd.models import load_config
from opd.objective.batch import Batch
from opd.objective.objective import Objective
from opd.recipe import Stage, Train, load_recipe
from opd.records import SignalNeed
from opd.runner.plan import COMPILED_STEPS, FULL, decode_steps, fit_sizes, make_plan, with_sizes
from opd.teachers.scoring import LocalTeacher
from tests.support.helpers import save_tiny, term, tiny_model, tiny_module
from tests.support.rollouts import sampled_by, some_rollouts


class Full:
    """A hook that runs out of memory when more than so many rows come by; it counts how often that was."""

    def __init__(self, most: int) -> None:
        self.most, self.times = most, 0

    def __call__(self, grad: torch.Tensor) -> None:
        if grad.shape[-2] > self.most:
            self.times += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def one_step(plant: Callable[[torch.nn.Module], None], tokens: int, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """What a step gives and the gradient it clips, with something planted in the student."""
    model = tiny_model("llama")
    model.module.to(dtype)
    rollouts = sampled_by(model, some_rollouts())
    teacher = LocalTeacher("t", "teacher", tiny_model("llama", 1), None, model.stop_ids)
    said = teacher.score(rollouts, SignalNeed("hidden"))
    signals: Any = {("teacher", "hidden"): {one.id: signal for one, signal in zip(rollouts, said, strict=True)}}
    objective = Objective([term()], {"t": teacher}, stop_ids=model.stop_ids)
    told: list[int] = []
    trainer = Trainer(model, objective, Train(micro_tokens=tokens, lr=1e-3), on_smaller=told.append)
    plant(model.module)
    grads: dict[str, torch.Tensor] = {}
    clip = trainer.optimiser.clip

    def clipped() -> float:
        grads.update({name: master.grad.clone() for name, master in trainer.optimiser._masters.items()})  # type: ignore[union-attr]
        return clip()

    trainer.optimiser.clip = clipped  # type: ignore[method-assign]
    result = trainer.step(Batch(rollouts, signals, {}))
    return (result, told), grads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_that_runs_out_of_memory_is_repeated_with_half_the_size(dtype: torch.dtype) -> None:
    """The first layers have no gradient yet when the hook strikes, and the last ones have: nothing is added twice."""
    (calm, _), exact = one_step(lambda module: None, 10**6, dtype)
    full = Full(most=42)

    def plant(module: torch.nn.Module) -> None:
        def watch(_: Any, __: Any, out: torch.Tensor) -> None:
            if out.requires_grad:
                out.register_hook(full)

        module.get_submodule("model.layers.0.mlp").register_forward_hook(watch)

    (found, told), grads = one_step(plant, 64, dtype)
    assert full.times == len(told) > 0
    assert told[-1] < 64
    assert found.norms == pytest.approx(calm.norms, rel=1e-5 if dtype == torch.float32 else 2e-2)
    losses = [sum(sum(s.loss.values()) for _, s in result.statistics) for result in (found, calm)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5 if dtype == torch.float32 else 2e-2)
    for name, grad in exact.items():
        bound = 1e-5 if dtype == torch.float32 else 3e-2
        assert float((grads[name] - grad).norm() / (grad.norm() + 1e-9)) < bound, name


def test_an_answer_longer_than_the_budget_is_a_separate_micro_batch() -> None:
    """Groups stay whole, whatever they take; the gradient is that of one pass over everything."""
    (whole, _), exact = one_step(lambda module: None, 10**6, torch.float32)
    (cut, told), grads = one_step(lambda module: None, 1, torch.float32)
    assert (len(whole.statistics), len(cut.statistics), told) == (1, 4, [])
    assert cut.norms == pytest.approx(whole.norms, rel=1e-5)
    for name, grad in exact.items():
        assert float((grads[name] - grad).norm() / (grad.norm() + 1e-9)) < 1e-5, name


def test_what_cannot_be_split_further_is_reported() -> None:
    def plant(module: torch.nn.Module) -> None:
        def explode(*_: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

        module.get_submodule("model.layers.0.mlp").register_forward_hook(explode)

    with pytest.raises(torch.OutOfMemoryError):
        one_step(plant, 64, torch.float32)


def test_a_teacher_reads_less_at_once_when_memory_runs_out() -> None:
    model = tiny_model("llama", 1)
    rollouts = sampled_by(model, some_rollouts())
    teacher = LocalTeacher("t", "teacher", model, 10**6, model.stop_ids)
    calm = teacher.score(rollouts, SignalNeed("logprobs_at"))
    full, before = Full(most=24), teacher._batch_tokens
    layer: Any = model.module.get_submodule("model.layers.0.mlp")
    layer.register_forward_hook(lambda _, __, out: full(out))
    found = teacher.score(rollouts, SignalNeed("logprobs_at"))
    assert full.times > 0
    assert teacher._batch_tokens < before
    for one, other in zip(found, calm, strict=True):
        torch.testing.assert_close(torch.tensor(one.values), torch.tensor(other.values), atol=1e-5, rtol=1e-5)


def stage_of(*overrides: str) -> Stage:
    return load_recipe("quickstart", ["device=cpu", "train.micro_tokens=null", *overrides]).stages[0]


def test_sizes_grow_with_the_device_and_fit_it() -> None:
    stage = stage_of("rollout.prompts=500")

    def estimate(settled: Stage) -> int:
        assert isinstance(settled.sampler, BuiltInSampler)
        return 1000 + settled.train.micro_tokens * 3 + (settled.sampler.slots or 0) * 10  # type: ignore[operator]

    found = [fit_sizes(stage, estimate, total, 64) for total in (6_000, 20_000, 60_000, 10**9)]
    tokens, slots = [sizes["micro_tokens"] for sizes in found], [sizes["slots"] or 0 for sizes in found]
    assert tokens == sorted(tokens)
    assert slots == sorted(slots)
    assert (tokens[0], tokens[-1], slots[-1]) == (1024, 32_768, 256)
    assert all(
        estimate(with_sizes(stage, sizes)) <= FULL * total
        for sizes, total in zip(found[1:], (20_000, 60_000, 10**9), strict=True)
    )


def test_slots_and_micro_batches_are_weighed_against_each_other() -> None:
    """Eight slots with the largest micro-batches fit as well as all 64 with the smallest: neither end is taken."""
    stage = stage_of("rollout.prompts=64", "rollout.samples=1", "rollout.max_new_tokens=512")

    def estimate(settled: Stage) -> int:
        assert isinstance(settled.sampler, BuiltInSampler)
        return settled.train.micro_tokens + 64 * (settled.sampler.slots or 0)  # type: ignore[operator]

    sizes = fit_sizes(stage, estimate, int((2048 + 64 * 64) / FULL) + 1, 64)
    assert (sizes["slots"], sizes["micro_tokens"]) == (32, 4096)


def test_what_a_recipe_says_stays() -> None:
    said = stage_of("train.micro_tokens=77", "sampler.slots=5", "sampler.compile=false")
    settled = with_sizes(said, fit_sizes(said, lambda _: 0, 10**9, 64))
    assert isinstance(settled.sampler, BuiltInSampler)
    assert (settled.train.micro_tokens, settled.sampler.slots, settled.sampler.compile) == (77, 5, False)


def test_long_runs_compile() -> None:
    short, long = (stage_of(f"train.steps={steps}", "rollout.max_new_tokens=512") for steps in (10, 1000))
    sizes = [fit_sizes(stage, lambda _: 0, 10**9, 64) for stage in (short, long)]
    assert [found["compile"] for found in sizes] == [False, True]
    assert decode_steps(with_sizes(long, sizes[1])) >= COMPILED_STEPS
    assert not fit_sizes(long, lambda _: 0, 10**9, 64, written=True)["compile"]  # which is faster


def test_which_families_have_layers_written_out() -> None:
    named = {
        kind: writes_out(tiny_module(kind).config) for kind in ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt2")
    }
    assert named == {"llama": True, "qwen2": True, "qwen3": True, "mistral": True, "gemma2": False, "gpt2": False}
    assert writes_out(load_config("tiny/generalist"))


def test_a_plan_says_which_sizes_were_chosen() -> None:
    (plan,) = make_plan(load_recipe("quickstart", ["device=cpu", "train.micro_tokens=null"]))
    line = next(line for line in plan.lines() if line.startswith("  sizes"))
    assert "4,096 tokens" in line
    assert "8,192 at once" in line
    assert "not compiled" in line


def test_a_run_keeps_its_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that had to be halved: after a restart it is not tried again."""
    model = save_tiny(tmp_path / "student")
    recipe = {
        "student": model, "teachers": {"a": save_tiny(tmp_path / "teacher", seed=1)}, "device": "cpu",
        "prompts": [{"source": "task:addition", "domain": "a"}], "rollout": {"prompts": 6, "max_new_tokens": 6},
        "train": {"steps": 2}, "eval": {"prompts": 0}, "log": {"start_table": False},
    }  # fmt: skip
    struck = []
    call = Objective.__call__

    def full(self: Objective, student: Any, pack: Any, *others: Any) -> Any:
        if pack.ids_T.numel() > 40:
            struck.append(pack.ids_T.numel())
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return call(self, student, pack, *others)

    monkeypatch.setattr(Objective, "__call__", full)
    run = opd.run(recipe, out=tmp_path / "run")
    kept = json.loads((run.directory / "sizes.json").read_text())["main"]
    assert struck
    assert kept["micro_tokens"] < 64
    assert (kept["batch_tokens"], kept["slots"], kept["compile"]) == (8192, None, False)
    assert "memory ran out" in (run.directory / "log.txt").read_text()


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_plan_for_a_gpu(tmp_path: Path, device: str) -> None:
    """However the device is named: sizes that fit it, and which layers are one kernel."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1 + 1 ="}\n', encoding="utf-8")
    model = save_tiny(tmp_path / "model")
    recipe = {
        "student": {"model": model},
        "teachers": {"teacher": model},
        "prompts": str(tmp_path / "prompts.jsonl"),
        "eval": {"prompts": 0},
        "device": device,
    }
    (plan,) = make_plan(load_recipe(recipe))
    assert "micro-batches of 32,768 tokens" in plan.sizes
    assert "RMS norms" in plan.fused
    assert not plan.unfused
