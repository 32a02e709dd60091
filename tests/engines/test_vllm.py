"""vLLM as the sampler, with real engines on the CPU: `make test-vllm` installs vLLM beside us and runs these."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from hashlib import sha256
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import opd
from opd.common.errors import ModelError, RecipeError, RemoteError, ServerAway, Stopped, TrainingError
from opd.engines import vllm, vllm_server
from opd.engines.vllm import (
    SERVER,
    AdapterFile,
    OwnReplica,
    Replica,
    VllmEngine,
    VllmSampler,
    WeightsBuffer,
    WeightsFile,
    engine_environment,
    why_merged,
)
from opd.models import load_model
from opd.models.attention import Packed
from opd.models.language_model import LanguageModel
from opd.models.lora import save_adapter
from opd.models.settings import Lora
from opd.objective.batch import own_turns
from opd.recipe import load_recipe
from opd.records import Author, Finished, Rollout, SampledToken, SampleRequest, Sampling, WeightsRef
from opd.rollouts.rollouter import answers
from opd.runner.plan import make_plan
from tests.support.crash import durable, ended, kept, start
from tests.support.helpers import tiny_model
from tests.support.ranks import Job, together
from tests.support.servers import free_port

real = pytest.mark.vllm
PYTHON = os.path.abspath(os.environ.get("VLLM_PYTHON", ".venv-vllm/bin/python"))
TOKEN = "a token for tests"
LENGTH = 512  # of the tiny models: long enough to be in the midst of an answer for seconds
ADAPTER = Lora(rank=6, alpha=12)
SLOTS = 4  # of the engine for adapters
EAGER = {"cache": 1, "eager": True}
RECIPE: dict[str, Any] = {
    "student": "tiny/spelling",  # far from its teacher
    "teachers": {"arithmetic": "tiny/arithmetic"},
    "prompts": [{"source": "task:addition", "domain": "arithmetic"}],
    "rollout": {"prompts": 12, "samples": 2, "max_new_tokens": 12},
    "train": {"steps": 10, "lr": 3e-4},
    "eval": {"prompts": 0},
    "store": {"commit_ms": 5},
    "log": {"start_table": False},
    "device": "cpu",
}


# What a recipe says


def test_terms_that_weigh_by_ratios_are_corrected_unless_they_say_otherwise() -> None:
    terms = [{"form": "policy_gradient"}, {"form": "policy_gradient", "correction": "icepop"}, {"form": "direct"}]
    spec = {**RECIPE, "objective": terms}

    def corrections(sampler: Any) -> list[str | None]:
        found = load_recipe({**spec, "sampler": sampler}).stages[0].objective
        return [None if term.correction is None else term.correction.name for term in found]  # type: ignore[attr-defined]

    assert corrections("vllm") == ["tis", "icepop", None]
    assert corrections({"engine": "vllm", "correct": False}) == corrections("builtin") == [None, "icepop", None]
    again = load_recipe(load_recipe({**spec, "sampler": "vllm"}).stages[0].model_dump(mode="json"))
    assert again.stages[0].objective[0].correction is not None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"checkpoint": {"resume": "exact"}}, "resume: prefill"),
        ({"rollout": {"temperature": 0.7}, "objective": {"form": "policy_gradient"}}, "at temperature 1"),
        ({"rollout": {"staleness": 1, "in_flight": "keep"}}, "in_flight keep"),
        ({"rollout": {"teacher_mix": 0.2}}, "cannot draw from two models"),
        ({"sampler": {"engine": "vllm", "lora": "merge"}}, "it has none"),
        ({"sampler": {"engine": "vllm", "address": "http://a:1", "replicas": 2}}, "have no effect"),
        ({"sampler": {"engine": "vllm", "devices": ["0"], "replicas": 2}}, "one for each"),
        ({"sampler": {"engine": "vllm", "address": ["http://a:1", "http://a:1/"]}}, "twice"),
        ({"sampler": {"engine": "vllm", "weights": "nccl"}}, "weights"),
        ({"sampler": {"engine": "vllm", "weights": "shared", "address": "http://10.0.0.7:1"}}, "on this machine"),
        ({"sampler": {"engine": "vllm", "weights": "shared", "parallel": 2}}, "parallel: 1"),
        ({"sampler": {"engine": "vllm", "weights": "shared", "lora": "swap"}}, "lora: merge"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_vllm_cannot_do_is_rejected_when_the_recipe_is_read(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        load_recipe({**RECIPE, "sampler": "vllm", **changes})


def test_a_python_without_vllm_is_named(tmp_path: Path) -> None:
    spec = VllmSampler(python=str(tmp_path / "python"))
    model = load_model("tiny/spelling")
    with pytest.raises(RemoteError, match="Name the Python that has vLLM"):
        VllmEngine(model, spec, LENGTH, merge_stop=model.stop_ids)


def test_a_plan_is_rejected_where_the_engines_could_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(**sampler: Any) -> list[str]:
        return list(make_plan(load_recipe({**RECIPE, "sampler": {"engine": "vllm", **sampler}}))[0].notes)

    (tmp_path / "python").symlink_to(sys.executable)  # outside of the environment, which may have vLLM
    with pytest.raises(RemoteError, match=r"has no vLLM\. Install it there, name a Python that has it"):
        planned(python=str(tmp_path / "python"))
    with pytest.raises(RemoteError, match="Name the Python that has vLLM"):
        planned(python=str(tmp_path / "absent"))
    address = f"http://127.0.0.1:{free_port()}"
    monkeypatch.delenv("OPD_TOKEN", raising=False)
    with pytest.raises(RemoteError, match="token_env 'OPD_TOKEN': this variable is not set"):
        planned(address=address)
    monkeypatch.setenv("OPD_TOKEN", TOKEN)
    assert [note for note in planned(address=address) if "not reachable now" in note]
    environment = {**os.environ, "OPD_TOKEN": "another"}
    command = [sys.executable, str(SERVER), "--port", "0"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        address = f"http://127.0.0.1:{json.loads(process.stdout.readline())['port']}"
        try:
            with pytest.raises(RemoteError, match="401: the token is missing or wrong"):
                planned(address=address)
            monkeypatch.setenv("OPD_TOKEN", "another")
            assert not [note for note in planned(address=address) if "not reachable" in note]
        finally:
            process.kill()


def test_an_engine_is_no_rank_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert {"TORCHELASTIC_USE_AGENT_STORE", "WORLD_SIZE"}.isdisjoint(engine_environment())
    assert engine_environment()["CUDA_VISIBLE_DEVICES"] == "1"


def test_a_stop_ends_the_wait_for_lost_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPD_TOKEN", TOKEN)
    model, waits = load_model("tiny/spelling"), [0]

    def stops() -> None:
        waits[0] += 1
        if waits[0] == 3:
            waits[0] = 0
            raise Stopped

    spec = VllmSampler(address=[f"http://127.0.0.1:{free_port()}"], patience=600)
    engine = VllmEngine(model.inference_copy(), spec, LENGTH, merge_stop=model.stop_ids)
    spec.poll_stop(engine, stops)
    with pytest.raises(Stopped):
        next(iter(engine.sample(requests(1))))
    monkeypatch.setattr(vllm, "AGAIN", 0.1)
    monkeypatch.setattr(vllm, "LOOK", 0.02)
    with pytest.raises(Stopped):
        engine.load(model.weights(0))
    engine.close()


def test_an_engine_that_takes_no_weights_of_this_size_or_has_no_vllm_says_so(tmp_path: Path) -> None:
    command = [sys.executable, str(SERVER), "--port", "0", "--max-gib", "0.001"]
    environment = {**os.environ, "OPD_TOKEN": TOKEN}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        port = json.loads(process.stdout.readline())["port"]
        (tmp_path / "large").write_bytes(bytes(32 << 20))
        replica = Replica(f"http://127.0.0.1:{port}", TOKEN)
        try:
            with pytest.raises(RemoteError, match="413: a body of 33554432 bytes"):
                replica.put(0, tmp_path / "large")
            if importlib.util.find_spec("vllm") is None:
                with pytest.raises(RemoteError, match=r"No module named 'vllm'.*under sampler\.python"):
                    replica.ask("POST", "/open", {"cache": None})
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("lora", "sampler", "said"),
    [
        ({}, {}, "sampler.lora swap: the engines get the base weights once"),
        ({"rank": 600}, {}, "sampler.lora merge: .*rank 512 at most, and student.lora.rank is 600"),
        ({}, {"lora": "merge"}, "sampler.lora merge: .*as the recipe says"),
        ({}, {"lora": "merge", "weights": "shared"}, "sampler.lora merge: .*as the recipe says"),
    ],
    ids=["by itself", "too large", "merged", "merged and shared"],
)
def test_the_plan_says_how_adapters_get_to_the_engines(
    lora: dict[str, Any], sampler: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm.py").touch()  # a plan looks whether it is there, and imports nothing of it
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    spec = {**RECIPE, "student": {"model": "tiny/spelling", "lora": lora}, "sampler": {"engine": "vllm", **sampler}}
    (plan,) = make_plan(load_recipe(spec))
    assert [note for note in plan.notes if re.match(said, note)]


def test_adapters_that_vllm_does_not_take_are_merged_or_rejected() -> None:
    from transformers import GPT2Config, LlamaConfig, Qwen3MoeConfig

    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    untied = LlamaConfig(**sizes, tie_word_embeddings=False)
    experts = Qwen3MoeConfig(**sizes, num_experts=2, moe_intermediate_size=8, num_key_value_heads=2, head_dim=8)
    assert "embed_tokens is a Embedding" in why_merged(untied, Lora(targets=["embed_tokens"]))
    assert "a mixture's experts" in why_merged(experts, ADAPTER)
    assert "Conv1D" in why_merged(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32), ADAPTER)
    assert why_merged(experts, Lora(targets=["q_proj", "o_proj"])) == why_merged(untied, ADAPTER) == ""
    assert not VllmSampler().takes_adapters(experts, ADAPTER)
    with pytest.raises(RecipeError, match=r"sampler\.lora swap: .*Set it to merge"):
        VllmSampler(lora="swap").takes_adapters(experts, ADAPTER)
    assert not VllmSampler(weights="shared").takes_adapters(experts, ADAPTER)
    with pytest.raises(
        RecipeError, match=r"only the adapter of this student after every update\. Set sampler\.lora: merge"
    ):
        VllmSampler(weights="shared").takes_adapters(untied, ADAPTER)


def test_a_server_that_takes_no_adapters_takes_weights_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-ins for vLLM's modules, with a model whose class takes no adapters."""

    def made(given: dict[str, Any]) -> Any:
        if "enable_lora" in given:
            raise ValueError("GPT2LMHeadModel does not support LoRA yet.")
        nothing = lambda *given, **named: None  # noqa: E731
        return SimpleNamespace(collective_rpc=nothing, reset_prefix_cache=nothing)

    engine = SimpleNamespace(LLMEngine=SimpleNamespace(from_engine_args=made))
    modules = {"vllm": SimpleNamespace(EngineArgs=dict), "vllm.v1.engine.llm_engine": engine}
    modules["vllm.lora.request"] = SimpleNamespace(LoRARequest=lambda *given, **named: given)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    host = vllm_server.Host(tmp_path)
    names = ("dtype", "slots", "parallel", "memory", "eager", "cache")
    asked = {"config": {}, "stop_ids": [0], "max_length": 8} | dict.fromkeys(names)
    with pytest.raises(ValueError, match="does not support LoRA"):
        host.open({**asked, "lora": {"r": 6, "lora_alpha": 12, "target_modules": ["q_proj"]}})
    assert "sampler.lora: merge" in host.hint
    assert host.open({**asked, "lora": None})["version"] == -1
    assert host.load(5, tmp_path / "model.safetensors")["version"] == 5
    assert host._policy is None
    assert not host.hint


# Weights in shared memory


class Reads:
    """An engine's place, where weights are read as a server reads them."""

    address = "http://127.0.0.1:1"

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.before = lambda: None

    def ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        self.before()
        given = json.loads(json.dumps(body))
        memory = vllm_server.opened(given["memory"])
        self.found = {name: tensor.clone() for name, tensor in vllm_server.tensors_in(memory, given["tensors"])}
        self.versions.append(given["version"])
        return {}


@pytest.mark.parametrize("kind", ["llama_tied", "qwen3_moe"])
def test_shared_weights_are_those_of_the_file(kind: str) -> None:
    experts = {"num_experts": 2, "moe_intermediate_size": 8, "num_experts_per_tok": 1}
    model = tiny_model(kind, tie_word_embeddings=kind == "llama_tied", **(experts if kind == "qwen3_moe" else {}))
    model.size -= 1  # ids beyond the vocabulary are cut off
    file, shared, replica = WeightsFile(model), WeightsBuffer(model), Reads()
    for version in range(2):
        changed(model, 0.1)
        written = load_file(file.write(version))
        assert shared.give(replica, version, shared.write(version))
        assert written.keys() == replica.found.keys()
        assert all(torch.equal(tensor, replica.found[name]) for name, tensor in written.items())
    assert written["lm_head.weight"].shape[0] == model.size
    shared.close()
    file.close()


def test_shared_weights_are_not_overwritten_while_read_and_older_ones_are_not_given() -> None:
    model, replica = load_model("tiny/spelling"), Reads()
    shared = WeightsBuffer(model)
    first, writing, seconds = shared.write(0), threading.Event(), list[int]()
    expected = model.head.weight.detach().clone()

    def writes() -> None:
        writing.set()
        seconds.append(shared.write(1))

    thread = threading.Thread(target=writes)

    def begins() -> None:
        changed(model, 0.1)
        thread.start()
        writing.wait()

    replica.before = begins
    assert shared.give(replica, 0, first)
    assert torch.equal(replica.found["lm_head.weight"], expected[: model.size])
    thread.join()
    replica.before = lambda: None
    assert not shared.give(replica, 0, first)
    assert shared.give(replica, 1, seconds[0])
    assert torch.equal(replica.found["lm_head.weight"], model.head.weight[: model.size])
    assert replica.versions == [0, 1]
    shared.close()


def test_a_server_reads_no_other_memory_than_a_runs_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(64))
    with secret.open() as file:
        here = {"process": os.getpid(), "descriptor": file.fileno()}
        for name in ("opd-vllm-weights-0123456789abcdef", "secret", str(secret)):
            with pytest.raises(ValueError, match=r"cannot be opened from here|not the shared memory of a run"):
                vllm_server.opened({**here, "name": name})
    weights = WeightsBuffer(tiny_model())
    shared = weights.memory.handle
    with pytest.raises(ValueError, match=r"on another machine, in another container.*weights: file"):
        vllm_server.opened({**shared, "process": 2**30})
    with pytest.raises(ValueError, match="cannot be opened from here"):
        vllm_server.opened({**shared, "name": "opd-vllm-weights-0123456789abcdef"})
    with pytest.raises(ValueError, match="invalid literal"):
        vllm_server.opened({**shared, "process": "self/../1"})
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ValueError, match="belongs to another user"):
        vllm_server.opened(shared)
    weights.close()
    for wrong in ({"start": 60}, {"start": -8}, {"dtype": "load"}, {"shape": [-1]}):
        entry = {"name": "a", "dtype": "float32", "shape": [2], "start": 0, **wrong}
        with pytest.raises(ValueError, match=r"^a"):
            list(vllm_server.tensors_in(torch.zeros(64, dtype=torch.uint8), [entry]))


def test_a_cuda_handle_survives_json_and_opens_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = (3, bytes(range(66)), 4096, 512, b"/torch_17_4171_0", 9, bytes(64), True)
    given = json.loads(json.dumps(vllm_server.cuda_handle("GPU-1", fields)))
    assert vllm_server.cuda_fields(given, 1) == (1, *fields[1:4], vllm_server.UNCOUNTED, 0, b"", False)
    for create in (False, True):  # a counter that nobody has, and nobody can make
        with pytest.raises(OSError, match="Invalid argument"):
            SharedMemory(vllm_server.UNCOUNTED.decode(), create=create, size=8)
    for wrong in ({"handle": "x"}, {"offset": -1}):
        with pytest.raises(ValueError, match=r"non-hex|no size|invalid size"):
            vllm_server.cuda_fields({**given, **wrong}, 1)
    monkeypatch.setattr(vllm_server, "devices", lambda: ["GPU-2"])
    with pytest.raises(ValueError, match=r"on GPU GPU-1, and this engine sees GPU-2\. .* sampler\.devices"):
        vllm_server.opened(given)


READER = """
import hashlib, importlib.util, json, sys
import torch
found = importlib.util.spec_from_file_location("vllm_server", sys.argv[1])
vllm_server = importlib.util.module_from_spec(found)
found.loader.exec_module(vllm_server)
for line in sys.stdin:
    given = json.loads(line)
    memory = vllm_server.opened(given["memory"])
    found = {name: tensor.cpu() for name, tensor in vllm_server.tensors_in(memory, given["tensors"])}
    sums = {name: hashlib.sha256(one.flatten().view(torch.uint8).numpy()).hexdigest() for name, one in found.items()}
    del memory
    print(json.dumps(sums), flush=True)
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_another_process_reads_weights_on_the_gpu_by_their_handle() -> None:
    model = load_model("tiny/spelling", device="cuda")
    file, shared = WeightsFile(model), WeightsBuffer(model)
    command = [sys.executable, "-c", READER, vllm_server.__file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for version in range(3):  # opened runs_named each time, which torch's counter is not to hear of
            changed(model, 0.1)
            shared.write(version)
            given = {"memory": shared.memory.handle, "tensors": shared.tensors}
            process.stdin.write(json.dumps(given) + "\n")
            process.stdin.flush()
            found = json.loads(process.stdout.readline())
            written = load_file(file.write(version))
            sums = {name: sha256(one.flatten().view(torch.uint8).numpy()).hexdigest() for name, one in written.items()}
            assert found == sums
        process.stdin.close()
    held = torch.cuda.memory_allocated()
    size = shared.memory.bytes.numel()
    shared.close()
    assert torch.cuda.memory_allocated() <= held - size  # given back at once, without `torch.cuda.ipc_collect`
    file.close()


class Keeps:
    """A sampler that ends every answer at once."""

    def __init__(self) -> None:
        self.loaded: list[WeightsRef] = []

    def load(self, weights: WeightsRef) -> None:
        self.loaded.append(weights)

    def sample(self, requests: Iterable[SampleRequest]) -> Iterator[Finished]:
        return (Finished(request.id, "length") for request in requests)


def test_a_sampler_by_hand_gives_engines_the_adapter_as_peft_would_write_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    student, keeps = with_adapter(0.1), Keeps()
    monkeypatch.setattr(VllmSampler, "open", lambda *given, **named: keeps)
    opd.Sampler(student, settings={"engine": "vllm"}).sample(["1 + 1 ="])
    save_adapter(student.adapter, tmp_path)
    written, (weights,) = load_file(tmp_path / "adapter_model.safetensors"), keeps.loaded
    assert written.keys() == weights.adapter.keys()
    assert all(torch.equal(tensor, weights.adapter[name]) for name, tensor in written.items())
    with pytest.raises(ModelError, match="come without their adapter"):
        AdapterFile(student.inference_copy(), WeightsFile(student.inference_copy())).write(student.weights(1))


# Real engines


class Server:
    """`vllm_server.py` as a user starts it."""

    def __init__(self, directory: Path) -> None:
        with (directory / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                [PYTHON, str(SERVER), "--port", "0"], stdout=subprocess.PIPE, stderr=log, start_new_session=True
            )

    @cached_property
    def address(self) -> str:
        """Once it listens."""
        assert self.process.stdout is not None
        return f"http://127.0.0.1:{json.loads(self.process.stdout.readline())['port']}"

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module", autouse=True)
def token() -> Iterator[None]:
    before, os.environ["OPD_TOKEN"] = os.environ.get("OPD_TOKEN"), TOKEN
    yield
    os.environ.pop("OPD_TOKEN")
    if before is not None:
        os.environ["OPD_TOKEN"] = before


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    assert Path(PYTHON).exists(), "run `make test-vllm`, which installs vLLM into .venv-vllm"
    found = [Server(tmp_path_factory.mktemp(name)) for name in ("one", "other")]
    student = load_model("tiny/spelling")
    try:
        opened(student, found).close()  # both at once: most of a start is importing
        yield found
    finally:
        for server in found:
            server.kill()


def opened(student: LanguageModel, servers: list[Server], **more: Any) -> VllmEngine:
    spec = VllmSampler(address=[server.address for server in servers], **EAGER, **more)
    return VllmEngine(student.inference_copy(), spec, LENGTH, merge_stop=student.stop_ids)


def requests(count: int, **how: Any) -> list[SampleRequest]:
    sampling = Sampling(**{"max_new_tokens": 12, "stop_ids": load_model("tiny/spelling").stop_ids, **how})
    return [
        SampleRequest(f"r/{number}", np.arange(20, 30 + number % 5, dtype=np.int32), number, sampling)
        for number in range(count)
    ]


def rescored(model: LanguageModel, rollout: Rollout) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs of a rollout's tokens and of the stop event, by the trainer's own arithmetic."""
    ids = torch.from_numpy(np.concatenate([rollout.prompt_ids, rollout.response_ids]).astype(np.int64))
    with torch.no_grad():
        rows = model.project(model.hidden(ids, Packed.of([ids.numel()]))).logits().double().log_softmax(-1)
    rows = rows[rollout.prompt_ids.size - 1 : -1]
    stop = rows[:, list(model.stop_ids)].logsumexp(-1).numpy()
    own = rows.gather(-1, ids[rollout.prompt_ids.size :, None])[:, 0].numpy()
    return np.where(np.isin(rollout.response_ids, model.stop_ids), stop, own), stop


def changed(student: LanguageModel, by: float) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in student.module.parameters():
            parameter.add_(torch.randn_like(parameter) * by)


@real
def test_log_probs_are_the_trainers_and_follow_its_weights(servers: list[Server]) -> None:
    student = load_model("tiny/spelling")
    engine = opened(student, servers)
    for version, by in enumerate((0.0, 0.02)):
        changed(student, by)
        engine.load(student.weights(version))
        found = answers(engine, requests(24))
        for rollout in found:
            logprob, stop = rescored(student, rollout)
            np.testing.assert_allclose(rollout.logprob, logprob, atol=1e-4)
            np.testing.assert_allclose(rollout.logprob_stop, stop, atol=1e-4)
            assert (rollout.version == version).all()
            assert (rollout.stop == "stop") == (rollout.response_ids[-1] in student.stop_ids)
    assert len({tuple(rollout.response_ids.tolist()) for rollout in found}) > 5  # no two engines draw alike
    first = found[0]
    prefix = np.array([35, 36, 37], dtype=np.int32)
    (longer,) = answers(engine, [SampleRequest("r", first.prompt_ids, 0, requests(1)[0].sampling, prefix_ids=prefix)])
    np.testing.assert_allclose(longer.logprob[3:], rescored(student, longer)[0][3:], atol=1e-4)
    greedy = {"temperature": 0.0, "stop_ids": (), "max_new_tokens": 20}
    (whole,) = answers(engine, requests(1, **greedy))
    text = student.tokenizer.decode([int(whole.response_ids[3])])
    (cut,) = answers(engine, requests(1, **greedy, stop_strings=(text,)))
    assert cut.stop == "stop"
    assert cut.response_ids.tolist() == whole.response_ids[: cut.response_ids.size].tolist()
    assert text in student.tokenizer.decode(cut.response_ids)


@real
def test_a_load_between_two_tokens_changes_the_rest(servers: list[Server]) -> None:
    before, student = load_model("tiny/spelling"), load_model("tiny/spelling")
    changed(student, 0.02)
    engine = opened(load_model("tiny/spelling"), servers[:1])
    for old in range(0, 60, 2):  # an engine does not wait: where it is done before it gets the weights, once more
        older, newer = before.weights(old), student.weights(old + 1)
        engine.load(older)
        stream = engine.sample(requests(4, max_new_tokens=LENGTH - 16, stop_ids=()))
        events = [next(stream)]
        while len({event.request_id for event in events}) < 4:
            events.append(next(stream))
        engine.load(newer)
        events += list(stream)
        tokens = [event for event in events if isinstance(event, SampledToken)]
        by_request = {
            name: [event for event in tokens if event.request_id == name] for name in ("r/0", "r/1", "r/2", "r/3")
        }
        if all(answer[-1].version == newer.version for answer in by_request.values()):
            break
    for request in requests(4):
        answer = by_request[request.id]
        versions = [event.version for event in answer]
        assert versions == sorted(versions)
        assert set(versions) == {older.version, newer.version}
        ids = np.array([event.token for event in answer], dtype=np.int32)
        told = np.array([event.logprob for event in answer])
        whole = Rollout(**{**vars(answers(engine, [request])[0]), "response_ids": ids})
        for weights, model in ((older, before), (newer, student)):
            mine = np.array(versions) == weights.version
            np.testing.assert_allclose(told[mine], rescored(model, whole)[0][mine], atol=1e-4)


@real
def test_a_stream_that_breaks_loses_no_token(servers: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    student, lines = load_model("tiny/spelling"), Replica.lines
    engine = opened(student, servers[:1])
    engine.load(student.weights(0))
    breaks = [3]

    def broken(self: Replica, session: str) -> Iterator[dict[str, Any]]:
        for number, line in enumerate(lines(self, session)):
            if breaks and number == breaks[0]:
                breaks.pop()
                raise ServerAway("the network")
            yield line

    monkeypatch.setattr(Replica, "lines", broken)
    for rollout in answers(engine, requests(4, max_new_tokens=60, stop_ids=())):
        assert rollout.response_ids.size == 60
        np.testing.assert_allclose(rollout.logprob, rescored(student, rollout)[0], atol=1e-4)
    assert not breaks

    def away(self: Replica, session: str) -> Iterator[dict[str, Any]]:
        raise ServerAway("it ended.")

    monkeypatch.setattr(Replica, "lines", away)
    with pytest.raises(ServerAway, match="in a row before it had drawn a token"):
        answers(engine, requests(2))
    engine.close()


@real
@pytest.mark.parametrize("head", [False, True], ids=["all of it", "its head"])
def test_stale_weights_are_detected(
    servers: list[Server], head: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    student = load_model("tiny/spelling")
    engine = opened(student, servers[:1])
    engine.load(student.weights(0))
    assert engine._newest is not None
    old = load_file(engine._newest.place)
    put = Replica.put

    def stale(self: Replica, version: int, file: Path, what: str = "weights") -> None:
        new = load_file(file)
        save_file(new | {"lm_head.weight": old["lm_head.weight"]} if head else old, tmp_path / "stale.safetensors")
        put(self, version, tmp_path / "stale.safetensors")

    monkeypatch.setattr(Replica, "put", stale)
    changed(student, 1e-3)  # about what one update does
    with pytest.raises(TrainingError, match="does not sample with the weights of version 1"):
        engine.load(student.weights(1))
    monkeypatch.undo()
    engine.load(student.weights(1))


@real
def test_shared_weights_reach_an_engine_and_stale_ones_are_detected(servers: list[Server]) -> None:
    student = load_model("tiny/spelling")
    engine = opened(student, servers[:1], weights="shared")
    assert isinstance(engine._weights, WeightsBuffer)
    shared = engine._weights.memory.bytes
    for version, by in enumerate((0.0, 0.02)):
        changed(student, by)
        engine.load(student.weights(version))
        kept = shared.clone()
        shared.zero_()  # whoever has answered has what it needs
        for rollout in answers(engine, requests(8)):
            np.testing.assert_allclose(rollout.logprob, rescored(student, rollout)[0], atol=1e-4)
            assert (rollout.version == version).all()
    settle, engine._weights.memory.settle = engine._weights.memory.settle, lambda: shared.copy_(kept)  # type: ignore[method-assign]
    changed(student, 1e-3)
    with pytest.raises(TrainingError, match="does not sample with the weights of version 2"):
        engine.load(student.weights(2))
    engine._weights.memory.settle = settle  # type: ignore[method-assign]
    engine.load(student.weights(2))
    memory = {**engine._weights.memory.handle, "process": 1}
    with pytest.raises(
        RemoteError, match="400: ValueError: the weights that process 1 shares cannot be opened from here"
    ):
        engine.replicas[0].ask("POST", "/weights", {"version": 3, "memory": memory, "tensors": []})
    engine.close()


@real
def test_an_engine_that_is_started_again_reads_the_newest_shared_weights() -> None:
    student = load_model("tiny/spelling")
    spec = VllmSampler(python=PYTHON, weights="shared", **EAGER)
    engine = VllmEngine(student.inference_copy(), spec, LENGTH, merge_stop=student.stop_ids)
    try:
        changed(student, 0.02)
        engine.load(student.weights(7))
        (replica,) = engine.replicas
        assert isinstance(replica, OwnReplica)
        first = replica._process
        assert first is not None
        os.killpg(first.pid, signal.SIGKILL)
        for rollout in answers(engine, requests(4)):
            np.testing.assert_allclose(rollout.logprob, rescored(student, rollout)[0], atol=1e-4)
            assert (rollout.version == 7).all()
        assert replica._process is not first
    finally:
        engine.close()


# Adapters


def with_adapter(by: float) -> LanguageModel:
    student = load_model("tiny/spelling", lora=ADAPTER)
    moved(student, by)
    return student


def moved(student: LanguageModel, by: float) -> None:
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in student.trainable().values():
            parameter.add_(torch.randn_like(parameter) * by)


def published(student: LanguageModel, version: int) -> WeightsRef:
    return replace(student.weights(version), adapter={name: one.clone() for name, one in student.factors().items()})


@pytest.fixture(scope="module")
def adapter_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("adapters"))
    yield server
    server.kill()


@real
def test_an_adapter_is_swapped_in_the_midst_of_answers(adapter_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, int]] = []
    put = Replica.put

    def counted(self: Replica, version: int, file: Path, what: str = "weights") -> None:
        sent.append((what, file.stat().st_size))
        put(self, version, file, what)

    monkeypatch.setattr(Replica, "put", counted)
    students = [with_adapter(by) for by in (0.0, 0.1)]
    engine = opened(students[0], [adapter_server], slots=SLOTS)
    first, second = (published(student, version) for version, student in enumerate(students))
    engine.load(first)
    asked = requests(3 * SLOTS, max_new_tokens=40, stop_ids=())  # the last ones wait until we have read the first
    stream = engine.sample(asked)
    events = [next(stream)]
    engine.load(second)
    events += list(stream)
    assert {event.version for event in events if isinstance(event, SampledToken)} == {0, 1}
    for request in asked:
        drawn = [event for event in events if isinstance(event, SampledToken) and event.request_id == request.id]
        ids = np.array([event.token for event in drawn], dtype=np.int32)
        whole = Rollout(**{**vars(answers(engine, [request])[0]), "response_ids": ids})
        scored = [rescored(student, whole)[0] for student in students]
        expected = [scored[event.version][place] for place, event in enumerate(drawn)]
        np.testing.assert_allclose([event.logprob for event in drawn], expected, atol=1e-4)
    (below, weights), *adapters = sent
    assert (below, *(what for what, _ in adapters)) == ("weights", "adapter", "adapter")
    assert max(size for _, size in adapters) < weights / 5

    other = with_adapter(0.1)
    changed(other, 0.02)  # below the adapter, too
    opened(other, [adapter_server], slots=SLOTS).load(published(other, 0))
    engine.load(published(students[1], 2))
    assert [what for what, _ in sent[3:]] == ["weights", "adapter"] * 2


@real
def test_a_stale_adapter_is_detected(adapter_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    student = with_adapter(0.02)
    engine = opened(student, [adapter_server], slots=SLOTS)
    engine.load(published(student, 0))
    assert engine._newest is not None
    save_file(load_file(engine._newest.place), tmp_path / "stale.safetensors")
    put = Replica.put

    def stale(self: Replica, version: int, file: Path, what: str = "weights") -> None:
        put(self, version, tmp_path / "stale.safetensors", what)

    monkeypatch.setattr(Replica, "put", stale)
    moved(student, 1e-3)  # about what one update does
    with pytest.raises(TrainingError, match="does not sample with the weights of version 1"):
        engine.load(published(student, 1))
    monkeypatch.undo()
    engine.load(published(student, 1))
    (tmp_path / "stale.safetensors").write_bytes(b"no tensors")
    with pytest.raises(RemoteError, match=r"sampler\.lora: merge"):
        engine.replicas[0].put(2, tmp_path / "stale.safetensors", "adapter")


@real
def test_two_ranks_give_their_adapter_to_the_leaders_engine_and_learn_from_its_tokens(
    adapter_server: Server, tmp_path: Path
) -> None:
    sampler = {"engine": "vllm", "address": adapter_server.address, "lora": "swap", "slots": SLOTS, **EAGER}
    student = {"model": "tiny/spelling", "lora": ADAPTER.model_dump(mode="json")}
    spec = {**RECIPE, "student": student, "sampler": sampler, "train": {"steps": 4, "lr": 1e-2}}
    together(2, tmp_path / "log", Job(tmp_path / "run", spec))
    run = opd.Run(tmp_path / "run")
    assert len(run.metrics) == 4
    assert max(metric["mismatch"] for metric in run.metrics) < 1e-4
    assert "only the adapter after every update" in (tmp_path / "run" / "log.txt").read_text()


@real
def test_strangers_are_turned_away(servers: list[Server]) -> None:
    for token in ("", "another"):
        with pytest.raises(RemoteError, match="401"):
            Replica(servers[0].address, token).ask("GET", "/state")
    with pytest.raises(RemoteError, match="409"):
        Replica(servers[0].address, TOKEN).ask("POST", "/open", {"max_length": 1})
    with pytest.raises(RemoteError, match="404"):
        Replica(servers[0].address, TOKEN).ask("POST", "/nothing", {})


@real
def test_two_ranks_learn_from_the_tokens_of_the_leaders_engine(servers: list[Server], tmp_path: Path) -> None:
    sampler = {"engine": "vllm", "address": servers[0].address, **EAGER}
    spec = {**RECIPE, "sampler": sampler, "train": {"steps": 2, "lr": 3e-4}}
    together(2, tmp_path / "log", Job(tmp_path / "run", spec))
    run = opd.Run(tmp_path / "run")
    assert len(run.metrics) == 2
    assert max(metric["mismatch"] for metric in run.metrics) < 1e-4


@real
def test_a_run_samples_ahead(servers: list[Server], tmp_path: Path) -> None:
    sampler = {"engine": "vllm", "address": servers[0].address, **EAGER}
    rollout = {**RECIPE["rollout"], "staleness": 1}
    run = opd.run(
        {**RECIPE, "sampler": sampler, "rollout": rollout, "train": {"steps": 4, "lr": 3e-4}}, out=tmp_path / "run"
    )
    assert len(run.metrics) == 4
    assert all(np.isfinite(metric["loss"]) for metric in run.metrics)


@real
@pytest.mark.parametrize("staleness", [0, 1])
def test_turns_in_an_environment_are_requests_with_the_history(
    servers: list[Server], staleness: int, tmp_path: Path
) -> None:
    environment = {"kind": "dialogue", "turn_tokens": 6}
    changes = {
        "prompts": "task:dialogue",
        "sampler": {"engine": "vllm", "address": servers[0].address, **EAGER},
        "rollout": {
            "prompts": 6, "samples": 2, "max_new_tokens": 40, "environment": environment, "staleness": staleness,
        },
        "train": {"steps": 2, "lr": 3e-4},
        "eval": {"prompts": 0 if staleness else 2, "teachers": False},
    }  # fmt: skip
    run = opd.run({**RECIPE, **changes}, out=tmp_path / "run")
    assert all(metric["env/turns"] > 1 and metric["env/lost"] == 0 for metric in run.metrics)
    found = run.rollouts.load(list(run.rollouts.entries))
    assert len(found) == 24
    student = load_model("tiny/spelling")
    for rollout in found:
        own = rollout.author == Author.STUDENT
        assert (rollout.author[~own] == Author.ENV).all()
        assert rollout.stop in ("env", "length")
        assert max(end - first for first, end in own_turns(rollout)) <= 6
        if (rollout.version[own] == 0).all():
            np.testing.assert_allclose(rollout.logprob[own], rescored(student, rollout)[0][own], atol=1e-4)
    assert any((rollout.author == Author.ENV).sum() > 1 for rollout in found)


@real
def test_a_run_learns_with_two_engines_and_with_one_when_the_other_dies(
    servers: list[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: dict[str, int] = {}
    read = vllm._Call.read

    def counted(self: Any, lane: Any, line: Any) -> Any:
        lines[lane.replica.address] = lines.get(lane.replica.address, 0) + len(line["tokens"])
        if sum(lines.values()) > 300:  # in the midst of a step
            servers[1].kill()
        return read(self, lane, line)

    monkeypatch.setattr(vllm._Call, "read", counted)
    sampler = {"engine": "vllm", "address": [server.address for server in servers], **EAGER}
    objective = [{"form": "direct"}, {"form": "policy_gradient", "coefficient": 0.1}]
    train = {"steps": 24, "lr": 1e-3}
    run = opd.run({**RECIPE, "sampler": sampler, "objective": objective, "train": train}, out=tmp_path / "run")
    assert servers[1].process.poll() is not None
    assert 50 < lines[servers[1].address] < lines[servers[0].address]
    kl = [metric["reverse_kl"] for metric in run.metrics]
    assert np.mean(kl[-6:]) < 0.7 * np.mean(kl[:6])
    assert max(metric["mismatch"] for metric in run.metrics) < 1e-4
    assert len(kl) == 24


@real
def test_an_interrupted_run_resumes_and_so_does_one_whose_engine_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines of the run's own: they end with it, even by kill -9, and are started again when they die."""
    directory, log, path = tmp_path / "run", tmp_path / "out.txt", tmp_path / "recipe.yaml"
    spec = {**RECIPE, "sampler": {"engine": "vllm", "python": PYTHON, **EAGER}, "train": {"steps": 3, "lr": 3e-4}}
    path.write_text(json.dumps(spec))
    assert ended(start(log, "run", path, "--out", directory, die=150)) == -signal.SIGKILL, log.read_text()
    until = time.monotonic() + 600  # a hang, on any machine
    while engines() and time.monotonic() < until:
        time.sleep(0.1)
    assert not engines()
    before = durable(directory)
    assert any(item.stop is None and item.response_ids.size for item in before.values())
    read, struck = vllm._Call.read, [0]

    def dies(self: Any, lane: Any, line: Any) -> Any:
        struck[0] += 1
        if struck[0] == 3:
            assert isinstance(lane.replica, OwnReplica)
            assert lane.replica._process is not None
            os.killpg(lane.replica._process.pid, signal.SIGKILL)
        return read(self, lane, line)

    monkeypatch.setattr(vllm._Call, "read", dies)
    run = opd.resume(directory)
    kept(before, durable(directory))
    assert struck[0] > 3
    assert [metric["step"] for metric in run.metrics] == [1, 2, 3]
    assert not engines()


def engines() -> list[str]:
    """Processes of ours that serve an engine to the run that started them."""
    found = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in found.splitlines() if str(SERVER) in line and "--child" in line]
