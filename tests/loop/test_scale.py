"""Minutes on several ranks: `make test-scale`. Whatever the number of ranks, the numbers are those of one process."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import opd
from opd.loop.distributed import joined_ranks
from opd.loop.ranks import Ranks
from opd.models import load_model
from opd.models.load import locate
from opd.models.settings import Lora
from opd.models.sharded import PreshardedModel
from opd.recipe.stage import Cluster
from opd.store import RolloutStore
from opd.teachers.scoring import ScoringTeacher
from tests.support.families import family_named
from tests.support.helpers import TEMPLATE, tiny_tokenizer
from tests.support.ranks import Job, differences, give_back_what_is_freed, numbers, start, together
from tests.support.servers import TOKEN, TOKEN_ENV, ServeProcess

pytestmark = pytest.mark.scale
SMALL = [
    "train.steps=2", "eval.prompts=0", "rollout.prompts=8", "rollout.max_new_tokens=12", "device=cpu", "threads=1",
    "log.start_table=false",
]  # fmt: skip
CUT = [*SMALL, "train.micro_tokens=128"]
LITTLE = [  # two of the quickstart's four teachers
    *CUT, "teachers={arithmetic: tiny/arithmetic, spelling: tiny/spelling}",
    "prompts=[{source: 'task:addition', domain: arithmetic}, {source: 'task:reverse', domain: spelling}]",
]  # fmt: skip
DEEP = 9  # layers
HYBRID = ["cluster.shard=hybrid", "cluster.group=2"]
RECIPES: dict[str, tuple[str, list[str]]] = {
    "direct": ("quickstart", [*CUT, "log.start_table=true"]),
    "policy gradient": ("methods/thinking-machines", CUT),
    "several updates": ("methods/thinking-machines", [*CUT, "train.epochs=2", "train.minibatches=2"]),
    "grpo": ("methods/grpo", CUT),
    "tip": ("methods/tip", CUT),
    "kdrl": ("methods/kdrl", CUT),
    "minillm": ("methods/minillm", CUT),  # and plain text
    "growing limit": (  # by what all ranks measured
        "methods/fast-opd",
        [*CUT, "train.steps=3", "rollout.length_schedule={kind: matched, start: 2, below: 100, steps: 1, factor: 2}"],
    ),
    "teacher prefix": ("methods/tropd", [*CUT, "rollout.samples=2", "rollout.teacher_prefix.over=3"]),
    "answers of an earlier stage": (
        "quickstart",
        [
            *LITTLE,
            "stages=[{name: one}, {name: two, prompts: [{source: 'stage:one', turn_into: completion}], rollout: {data_share: 1}}]",
        ],
    ),
    "sft": ("methods/sft", CUT),
    "lora": ("quickstart", [*LITTLE, "student.lora.rank=4", "student.lora.alpha=8"]),
    "checkpointing": ("quickstart", [*LITTLE, "student.gradient_checkpointing=true", "train.schedule=linear"]),
    "mixed precision": ("quickstart", [*LITTLE, "train.precision=mixed"]),
    "pairs": ("methods/online-dpo", CUT),
    "pairs by author": ("methods/spin", [*CUT, "stages=[{name: first}, {name: second, student: 'stage:first'}]"]),
    "given pairs": ("methods/dpo", CUT),
    "own alphas": ("methods/distillm-2", CUT),
    "anchor": ("methods/j-bond", CUT),
    "traces in groups": ("methods/luffy", [*CUT, "rollout.samples=4"]),
    "glm5": ("methods/glm5-objective", CUT),
    "ema": ("methods/ema", CUT),
    "siblings": ("methods/sdpo", [*CUT, "rollout.samples=4"]),
    "feedback": (
        "methods/sdpo",
        [*CUT, "rollout.samples=4", "teachers.arithmetic.view={kind: feedback, sibling: ' {sibling}'}"],
    ),
    "hints": ("methods/kepo", [*CUT, "rollout.samples=4", "rollout.rescue.attempts=2"]),
    "experience": ("methods/oel", CUT),
    "one pack": ("methods/opd", [*SMALL, "rollout.prompts=1"]),  # most ranks have nothing to do
    "untied": ("quickstart", LITTLE),
    "muon": ("quickstart", [*LITTLE, "train.optimiser=muon"]),
    "ppo": ("methods/ppo", CUT),
    "ppo, lora": (  # values alone at first
        "methods/ppo",
        [*CUT, "student.lora.rank=4", "student.lora.alpha=8", "objective.0.coefficient.after=1"],
    ),
    "discriminator": (
        "methods/gad",
        [
            *CUT,
            "rollout.samples=4",
            "stages.0.train.steps=2",
            "stages.1.train.steps=2",
            "stages.0.objective.coefficient.after=1",
        ],
    ),
    "led": ("quickstart", [*LITTLE, "sampler={engine: led}", "log.start_table=true"]),  # one rank samples for all
    "mix": ("quickstart", [*LITTLE, "rollout.teacher_mix=0.3"]),
    "turns": (
        "methods/sod",
        [*CUT, "rollout.max_new_tokens=40", "eval.prompts=2", "eval.every=1"],
    ),  # one rank plays for all
    "turns, split": (
        "quickstart",
        [
            *CUT,
            "teachers={arithmetic: tiny/arithmetic}",
            "prompts=task:dialogue",
            "rollout.max_new_tokens=40",
            "rollout.environment={kind: dialogue, turn_tokens: 6, history: split}",
            "rollout.samples=2",
            "objective=[{form: direct}, {form: policy_gradient, advantage: {teacher_weight: 0, also: [{kind: turns}]}}]",
        ],
    ),
    "spread teachers": ("quickstart", [*LITTLE, "cluster.teachers=shard", "log.start_table=true"]),
}
LED = """
import opd
from opd.engines.kinds import BuiltInSampler, SamplerKind

@opd.register
class LedSampler(SamplerKind):
    \"\"\"The leader's answers for all.\"\"\"

    name = "led"
    leader_only = True

    def open(self, model, max_length, *, merge_stop, partner=None):
        return BuiltInSampler().open(model, max_length, merge_stop=merge_stop)
"""
EVERYWHERE = [
    "direct", "policy gradient", "grpo", "tip", "kdrl", "minillm", "sft", "lora", "untied", "muon", "ppo", "discriminator",
]  # fmt: skip
REPLICAS = {"two groups": "untied", "two groups, lora": "lora", "two groups, muon": "muon"}  # the same, hybrid
ON = {  # ranks -> recipes
    1: EVERYWHERE,
    2: list(RECIPES),
    3: [*EVERYWHERE, "pairs by author", "given pairs", "traces in groups", "own alphas", "anchor"],
    4: [*EVERYWHERE, "one pack", "spread teachers", *REPLICAS],
}
BOUND = {
    "muon": 1e-4,  # which multiplies in bfloat16
    "two groups, muon": 1e-4,
    "turns": 1e-4,
    "ppo": 1e-4,  # four updates of each batch
    "ppo, lora": 1e-4,
    "discriminator": 1e-3,  # after two steps its scores differ by little, and are divided by their spread
    "mixed precision": 1e-3,
    "several updates": 1e-4,  # of which each divides by moments that are still almost nothing: roundings grow
}

FIRST = {"mixed precision": 1}  # bfloat16 gradients are rounded once per micro-batch, and Adam begins with their signs


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny/generalist with a head of its own, and with layers enough that two are gathered at once, behind its own as drawn."""
    path = tmp_path_factory.mktemp("models") / "untied"
    source = locate("tiny/generalist").path
    module = AutoModelForCausalLM.from_pretrained(source)
    module.config.tie_word_embeddings, module.config.num_hidden_layers = False, DEEP
    torch.manual_seed(0)
    head = AutoModelForCausalLM.from_config(module.config)
    known = {**module.state_dict(), "lm_head.weight": module.get_input_embeddings().weight.detach() * 0.9}
    head.load_state_dict({**head.state_dict(), **known})
    head.generation_config = module.generation_config
    head.save_pretrained(path)
    AutoTokenizer.from_pretrained(source).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def alone(untied: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every recipe in one process."""
    root = tmp_path_factory.mktemp("alone")
    for name in RECIPES:
        job(name, root, untied).carry_out()
    return root


def job(name: str, root: Path, untied: Path) -> Job:
    recipe, overrides = RECIPES[REPLICAS.get(name, name)]
    more = [f"student.model={untied}"] if REPLICAS.get(name, name) == "untied" else []
    if name == "led":
        plugin = untied.parent / "led_sampler.py"
        plugin.write_text(LED, encoding="utf-8")
        more = [f"plugins=[{plugin}]"]
    return Job(root / name.replace(" ", "-"), recipe, [*overrides, *more, *(HYBRID if name in REPLICAS else ())])


@pytest.mark.xdist_group("steps")  # so that one process runs every recipe alone, once
@pytest.mark.parametrize("size", ON)
def test_any_number_of_ranks_takes_the_same_steps(size: int, alone: Path, untied: Path, tmp_path: Path) -> None:
    names = ON[size]
    together(size, tmp_path / "log.txt", *(job(name, tmp_path, untied) for name in names))
    found = []
    for name in names:
        one, many = job(REPLICAS.get(name, name), alone, untied).out, job(name, tmp_path, untied).out
        found += differences(one, many, BOUND.get(name, 1e-5), FIRST.get(name))
    assert not found, "\n".join(found)


LONG: dict[str, Any] = {
    "student": "tiny/generalist",
    "teachers": {"arithmetic": "tiny/arithmetic", "spelling": "tiny/spelling"},
    "prompts": [
        {"source": "task:addition", "domain": "arithmetic"},
        {"source": "task:reverse", "domain": "spelling"},
    ],
    "rollout": {"prompts": 8, "samples": 2, "max_new_tokens": 16},
    "objective": [{"form": "direct"}, {"form": "policy_gradient", "coefficient": 0.5}],
    "train": {"steps": 5, "lr": 1e-4, "micro_tokens": 128},
    "eval": {"prompts": 4, "every": 3, "teachers": False},
    "checkpoint": {"every": 2},
    "log": {"start_table": False},
    "device": "cpu",
    "threads": 1,
}


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8}], ids=["whole", "lora"])
def test_saved_on_two_ranks_and_resumed_on_others(lora: dict[str, int] | None, tmp_path: Path) -> None:
    recipe = LONG | {"student": {"model": "tiny/generalist", **({"lora": lora} if lora else {})}}
    _saved_and_resumed(recipe, tmp_path)


def test_muon_and_a_head_are_saved_on_two_ranks_and_resumed_on_others(tmp_path: Path) -> None:
    gae = {"teacher_weight": 0, "also": {"kind": "gae", "lam": 0.9}}
    terms = [{"form": "policy_gradient", "advantage": gae}, {"form": "value", "coefficient": 0.1}]
    changes = {"objective": terms, "modules": {"value": {"kind": "head", "lr": 1e-3}}, "teachers": {}}
    train = {"steps": 5, "lr": 1e-4, "micro_tokens": 128, "optimiser": "muon"}
    reference, found = _saved_and_resumed(LONG | changes | {"train": train}, tmp_path, 1e-4)
    names = {f"{kind}.safetensors" for kind in ("weights", "optimiser")}
    for name in names:
        one, many = (load_file(run / "modules" / "value" / name) for run in (reference, found))
        assert one.keys() == many.keys()
        for key, tensor in one.items():
            torch.testing.assert_close(many[key], tensor, rtol=1e-2, atol=1e-5)


def test_a_discriminator_is_saved_on_two_ranks_and_resumed_on_others(tmp_path: Path) -> None:
    terms = {"form": "policy_gradient", "advantage": {"teacher_weight": 0, "also": {"kind": "score", "std": True}}}
    rollout = {"prompts": 8, "samples": 3, "max_new_tokens": 16, "writers": [{"kind": "data", "samples": 1}]}
    changes = {
        "objective": terms,
        "modules": {"judge": {"kind": "discriminator", "lr": 1e-4}},
        "teachers": {},
        "rollout": rollout,
    }
    reference, found = _saved_and_resumed(LONG | changes, tmp_path, 1e-4)
    for name in ("weights", "optimiser"):
        one, many = (load_file(run / "modules" / "judge" / f"{name}.safetensors") for run in (reference, found))
        assert one.keys() == many.keys()
        distance = sum(float((many[key] - tensor).norm() ** 2) for key, tensor in one.items()) ** 0.5
        assert distance < 1e-3 * sum(float(tensor.norm() ** 2) for tensor in one.values()) ** 0.5


def _saved_and_resumed(recipe: dict[str, Any], tmp_path: Path, bound: float = 1e-5) -> tuple[Path, Path]:
    """The models of a run in one process, and of one that began on two ranks and ended on three."""
    opd.run(recipe, out=tmp_path / "reference")
    stopped = {size: tmp_path / f"on-{size}" for size in (1, 3)}
    together(2, tmp_path / "log.txt", Job(stopped[1], recipe, stop_after=3))
    assert len(numbers(stopped[1])) == 3
    shutil.copytree(stopped[1], stopped[3], symlinks=True)
    opd.resume(stopped[1])
    together(3, tmp_path / "log-3.txt", Job(stopped[3]))
    for path in stopped.values():
        assert not differences(tmp_path / "reference", path, bound)
        assert opd.Run(path).summary["status"] == "done"
    assert len(AutoModelForCausalLM.from_pretrained(opd.Run(stopped[3]).model).state_dict()) > 10
    return opd.Run(tmp_path / "reference").model, opd.Run(stopped[3]).model


def test_an_unexpected_error_is_reported_once(tmp_path: Path) -> None:
    group = start(2, tmp_path / "log.txt", Job(tmp_path / "run", LONG | {"eval": {"prompts": 0}}, bug_after=1))
    assert group.codes() == [1, 1]
    assert "KeyError: 'planted'" in group.said()
    assert "lost its connection" not in group.said(), group.said()


def test_nothing_is_lost_when_a_rank_is_killed(tmp_path: Path) -> None:
    recipe = LONG | {"train": {"steps": 100_000, "lr": 1e-4, "micro_tokens": 128}, "eval": {"prompts": 0}}
    run = tmp_path / "run"
    group = start(2, tmp_path / "log.txt", Job(run, recipe))
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        time.sleep(0.05)
        assert all(rank.exitcode is None for rank in group.ranks), group.said()
    killed = group.ranks[0].pid  # the one that writes the store
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    codes = group.codes()
    assert codes == [-signal.SIGKILL, 1], group.said()
    assert "lost its connection to another rank" in group.said()
    before = {entry.id: entry.stop for entry in RolloutStore(run / "rollouts", read_only=True).entries.values()}
    steps = len(numbers(run))
    together(3, tmp_path / "log-2.txt", Job(run, stop_after=steps + 3))
    after = RolloutStore(run / "rollouts", read_only=True).entries
    assert set(before) <= set(after)
    opd.run(
        recipe,
        out=tmp_path / "reference",
        on_step=lambda live, found: live.stop() if found["step"] == steps + 3 else None,
    )
    assert not differences(tmp_path / "reference", run)


def test_sigterm_to_one_rank_preempts_all(tmp_path: Path) -> None:
    recipe = LONG | {
        "train": {"steps": 100_000, "lr": 1e-4, "micro_tokens": 128},
        "eval": {"prompts": 0},
        "checkpoint": {"grace": 3600},
    }
    (tmp_path / "recipe.yaml").write_text(str(recipe).replace("True", "true").replace("False", "false"))
    run = tmp_path / "run"
    group = start(2, tmp_path / "log.txt", "run", str(tmp_path / "recipe.yaml"), "--out", str(run))
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 2:
        time.sleep(0.05)
        assert all(rank.exitcode is None for rank in group.ranks), group.said()
    group.ranks[1].terminate()
    assert group.codes() == [75, 75], group.said()
    assert list((run / "checkpoints" / "main").glob("step-*")), group.said()


AWAY = LED.replace("import opd", "import time\nfrom pathlib import Path\nimport opd", 1).replace(
    "return BuiltInSampler().open(model, max_length, merge_stop=merge_stop)",
    """return Away(BuiltInSampler().open(model, max_length, merge_stop=merge_stop))

    def poll_stop(self, sampler, check):
        sampler.check = check

class Away:
    def __init__(self, own):
        self.load, self._own, self._asked = own.load, own, 0

    def sample(self, requests):
        self._asked += 1
        for number, event in enumerate(self._own.sample(requests)):
            yield event
            while self._asked == 2 and number == 20:
                Path(__file__).with_name("waiting").touch()
                self.check()
                time.sleep(0.05)
""",
)


def test_a_stop_works_while_the_sampler_of_all_ranks_is_unreachable(tmp_path: Path) -> None:
    plugin, run = tmp_path / "away_sampler.py", tmp_path / "run"
    plugin.write_text(AWAY, encoding="utf-8")
    settings = [*LITTLE, "train.steps=9", "checkpoint.grace=3600", "sampler={engine: led}", f"plugins=[{plugin}]"]
    group = start(2, tmp_path / "log.txt", "run", "quickstart", *settings, "--out", str(run))
    while not (tmp_path / "waiting").exists():
        time.sleep(0.05)
        assert all(rank.exitcode is None for rank in group.ranks), group.said()
    for rank in group.ranks:  # as torchrun passes it on
        rank.terminate()
    assert group.codes() == [75, 75], group.said()
    entries = RolloutStore(run / "rollouts", read_only=True).entries.values()
    trained = numbers(run)[0]["tokens"]
    assert trained is not None
    assert sum(entry.length for entry in entries) > trained + 8  # what had been drawn by then is kept
    assert list((run / "checkpoints" / "main").glob("step-*")), group.said()


@dataclass(frozen=True)
class Loading(Job):
    """Each rank reads its part of the model `recipe`, the first then all of it, and says how much memory that took at most."""

    lora: Lora | None = None

    def carry_out(self) -> None:
        give_back_what_is_freed()
        with joined_ranks() as ranks:
            # the first touches what any model needs, the second what a library needs for products of this size (MKL: 190 MB)
            for name in ("tiny/generalist", str(self.recipe), str(self.recipe)):
                found = {"parts": _peak(lambda name=name: self._part(ranks, name))}  # type: ignore[misc]
                if ranks.leads:
                    found["whole"] = _peak(lambda name=name: load_model(name))  # type: ignore[misc]
        (self.out / f"{ranks.rank}.json").write_text(json.dumps(found), encoding="utf-8")

    def _part(self, ranks: Ranks, name: str) -> None:
        model = ranks.load_student(name, "float32", "cpu", None, Cluster(), False, self.lora)
        assert isinstance(model, PreshardedModel)


def _peak(make: Callable[[], object]) -> int:
    """Bytes that it took at most."""
    gc.collect()
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins runs_named
    make()
    return _memory("VmHWM") - before


def _memory(which: str) -> int:
    """Bytes, of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(which))


def test_no_rank_ever_has_the_full_student(tmp_path: Path) -> None:
    jobs, source = [], locate("tiny/generalist").path
    for tied in (True, False):
        shape = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 32, "tie_word_embeddings": tied}
        module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source, **shape))
        path = tmp_path / f"tied-{tied}"
        module.save_pretrained(path)
        AutoTokenizer.from_pretrained(source).save_pretrained(path)
        jobs.append(Loading(path, path))
        (path / "lora").mkdir()
        jobs.append(Loading(path / "lora", path, lora=Lora(rank=4, alpha=8)))
        whole = sum(weight.numel() for weight in module.parameters()) * 4
        pages = (path / "model.safetensors").stat().st_size  # of the file, which count as soon as one near them is read
    together(4, tmp_path / "log.txt", *jobs)
    for job in jobs:
        for rank in range(4):
            found = json.loads((job.out / f"{rank}.json").read_text())
            assert found.get("whole", 2 * whole) - pages > 0.9 * whole, found  # the measure tells the two apart
            # with a layer or two that are whole while the probe passes
            assert found["parts"] - pages < 0.6 * whole, found


def test_ranks_measure_what_monitors_ask_for(tmp_path: Path) -> None:
    asked = [{"kind": name, "every": 2, "answers": 16} for name in ("conflict", "calibration", "prefix")]
    recipe = LONG | {"train": {"steps": 2, "lr": 1e-3, "micro_tokens": 128}, "monitors": {"watch": asked}}
    opd.run(recipe, out=tmp_path / "alone")
    for size in (1, 2):
        together(size, tmp_path / f"log-{size}.txt", Job(tmp_path / f"on-{size}", recipe))
    runs = [_measured(tmp_path / name) for name in ("alone", "on-1", "on-2")]
    assert {"ece/teacher", "takeover/first", "takeover/late"} < runs[0].keys()
    assert sum(name.startswith("cosine/") for name in runs[0]) == 2
    assert runs[1] == pytest.approx(runs[0], abs=1e-4)
    assert runs[2] == pytest.approx(runs[0], abs=1e-4)
    assert not differences(tmp_path / "alone", tmp_path / "on-2")


def _measured(run: Path) -> dict[str, float]:
    """By probes, at the last step."""
    last = json.loads((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    return {name: last[name] for name in last if name.startswith(("cosine/", "ece/teacher", "takeover/"))}


KINDS: dict[str, dict[str, Any]] = {  # families, and what else a rank could do differently
    "Llama": {"student": {"gradient_checkpointing": True, "lora": {"rank": 2, "alpha": 4}}},
    "Qwen3": {"train": {"epochs": 2, "minibatches": 2}},
    "Qwen3-MoE": {"student": {"lora": {"rank": 2, "alpha": 4}}},
    "Gemma 2": {"eval": {"every": 1, "prompts": 3, "teachers": False}},
    "Gemma 3": {"cluster": {"shard": "hybrid", "group": 1}},
    "GPT-2": {"rollout": {"teacher_share": 0.25}},
}


def test_other_families_on_three_ranks(tmp_path: Path) -> None:
    """Untied heads, experts, capped scores, windows, a model that does not run packed."""
    jobs = []
    for name, more in KINDS.items():
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = TEMPLATE
        for seed, role in enumerate(("student", "teacher")):
            family_named(name).build(seed).save_pretrained(tmp_path / name / role)
            tokenizer.save_pretrained(tmp_path / name / role)
        recipe = LONG | {"teachers": {"spelling": str(tmp_path / name / "teacher")}, "prompts": LONG["prompts"][1:]}
        recipe = recipe | {"train": {"steps": 2, "lr": 1e-3, "micro_tokens": 64}, "eval": {"prompts": 0}}
        recipe = recipe | {"rollout": {"prompts": 5, "samples": 2, "max_new_tokens": 6}, "student": {}}
        recipe |= {key: {**recipe.get(key, {}), **values} for key, values in more.items()}
        recipe["student"] |= {"model": str(tmp_path / name / "student")}
        jobs.append(Job(tmp_path / name / f"{name} on ranks", recipe))
        opd.run(recipe, out=tmp_path / name / "alone")
    together(3, tmp_path / "log.txt", *jobs)
    found = [line for job in jobs for line in differences(job.out.parent / "alone", job.out, 1e-4)]
    assert not found, "\n".join(found)


@dataclass(frozen=True)
class Asking(Job):
    """Each rank writes down which rollouts it asks its teacher about, step by step."""

    def carry_out(self) -> None:
        asked: list[list[str]] = []
        score = ScoringTeacher.score

        def counted(teacher: Any, rollouts: Any, *more: Any) -> Any:
            if not rollouts[0].id.startswith("probe/"):  # by which a rank sees that the server has not changed
                asked.append([rollout.id for rollout in rollouts])
            return score(teacher, rollouts, *more)

        os.environ[TOKEN_ENV] = TOKEN
        ScoringTeacher.score = counted  # type: ignore[method-assign]
        super().carry_out()
        self.out.with_name(f"asked-{os.environ['RANK']}.json").write_text(json.dumps(asked), encoding="utf-8")


def test_hidden_states_of_a_server_go_to_the_rank_that_trains_on_them(tmp_path: Path) -> None:
    server = ServeProcess("spelling=tiny/spelling")
    try:
        served = {"kind": "served", "address": server.address, "model": "spelling", "token_env": TOKEN_ENV}
        recipe = LONG | {"prompts": LONG["prompts"][1:], "eval": {"prompts": 0}}
        recipe |= {"train": {"steps": 2, "lr": 1e-3}, "objective": {"form": "direct"}}
        together(2, tmp_path / "log.txt", Asking(tmp_path / "two", recipe | {"teachers": {"spelling": served}}))
    finally:
        server.kill()
    first, second = (json.loads((tmp_path / f"asked-{rank}.json").read_text()) for rank in range(2))
    assert len(first) == 2
    for one, other in zip(first, second, strict=True):
        assert one
        assert other
        assert len(set(one) | set(other)) == len(one) + len(other) == 16
    opd.run(recipe | {"teachers": {"spelling": "tiny/spelling"}}, out=tmp_path / "one")
    assert not differences(tmp_path / "one", tmp_path / "two")
