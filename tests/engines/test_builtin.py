"""The built-in sampler against stock `generate`, the exact distribution, and itself in other company."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from opd.common.errors import DataError, ModelError, TrainingError
from opd.divergences import token_logprobs
from opd.divergences.projection import log_probs
from opd.engines.calls import RowSettings, draw, uniforms_at
from opd.engines.kinds import BuiltInSampler
from opd.engines.requests import request_key, uniforms
from opd.models.attention import Packed
from opd.models.language_model import LanguageModel
from opd.models.load import load_model, tiny_models
from opd.recipe import Lora
from opd.records import Finished, SampledToken, SampleRequest, Sampling, WeightsRef
from tests.support.engines import SPEC, STOPS, by_id, collect, make_engine, make_requests
from tests.support.helpers import EOS, KINDS, tiny_model, tiny_module


def forced(model: LanguageModel, prompt: np.ndarray, response: Sequence[int]) -> Any:
    """The projection at the positions that predict the response."""
    ids = torch.tensor([*prompt.tolist(), *response])
    with torch.no_grad():
        hidden = model.hidden(ids, Packed.of([ids.numel()]))
    return model.project(hidden[len(prompt) - 1 : -1])


# Draws


def test_keys_and_uniforms_are_pinned() -> None:
    """A change here would change every rollout of every recorded run."""
    assert request_key(0, "task:addition/train/7", 0, 0) == 749208210481603748
    assert uniforms(749208210481603748, 0, 3).tolist() == [0.7449504733085632, 0.16865462064743042, 0.03803128004074097]
    assert len({request_key(s, p, v, k) for s in range(3) for p in "ab" for v in range(3) for k in range(3)}) == 54


def test_uniforms_are_the_same_from_numpy_and_torch() -> None:
    for key in (0, 1, 2**62 + 12345, 2**63 - 1, request_key(3, "x", 1, 2)):
        ours = uniforms_at(torch.full((2000,), key), torch.arange(5, 2005))
        assert np.array_equal(uniforms(key, 5, 2000), ours.numpy())
        assert np.array_equal(uniforms(key, 0, 2005)[5:], ours.numpy())
    many = np.concatenate([uniforms(request_key(0, str(i), 0, 0), 0, 100) for i in range(1000)])
    assert many.min() >= 0
    assert many.max() < 1
    counts = np.histogram(many, bins=20, range=(0, 1))[0]
    assert chi_square(counts, np.full(20, 0.05)) < 50  # 19 degrees of freedom: p about 1e-4


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Pools events expected fewer than 5 times."""
    total = counts.sum()
    rare = expected * total < 5
    assert counts[expected == 0].sum() == 0
    pooled = np.append(counts[~rare], counts[rare].sum()), np.append(expected[~rare], expected[rare].sum()) * total
    keep = pooled[1] > 0
    return float(((pooled[0][keep] - pooled[1][keep]) ** 2 / pooled[1][keep]).sum())


def settings(rows: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> RowSettings:
    keys = torch.tensor([request_key(1, str(row), 0, 0) for row in range(rows)])
    return RowSettings(
        torch.full((rows,), temperature),
        torch.full((rows,), top_p),
        torch.full((rows,), top_k),
        keys,
        torch.arange(rows) % 7,
    )


def exact(logits: np.ndarray, temperature: float, top_p: float, top_k: int) -> np.ndarray:
    """Probabilities by the definition, in fp64, with a loop."""
    scaled = logits.astype(np.float64) / temperature
    probability = np.exp(scaled - scaled.max())
    order = np.argsort(-scaled, kind="stable")
    if top_k:
        probability[order[top_k:]] = 0
    probability /= probability.sum()
    mass = 0.0
    for index in order:
        if mass >= top_p:
            probability[index] = 0
        mass += probability[index]
    return probability / probability.sum()


@pytest.mark.parametrize("vocabulary", [50, 700])
@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.7, 1.0, 0), (1.0, 0.8, 0), (1.3, 1.0, 7), (0.9, 0.7, 20)]
)
def test_frequencies_match_the_exact_distribution(
    vocabulary: int, temperature: float, top_p: float, top_k: int
) -> None:
    rows = 8_000
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(3)) * 1.5
    expected = exact(logits.numpy(), temperature, top_p, top_k)
    token, _, logprob_sampled, _ = draw(
        logits.expand(rows, -1), settings(rows, temperature, top_p, top_k), torch.tensor([2, 3]), top_p < 1 or top_k > 0
    )
    counts = np.bincount(token.long().numpy(), minlength=vocabulary)
    support = int((expected * rows >= 5).sum())
    assert chi_square(counts, expected) < support + 5 * (2 * support) ** 0.5 + 5
    assert np.allclose(logprob_sampled.numpy(), np.log(expected[token.long().numpy()]), atol=1e-5)


def test_a_row_without_filters_does_not_notice_the_filtered_path() -> None:
    logits = torch.randn(64, 300)
    plain, filtered = (draw(logits, settings(64, 0.8), torch.tensor([5]), filtered) for filtered in (False, True))
    assert torch.equal(plain, filtered)


def test_an_id_of_probability_zero_is_never_drawn() -> None:
    """Peaked rows, rows with one possible id, huge and tiny temperatures, and draws at both edges of the CDF."""
    rows, vocabulary = 4096, 600
    for temperature in (1e-4, 1.0, 50.0):
        logits = torch.full((rows, vocabulary), float("-inf"))
        alive = torch.rand(rows, vocabulary) < 0.01
        alive[torch.arange(rows), torch.randint(vocabulary, (rows,))] = True
        logits[alive] = torch.randn(int(alive.sum())) * 30
        token, _, logprob_sampled, _ = draw(logits, settings(rows, temperature), torch.tensor([0]), False)
        tempered = (logits - logits.max(-1, keepdim=True).values) / temperature
        assert (tempered.exp().gather(-1, token.long()[:, None]) > 0).all()
        assert logprob_sampled.isfinite().all()


# Against stock models


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_generate(kind: str) -> None:
    model, stock = tiny_model(kind), tiny_module(kind)
    requests = make_requests((3, 17, 30, 1), Sampling(16, temperature=0.0))
    responses = collect(make_engine(model), requests)
    assert len({token for response in responses.values() for token in response.ids}) > 3
    for request in requests:
        compare_greedy(model, stock, request, responses[request.id].ids)


def compare_greedy(model: LanguageModel, stock: Any, request: SampleRequest, ours: list[int]) -> None:
    """Equal ids up to the first tie: there the two likeliest ids are closer than 1e-4."""
    prompt = torch.from_numpy(request.prompt_ids).long()[None]
    padding = list(range(model.size, stock.config.vocab_size)) or None
    with torch.no_grad():
        theirs = stock.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=request.sampling.max_new_tokens, do_sample=False,
            eos_token_id=list(request.sampling.stop_ids) or None, suppress_tokens=padding,
        )[0, prompt.shape[1] :].tolist()  # fmt: skip
    if ours != theirs:
        first = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
        logits = forced(model, request.prompt_ids, theirs).logits()[first]
        assert abs(logits[ours[first]] - logits[theirs[first]]) < 1e-4


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mistral", "qwen3_moe", "gpt2"])
def test_logprobs_equal_a_teacher_forced_pass(kind: str) -> None:
    model = tiny_model(kind)
    options = [
        Sampling(20),
        Sampling(20, 0.6),
        Sampling(20, 1.2, top_p=0.8),
        Sampling(20, 1.0, top_k=5),
        Sampling(20, 0.0),
    ]
    requests = [
        replace(r, sampling=options[i % 5]) for i, r in enumerate(make_requests((4, 9, 15, 2, 22, 6, 11), options[0]))
    ]
    for request, response in zip(requests, by_id(collect(make_engine(model), requests), requests), strict=True):
        projection, ids = forced(model, request.prompt_ids, response.ids), torch.tensor(response.ids)
        merged = token_logprobs(projection, ids, merge=(STOPS,))
        stop = log_probs(projection, model.size, (STOPS,))[:, EOS]
        s = request.sampling
        drawn_from = [
            exact(row, s.temperature or 1.0, s.top_p, s.top_k) for row in projection.logits().detach().numpy()
        ]
        sampled = [
            0.0 if s.temperature == 0 else float(np.log(p[i])) for p, i in zip(drawn_from, response.ids, strict=True)
        ]
        assert max(response.ids) < model.size
        for index, expected in ((2, merged.tolist()), (3, sampled), (4, stop.tolist())):
            assert [event[index] for event in response.events] == pytest.approx(expected, abs=1e-4)


def test_without_stop_ids_the_stop_event_is_nan() -> None:
    (response,) = collect(make_engine(tiny_model(), stop=()), make_requests((4,), Sampling(3))).values()
    assert all(np.isnan(event.logprob_stop) for event in response.events)


def test_sampled_tokens_follow_the_model() -> None:
    """End to end: first tokens of many requests with one prompt and different keys."""
    model = tiny_model("llama_tied")
    prompt = np.array([5, 6, 7], dtype=np.int32)
    requests = [SampleRequest(str(i), prompt, request_key(0, "p", 0, i), Sampling(2)) for i in range(1500)]
    spec = BuiltInSampler(slots=64, prefill_rows=16, prefill_chunk=4)
    responses = collect(make_engine(model, spec, max_length=8), requests)
    first = np.array([responses[str(i)].ids[0] for i in range(1500)])
    expected = exact(forced(model, prompt, [2]).logits()[0].detach().numpy(), 1.0, 1.0, 0)
    support = int((expected * 1500 >= 5).sum())
    assert chi_square(np.bincount(first, minlength=model.size), expected) < support + 5 * (2 * support) ** 0.5 + 5


# Independence of company


WIDE = BuiltInSampler(slots=16, prefill_rows=1, prefill_chunk=16)


@pytest.mark.parametrize(
    ("kind", "spec"),
    [("llama", SPEC), ("llama", WIDE), ("gemma2", SPEC), ("gemma3_text", SPEC), ("mistral", WIDE), ("olmo2", SPEC)],
)
def test_a_rollout_is_bitwise_the_same_alone_batched_and_permuted(kind: str, spec: BuiltInSampler) -> None:
    engine = make_engine(tiny_model(kind), spec, max_length=200)
    options = [Sampling(20), Sampling(9, 0.7), Sampling(40, 1.1, top_p=0.9), Sampling(12, 0.0)]
    lengths = (3, 17, 8, 30, 1, 12, 25, 5, 40)
    requests = [replace(r, sampling=options[i % 4]) for i, r in enumerate(make_requests(lengths, options[0]))]
    together = collect(engine, requests)
    permuted = collect(engine, [requests[i] for i in (5, 2, 8, 0, 7, 3, 1, 6, 4)])
    for request in requests:
        assert together[request.id].numbers == permuted[request.id].numbers
    for request in (requests[1], requests[6], requests[8]):
        assert together[request.id].numbers == collect(engine, [request])[request.id].numbers


@pytest.mark.parametrize("kind", ["llama", "gemma2", "phi3", "gpt2", "olmo2"])
@pytest.mark.parametrize("slots", [3, 20, 64])
def test_every_slot_gives_the_same_bits(kind: str, slots: int) -> None:
    """The end of a tensor is computed by other instructions than the rest; no slot may notice."""
    engine = make_engine(tiny_model(kind), BuiltInSampler(slots=slots, prefill_rows=3, prefill_chunk=7), max_length=100)
    (request,) = make_requests((9,), Sampling(12, 0.9, stop_ids=STOPS))
    for sampling in (request.sampling, replace(request.sampling, top_p=0.95)):
        copies = [replace(request, id=f"copy{index}", sampling=sampling) for index in range(engine.settings.slots)]
        assert len({tuple(response.numbers) for response in collect(engine, copies).values()}) == 1


TAIL = BuiltInSampler(slots=8, prefill_rows=1, prefill_chunk=8)
LONG_TAILED = [
    replace(request, sampling=Sampling(length, top_k=top_k))
    for length, top_k, request in zip(
        (2, 18, 3, 9, 5, 4), (0, 0, 0, 0, 0, 4), make_requests((3, 7, 8, 5, 1, 6), Sampling(1)), strict=True
    )
]


def test_steps_without_idle_slots_change_no_bit() -> None:
    model = tiny_model("llama")
    whole, engine = make_engine(model, TAIL), make_engine(model, TAIL)
    whole.steps._fewer = []
    counts = list(engine.steps._fewer)
    assert counts[-1] == engine.settings.slots // 2
    expected = {name: response.numbers for name, response in collect(whole, LONG_TAILED).items()}
    assert {name: response.numbers for name, response in collect(engine, LONG_TAILED).items()} == expected
    used = {name: {rows for call, rows, *_ in engine.steps._alike if call == name} for name in ("decode", "prefill")}
    unlike = engine.steps._unlike  # some libraries multiply fewer rows in another order
    assert used["decode"] == set(counts) or "decode" in unlike
    assert used["prefill"] == {4} or "prefill" in unlike
    assert not whole.steps._alike


def test_steps_are_made_for_all_slots_where_that_changes_bits() -> None:
    def by_rows(module: Any, args: Any, out: Tensor) -> Tensor:
        return out * (1 + 1e-6 * out.shape[:-1].numel())

    engines = [make_engine(tiny_model("llama"), TAIL) for _ in range(2)]
    for engine in engines:
        engine.model.backbone.layers[0].mlp.register_forward_hook(by_rows)
    engines[0].steps._fewer = []
    expected, found = (collect(engine, LONG_TAILED) for engine in engines)
    assert {name: response.numbers for name, response in found.items()} == {
        name: response.numbers for name, response in expected.items()
    }
    assert engines[1].steps._unlike == {"decode", "prefill"}
    assert not engines[1].steps._alike
    assert not make_engine(tiny_model("qwen3_moe"), TAIL).steps._fewer


def test_a_mixture_of_experts_keeps_its_tokens_in_other_company() -> None:
    """How many tokens share an expert depends on the batch, so here only rounding may differ."""
    engine = make_engine(tiny_model("qwen3_moe"))
    requests = make_requests((3, 17, 8, 30, 12), Sampling(20))
    together = collect(engine, requests)
    for request in requests:
        alone = collect(engine, [request])[request.id]
        assert alone.ids == together[request.id].ids
        assert [e.logprob for e in alone.events] == pytest.approx(
            [e.logprob for e in together[request.id].events], abs=1e-4
        )


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_an_interrupted_rollout_continues_as_if_nothing_had_happened(kind: str) -> None:
    model = tiny_model(kind)
    engine = make_engine(model)
    requests = make_requests((6, 13, 21), Sampling(25, stop_ids=(EOS,)))
    whole = collect(engine, requests)
    for cut in (1, 4, 11):
        parts = [
            replace(r, prefix_ids=np.array(whole[r.id].ids[:cut], dtype=np.int32))
            for r in requests
            if len(whole[r.id].ids) > cut
        ]
        for request, response in zip(parts, by_id(collect(engine, parts), parts), strict=True):
            rest = whole[request.id].events[cut:]
            assert response.ids == [event.token for event in rest]
            assert response.stop == whole[request.id].stop
            for index in (2, 3, 4):
                assert [e[index] for e in response.events] == pytest.approx([e[index] for e in rest], abs=1e-4)


# Ending


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_samples_of_one_prompt_share_its_prefill(kind: str) -> None:
    """Bit for bit what each gives alone, whatever order they come in, though slots change hands meanwhile."""
    model, sampling = tiny_model(kind), Sampling(6, stop_ids=STOPS)
    engine = make_engine(model)
    prompts = make_requests((23, 3, 17, 10, 23), sampling)
    requests = [
        replace(prompt, id=f"{prompt.id}/{sample}", key=request_key(0, prompt.id, 0, sample))
        for prompt in prompts
        for sample in range(5)
    ]
    requests[7] = replace(requests[7], prefix_ids=np.array([5, 6, 8, 10], dtype=np.int32))
    requests[12] = replace(requests[12], sampling=Sampling(1))
    alone = {request.id: collect(engine, [request])[request.id].numbers for request in requests}
    separate = sum(-(-(len(r.prompt_ids) + (0 if r.prefix_ids is None else 4)) // 5) for r in requests)
    for order in (
        list(range(25)),
        np.random.default_rng(0).permutation(25).tolist(),
        [i % 5 * 5 + i // 5 for i in range(25)],
    ):
        before = engine.prefill_rows
        together = collect(engine, [requests[index] for index in order])
        assert {name: response.numbers for name, response in together.items()} == alone
        assert engine.prefill_rows - before < separate
    before = engine.prefill_rows
    collect(engine, requests)  # prompt by prompt: five pieces and four last ones, and so on
    assert engine.prefill_rows - before <= 9 + 6 + 8 + 6 + 9


def test_new_weights_end_the_sharing() -> None:
    model, other = tiny_model("llama"), tiny_model("llama", seed=1)
    prompt = make_requests((22,), Sampling(4))[0]
    requests = [replace(prompt, id=str(sample), key=request_key(0, "p", 0, sample)) for sample in range(9)]
    engine = make_engine(model, BuiltInSampler(slots=2, prefill_rows=3, prefill_chunk=5))
    events: dict[str, list[Any]] = {}
    for number, event in enumerate(engine.sample(requests)):
        if isinstance(event, SampledToken):
            events.setdefault(event.request_id, []).append(event[1:6])
        if number == 12:
            engine.load(other.weights(1))
    fresh = make_engine(other)
    fresh.load(other.weights(1))
    whole = [request for request in requests if all(numbers[-1] == 1 for numbers in events[request.id])]
    assert len(whole) >= 4
    for request in whole:
        assert collect(fresh, [request])[request.id].numbers == events[request.id]


def test_stop_ids_and_length() -> None:
    model = tiny_model()
    engine = make_engine(model)
    requests = make_requests((4, 7, 9, 12, 5, 6, 8, 10), Sampling(40))
    free = collect(engine, requests)
    assert all(len(response.ids) == 40 and response.stop == "length" for response in free.values())
    halves = tuple(range(2, 12))
    stopped = collect(engine, [replace(r, sampling=Sampling(40, stop_ids=halves)) for r in requests])
    for request in requests:
        ids = free[request.id].ids
        end = next((i for i, token in enumerate(ids) if token in halves), None)
        assert stopped[request.id].ids == (ids if end is None else ids[: end + 1])
        assert stopped[request.id].stop == ("length" if end is None else "stop")
    assert any(response.stop == "stop" for response in stopped.values())


def test_stop_strings_end_a_response_whose_tokens_stay_as_sampled() -> None:
    model = tiny_model()
    engine = make_engine(model)
    (request,) = make_requests((5,), Sampling(40))
    ids = collect(engine, [request])["r0"].ids
    wanted = model.tokenizer.decode(ids[20:23])
    end = next(n for n in range(1, 41) if wanted in model.tokenizer.decode(ids[:n]))
    cut = replace(request, sampling=Sampling(40, stop_strings=("never there", wanted)))
    response = collect(engine, [cut])["r0"]
    assert response.ids == ids[:end]
    assert response.stop == "stop"
    half = replace(cut, prefix_ids=np.array(ids[: end - 1], dtype=np.int32))  # the string straddles the prefix
    assert collect(engine, [half])["r0"].ids == ids[end - 1 : end]


def test_a_prefix_that_is_complete_needs_no_sampling() -> None:
    engine = make_engine(tiny_model())
    (request,) = make_requests((5,), Sampling(4, stop_ids=(EOS,)))
    full = replace(request, prefix_ids=np.array([5, 6, 7, 8], dtype=np.int32))
    ended = replace(request, prefix_ids=np.array([5, EOS], dtype=np.int32))
    assert list(engine.sample([full])) == [Finished("r0", "length")]
    assert list(engine.sample([ended])) == [Finished("r0", "stop")]


def test_a_request_that_does_not_fit_is_rejected() -> None:
    engine = make_engine(tiny_model(), max_length=40)
    assert len(collect(engine, make_requests((30,), Sampling(10)))["r0"].ids) == 10
    with pytest.raises(DataError, match=r"30 prompt tokens and 11 new ones.*at most 40"):
        list(engine.sample(make_requests((30,), Sampling(11))))
    assert len(collect(engine, make_requests((30,), Sampling(10)))["r0"].ids) == 10  # the engine is usable again
    with pytest.raises(DataError, match="context"):
        make_engine(tiny_model(), max_length=100_000)


def test_slots_are_refilled() -> None:
    engine = make_engine(tiny_model(), BuiltInSampler(slots=4, prefill_rows=1, prefill_chunk=16))
    lengths = [3, 40, 5, 8, 20, 2, 9, 4, 30, 6, 7, 3, 12, 25, 5, 10]
    requests = [
        replace(r, sampling=Sampling(n)) for r, n in zip(make_requests([5] * 16, Sampling(1)), lengths, strict=True)
    ]
    before = engine.decode_steps
    responses = collect(engine, requests)
    assert [len(responses[r.id].ids) for r in requests] == lengths
    assert engine.decode_steps - before <= sum(lengths) / 4 + max(
        lengths
    )  # list scheduling; batches of 4 would take 113


def test_requests_are_pulled_as_slots_become_free() -> None:
    engine, pulled = make_engine(tiny_model()), []

    def source() -> Iterator[SampleRequest]:
        for request in make_requests([5] * 12, Sampling(6)):
            pulled.append(request.id)
            yield request

    events = engine.sample(source())
    next(events)
    assert len(pulled) == 4
    with pytest.raises(RuntimeError, match="sampling already"):
        next(engine.sample([]))
    assert sum(isinstance(event, Finished) for event in events) == 12


@pytest.mark.parametrize("lag", [1, 3])
def test_running_ahead_of_the_results_changes_nothing(lag: int) -> None:
    """What CUDA does: the next step is launched before the last one's tokens are known."""
    engine = make_engine(tiny_model())
    options = [Sampling(30, stop_ids=STOPS), Sampling(1), Sampling(12, stop_ids=tuple(range(2, 20))), Sampling(2)]
    requests = [
        replace(r, sampling=options[i % 4]) for i, r in enumerate(make_requests([3, 17, 8, 30, 1, 12] * 3, options[0]))
    ]
    expected = collect(engine, requests)
    engine.lag = lag
    ahead = collect(engine, requests)
    assert {key: (r.numbers, r.stop) for key, r in ahead.items()} == {
        key: (r.numbers, r.stop) for key, r in expected.items()
    }
    assert {r.stop for r in ahead.values()} == {"stop", "length"}


# Weights


def test_load_changes_the_policy_and_its_version() -> None:
    model, other = tiny_model(), tiny_model(seed=1)
    engine = make_engine(model.inference_copy(torch.float32))
    requests = make_requests((4, 9), Sampling(12))
    before = collect(engine, requests)
    shared = collect(make_engine(other), requests)
    storage = {name: p.data_ptr() for name, p in engine.model.module.named_parameters()}
    engine.load(other.weights(7))
    after = collect(engine, requests)
    assert {name: p.data_ptr() for name, p in engine.model.module.named_parameters()} == storage
    assert {event.version for event in before["r0"].events} == {0}
    assert {event.version for event in after["r0"].events} == {7}
    assert [r.ids for r in by_id(after, requests)] == [r.ids for r in by_id(shared, requests)]
    assert after["r0"].ids != before["r0"].ids


def test_load_between_two_tokens_takes_effect_from_there() -> None:
    model, other = tiny_model(), tiny_model(seed=1)
    engine = make_engine(model)
    (request,) = make_requests((4,), Sampling(6))
    events = engine.sample([request])
    versions = [next(events).version for _ in range(2)]
    engine.load(other.weights(3))
    versions += [event.version for event in events if isinstance(event, SampledToken)]
    assert versions == [0, 0, 3, 3, 3, 3]


def test_weights_that_do_not_fit_are_rejected() -> None:
    engine = make_engine(tiny_model())
    with pytest.raises(ModelError, match="is missing"):
        engine.load(WeightsRef(1, {}))


def test_lora_is_merged_into_the_sampler() -> None:
    pytest.importorskip("peft")
    model = tiny_model()
    model.add_lora(Lora(rank=2, alpha=8))
    engine = make_engine(model)
    requests = make_requests((4, 9), Sampling(12))
    plain = collect(engine, requests)
    with torch.no_grad():
        for name, parameter in model.trainable().items():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    engine.load(model.weights(1))
    adapted = collect(engine, requests)
    assert adapted["r0"].ids != plain["r0"].ids
    for request, response in zip(requests, by_id(adapted, requests), strict=True):
        expected = token_logprobs(
            forced(model, request.prompt_ids, response.ids), torch.tensor(response.ids), merge=(STOPS,)
        )
        assert [event.logprob for event in response.events] == pytest.approx(expected.tolist(), abs=1e-4)


def test_logits_that_are_not_finite_are_an_error() -> None:
    engine = make_engine(tiny_model())
    requests = make_requests((4, 9), Sampling(3))
    good, weights = collect(engine, requests), {name: p.clone() for name, p in engine.model.module.named_parameters()}
    engine.load(WeightsRef(1, {name: torch.full_like(p, float("nan")) for name, p in weights.items()}))
    with pytest.raises(TrainingError, match="not finite"):
        list(engine.sample(requests))
    engine.load(WeightsRef(0, weights))
    assert collect(engine, requests)["r0"].numbers == good["r0"].numbers


# Built-in and real models


@pytest.mark.skipif(not (Path(__file__).parents[2] / "opd/models/tiny").is_dir(), reason="no built-in models here")
def test_built_in_models_agree_with_generate() -> None:
    for name in list(tiny_models())[:2]:
        model = load_model(name)
        from transformers import AutoModelForCausalLM

        stock = AutoModelForCausalLM.from_pretrained(tiny_models()[name])
        prompts = [np.array(model.tokenizer.encode(text), dtype=np.int32) for text in ("add 12+30", "reverse abc", "7")]
        sampling = Sampling(12, temperature=0.0, stop_ids=model.stop_ids)
        requests = [SampleRequest(str(i), prompt, i, sampling) for i, prompt in enumerate(prompts) if prompt.size]
        responses = collect(make_engine(model, BuiltInSampler(), 64, model.stop_ids), requests)
        for request in requests:
            compare_greedy(model, stock, request, responses[request.id].ids)


@pytest.fixture(scope="session")
def smol_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("smol")
    load_model("smol").save(directory)
    return directory


@pytest.mark.smol
def test_smol_agrees_with_generate(smol_directory: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = load_model(str(smol_directory))
    stock = AutoModelForCausalLM.from_pretrained(smol_directory)
    texts = (
        "What is 12 + 30?",
        "Hi",
        "Name three colours and say why you like each of them, in one short sentence per colour.",
    )
    chats = [
        model.tokenizer.apply_chat_template(
            [{"role": "user", "content": t}], add_generation_prompt=True, tokenize=False
        )
        for t in texts
    ]
    sampling = Sampling(24, temperature=0.0, stop_ids=model.stop_ids)
    requests = [
        SampleRequest(str(i), np.array(model.tokenizer.encode(c), dtype=np.int32), i, sampling)
        for i, c in enumerate(chats)
    ]
    engine = make_engine(model, BuiltInSampler(slots=4), 160, model.stop_ids)
    responses = collect(engine, requests)
    for request in requests:
        compare_greedy(model, stock, request, responses[request.id].ids)
