"""The sampler on CUDA: graphs, compilation and running ahead, against stock `generate` and a teacher-forced pass."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from opd.divergences import Projection, token_logprobs
from opd.divergences.projection import log_probs
from opd.engines.builtin import Engine
from opd.engines.calls import uniforms_at
from opd.engines.kinds import BuiltInSampler
from opd.engines.requests import request_key, uniforms
from opd.models.attention import Packed
from opd.models.fused_layers import fuse_layers
from opd.records import SampledToken, Sampling
from tests.support.engines import STOPS, collect, make_requests
from tests.support.helpers import EOS, tiny_model, tiny_module

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SPEC = BuiltInSampler(slots=8, prefill_rows=4, prefill_chunk=8)
KINDS = ("llama", "llama_tied", "qwen2", "qwen3", "gemma2", "gemma3_text", "mistral", "phi3", "olmo2", "gpt2")
SHAPE = {
    "hidden_size": 128,
    "head_dim": 32,
    "intermediate_size": 256,
    "initializer_range": 0.08,
}  # tame enough for bf16


def cuda_engine(
    kind: str, dtype: torch.dtype = torch.float32, spec: BuiltInSampler = SPEC, fused: bool = False, **config: Any
) -> Engine:
    model = tiny_model(kind, **config)
    model.module.to("cuda", dtype)
    if fused:
        fuse_layers(model.module)
    return Engine(model.inference_copy(), spec, 200, merge_stop=STOPS)


def test_uniforms_are_the_same_on_the_device() -> None:
    key = request_key(0, "x", 0, 0)
    keys, positions = torch.full((500,), key, device="cuda"), torch.arange(500, device="cuda")
    for function in (uniforms_at, torch.compile(uniforms_at)):
        assert np.array_equal(function(keys, positions).cpu().numpy(), uniforms(key, 0, 500))


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_generate(kind: str) -> None:
    engine, stock = cuda_engine(kind), tiny_module(kind).cuda()
    requests = make_requests((3, 17, 8, 30, 1, 12, 40, 5, 9, 33), Sampling(40, temperature=0.0))
    responses = collect(engine, requests)
    for request in requests:
        prompt = torch.from_numpy(request.prompt_ids).long()[None].cuda()
        padding = list(range(engine.model.size, stock.config.vocab_size))
        theirs = stock.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False, eos_token_id=None, suppress_tokens=padding
        )[0, prompt.shape[1] :].tolist()  # fmt: skip
        ours = responses[request.id].ids
        if ours != theirs:  # only at a tie
            first = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
            logits = teacher_forced(engine, request.prompt_ids, theirs).logits()[first]
            assert abs(logits[ours[first]] - logits[theirs[first]]) < 5e-3


def teacher_forced(engine: Engine, prompt: np.ndarray, response: list[int]) -> Projection:
    ids = torch.tensor([*prompt.tolist(), *response], device="cuda")
    with torch.no_grad():
        hidden = engine.model.hidden(ids, Packed.of([ids.numel()], "cuda"))
    return engine.model.project(hidden[len(prompt) - 1 : -1])


@pytest.mark.parametrize("how", ["plain", "compiled", "written out"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-3), (torch.bfloat16, 0.15)])
def test_logprobs_equal_a_teacher_forced_pass(dtype: torch.dtype, tolerance: float, how: str) -> None:
    spec = SPEC.model_copy(update={"compile": how == "compiled"})
    engine = cuda_engine("llama", dtype, spec, fused=how == "written out", **SHAPE)
    assert engine.steps.writes_out == (how == "written out" and dtype == torch.bfloat16)
    options = [
        Sampling(60),
        Sampling(60, 0.6),
        Sampling(60, 1.2, top_p=0.8),
        Sampling(60, 1.0, top_k=5),
        Sampling(60, 0.0),
    ]
    requests = [
        replace(r, sampling=options[i % 5])
        for i, r in enumerate(make_requests((4, 9, 15, 2, 22, 6, 11, 90, 31, 7), options[0]))
    ]
    responses = collect(engine, requests)
    for request in requests:
        events = responses[request.id].events
        ids = torch.tensor([event.token for event in events], device="cuda")
        projection = teacher_forced(engine, request.prompt_ids, ids.tolist())
        expected = token_logprobs(projection, ids, merge=(STOPS,)).tolist()
        stop = log_probs(projection, engine.model.size, (STOPS,))[:, EOS].tolist()
        assert [event.logprob for event in events] == pytest.approx(expected, abs=tolerance)
        assert [event.logprob_stop for event in events] == pytest.approx(stop, abs=tolerance)
        if request.sampling.temperature == 1.0 and not request.sampling.top_k:
            assert [e.logprob_sampled for e in events if e.token not in STOPS] == pytest.approx(
                [e.logprob for e in events if e.token not in STOPS], abs=1e-4
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_device_and_cpu_draw_the_same_tokens(dtype: torch.dtype) -> None:
    """Same keys, same uniform numbers: fp32 responses agree almost everywhere; a rounding may move a draw over an edge."""
    requests = make_requests((3, 17, 8, 30, 12), Sampling(30))
    here = collect(Engine(tiny_model("llama").inference_copy(), SPEC, 200, merge_stop=STOPS), requests)
    there = collect(cuda_engine("llama", dtype), requests)
    same = np.mean([here[r.id].ids[:5] == there[r.id].ids[:5] for r in requests])
    assert same == 1.0 or dtype == torch.bfloat16
    assert max(max(r.ids) for r in there.values()) < 78


def test_company_and_order_do_not_matter_much() -> None:
    """Not bitwise on CUDA (the span picks the kernel), but one run repeats itself exactly."""
    engine = cuda_engine("llama")
    requests = make_requests([3, 17, 8, 30, 1, 12, 5, 9, 44, 20, 7, 2], Sampling(50, stop_ids=tuple(range(2, 10))))
    first, again = collect(engine, requests), collect(engine, requests)
    assert {k: r.numbers for k, r in first.items()} == {k: r.numbers for k, r in again.items()}
    alone = collect(engine, [requests[4]])[requests[4].id]
    assert [e.logprob for e in alone.events][:5] == pytest.approx(
        [e.logprob for e in first[requests[4].id].events][:5], abs=5e-3
    )


def test_load_keeps_the_graphs() -> None:
    engine, other = cuda_engine("llama"), tiny_model("llama", seed=1)
    other.module.cuda()
    requests = make_requests((4, 9), Sampling(12))
    collect(engine, requests)
    graphs = len(engine.steps.calls.graphs)
    engine.load(other.weights(5))
    after = collect(engine, requests)
    assert len(engine.steps.calls.graphs) == graphs
    assert {event.version for event in after["r0"].events} == {5}
    fresh = collect(Engine(other.inference_copy(), SPEC, 200, merge_stop=STOPS), requests)
    assert after["r0"].ids == fresh["r0"].ids


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-3), (torch.bfloat16, 0.15)])
def test_samples_of_one_prompt_share_its_prefill(dtype: torch.dtype, tolerance: float) -> None:
    engine = cuda_engine("llama", dtype, **SHAPE)
    prompts = make_requests((30, 5, 21), Sampling(12))
    requests = [
        replace(prompt, id=f"{prompt.id}/{sample}", key=request_key(0, prompt.id, 0, sample))
        for prompt in prompts
        for sample in range(6)
    ]
    responses = collect(engine, requests)
    assert engine.prefill_rows < 35  # 48 pieces of 8 tokens, if each were read
    for request in requests:
        ids = torch.tensor(responses[request.id].ids, device="cuda")
        expected = token_logprobs(teacher_forced(engine, request.prompt_ids, ids.tolist()), ids, merge=(STOPS,))
        assert [event.logprob for event in responses[request.id].events] == pytest.approx(
            expected.tolist(), abs=tolerance
        )


def test_experts_run_with_or_without_graphs() -> None:
    responses = collect(cuda_engine("qwen3_moe", torch.bfloat16, **SHAPE), make_requests((4, 9, 20), Sampling(12)))
    assert all(len(response.ids) == 12 for response in responses.values())


def test_long_sequences_cross_spans() -> None:
    """Graphs of two spans in one run, with slots of very different lengths."""
    model = tiny_model("llama", max_position_embeddings=1024)
    model.module.to("cuda")
    engine = Engine(model.inference_copy(), SPEC, 1000, merge_stop=STOPS)
    requests = [
        replace(r, sampling=Sampling(n))
        for r, n in zip(make_requests((10, 600, 50, 3), Sampling(1)), (700, 300, 20, 5), strict=True)
    ]
    responses = collect(engine, requests)
    for request in requests:
        events = [event for event in responses[request.id].events if isinstance(event, SampledToken)]
        ids = torch.tensor([event.token for event in events], device="cuda")
        expected = token_logprobs(teacher_forced(engine, request.prompt_ids, ids.tolist()), ids, merge=(STOPS,))
        assert [event.logprob for event in events] == pytest.approx(expected.tolist(), abs=5e-3)


def test_two_engines_record_at_once() -> None:
    """As with `rollout.staleness`: one samples ahead while the other evaluates, and both come upon new spans."""
    model = tiny_model("llama", max_position_embeddings=1024)
    model.module.to("cuda")
    requests = make_requests((3, 17, 8, 30), Sampling(700, temperature=0.0))
    engines = [Engine(model.inference_copy(), SPEC, 1000, merge_stop=STOPS) for _ in range(3)]
    alone = {name: answer.ids for name, answer in collect(engines[2], requests).items()}
    torch.cuda.synchronize()

    def sample(engine: Engine) -> dict[str, list[int]]:
        with torch.cuda.stream(torch.cuda.Stream()):
            return {name: answer.ids for name, answer in collect(engine, requests).items()}

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(sample, engines[:2])) == [alone, alone]


@pytest.mark.parametrize("before", [True, False])
def test_sampling_that_cannot_be_recorded_continues(before: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Tokens, random numbers and other recordings are as if nothing had been tried; what was recorded `before` is still used."""
    expected_engine, engine = cuda_engine("llama"), cuda_engine("llama")
    requests = make_requests((3, 17, 8, 30, 12), Sampling(30))
    longer = make_requests((4, 150), Sampling(20), seed=1)  # of the same span: 200 columns
    expected = collect(expected_engine, requests)
    if before:
        collect(engine, requests)
    numbers = torch.cuda.get_rng_state()
    following = torch.rand(4, device="cuda")
    torch.cuda.set_rng_state(numbers)

    def wait(*args: Any) -> None:
        if torch.cuda.is_current_stream_capturing():
            torch.ones(1, device="cuda").item()

    engine.model.backbone.layers[1].register_forward_pre_hook(wait)
    filtered = [replace(request, sampling=Sampling(20, top_k=5)) for request in longer]
    found = collect(engine, filtered)
    assert {name: answer.ids for name, answer in found.items()} == {
        name: answer.ids for name, answer in collect(expected_engine, filtered).items()
    }
    again = collect(engine, requests)
    assert {name: answer.ids for name, answer in again.items()} == {
        name: answer.ids for name, answer in expected.items()
    }
    assert caplog.text.count("cannot be recorded") == 1
    kept = [graph is not None for graph in engine.steps.calls.graphs.values()]
    assert any(kept)
    assert not all(kept)
    assert torch.equal(torch.rand(4, device="cuda"), following)
    other = cuda_engine("llama")
    assert {name: answer.ids for name, answer in collect(other, requests).items()} == {
        name: answer.ids for name, answer in expected.items()
    }
    assert all(graph is not None for graph in other.steps.calls.graphs.values())
