"""Plans for many GPUs, on paper, and against memory that was measured."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import opd
from opd.cluster.plan import Placement, cluster_plan, given_sizes, of_directory, place, rank_memory, shape_of, task_of
from opd.common.errors import ModelError, RecipeError, UserError
from opd.models.load import locate
from opd.models.optimisers import Muon, OptimisedWeights
from opd.recipe import Recipe, load_recipe
from opd.runner.cost import DEVICES, Device, gradient_bytes
from opd.runner.plan import make_plan
from tests.support.ranks import Job, give_back_what_is_freed, together

ROOT = Path(__file__).parents[2]
CPU = Device("cpu", 64 << 30, 1e11, 1e10)


def test_the_large_case_is_planned_without_torch() -> None:
    code = (
        "import sys; from opd.cli import app; import typer.main; "
        "typer.main.get_command(app)(sys.argv[1:], standalone_mode=False); assert 'torch' not in sys.modules"
    )
    command = ["cluster", "plan", str(ROOT / "examples" / "deepseek-v4-like.yaml"), "--gpus", "1024"]
    out = subprocess.run([sys.executable, "-c", code, *command], check=True, capture_output=True, text=True).stdout
    for word in ("trainer", "samplers", "teachers", "rewards", "memory", "hidden states", "gradients", "time"):
        assert word in out, out
    assert out.count("  teacher    ") == 10


@pytest.mark.parametrize("gpus", [128, 256, 512, 1024])
def test_more_devices_are_faster_and_never_overfull(gpus: int) -> None:
    recipe = load_recipe(ROOT / "examples" / "deepseek-v4-like.yaml")
    (plan,), (half,) = cluster_plan(recipe, gpus), cluster_plan(recipe, gpus // 2 if gpus > 128 else 100)
    assert half.placed.gpus < plan.placed.gpus <= gpus
    assert sum(plan.seconds.values()) < sum(half.seconds.values())
    assert max(sum(plan.memory.values()), *plan.others.values()) <= plan.task.device.usable
    assert plan.placed.ranks % plan.placed.group == 0
    json.dumps(plan.to_json())


def test_what_fits_on_every_rank_stays_there() -> None:
    (plan,) = cluster_plan(load_recipe("quickstart"), 64)
    assert plan.placed == Placement(True, 64, 64)


def test_sizes_that_are_given_and_those_of_files() -> None:
    sizes = given_sizes(["student=32B", "t={parameters: 671B, active: 37B, width: 7168, layers: 61}"])
    large, sparse = (shape_of("lab/none", None, sizes, name) for name in ("student", "t"))
    assert large.parameters == large.active == 32_000_000_000
    assert 4096 <= large.width <= 8192
    assert 40 <= large.layers <= 90
    assert (sparse.active, sparse.width, sparse.layers) == (37_000_000_000, 7168, 61)
    tiny = of_directory(Path(locate("tiny/generalist").path))
    assert tiny.parameters == opd.models.parameter_count("tiny/generalist")
    with pytest.raises(ModelError, match=r"not on this machine.*--size student=32B"):
        shape_of("lab/none", None, {}, "student")
    with pytest.raises(UserError, match="expected NAME=PARAMETERS"):
        given_sizes(["32B"])
    with pytest.raises(RecipeError, match=r"--size student\.parameters"):
        given_sizes(["student=large"])


def test_too_few_devices_are_rejected_with_the_number_needed() -> None:
    recipe = load_recipe(ROOT / "examples" / "deepseek-v4-like.yaml")
    with pytest.raises(UserError, match=r"16 GPUs of 80.0 GiB are too few.* at least"):
        cluster_plan(recipe, 16)


@pytest.mark.parametrize(("optimiser", "title"), [("adamw", "AdamW"), ("muon", "Muon")])
def test_both_plans_have_one_cost_model(optimiser: str, title: str) -> None:
    recipe = load_recipe("quickstart", [f"train.optimiser={optimiser}"])
    (paper,), (usual,) = cluster_plan(recipe, 1, device=CPU, prompt=20), make_plan(recipe)
    assert paper.memory[f"gradients and {title}"] == usual.memory[f"gradients and {title}"]
    assert paper.memory["teachers"] == usual.memory["teachers"]
    assert paper.memory["weights"] == usual.memory["weights"]


def test_every_rank_has_the_full_discriminator() -> None:
    (plan, _) = cluster_plan(load_recipe("methods/gad"), 8)
    (alone, _) = cluster_plan(load_recipe("methods/gad"), 1)
    size = plan.task.student.parameters
    assert plan.memory["modules"] == alone.memory["modules"] >= 16 * size
    (moved,) = (value for what, value in plan.moved.items() if what.startswith("gradients of modules (judge)"))
    assert moved == 2 * 4 * size * 7 / 8


class Live(TorchDispatchMode):
    """The largest number of bytes of tensors that were alive at once, of those made meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._known = WeakIdKeyDictionary()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in self._known:
                storage = tensor.untyped_storage()
                self._known[storage] = True
                self._now += storage.nbytes()
                weakref.finalize(storage, self._gone, storage.nbytes())
        self.peak = max(self.peak, self._now)
        return found

    def _gone(self, size: int) -> None:
        self._now -= size


@pytest.mark.parametrize("shape", [(512, 1536), (1536, 512), (512, 512)])
def test_an_update_of_muon_takes_the_memory_of_the_plan(shape: tuple[int, int]) -> None:
    kind, rows = Muon(), torch.nn.Parameter(torch.randn(shape))
    weights = OptimisedWeights(
        {"w": rows}, {"w": shape}, frozenset(), 1e-3, (0.9, 0.95), 1e-8, 0.0, True,
        whole=lambda name, part: part.clone(), rows=lambda name, whole: whole,
    )  # fmt: skip
    (rule,) = kind.open(weights)
    rows.grad = torch.randn(shape)
    rule.step()  # the momentum of a first update stays
    with Live() as live:
        rule.step()
    share = live.peak / kind.update_bytes(rows.numel())
    assert 0.7 < share < 1.25, f"{live.peak} bytes, and planned were {kind.update_bytes(rows.numel())}"


def test_a_group_needs_hybrid_sharding() -> None:
    with pytest.raises(RecipeError, match="group 4 is for shard: hybrid"):
        load_recipe("quickstart", ["cluster.group=4"])


# Measured


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """17 million random weights with the tokenizer of tiny/generalist: much more than whatever else a process needs."""
    path = tmp_path_factory.mktemp("models") / "large"
    tokenizer = AutoTokenizer.from_pretrained(locate("tiny/generalist").path)
    config = AutoConfig.for_model(
        "llama", hidden_size=512, intermediate_size=1536, num_hidden_layers=5, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=512, tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None, max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@dataclass(frozen=True)
class Measured(Job):
    """Writes the peak of the leader's memory during the third step, above what it had before the run, beside the run."""

    def carry_out(self) -> opd.Run:
        give_back_what_is_freed()
        small = {**self.recipe["student"], "model": "tiny/generalist"}  # a first run touches what any run needs
        opd.run({**self.recipe, "student": small, "teachers": {"t": "tiny/arithmetic"}}, out=self.out.with_suffix(".1"))
        gc.collect()
        before = _status("VmRSS")

        def on_step(run: Any, metrics: dict[str, Any]) -> None:
            if metrics["step"] == 2:
                Path("/proc/self/clear_refs").write_text("5")  # begin the peak anew
            if metrics["step"] == 3:
                self.out.with_suffix(".peak").write_text(str(_status("VmHWM") - before))

        return opd.run(self.recipe, out=self.out, on_step=on_step)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


CASES = {
    "alone": (0, {}),
    "one rank": (1, {}),
    "two ranks": (2, {}),
    "lora": (0, {"lora": {"rank": 4, "alpha": 8}}),
    "lora on two ranks": (2, {"lora": {"rank": 4, "alpha": 8}}),
}


@pytest.mark.scale
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.parametrize("case", CASES)
def test_memory_is_what_the_plan_says(case: str, large: Path, tmp_path: Path) -> None:
    ranks, more = CASES[case]
    recipe = {
        "student": {"model": str(large), **more},
        "teachers": {"t": str(large)},
        "prompts": "task:addition",
        "rollout": {"prompts": 4, "max_new_tokens": 4},
        "train": {"steps": 4, "micro_tokens": 64},
        "eval": {"prompts": 0},
        "log": {"start_table": False},
        "sampler": {"slots": 4},
        "device": "cpu",
        "threads": 1,
    }
    job = Measured(tmp_path / "run", recipe)
    together(max(ranks, 1), tmp_path / "log.txt", job) if ranks else _by_itself(job)
    measured = int(job.out.with_suffix(".peak").read_text())
    predicted = sum(paper(load_recipe(recipe), max(ranks, 1), sharded=bool(ranks)).values())
    assert abs(predicted / measured - 1) < 0.25, f"{predicted / 2**20:.0f} MiB, and measured {measured / 2**20:.0f} MiB"


class Gathers(TorchDispatchMode):
    """Bytes received by gathering."""

    def __init__(self) -> None:
        super().__init__()
        self.received = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name()
        if name.startswith("_c10d_functional::all_gather_into_tensor"):
            self.received += args[0].nbytes * (args[1] - 1)
        elif name.startswith("c10d::_allgather_base_"):
            self.received += args[0].nbytes - args[1].nbytes
        return function(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Counted(Job):
    """Writes what the leader received by gathering during the second step."""

    def carry_out(self) -> opd.Run:
        with Gathers() as gathers:
            before = 0

            def on_step(run: Any, metrics: dict[str, Any]) -> None:
                nonlocal before
                if metrics["step"] == 2:
                    self.out.with_suffix(".bytes").write_text(str(gathers.received - before))
                before = gathers.received

            return opd.run(self.recipe, out=self.out, on_step=on_step)


@pytest.mark.scale
def test_muon_gathers_what_the_plan_says(large: Path, tmp_path: Path) -> None:
    found, planned = {}, {}
    for optimiser in ("adamw", "muon"):
        recipe = {
            "student": str(large),
            "teachers": {"t": "tiny/arithmetic"},
            "prompts": "task:addition",
            "rollout": {"prompts": 4, "max_new_tokens": 4},
            "train": {"steps": 3, "epochs": 2, "optimiser": optimiser},
            "eval": {"prompts": 0},
            "log": {"start_table": False},
            "device": "cpu",
            "threads": 1,
        }
        job = Counted(tmp_path / optimiser, recipe)
        together(2, tmp_path / "log.txt", job)
        found[optimiser] = int(job.out.with_suffix(".bytes").read_text())
        task = task_of(load_recipe(recipe).stages[0], str, {}, CPU, 12)
        spread = place(task, 2).spread(task.stage)
        planned[optimiser] = gradient_bytes(task.stage, task.work, task.student, task.trained, 4, spread)
    more = planned["muon"] - planned["adamw"]
    assert more > 10**7
    assert found["muon"] - found["adamw"] == pytest.approx(more, rel=0.01)


def _by_itself(job: Job) -> None:
    from tests.support.crash import FORKS

    process = FORKS.Process(target=job.carry_out)
    process.start()
    process.join(1800)  # a hang, on any machine
    assert process.exitcode == 0


def paper(recipe: Recipe, ranks: int, sharded: bool) -> dict[str, int]:
    task = task_of(recipe.stages[0], str, {}, CPU, 12)
    return rank_memory(task, place(task, ranks), sharded)


def test_devices_are_known_by_name() -> None:
    assert all(name == device.name for name, device in DEVICES.items())
