"""The Tinker API without the SDK: losses against fp64, order, isolation, errors, samples, saved states."""

from __future__ import annotations

import contextlib
import gc
import json
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opd.common.errors import UserError
from opd.divergences import Projection
from opd.serve.tinker import service as service_module
from opd.serve.tinker.checkpoints import Checkpoints, SavedClient
from opd.serve.tinker.losses import TokenLoss, loss_named
from opd.serve.tinker.requests import SampleBody, SaveForSampler
from opd.serve.tinker.service import QueuedRequest
from opd.serve.tinker.start import base_hash, tinker_tokens
from opd.serve.tinker.wire import LossRow, loss_rows, read_protobuf
from opd.teachers.served import RequestLimits, WireError
from tests.support.tinker import OTHER, TOKEN, TinkerServer, loss_request, prompt, stock, tiny

IDS = [21, 22, 15, 23, 33, 40, 41]
TARGETS = {"target_tokens": IDS[1:], "weights": [1.0] * 6}
DATUM = (IDS[:-1], TARGETS)


def policy(**changed: Any) -> tuple[list[int], dict[str, Any]]:
    inputs = {"target_tokens": IDS[1:], "logprobs": [-1.0] * 6, "advantages": [0.5, -0.5, 1, -1, 2, 0]}
    return IDS[:-1], {**inputs, **changed}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerServer]:
    with TinkerServer(tmp_path_factory.mktemp("tinker")) as found:
        yield found


# --- Losses ---


def reference(name: str, p: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The formulas of the page, in fp64."""
    if name == "cross_entropy":
        return -(inputs["weights"] * p).sum()
    ratio, advantage = (p - inputs["logprobs"]).exp(), inputs["advantages"]
    if name == "dro":
        return -(p * advantage - 0.5 * 0.3 * (p - inputs["logprobs"]) ** 2).sum()
    if name == "importance_sampling":
        return -(ratio * advantage).sum()
    clipped = ratio.clamp(0.7, 1.3)
    if name == "ppo":
        return -torch.minimum(ratio * advantage, clipped * advantage).sum()
    return -(clipped.detach() * advantage * p).sum()


@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "two targets"])
def test_losses_and_gradients_against_fp64(name: str) -> None:
    rng, columns = np.random.default_rng(0), 2 if name == "two targets" else 1
    name = "cross_entropy" if name == "two targets" else name
    hidden, weight = (torch.tensor(rng.normal(size=size), dtype=torch.float64, requires_grad=True) for size in ((9, 5), (11, 5)))  # fmt: skip
    targets = rng.integers(0, 11, (9, columns)).astype(np.int64)
    numbers = {key: rng.normal(size=(9, columns)).astype(np.float32) for key in ("weights", "advantages", "logprobs")}
    numbers["logprobs"] -= 3
    p = torch.log_softmax(hidden @ weight.T, -1).gather(-1, torch.tensor(targets))
    expected = reference(name, p, {key: torch.tensor(value, dtype=torch.float64) for key, value in numbers.items()})
    wanted = torch.autograd.grad(expected, (hidden, weight))

    clips = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3}
    config = {"ppo": clips, "cispo": clips, "dro": {"beta": 0.3}}.get(name, {})
    loss = loss_named(name, config, tiny)
    given_inputs = {"target_tokens": targets} | {key: numbers[key] for key in loss.inputs if key in numbers}
    if columns == 1:
        given_inputs = {key: value[:, 0] for key, value in given_inputs.items()}
    halves = [LossRow(np.arange(4), {key: value[:4] for key, value in given_inputs.items()}),
              LossRow(np.arange(5), {key: value[4:] for key, value in given_inputs.items()})]  # fmt: skip
    loss.check(halves, 11, 100)
    student = Projection(hidden.detach().float().requires_grad_(), weight.detach().float().requires_grad_())
    part = loss.part(halves, student, torch.zeros(9, dtype=torch.int64))
    assert float(part.loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    np.testing.assert_allclose(part.outputs["logprobs"].reshape(9, columns), p.detach(), atol=1e-5)
    found = torch.autograd.grad(part.loss, (student.hidden, student.weight))
    for gradient, correct in zip(found, wanted, strict=True):
        np.testing.assert_allclose(gradient, correct, atol=1e-4)


@pytest.mark.parametrize("kind", ["reverse_kl", "jsd"])
def test_divergence_to_a_teacher_is_the_sum_over_the_vocabulary(server: TinkerServer, kind: str) -> None:
    client = server.client(server.session())
    weights = [0.0, 1.0, 2.0, 0.5, 1.0, 1.0]
    config: dict[str, float | str] = {"teacher": "arithmetic", "kind": kind}
    found = server.result(server.passes(client, 1, [(IDS[:-1], {"weights": weights})], "divergence", config))
    with torch.no_grad():
        ids = torch.tensor([IDS[:-1]])
        s, t = (stock(name)(input_ids=ids).logits[0].double().log_softmax(-1) for name in ("generalist", "arithmetic"))
    mean = torch.logaddexp(s, t) - np.log(2)
    exact = {"reverse_kl": s.exp() * (s - t), "jsd": (s.exp() * (s - mean) + t.exp() * (t - mean)) / 2}[kind].sum(-1)
    counted = np.array(weights) > 0
    np.testing.assert_allclose(found["outputs"][0]["divergence"][counted], exact.numpy()[counted], atol=1e-4)
    assert found["metrics"]["loss:sum"] == pytest.approx(float((exact * torch.tensor(weights)).sum()), abs=1e-3)


def test_gradients_of_requests_are_added_and_the_update_is_adamw(server: TinkerServer) -> None:
    """Two requests and one with both data make the same update; so does torch's AdamW on a plain model."""
    session, short = server.session(), (IDS[:3], {"target_tokens": IDS[1:4], "weights": [1.0, 0.5, 2.0]})
    apart, together = (server.client(session, number, rank=0) for number in range(2))
    server.passes(apart, 1, [DATUM])
    server.passes(apart, 2, [short])
    server.passes(together, 1, [DATUM, short])
    settings = {"weight_decay": 0.1, "beta2": 0.9, "grad_clip_norm": 0.5}
    norms = [
        server.result(server.step(client, seq, **settings))["metrics"] for client, seq in ((apart, 3), (together, 2))
    ]
    assert norms[0]["grad_norm:mean"] == pytest.approx(norms[1]["grad_norm:mean"], rel=1e-4)
    plain = stock("generalist")
    matrices, norm_weights = ([p for p in plain.parameters() if (p.ndim > 1) == decayed] for decayed in (True, False))
    rule = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": norm_weights, "weight_decay": 0.0}],
        lr=1e-3, betas=(0.9, 0.9), eps=1e-12,
    )  # fmt: skip
    for ids, inputs in (DATUM, short):
        p = plain(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        p = p.gather(-1, torch.tensor(inputs["target_tokens"])[:, None])[:, 0]
        (-(p * torch.tensor(inputs["weights"])).sum()).backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    rule.step()
    with torch.no_grad():
        expected = plain(input_ids=torch.tensor([IDS[:-1]])).logits[0].log_softmax(-1)
    expected = expected.gather(-1, torch.tensor(IDS[1:])[:, None])[:, 0]
    for client, seq in ((apart, 4), (together, 3)):
        found = server.result(server.passes(client, seq, [DATUM], forward_only=True))
        np.testing.assert_allclose(found["outputs"][0]["logprobs"], expected, atol=1e-3)


def test_forward_alone_leaves_no_gradients(server: TinkerServer) -> None:
    client = server.client(server.session())
    server.passes(client, 1, [DATUM], forward_only=True)
    assert "no gradients" in server.result(server.step(client, 2))["error"]


def test_weights_of_whole_numbers_do_not_truncate_those_of_other_data(server: TinkerServer) -> None:
    client = server.client(server.session())
    whole = (IDS[:-1], {**TARGETS, "weights": np.ones(6, np.int64)})
    half = (IDS[:-1], {**TARGETS, "weights": [0.5] * 6})
    one, both = (server.result(server.passes(client, seq, data, forward_only=True)) for seq, data in ((1, [whole]), (2, [whole, half])))  # fmt: skip
    assert both["metrics"]["loss:sum"] == pytest.approx(1.5 * one["metrics"]["loss:sum"], rel=1e-4)


def test_data_with_different_numbers_of_targets_share_a_request(server: TinkerServer) -> None:
    client = server.client(server.session())
    targets = np.array([IDS[1:], IDS[:-1], [5] * 6]).T
    data = [(IDS[:-1], {"target_tokens": targets[:, :k], "weights": np.ones((6, k), np.float32)}) for k in (2, 3, 2)]
    found = server.result(server.passes(client, 1, [data[0], DATUM, *data[1:]], forward_only=True))["outputs"]
    assert [each["logprobs"].shape for each in found] == [(6, 2), (6,), (6, 3), (6, 2)]
    for each in (found[0], found[3]):
        np.testing.assert_allclose(each["logprobs"], found[2]["logprobs"][:, :2], atol=1e-4)
    np.testing.assert_allclose(found[1]["logprobs"], found[2]["logprobs"][:, 0], atol=1e-4)


# --- Order ---


def test_requests_run_by_their_numbers_whatever_order_they_arrive_in(server: TinkerServer) -> None:
    session = server.session()
    straight, mixed = server.client(session, 0), server.client(session, 1)
    for seq, datum in enumerate((DATUM, policy()), 1):
        server.passes(straight, seq, [datum], "cross_entropy" if seq == 1 else "importance_sampling")
    server.step(straight, 3)
    expected = server.result(server.passes(straight, 4, [DATUM], forward_only=True))
    last = server.passes(mixed, 4, [DATUM], forward_only=True)
    server.step(mixed, 3)
    server.passes(mixed, 2, [policy()], "importance_sampling")
    assert not server.service.future(_owner(server), last["request_id"]).answer.done()
    server.passes(mixed, 1, [DATUM])
    found = server.result(last)
    assert np.array_equal(found["outputs"][0]["logprobs"], expected["outputs"][0]["logprobs"])


def test_a_request_that_is_sent_again_is_one_request(server: TinkerServer) -> None:
    client = server.client(server.session())
    assert server.passes(client, 1, [DATUM]) == server.passes(client, 1, [DATUM])
    norm = server.result(server.step(client, 2))["metrics"]["grad_norm:mean"]
    other = server.client(server.session())
    server.passes(other, 1, [DATUM])
    assert server.result(server.step(other, 2))["metrics"]["grad_norm:mean"] == norm
    found = server.post("forward_backward", loss_request(client, 1, [policy()], "ppo", {}, False))
    assert (found.status_code, "used by another request" in found.json()["error"]) == (400, True)


def test_requests_that_wait_for_one_that_never_arrives_fail(
    server: TinkerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = server.client(server.session())
    monkeypatch.setattr(service_module, "ORDER_SECONDS", 0.0)
    late = server.passes(client, 2, [DATUM], forward_only=True)
    assert "request 1" in server.result(late)["error"]
    assert "outputs" in server.result(server.passes(client, 3, [DATUM], forward_only=True))


def test_unloading_frees_a_client_and_ends_what_waits_for_an_earlier_request(server: TinkerServer) -> None:
    session = server.session()
    client = server.client(session)
    server.result(server.passes(client, 1, [DATUM]))
    failed = server.passes(client, 2, [policy(advantages=[float("nan")] * 6)], "ppo")
    assert "not finite" in server.result(failed)["error"]
    error = server.service.future(_owner(server), failed["request_id"]).answer.exception()
    assert error is not None
    assert (error.__traceback__, error.__context__) == (None, None)  # they hold the tensors of the pass
    held = weakref.ref(server.service.client(_owner(server), client)[1])
    early = server.passes(client, 4, [DATUM])
    server.result(server.ask("unload_model", model_id=client))
    assert "was unloaded" in server.result(early)["error"]
    gc.collect()
    assert held() is None


def test_a_session_ends_although_requests_never_stop_arriving(server: TinkerServer) -> None:
    session, service = server.session(), server.service
    with service._changed:
        service._sessions[session].seen -= service_module.SESSION_SECONDS + 1
        service._tidied -= 60
        job = QueuedRequest("busy", lambda: {"there": session in service._sessions})
        service._enqueue(job)
    assert job.answer.result(60) == {"there": False}


def test_only_samples_can_be_cancelled(server: TinkerServer) -> None:
    client = server.client(server.session())
    late = server.passes(client, 2, [DATUM])["request_id"]
    assert "only samples" in server.error("cancel_future", request_id=late)[1]
    server.passes(client, 1, [DATUM])
    assert server.result({"request_id": late})["metrics"]["loss:sum"] > 0


def test_a_creation_that_failed_keeps_no_place(server: TinkerServer, monkeypatch: pytest.MonkeyPatch) -> None:
    session = server.session()
    client = server.client(session)
    again = {"session_id": session, "base_model": "generalist", "lora_config": {"rank": 4, "seed": 0}}
    assert server.result(server.ask("create_model", model_seq_id=0, **again))["model_id"] == client
    with server.service._changed:
        del server.service._jobs[f"{client}:0"]  # as ten minutes after it was fetched
        server.service._sessions[session].futures.discard(f"{client}:0")
    assert server.error("create_model", model_seq_id=0, **again)[0] == 410

    def full(*_: object) -> None:
        raise WireError(400, "no memory")

    monkeypatch.setattr(service_module, "TrainedModel", full)
    assert "no memory" in server.result(server.ask("create_model", model_seq_id=1, **again))["error"]
    assert list(server.service._sessions[session].clients) == [client]


# --- Isolation ---


def _owner(server: TinkerServer, token: str = TOKEN) -> str:
    found = server.state.owner(token.encode())
    assert found is not None
    return found


def test_other_tokens_see_nothing(server: TinkerServer) -> None:
    session = server.session()
    client = server.client(session)
    future = server.passes(client, 1, [DATUM])
    saved = server.result(server.ask("save_weights_for_sampler", model_id=client, seq_id=2, path="mine"))["path"]
    live = server.result(server.ask("save_weights_for_sampler", model_id=client, seq_id=3, sampling_session_seq_id=7))
    theirs = server.session(OTHER)
    sampling = {"prompt": prompt(IDS), "sampling_params": {"max_tokens": 1}, "num_samples": 1}
    for path, body in {
        "retrieve_future": {"request_id": future["request_id"]},
        "cancel_future": {"request_id": future["request_id"]},
        "get_info": {"model_id": client},
        "unload_model": {"model_id": client},
        "optim_step": {"model_id": client, "seq_id": 4, "adam_params": {}},
        "save_weights": {"model_id": client, "seq_id": 4, "path": "x"},
        "weights_info": {"tinker_path": saved},
        "create_sampling_session": {"session_id": theirs, "sampling_session_seq_id": 0, "model_path": saved},
        "asample": {"sampling_session_id": live["sampling_session_id"], "seq_id": 0, **sampling},
        "create_model": {"session_id": session, "model_seq_id": 1, "base_model": "generalist"},
        "sessions/" + session + "/finish": {},
    }.items():
        assert server.error(path, OTHER, **body)[0] == 404, path
    assert server.error("session_heartbeat", OTHER, session_id=session)[0] == 410
    for path in (f"samplers/{live['sampling_session_id']}", f"training_runs/{client}"):
        for token, status in ((TOKEN, 200), (OTHER, 404)):
            assert server.http.get(f"/api/v1/{path}", headers={"x-api-key": token}).status_code == status
    listed = server.http.get(f"/api/v1/training_runs/{client}/checkpoints", headers={"x-api-key": OTHER})
    assert listed.json() == {"checkpoints": []}
    assert server.result(server.passes(client, 4, [DATUM]))["metrics"]["loss:sum"] > 0


@pytest.mark.parametrize("rank", [0, 4])
def test_clients_over_one_base_do_not_touch_each_other(server: TinkerServer, rank: int) -> None:
    session = server.session()
    one, two = (server.client(session, number, rank=rank) for number in range(2))
    base = server.sampler(session, base_model="tiny/generalist")
    scored = {"prompt_logprobs": True, "num_samples": 1}
    before = server.sample(base, IDS, **scored)["prompt_logprobs"]
    untouched = server.result(server.passes(two, 1, [DATUM], forward_only=True))
    server.passes(one, 1, [DATUM])
    server.result(server.step(one, 2, 1e-2))
    trained = server.result(server.passes(one, 3, [DATUM], forward_only=True))
    again = server.result(server.passes(two, 2, [DATUM], forward_only=True))
    assert np.array_equal(again["outputs"][0]["logprobs"], untouched["outputs"][0]["logprobs"])
    assert np.array_equal(server.sample(base, IDS, 1, **scored)["prompt_logprobs"], before, equal_nan=True)
    assert np.abs(trained["outputs"][0]["logprobs"] - untouched["outputs"][0]["logprobs"]).max() > 0.1

    live = server.result(server.ask("save_weights_for_sampler", model_id=one, seq_id=4, sampling_session_seq_id=1))
    found = server.sample(live["sampling_session_id"], IDS, **scored)["prompt_logprobs"]
    np.testing.assert_allclose(found[1:], trained["outputs"][0]["logprobs"], atol=1e-4)
    server.passes(one, 5, [DATUM])
    server.result(server.step(one, 6, 1e-2))
    kept = server.sample(live["sampling_session_id"], IDS, 1, **scored)["prompt_logprobs"]
    assert np.array_equal(kept, found, equal_nan=True)  # a snapshot


# --- Samples ---


def test_samples_have_the_trainers_log_probs_and_their_own_seeds(server: TinkerServer) -> None:
    session = server.session()
    client = server.client(session)
    server.passes(client, 1, [DATUM])
    server.step(client, 2, 1e-2)
    live = server.result(server.ask("save_weights_for_sampler", model_id=client, seq_id=3, sampling_session_seq_id=0))
    sampler = live["sampling_session_id"]
    params = {"max_tokens": 6, "stop": []}
    first, second = (server.sample(sampler, IDS, seq, num_samples=3, params=params)["sequences"] for seq in range(2))
    for one, two in zip(first, second, strict=True):
        assert np.array_equal(one["tokens"], two["tokens"])
    assert len({tuple(each["tokens"]) for each in first}) > 1
    ids = [*IDS, *first[0]["tokens"].tolist()]
    rest = {"target_tokens": ids[1:], "weights": [0.0] * (len(ids) - 1)}
    scored = server.result(server.passes(client, 4, [(ids[:-1], rest)], forward_only=True))
    np.testing.assert_allclose(first[0]["logprobs"], scored["outputs"][0]["logprobs"][len(IDS) - 1 :], atol=1e-4)


def test_prompt_scores(server: TinkerServer) -> None:
    sampler = server.sampler(server.session(), base_model="arithmetic")
    targets = np.array([[4, -1], [5, 6], [-1, -1], [7, 8], [9, 10], [11, 12]])
    found = server.sample(
        sampler, IDS, num_samples=1, prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=2,
        target_prompt_logprobs={"data": targets.ravel().tolist(), "dtype": "int64", "shape": [6, 2]},
    )  # fmt: skip
    with torch.no_grad():
        exact = stock("arithmetic")(input_ids=torch.tensor([IDS])).logits[0].log_softmax(-1).numpy()
    rows = np.arange(6)
    assert np.isnan(found["prompt_logprobs"][0])
    np.testing.assert_allclose(found["prompt_logprobs"][1:], exact[rows, IDS[1:]], atol=1e-4)
    ids, logprobs = found["top"]
    assert logprobs[0].tolist() == [-99999.0] * 3
    np.testing.assert_allclose(logprobs[1:], -np.sort(-exact[:-1], axis=-1)[:, :3], atol=1e-4)
    np.testing.assert_allclose(exact[rows[:, None], ids[1:]], logprobs[1:], atol=1e-4)
    wanted = np.where(targets < 0, 0, np.take_along_axis(exact[:-1], np.maximum(targets, 0), -1))
    np.testing.assert_allclose(found["targets"], wanted, atol=1e-4)
    (sequence,) = found["sequences"]
    chosen, likeliest = sequence["top"]
    assert chosen.shape == (len(sequence["tokens"]), 2)
    assert (likeliest[:, 0] >= sequence["logprobs"] - 1e-4).all()
    last = server.sample(sampler, IDS, 1, num_samples=1, prompt_logprobs=True, prompt_logprobs_last_n=2)
    assert np.isnan(last["prompt_logprobs"]).tolist() == [True] * 5 + [False] * 2


def test_stops(server: TinkerServer) -> None:
    sampler = server.sampler(server.session(), base_model="arithmetic")
    tokenizer = tiny("arithmetic").tokenizer
    ids = tokenizer.encode("12+3=")
    free = server.sample(sampler, ids, params={"max_tokens": 8, "stop": [], "temperature": 0})["sequences"][0]
    assert (len(free["tokens"]), free["stop_reason"]) == (8, 1)
    third = int(free["tokens"][2])
    by_id = server.sample(sampler, ids, 1, params={"max_tokens": 8, "stop": [third], "temperature": 0})["sequences"][0]
    first = free["tokens"].tolist().index(third) + 1
    assert (by_id["tokens"].tolist(), by_id.get("stop_reason", 0)) == (free["tokens"][:first].tolist(), 0)
    text = tokenizer.decode([int(free["tokens"][0])])
    by_text = server.sample(sampler, ids, 2, params={"max_tokens": 8, "stop": text, "temperature": 0})["sequences"][0]
    assert (len(by_text["tokens"]), by_text.get("stop_reason", 0)) == (1, 0)


def test_a_sample_that_fails_fails_alone(server: TinkerServer) -> None:
    sampler = server.sampler(server.session(), base_model="generalist")
    jobs = []
    with server.service._changed:
        for seq in range(2):
            body = SampleBody(sampling_session_id=sampler, seq_id=seq, prompt=prompt(IDS), sampling_params={"max_tokens": 2})  # type: ignore[arg-type]  # fmt: skip
            jobs.append(server.service.sample(_owner(server), body, b"")[0])
        question = jobs[0].question
        assert question is not None
        jobs[0].question = replace(question, sampling=replace(question.sampling, top_k=2**70))
    assert isinstance(jobs[0].answer.exception(60), (RuntimeError, OverflowError))
    assert isinstance(jobs[1].answer.result(60), bytes)


# --- Saved states ---


def test_loading_drops_the_gradients_of_the_weights_before(server: TinkerServer) -> None:
    client, name = server.client(server.session()), "n" * 200
    path = server.result(server.ask("save_weights", model_id=client, seq_id=1, path=name))["path"]
    server.passes(client, 2, [DATUM])
    loaded = server.ask("load_weights", model_id=client, seq_id=3, path=path, optimizer=False)
    assert server.result(loaded)["path"] == path
    assert "no gradients" in server.result(server.step(client, 4))["error"]


def test_states_whose_time_ran_out_are_removed_and_their_names_are_free(tmp_path: Path) -> None:
    client, tensors = SavedClient("b", "h", 4, True, True, 0, {}), {"weights.a": torch.zeros(2)}

    def save(checkpoints: Checkpoints, name: str, seconds: float | None) -> Path:
        return checkpoints.save("o", "run", "weights", name, tensors, client, seconds=seconds).directory

    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, "a", -1.0)
    kept = save(checkpoints, "a", None)
    with pytest.raises(WireError, match="exists already"):
        save(checkpoints, "a", None)
    (kept / "manifest.json").unlink()  # killed while it was deleted
    kept, gone = save(checkpoints, "a", 1000.0), save(checkpoints, "b", -1.0)
    checkpoints.close()
    Checkpoints(tmp_path).close()
    assert (kept.exists(), gone.exists()) == (True, False)


def test_a_snapshot_of_a_session_that_ends_leaves_no_file(
    server: TinkerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = server.session()
    client, files = server.client(session), list[Path]()
    keep = server.service.checkpoints.keep_live

    def slow(tensors: Mapping[str, torch.Tensor]) -> Path:
        server.service.end_session(_owner(server), session)
        files.append(keep(tensors))
        return files[0]

    monkeypatch.setattr(server.service.checkpoints, "keep_live", slow)
    with server.service._changed:
        body = SaveForSampler(model_id=client, seq_id=1, sampling_session_seq_id=0)
        job = server.service.save_for_sampler(_owner(server), body, b"")
    assert "ended" in str(job.answer.exception(60))
    assert not files[0].exists()


def test_the_hash_of_a_base_model_is_of_what_its_files_store() -> None:
    model = tiny("generalist")
    before = base_hash(model)
    buffers = [each for each in model.module.buffers() if each.is_floating_point()]
    assert buffers
    try:
        for each in buffers:
            each.mul_(1 + 1e-6)
        assert base_hash(model) == before
    finally:
        for each in buffers:
            each.div_(1 + 1e-6)


@pytest.mark.parametrize("rank", [0, 4])
def test_a_saved_state_continues_after_a_restart_as_if_nothing_had_happened(tmp_path: Path, rank: int) -> None:
    def train(server: TinkerServer, client: str, seq: int) -> Any:
        server.passes(client, seq, [DATUM])
        server.step(client, seq + 1)
        return server.result(server.passes(client, seq + 2, [DATUM], forward_only=True))["outputs"][0]["logprobs"]

    with TinkerServer(tmp_path) as server:
        client = server.client(server.session(), rank=rank)
        train(server, client, 1)
        saved = server.ask("save_weights", model_id=client, seq_id=4, path="half", user_metadata={"note": "x"})
        path = server.result(saved)["path"]
        sampled = server.result(server.ask("save_weights_for_sampler", model_id=client, seq_id=5, path="half"))["path"]
        expected = train(server, client, 6)
    with TinkerServer(tmp_path) as server:
        facts = server.ask("weights_info", tinker_path=path)
        assert (facts["base_model"], facts["lora_rank"]) == ("generalist", rank)
        session = server.session()
        again = server.client(session, rank=rank, seed=5)
        loaded = server.ask("load_weights", model_id=again, seq_id=1, path=path, optimizer=True)
        assert server.result(loaded)["path"] == path
        assert np.array_equal(train(server, again, 2), expected)
        fresh = server.client(session, 1, rank=rank, seed=5)
        server.ask("load_weights", model_id=fresh, seq_id=1, path=path, optimizer=False)
        half = server.result(server.passes(fresh, 2, [DATUM], forward_only=True))["outputs"][0]["logprobs"]
        sampler = server.sampler(session, model_path=sampled)
        found = server.sample(sampler, IDS, num_samples=1, prompt_logprobs=True)["prompt_logprobs"]
        np.testing.assert_allclose(found[1:], half, atol=1e-4)
        run = server.http.get(f"/api/v1/training_runs/{client}/checkpoints", headers={"x-api-key": TOKEN}).json()
        assert [each["checkpoint_id"] for each in run["checkpoints"]] == ["sampler_weights/half", "weights/half"]
        assert "no optimiser state" in server.result(
            server.ask("load_weights", model_id=fresh, seq_id=3, path=sampled, optimizer=True)
        )["error"]  # fmt: skip


def test_names_overwriting_deleting_and_damage(server: TinkerServer) -> None:
    client = server.client(server.session())

    def save(seq: int, **asked: Any) -> Any:
        return server.result(server.ask("save_weights", model_id=client, seq_id=seq, **asked))

    path = save(1, path="a")["path"]
    assert "exists already" in save(2, path="a")["error"]
    assert save(3, path="a", overwrite=True)["path"] == path
    assert "letters, digits" in save(4, path="../a")["error"]
    for odd in ("tinker://../weights/a", "tinker://x/weights/../../a", "/etc/passwd", "tinker://x/other/a"):
        assert server.error("weights_info", tinker_path=odd)[0] == 400
    other = server.client(server.session(), rank=2)
    wrong = server.ask("load_weights", model_id=other, seq_id=1, path=path, optimizer=True)
    assert "has LoRA rank 4, this client has 2" in server.result(wrong)["error"]
    server.passes(client, 5, [DATUM])
    server.step(client, 6)
    sampler = server.sampler(server.session(), model_path=path)
    assert save(7, path="a", overwrite=True)["path"] == path
    assert "was overwritten" in server.sample(sampler, IDS)["error"]
    rejected = server.ask("save_weights_for_sampler", model_id=client, seq_id=8, path="a", overwrite=True)
    assert "overwrite" in server.result(rejected)["error"]
    found = server.service.checkpoints.find(_owner(server), path)
    tensors = found.directory / "tensors.safetensors"
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.write_bytes(content)
    load = server.ask("load_weights", model_id=client, seq_id=9, path=path, optimizer=True)
    assert "damaged" in server.result(load)["error"]
    address = f"/api/v1/training_runs/{client}/checkpoints/weights/a"
    assert server.http.delete(address, headers={"x-api-key": TOKEN}).status_code == 204
    assert server.error("weights_info", tinker_path=path)[0] == 404
    with pytest.raises(UserError, match="another server"):
        type(server.service.checkpoints)(found.directory.parents[3])


def test_an_overwritten_checkpoint_survives_a_kill_between_its_two_names(tmp_path: Path) -> None:
    with TinkerServer(tmp_path) as server:
        client = server.client(server.session())
        path = server.result(server.ask("save_weights", model_id=client, seq_id=1, path="a"))["path"]
        place = server.service.checkpoints.find(_owner(server), path).directory
    place.rename(place.with_name(".a.0123456789ab"))
    with TinkerServer(tmp_path) as server:
        assert server.ask("weights_info", tinker_path=path)["lora_rank"] == 4


# --- Errors ---


BAD_DATA: dict[str, tuple[Any, str, dict[str, float | str], str]] = {
    "NaN advantages": (policy(advantages=[float("nan")] * 6), "ppo", {}, "advantages has numbers that are not finite"),
    "an id outside": ([3, 10**6], "cross_entropy", {}, "outside the vocabulary"),
    "a target outside": (policy(target_tokens=[99] * 6), "ppo", {}, "target_tokens: id 99 is outside"),
    "a negative target": (policy(target_tokens=[-1] * 6), "ppo", {}, "id -1 is outside"),
    "a loss nobody knows": (DATUM, "mse", {}, "nothing here has that name"),
    "dro without beta": (policy(), "dro", {}, "its beta is missing"),
    "a negative beta": (policy(), "dro", {"beta": -1}, "at least 0"),
    "a beta that is a text": (policy(), "dro", {"beta": "large"}, "expected a number"),
    "a missing input": (DATUM, "ppo", {}, "'advantages' is missing"),
    "another input": (policy(mask=[1.0] * 6), "ppo", {}, "'mask' is not one of them"),
    "another length": (policy(advantages=[1.0] * 5), "ppo", {}, "shape [5]; there are 6 tokens"),
    "another shape": (policy(advantages=np.ones((6, 2), np.float32)), "ppo", {}, "one number per token"),
    "no targets": ((IDS[:-1], {"target_tokens": np.zeros((6, 0), np.int64), "weights": np.zeros((6, 0), np.float32)}), "cross_entropy", {}, "without a target"),
    "two weights": ((IDS, {"weights": np.ones((7, 2), np.float32)}), "divergence", {"teacher": "arithmetic"}, "one number per token"),
    "an unknown setting": (policy(), "ppo", {"clip": 0.1}, "clip_low_threshold"),
    "clips that are distances": (policy(), "ppo", {"clip_low_threshold": 0.2, "clip_high_threshold": 0.2}, "they are ratios"),
    "no tokens": (([], {"target_tokens": [], "weights": []}), "cross_entropy", {}, "reads 1 to 512"),
    "too many tokens": (([3] * 600, {"target_tokens": [3] * 600, "weights": [1.0] * 600}), "cross_entropy", {}, "reads 1 to 512"),
    "no such teacher": ((IDS, {"weights": [1.0] * 7}), "divergence", {"teacher": "nobody"}, "no model 'nobody'"),
    "no such divergence": ((IDS, {"weights": [1.0] * 7}), "divergence", {"teacher": "arithmetic", "kind": "x"}, "x"),
    "a loss too large": (policy(logprobs=[-1e9] * 6), "importance_sampling", {}, "the loss is"),
}  # fmt: skip


@pytest.fixture(scope="module")
def used(server: TinkerServer) -> tuple[str, list[int]]:
    return server.client(server.session()), [0]


@pytest.mark.parametrize("name", BAD_DATA)
def test_bad_data_fail_alone(server: TinkerServer, used: tuple[str, list[int]], name: str) -> None:
    """The request, and the update that would have used its gradients. The next ones work."""
    client, count = used
    datum, loss, config, said = BAD_DATA[name]
    if isinstance(datum, list):
        datum = (datum, {"target_tokens": datum, "weights": [1.0] * len(datum)})

    def number() -> int:
        count[0] += 1
        return count[0]

    server.passes(client, number(), [DATUM])
    failed = server.result(server.passes(client, number(), [datum], loss, config))
    assert (failed["category"], said in failed["error"]) == ("user", True), failed
    assert "gradients were dropped" in server.result(server.step(client, number()))["error"]
    server.passes(client, number(), [DATUM])
    assert server.result(server.step(client, number(), 0.0))["metrics"]["grad_norm:mean"] > 0


def test_bodies_that_cannot_be_used_take_their_turn(server: TinkerServer) -> None:
    client = server.client(server.session())
    body = loss_request(client, 1, [DATUM], "cross_entropy", {}, False)
    image = body + b"\x1a\x04" + b"\x0a\x02" + b"\x12\x00"  # a datum with an image
    failed = server.result(server.post("forward_backward", image).json())
    assert "images" in failed["error"]
    wrong = server.ask("optim_step", model_id=client, seq_id=2, adam_params={"learning_rate": "fast"})
    assert "learning_rate" in server.result(wrong)["error"]
    wrong = server.ask("optim_step", model_id=client, seq_id=3, optimizer_params={"type": "dimuon", "learning_rate": 1})
    assert "optim" in server.result(wrong)["error"] or "adam_params" in server.result(wrong)["error"]
    assert "gradients were dropped" in server.result(server.step(client, 4))["error"]
    server.passes(client, 5, [DATUM])
    assert "metrics" in server.result(server.step(client, 6))


IMPOSSIBLE: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "an unknown model": ("create_model", {"model_seq_id": 9, "base_model": "gpt"}, 404, "there are generalist, arithmetic"),
    "the head alone": ("create_model", {"model_seq_id": 9, "base_model": "generalist", "lora_config": {"rank": 4, "train_mlp": False, "train_attn": False}}, 400, "head alone"),
    "another optimiser": ("create_model", {"model_seq_id": 9, "base_model": "generalist", "optimizer_config": {"type": "dimuon"}}, 400, "only adamw"),
    "a key nobody knows": ("create_model", {"model_seq_id": 9, "base_model": "generalist", "speed": 1}, 422, "speed"),
    "a sampler of nothing": ("create_sampling_session", {"sampling_session_seq_id": 9}, 400, "base_model or model_path"),
    "no checkpoint": ("create_sampling_session", {"sampling_session_seq_id": 9, "model_path": "tinker://a/weights/b"}, 404, "no checkpoint"),
}  # fmt: skip


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_requests(server: TinkerServer, name: str) -> None:
    path, body, status, said = IMPOSSIBLE[name]
    found = server.error(path, session_id=server.session(), **body)
    assert (found[0], said in found[1]) == (status, True), found


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"prompt": prompt([3, 99])}, "id 99 is outside"),
        ({"prompt": prompt([])}, "a prompt of 0 tokens"),
        ({"prompt": prompt([3] * 512)}, "at most 512"),
        ({"sampling_params": {"max_tokens": 510}}, "max_tokens 510"),
        ({"sampling_params": {"max_tokens": 1, "temperature": -1}}, "temperature"),
        ({"num_samples": 10**7}, "num_samples"),
        ({"sampling_params": {"max_tokens": 1, "top_k": 2**40}}, "top_k"),
        ({"target_prompt_logprobs": {"data": [2**70] * 6, "shape": [6, 1]}}, "target_prompt_logprobs"),
        ({"prompt_alt_tokens_k": 1}, "not served"),
        ({"prompt_logprobs_last_n": 3}, "needs prompt_logprobs"),
        ({"target_prompt_logprobs": {"data": [1], "shape": [1, 1]}}, "expected the shape"),
    ],
)
def test_impossible_samples(server: TinkerServer, changed: dict[str, Any], said: str) -> None:
    sampler = server.sampler(server.session(), base_model="generalist")
    body = {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt(IDS), "sampling_params": {"max_tokens": 2}}
    status, error = server.error("asample", **{**body, **changed})
    assert (status in (400, 413, 422), said in error) == (True, True), error


def test_tokens_sizes_and_addresses(server: TinkerServer) -> None:
    for token in ("", "wrong", "tml-", TOKEN + "x"):
        assert server.error("create_session", token)[0] == 401
    assert server.http.get("/api/v1/healthz").status_code == 200
    assert server.http.get("/api/v1/get_server_capabilities").status_code == 401
    limit = server.state.limits.bytes
    assert server.post("telemetry", b" " * (limit + 1)).status_code == 413
    assert server.post("create_session", b"[" * 9000).status_code == 413
    assert server.post("create_session", b"{").status_code == 400
    assert "docs/tinker.md" in server.error("publish")[1]
    assert server.post("forward_backward", b"\xff\xff").status_code == 400
    asked = {"model_id": server.client(server.session()), "seq_id": 1, "adam_params": {}, "note": "x" * 70_000}
    assert server.error("optim_step", **asked)[0] == 422  # at once: bodies of this size do not take a turn


def test_a_server_that_is_full_or_ending_says_so(tmp_path: Path) -> None:
    with TinkerServer(tmp_path, RequestLimits(tokens=8, sequences=4)) as server:
        client = server.client(server.session())
        assert "12 tokens" in server.result(server.passes(client, 1, [DATUM, DATUM]))["error"]
        server.service._most = 0
        asked = {"model_id": client, "seq_id": 2, "adam_params": {}}
        assert server.error("optim_step", **asked)[0] == 429
        assert server.error("unload_model", model_id=client)[0] == 429
        assert server.ask("get_info", model_id=client)["lora_rank"] == 4  # it is still there
        server.state.draining = True
        found = server.post("optim_step", b"{}")
        assert (found.status_code, found.headers["retry-after"]) == (503, "1")


def test_every_owner_has_a_share_of_the_requests_and_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "CLIENTS", 2)
    with TinkerServer(tmp_path, owners=2) as server:
        server.service._most = 2
        session = server.session()
        client = server.client(session)
        another = {"session_id": session, "model_seq_id": 1, "base_model": "generalist"}
        assert server.error("create_model", **another) == (400, "you have 1 training clients already; unload one first")
        for seq in (2, 3):  # they wait for 1
            server.passes(client, seq, [DATUM])
        assert server.post("forward_backward", loss_request(client, 4, [DATUM], "cross_entropy", {}, False)).status_code == 429  # fmt: skip
        theirs = server.client(server.session(OTHER), token=OTHER)
        assert server.result(server.passes(theirs, 1, [DATUM], token=OTHER), OTHER)["metrics"]["loss:sum"] > 0


def test_metrics(server: TinkerServer) -> None:
    client = server.client(server.session())
    server.result(server.passes(client, 1, [DATUM]))
    server.sample(server.sampler(server.session(), base_model="generalist"), IDS)
    assert server.http.get("/metrics").status_code == 401
    found = server.http.get("/metrics", headers={"authorization": f"Bearer {TOKEN}"}).text
    numbers = dict(line.rsplit(" ", 1) for line in found.splitlines() if not line.startswith("#"))
    for name in ('requests_total{code="200"}', 'tokens_total{kind="trained"}', 'tokens_total{kind="sampled"}', 'computing_seconds_total{kind="forward_backward"}', "training_clients"):  # fmt: skip
        assert float(numbers[f"opd_{name}"]) > 0, name
    assert numbers["opd_draining"] == "0"


def test_a_client_that_vanishes_frees_what_it_held(server: TinkerServer) -> None:
    session = server.session()
    client = server.client(session)
    server.passes(client, 1, [DATUM])
    live = server.result(server.ask("save_weights_for_sampler", model_id=client, seq_id=2, sampling_session_seq_id=0))
    file = server.service._sessions[session].samplers[live["sampling_session_id"]].file
    assert file is not None
    assert file.exists()
    other = server.client(server.session())
    server.service._sessions[session].seen -= service_module.SESSION_SECONDS + 1
    until = time.monotonic() + 60
    while session in server.service._sessions and time.monotonic() < until:
        time.sleep(0.05)
    assert server.error("get_info", model_id=client)[0] == 404
    assert server.error("session_heartbeat", session_id=session)[0] == 410
    assert server.error("retrieve_future", request_id=f"{client}:1")[0] == 404
    assert not file.exists()
    assert live["sampling_session_id"] not in str(server.service._jobs)
    assert server.result(server.passes(other, 1, [DATUM]))["metrics"]["loss:sum"] > 0


def test_adapters_on_attention_or_mlp_alone(server: TinkerServer) -> None:
    session = server.session()
    attention, mlp = server.client(session, 0, train_mlp=False), server.client(session, 1, train_attn=False)

    def names(client: str) -> set[str]:
        found = server.service.client(_owner(server), client)[1].model
        assert found is not None
        return {part for name in found.weights() for part in ("attn", "mlp") if part in name}

    assert (names(attention), names(mlp)) == ({"attn"}, {"mlp"})


# --- The wire ---


WHOLE = loss_request("s:train:0", 3, [DATUM, policy()], "ppo", {"clip_low_threshold": 0.9, "teacher": "x"}, True)


def test_a_message_is_read_as_it_was_written() -> None:
    found = read_protobuf("ForwardBackwardRequest", WHOLE)
    assert (found["model_id"], found["seq_id"], found["loss_fn"], found["forward_only"]) == (
        "s:train:0",
        3,
        "ppo",
        True,
    )
    rows = loss_rows(found, RequestLimits())
    assert [row.ids.tolist() for row in rows] == [IDS[:-1]] * 2
    assert rows[1].inputs["advantages"].tolist() == [0.5, -0.5, 1, -1, 2, 0]


ODD = [None, True, -1, 2**70, 1e308, float("nan"), "", "\ud800", "x" * 300, "../..", [], {}, [[]], {"a": {}}]
BODIES: dict[str, dict[str, Any]] = {
    "create_session": {"tags": [], "user_metadata": {}, "sdk_version": "0", "project_id": None},
    "create_model": {"session_id": "", "model_seq_id": 77, "base_model": "generalist", "lora_config": {"rank": 4, "seed": 0}},
    "create_sampling_session": {"session_id": "", "sampling_session_seq_id": 0, "base_model": "generalist", "model_path": None},
    "optim_step": {"model_id": "", "seq_id": 900, "adam_params": {"learning_rate": 0.1, "beta1": 0.9}},
    "save_weights": {"model_id": "", "seq_id": 901, "path": "a", "ttl_seconds": 5, "user_metadata": {}},
    "save_weights_for_sampler": {"model_id": "", "seq_id": 902, "sampling_session_seq_id": 1},
    "load_weights": {"model_id": "", "seq_id": 903, "path": "tinker://a/weights/b", "optimizer": True},
    "asample": {"sampling_session_id": "", "seq_id": 5, "prompt": prompt(IDS), "sampling_params": {"max_tokens": 1, "seed": 1}, "num_samples": 1},
    "retrieve_future": {"request_id": "a:1"},
    "cancel_future": {"request_id": "a:1"},
    "get_info": {"model_id": ""},
    "weights_info": {"tinker_path": "tinker://a/weights/b"},
    "session_heartbeat": {"session_id": ""},
}  # fmt: skip


@pytest.mark.parametrize("address", BODIES)
def test_odd_values_in_any_key_are_errors_of_the_request(server: TinkerServer, address: str) -> None:
    session = server.session()
    known = {"session_id": session, "model_id": server.client(session), "sampling_session_id": server.sampler(session, base_model="generalist")}  # fmt: skip
    whole = {key: known.get(key, value) for key, value in BODIES[address].items()}
    bodies: list[Any] = [*ODD]
    for key, value in whole.items():
        bodies += [{**whole, key: odd} for odd in ODD]
        if isinstance(value, dict):
            bodies += [{**whole, key: {**value, inner: odd}} for inner in value for odd in ODD]
    for body in bodies:
        found = server.post(address, json.dumps(body).encode())
        assert found.status_code < 500, (body, found.text)
        assert found.status_code < 300 or found.json()["category"] == "user", body
    assert server.ask("get_info", model_id=known["model_id"])["lora_rank"] == 4


@given(st.integers(0, len(WHOLE)), st.binary(max_size=4))
def test_damaged_messages_are_errors_or_other_messages(at: int, noise: bytes) -> None:
    for body in (WHOLE[:at], WHOLE[:at] + noise + WHOLE[at + len(noise) :], noise):
        with contextlib.suppress(WireError):  # anything else is a mistake
            found = read_protobuf("ForwardBackwardRequest", body)
            rows = loss_rows(found, RequestLimits())
            loss: TokenLoss = loss_named("cross_entropy", {}, tiny)
            loss.check(rows, 99, 512)


def test_bodies_of_many_small_things_are_refused_before_they_cost_memory() -> None:
    with pytest.raises(WireError, match="too many fields"):
        read_protobuf("ForwardBackwardRequest", b"\x1a\x00" * 1001, most=1000)


def test_sparse_targets() -> None:
    sparse = {"values": np.array([5, 6], "<i8").tobytes(), "crow_indices": np.array([0, 1, 1, 2], "<i8").tobytes(),
              "col_indices": np.array([1, 0], "<i8").tobytes()}  # fmt: skip
    datum = {"model_input": [{"encoded_text": {"tokens": np.array([3, 4, 5], "<i4").tobytes()}}],
             "loss_fn_inputs": [{"key": "target_tokens", "value": {"dtype": 2, "shape": [3, 2], "sparse_csr": sparse}}]}  # fmt: skip
    (row,) = loss_rows({"data": [datum]}, RequestLimits())
    assert row.inputs["target_tokens"].tolist() == [[0, 5], [0, 0], [6, 0]]
    sparse["col_indices"] = np.array([1, 2], "<i8").tobytes()
    with pytest.raises(WireError, match="outside its shape"):
        loss_rows({"data": [datum]}, RequestLimits())
    sent = datum["loss_fn_inputs"][0]["value"]
    sent["shape"] = [4, 2]
    with pytest.raises(WireError, match="there are 3 tokens"):
        loss_rows({"data": [datum]}, RequestLimits())
    sent["shape"] = [3, 1 << 22]
    with pytest.raises(WireError, match="sparse tensors of 25165824 numbers"):
        loss_rows({"data": [datum, datum]}, RequestLimits())


# --- The command ---


def test_tokens_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tinker_tokens(None)[0].startswith("tml-")
    for value, said in (("secret", "begin with tml-"), ("tml-a,tml-a", "all different"), ("tml-a,", "commas")):
        monkeypatch.setenv("KEYS", value)
        with pytest.raises(UserError, match=said):
            tinker_tokens("KEYS")
    monkeypatch.setenv("KEYS", "tml-a, tml-b")
    assert tinker_tokens("KEYS") == ["tml-a", "tml-b"]
