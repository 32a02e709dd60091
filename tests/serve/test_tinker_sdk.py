"""The `tinker` SDK and tinker-cookbook, unmodified, against `opd serve --tinker`."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opd.serve.tinker.wire import SampleAnswer, SampledSequence, loss_message, loss_rows, read_protobuf
from opd.teachers.served import RequestLimits
from tests.support.servers import free_port

pytestmark = pytest.mark.tinker
TOKEN = "tml-for-tests"
ROOT = Path(__file__).parents[2]
IDS = [21, 22, 15, 23, 33, 40, 41]


class Serving:
    """A real `opd serve --tinker`. At most 8 data per request, so that the SDK sends several at once."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.port = directory, free_port()
        self.start()

    def start(self) -> None:
        command = [
            sys.executable,
            "-m",
            "opd",
            "serve",
            "tiny/generalist",
            "tiny/arithmetic",
            "tiny/spelling",
            "--tinker",
        ]
        options = {
            "checkpoints": self.directory,
            "port": self.port,
            "token-env": "KEY",
            "device": "cpu",
            "max-sequences": 8,
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        environment = os.environ | {"KEY": TOKEN, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True, env=environment)
        assert self.process.stderr is not None
        self.lines: list[str] = []
        for line in self.process.stderr:
            self.lines.append(line)
            if "serving" in line:
                break
        assert self.process.poll() is None, self.lines
        threading.Thread(target=self.lines.extend, args=(self.process.stderr,), daemon=True).start()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    found = Serving(tmp_path_factory.mktemp("checkpoints"))
    before = dict(os.environ)
    os.environ |= {"TINKER_BASE_URL": f"http://127.0.0.1:{found.port}", "TINKER_API_KEY": TOKEN}
    yield found
    os.environ.clear()
    os.environ.update(before)
    found.kill()


@pytest.fixture(scope="module")
def service(serving: Serving) -> Any:
    import tinker

    return tinker.ServiceClient()


def datum(ids: list[int] = IDS, **inputs: Any) -> Any:
    from tinker import types

    given = inputs or {"weights": [1.0] * (len(ids) - 1)}
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={"target_tokens": ids[1:], **given}
    )


def prompt(ids: list[int] = IDS) -> Any:
    from tinker import types

    return types.ModelInput.from_ints(ids)


def logprobs(client: Any) -> np.ndarray:
    found = client.forward([datum()], "cross_entropy").result()
    return np.array(found.loss_fn_outputs[0]["logprobs"].data)


def test_messages_are_those_of_the_sdk() -> None:
    from tinker import types
    from tinker.proto import tinker_public_pb2 as sdk
    from tinker.proto.request_conv import forward_backward_request_to_proto
    from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

    sparse = types.TensorData(data=[5, 6], dtype="int64", shape=[6, 9], sparse_crow_indices=[0, 1, 1, 1, 1, 1, 2], sparse_col_indices=[8, 0])  # fmt: skip
    asked = types.ForwardBackwardRequest(
        types.ForwardBackwardInput([datum(), datum(target_tokens=sparse)], "ppo", {"clip_low_threshold": 0.9, "teacher": "x"}),
        "m", 3,
    )  # fmt: skip
    body = forward_backward_request_to_proto(asked).SerializeToString()
    found = read_protobuf("ForwardBackwardRequest", body)
    assert (found["model_id"], found["seq_id"], found["loss_fn"], len(found["loss_fn_config"])) == ("m", 3, "ppo", 1)
    rows = loss_rows(found, RequestLimits())
    assert rows[0].ids.tolist() == IDS[:-1]
    assert rows[0].inputs["weights"].tolist() == [1.0] * 6
    assert (rows[1].inputs["target_tokens"][0, 8], rows[1].inputs["target_tokens"][5, 0]) == (5, 6)

    outputs = [{"logprobs": np.arange(6, dtype=np.float32).reshape(3, 2)}, {"logprobs": np.ones((2, 2), np.float32)}]
    mixed = [*outputs, {"logprobs": np.ones(4, np.float32)}]
    for each in (outputs, mixed):
        answer = deserialize_forward_backward_output(loss_message(each, {"loss:sum": 1.5}))
        assert answer.metrics == {"loss:sum": 1.5}
        for one, two in zip(answer.loss_fn_outputs, each, strict=True):
            assert np.array_equal(one["logprobs"].to_numpy(), two["logprobs"])

    top = (np.array([[1, 2], [3, 4]]), np.array([[-1.0, -2.0], [-3.0, -4.0]]))
    sequence = SampledSequence(np.array([7, 8]), np.array([-0.5, -0.25]), True, top)
    scores, targets = np.array([np.nan, -1.0], np.float32), np.ones((1, 3), np.float32)
    sample = deserialize_sample_response(SampleAnswer([sequence], scores, top, targets).message())
    assert sample.sequences[0].tokens == [7, 8]
    assert (sample.sequences[0].logprobs, sample.sequences[0].stop_reason) == ([-0.5, -0.25], "stop")
    assert (sample.prompt_logprobs, sample.target_prompt_logprobs.shape) == ([None, -1.0], [1, 3])
    assert sample.topk_prompt_logprobs[1] == [(3, -3.0), (4, -4.0)]
    assert sdk.DTYPE_INT64 == 2


@pytest.mark.parametrize("rank", [0, 4])
def test_training_sampling_and_saving(service: Any, serving: Serving, rank: int) -> None:
    from tinker import types

    client = service.create_lora_training_client("tiny/generalist", rank=rank, seed=0)
    assert client.get_info().lora_rank == rank
    assert client.get_tokenizer().encode("12+3=") == IDS[:5]
    losses = []
    for _ in range(3):
        trained = client.forward_backward([datum()] * 20, "cross_entropy")  # three requests, the first one last
        client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        losses.append(trained.result().metrics["loss:sum"])
        assert len(trained.result().loss_fn_outputs) == 20
    assert losses[2] < losses[0]

    now = logprobs(client)
    live = client.save_weights_and_get_sampling_client()
    path = client.save_weights_for_sampler("sampler").result().path
    for sampler in (live, service.create_sampling_client(model_path=path)):
        scored = sampler.compute_logprobs(prompt()).result()
        np.testing.assert_allclose(scored[1:], now, atol=1e-4)
    drawn = live.sample(prompt(), 2, types.SamplingParams(max_tokens=5, seed=1, stop=[])).result()
    for sequence in drawn.sequences:
        ids = IDS + list(sequence.tokens)
        found = client.forward([datum(ids)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
        np.testing.assert_allclose(sequence.logprobs, found[len(IDS) - 1 :], atol=1e-4)

    saved = client.save_state("state").result().path
    client.forward_backward([datum()], "cross_entropy").result()
    client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    expected = logprobs(client)
    again = service.create_training_client_from_state_with_optimizer(saved)
    np.testing.assert_array_equal(logprobs(again), now)
    again.forward_backward([datum()], "cross_entropy").result()
    again.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    np.testing.assert_array_equal(logprobs(again), expected)


def test_custom_losses_and_exact_divergences(service: Any) -> None:
    from tinker import types

    one, two = (service.create_lora_training_client("tiny/generalist", rank=4, seed=0) for _ in range(2))

    def negative(data: Any, found: Any) -> Any:
        loss = -sum(each.sum() for each in found)
        return loss, {"mine": float(loss)}

    custom = one.forward_backward_custom([datum()], negative).result()
    plain = two.forward_backward([datum()], "cross_entropy").result()
    assert custom.metrics["loss:sum"] == pytest.approx(plain.metrics["loss:sum"], rel=1e-5)
    norms = [each.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics for each in (one, two)]
    assert norms[0]["grad_norm:mean"] == pytest.approx(norms[1]["grad_norm:mean"], rel=1e-4)

    values = []
    exact = types.Datum(model_input=prompt(), loss_fn_inputs={"weights": [1.0] * len(IDS)})
    for _ in range(10):
        found = one.forward_backward([exact], "divergence", {"teacher": "arithmetic", "kind": "reverse_kl"}).result()
        one.optim_step(types.AdamParams(learning_rate=3e-3)).result()
        values.append(found.metrics["reverse_kl:mean"])
    assert values[-1] < 0.3 * values[0]


def test_errors_in_the_form_of_the_sdk(service: Any, serving: Serving) -> None:
    import tinker
    from tinker import types

    client = service.create_lora_training_client("tiny/generalist", rank=4)
    bad = datum(logprobs=[0.0] * 6, advantages=[float("nan")] * 6)
    for data, loss, said in (([bad], "ppo", "not finite"), ([datum()], "gspo", "not served yet"), ([datum([3, 999])], "cross_entropy", "outside")):  # fmt: skip
        with pytest.raises(tinker.RequestFailedError, match=said) as caught:
            client.forward_backward(data, loss).result()
        assert caught.value.category == types.RequestErrorCategory.User
        with pytest.raises(tinker.RequestFailedError, match="gradients were dropped"):
            client.optim_step(types.AdamParams()).result()
    client.forward_backward([datum()], "cross_entropy").result()
    assert client.optim_step(types.AdamParams()).result().metrics["grad_norm:mean"] > 0
    with pytest.raises(tinker.NotFoundError, match="there are generalist"):
        service.create_lora_training_client("gpt-9")
    with pytest.raises(tinker.AuthenticationError):
        tinker.ServiceClient(api_key="tml-wrong").get_server_capabilities()


def test_the_example_runs(service: Any) -> None:
    text = (ROOT / "examples" / "tinker_opd.py").read_text(encoding="utf-8")
    code = text.replace("STEPS, PROMPTS, SAMPLES = 20, 32, 4", "STEPS, PROMPTS, SAMPLES = 3, 8, 4")
    assert code != text
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600)
    assert found.stdout.count("nats per token") == 3, found.stderr
    path = re.findall(r"saved at (\S+)", found.stdout)[0]
    trained = service.create_training_client_from_state(path)
    fresh = service.create_lora_training_client("tiny/generalist", rank=16)
    assert np.abs(logprobs(trained) - logprobs(fresh)).max() > 0.01


# --- tinker-cookbook ---


def cookbook_renderer() -> Any:
    """The chat format of the tiny models for the cookbook: `add 12+3=15`. Its loops find it as the model's own renderer."""
    from tinker import types
    from tinker_cookbook import model_info, renderers
    from tinker_cookbook.renderers.base import ParseTermination, RenderedMessage
    from tinker_cookbook.renderers.role_colon import RoleColonRenderer
    from tinker_cookbook.tokenizer_utils import register_tokenizer
    from transformers import AutoTokenizer

    class TinyRenderer(RoleColonRenderer):
        def render_message(self, message: Any, ctx: Any) -> Any:
            end = [self.tokenizer.eos_token_id] if message["role"] == "assistant" else self.tokenizer.encode("=")
            return RenderedMessage(
                output=[types.EncodedTextChunk(tokens=self.tokenizer.encode(message["content"]) + end)]
            )

        def build_generation_prompt(self, messages: Any, *_: Any, **__: Any) -> Any:
            question = messages[-1]["content"].partition(" Provide ")[0]  # rl_loop asks for a box
            return prompt(self.tokenizer.encode(question + "="))

        def get_stop_sequences(self) -> Any:
            return [self.tokenizer.eos_token_id]

        def parse_response(self, response: Any) -> Any:
            text = self.tokenizer.decode([token for token in response if token != self.tokenizer.eos_token_id])
            return {"role": "assistant", "content": f"\\boxed{{{text}}}"}, ParseTermination.EOS

    register_tokenizer("tiny/generalist", lambda: AutoTokenizer.from_pretrained(ROOT / "opd/models/tiny/generalist"))
    renderers.register_renderer("opd/tiny", lambda tokenizer, _=None: TinyRenderer(tokenizer))
    model_info.get_recommended_renderer_name = lambda _: "opd/tiny"
    return TinyRenderer


def metrics_of(log: Path, key: str) -> list[float]:
    rows = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    return [row[key] for row in rows if key in row]


def sums(count: int) -> list[tuple[str, str]]:
    rng = np.random.default_rng(0)
    return [(f"add {a}+{b}", str(a + b)) for a, b in rng.integers(10, 100, (count, 2))]


def distance(client: Any, teacher: str, texts: list[str]) -> float:
    """The exact reverse KL to a teacher, on average over the tokens after `=`."""
    from tinker import types
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "opd/models/tiny/generalist")
    data, answered = [], []
    for text in texts:
        question, answer = (tokenizer.encode(part) for part in (text.partition("=")[0] + "=", text.partition("=")[2]))
        answered.append(np.array([0.0] * (len(question) - 1) + [1.0] * (len(answer) + 1)))
        inputs: Any = {"weights": answered[-1].tolist()}
        data.append(types.Datum(model_input=prompt(question + answer), loss_fn_inputs=inputs))
    found = client.forward(data, "divergence", {"teacher": teacher, "kind": "reverse_kl"}).result().loss_fn_outputs
    values = np.concatenate([np.array(each["divergence"].data) for each in found])
    return float(np.average(values, weights=np.concatenate(answered)))


def test_the_cookbooks_on_policy_distillation_with_two_teachers(service: Any, tmp_path: Path) -> None:
    """Each prompt has its own teacher, and the exact KL to both falls. The sampler is the trainer: their log-probs agree."""
    import chz
    from tinker_cookbook.distillation import train_on_policy
    from tinker_cookbook.distillation.datasets import DistillationDatasetConfig, PromptOnlyDataset, TeacherConfig
    from tinker_cookbook.rl.types import RLDatasetBuilder
    from tinker_cookbook.tokenizer_utils import get_tokenizer

    renderer = cookbook_renderer()

    @chz.chz
    class Questions(RLDatasetBuilder):
        prompts: list[str]

        async def __call__(self) -> Any:
            tokenizer = get_tokenizer("tiny/generalist")
            return PromptOnlyDataset(self.prompts, 4, 4, renderer(tokenizer), tokenizer), None

    words = ["".join(each) for each in np.random.default_rng(0).choice(list("abcdefgh"), (80, 6))]
    prompts = {"arithmetic": [question for question, _ in sums(80)], "spelling": [f"reverse {word}" for word in words]}
    datasets = [
        DistillationDatasetConfig(
            dataset_builder=Questions(prompts=texts), teacher_config=TeacherConfig(base_model=f"tiny/{teacher}"), groups_per_batch=4
        )
        for teacher, texts in prompts.items()
    ]  # fmt: skip
    config = train_on_policy.Config(
        learning_rate=1e-3, dataset_configs=datasets, model_name="tiny/generalist", recipe_name="test", max_tokens=8,
        lora_rank=16, save_every=8, eval_every=0, log_path=str(tmp_path / "log"),
    )  # fmt: skip
    asyncio.run(train_on_policy.main(config))
    gaps = metrics_of(tmp_path / "log", "optim/kl_sample_train_v1")
    assert gaps
    assert max(map(abs, gaps)) < 1e-4
    saved = [json.loads(line) for line in (tmp_path / "log" / "checkpoints.jsonl").read_text().splitlines()]
    trained = service.create_training_client_from_state(saved[-1]["state_path"])
    fresh = service.create_lora_training_client("tiny/generalist", rank=16)
    assert np.abs(logprobs(trained) - logprobs(fresh)).max() > 0.01
    held_out = {
        "arithmetic": [f"{question}={answer}" for question, answer in sums(144)[80:]],
        "spelling": [f"reverse {word}={word[::-1]}" for word in ("hgfeda", "abcabc", "gaddab", "cfhbea")],
    }
    for teacher, texts in held_out.items():
        assert distance(trained, teacher, texts) < 0.8 * distance(fresh, teacher, texts)


@pytest.mark.parametrize("loop", ["sl_loop", "rl_loop"])
def test_the_cookbooks_loops(service: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: str) -> None:
    """Its minimal loops for SFT and RL, on sums: the NLL falls, the reward of questions that come again rises."""
    import datasets
    from tinker_cookbook.recipes import rl_loop, sl_loop

    cookbook_renderer()
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        if loop == "sl_loop"
        else {"question": question, "answer": f"#### {answer}"}
        for question, answer in (sums(96) if loop == "sl_loop" else sums(8) * 12)
    ]
    data = datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: data)
    shared: dict[str, Any] = {"model_name": "tiny/generalist", "lora_rank": 16, "batch_size": 8, "save_every": 6, "log_path": str(tmp_path)}  # fmt: skip
    if loop == "sl_loop":
        sl_loop.main(sl_loop.Config(learning_rate=3e-3, max_length=64, **shared))
        found = metrics_of(tmp_path, "train_mean_nll")
        assert np.mean(found[-3:]) < 0.8 * np.mean(found[:3]), found
    else:
        rl_loop.main(rl_loop.Config(learning_rate=5e-3, max_tokens=6, group_size=8, **shared))
        found = metrics_of(tmp_path, "reward/total")
        assert np.mean(found[-3:]) > np.mean(found[:3]) + 0.2, found
    assert len(found) == 12


def test_a_script_continues_through_kill_9(service: Any, serving: Serving) -> None:
    """The last test: the server that all others use is killed, with requests on their way."""
    from tinker import types

    one, two = (service.create_lora_training_client("tiny/generalist", rank=4, seed=0) for _ in range(2))
    found = []
    for client, killed in ((one, False), (two, True)):
        live = client.save_weights_and_get_sampling_client()
        for step in range(4):
            trained = client.forward_backward([datum()] * 20, "cross_entropy")
            updated = client.optim_step(types.AdamParams(learning_rate=1e-3))
            drawn = live.sample(prompt(), 2, types.SamplingParams(max_tokens=5, seed=step, stop=[]))
            if killed and step in (0, 2):
                serving.kill()
                serving.start()
            found.append(
                (trained.result().metrics, updated.result().metrics, [each.tokens for each in drawn.result().sequences])
            )
        found.append(logprobs(client).tolist())
        path = client.save_state("last").result().path
    assert found[:5] == found[5:]
    again = service.create_training_client_from_state_with_optimizer(path)
    assert logprobs(again).tolist() == found[-1]
