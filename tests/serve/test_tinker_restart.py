"""A server of the Tinker API that is killed: its clients continue as if nothing had happened."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from opd.serve.tinker import journal as journal_module
from opd.serve.tinker import service as service_module
from tests.support.crash import FORKS, PATIENCE, _command
from tests.support.servers import free_port
from tests.support.tinker import TOKEN, TinkerCalls, TinkerServer

IDS = [21, 22, 15, 23, 33, 40, 41]
DATUM = (IDS[:-1], {"target_tokens": IDS[1:], "weights": [1.0] * 6})
COUNT = int(os.environ.get("COUNT") or 3)
STEPS = 6


@pytest.fixture(params=["every request repeated", "a snapshot after every request"])
def snapshots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param.startswith("a snapshot"):
        monkeypatch.setattr(service_module, "SNAPSHOT_SECONDS", 0.0)
        monkeypatch.setattr(journal_module, "REWRITE_BYTES", 0)


@pytest.mark.parametrize("rank", [0, 4])
def test_a_client_continues_in_the_middle_of_an_update(tmp_path: Path, snapshots: None, rank: int) -> None:
    """Gradients, a request that waits for an earlier one, answers and a live sampler are still there."""

    def begin(server: TinkerServer, session: str, number: int) -> str:
        client = server.client(session, number, rank=rank)
        for seq in (1, 3):
            server.passes(client, seq, [DATUM])
            server.step(client, seq + 1)
        server.passes(client, 5, [DATUM])
        bad = server.passes(client, 7, [([3, 10**6], DATUM[1])])  # waits for 6
        assert "request_id" in bad
        return client

    def end(server: TinkerServer, client: str) -> list[Any]:
        server.passes(client, 6, [DATUM])
        dropped = server.result(server.step(client, 8))["error"]
        server.passes(client, 9, [DATUM])
        norm = server.result(server.step(client, 10))["metrics"]
        return [dropped.replace(client, ""), norm, server.result(server.passes(client, 11, [DATUM], forward_only=True))]

    with TinkerServer(tmp_path / "undisturbed") as server:
        expected = end(server, begin(server, server.session(), 0))
    with TinkerServer(tmp_path / "stopped") as server:
        session = server.session()
        client = begin(server, session, 0)
        answer = server.result({"request_id": f"{client}:5"})
        norm = server.result({"request_id": f"{client}:4"})
    for _ in range(2):
        with TinkerServer(tmp_path / "stopped") as server:
            again = server.result({"request_id": f"{client}:5"})
            assert np.array_equal(again["outputs"][0]["logprobs"], answer["outputs"][0]["logprobs"])
            assert server.result({"request_id": f"{client}:4"}) == norm
            assert server.step(client, 4)["request_id"] == f"{client}:4"  # sent again
    with TinkerServer(tmp_path / "stopped") as server:
        found = end(server, client)
        assert found[:2] == expected[:2]
        assert np.array_equal(found[2]["outputs"][0]["logprobs"], expected[2]["outputs"][0]["logprobs"])
        assert server.post(f"sessions/{session}/finish", b"").status_code == 204
    with TinkerServer(tmp_path / "stopped") as server:
        assert server.error("get_info", model_id=client)[0] == 404
        assert not list((tmp_path / "stopped" / ".live").glob("*"))


def test_samples_without_a_seed_are_drawn_again_as_before(tmp_path: Path) -> None:
    with TinkerServer(tmp_path) as server:
        session = server.session()
        client = server.client(session)
        server.passes(client, 1, [DATUM])
        server.step(client, 2, 1e-2)
        live = server.ask("save_weights_for_sampler", model_id=client, seq_id=3, sampling_session_seq_id=0)
        sampler = server.result(live)["sampling_session_id"]
        sampled = server.sample(sampler, IDS, num_samples=3, params={"seed": None, "max_tokens": 6, "stop": []})
        base = server.sampler(session, 1, base_model="arithmetic")
        server.sample(base, IDS)
        unanswered = server.service.journal  # as if the server had been killed before
        unanswered.rewrite(lambda entry: None if entry.op == "answer" and ":sample:" in entry.id else entry)
    with TinkerServer(tmp_path) as server:
        again = server.result({"request_id": f"{sampler}:0"})
        for one, two in zip(sampled["sequences"], again["sequences"], strict=True):
            assert np.array_equal(one["tokens"], two["tokens"])
            assert np.array_equal(one["logprobs"], two["logprobs"])
        other = server.sample(sampler, IDS, 1, num_samples=3, params={"seed": None, "max_tokens": 6, "stop": []})
        assert any(not np.array_equal(a["tokens"], b["tokens"]) for a, b in zip(sampled["sequences"], other["sequences"], strict=True))  # fmt: skip
        assert server.sample(base, IDS, 1)["sequences"]


def test_the_journal_keeps_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "SNAPSHOT_SECONDS", 0.0)
    monkeypatch.setattr(service_module, "RESULT_SECONDS", 0.0)
    with TinkerServer(tmp_path) as server:
        client = server.client(server.session())
        for seq in range(1, 20, 2):
            server.passes(client, seq, [DATUM] * 20)
            server.result(server.step(client, seq + 1))
        server.service._tidy()
        with server.service._changed:
            server.service.journal.rewrite(server.service._needed)
    files = [file for file in (tmp_path / ".journal").rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 20_000
    assert len(list((tmp_path / ".live").iterdir())) == 1


# --- Kills ---


class KilledServer(TinkerCalls):
    """`opd serve --tinker` in a process that is killed around each of the `kills`, numbers of requests, and started again."""

    def __init__(self, directory: Path, kills: set[int], rng: random.Random) -> None:
        self._directory, self._kills, self._rng = directory, kills, rng
        self._port, self._http = free_port(), httpx.Client(timeout=60)
        self._sent, self._began, self.killed = 0, time.monotonic(), 0
        self._timers: list[threading.Timer] = []
        self._start()

    def _start(self) -> None:
        arguments = ["serve", "tiny/generalist", "tiny/arithmetic", "--tinker", "--token-env", "KEY", "--device", "cpu"]
        arguments += ["--checkpoints", str(self._directory), "--port", str(self._port)]
        log = str(self._directory.with_suffix(".log"))
        self._process = FORKS.Process(target=serve, args=(log, arguments))
        self._process.start()

    def _kill(self) -> None:
        self._process.kill()
        self._process.join()
        self.killed += 1
        self._start()

    def post(self, path: str, content: bytes, token: str = TOKEN) -> Any:
        """Sends it until it is answered, as the SDK does."""
        self._sent += 1
        if self._sent in self._kills:
            mean = (time.monotonic() - self._began) / self._sent
            self._timers.append(threading.Timer(self._rng.uniform(0, 2 * mean), self._kill))
            self._timers[-1].start()
        until = time.monotonic() + PATIENCE
        while True:
            try:
                return self._http.post(
                    f"http://127.0.0.1:{self._port}/api/v1/{path}", content=content, headers={"x-api-key": token}
                )
            except httpx.TransportError:
                assert time.monotonic() < until
                time.sleep(0.05)

    def close(self) -> None:
        for timer in self._timers:
            timer.join()
        self._process.kill()
        self._process.join()


def serve(log: str, arguments: list[str]) -> None:
    os.environ["KEY"] = TOKEN
    service_module.SNAPSHOT_SECONDS, journal_module.REWRITE_BYTES = 0.1, 20_000  # so that all of it happens
    _command(log, arguments)


def train(server: TinkerCalls) -> tuple[bytes, int]:
    """A client's script: sample, weigh, update. Returns the checkpoint's path, and how many requests were sent."""
    session = server.session()
    client, seq = server.client(session), 0
    teacher = server.sampler(session, 9, base_model="arithmetic")
    for step in range(STEPS):
        live = server.ask("save_weights_for_sampler", model_id=client, seq_id=seq + 1, sampling_session_seq_id=step)
        sampler = server.result(live)["sampling_session_id"]
        drawn = server.sample(sampler, IDS, num_samples=4, params={"seed": step, "max_tokens": 6, "stop": []})
        data = []
        for number, each in enumerate(drawn["sequences"]):
            ids = [*IDS, *each["tokens"].tolist()]
            scored = server.sample(teacher, ids, 4 * step + number, prompt_logprobs=True, params={"max_tokens": 1})
            unsampled = [0.0] * (len(IDS) - 1)
            advantages = [*unsampled, *(scored["prompt_logprobs"][len(IDS) :] - each["logprobs"])]
            inputs = {"target_tokens": ids[1:], "logprobs": [*unsampled, *each["logprobs"]], "advantages": advantages}
            data.append((ids[:-1], inputs))
        for half in (data[:2], data[2:]):
            seq += 1
            server.passes(client, seq + 1, half, "importance_sampling")
        server.result(server.step(client, seq + 2, 1e-2))
        seq += 2
        if step % 2:
            server.result(server.ask("save_weights", model_id=client, seq_id=seq + 1, path=f"step-{step}"))
            seq += 1
    saved = server.result(server.ask("save_weights", model_id=client, seq_id=seq + 1, path="last"))
    return str(saved["path"]), seq


@pytest.mark.crash
def test_kill_9_changes_no_bit_of_the_weights(tmp_path: Path) -> None:
    undisturbed = KilledServer(tmp_path / "undisturbed", set(), random.Random(0))
    train(undisturbed)
    sent = undisturbed._sent
    undisturbed.close()
    rng = random.Random(os.environ.get("SEED", "0"))
    for begin in range(0, COUNT, 5):  # at most five kills in one run
        directory = tmp_path / f"killed-{begin}"
        kills = set(rng.sample(range(2, sent), min(5, COUNT - begin)))
        server = KilledServer(directory, kills, rng)
        train(server)
        server.close()
        assert server.killed == len(kills)
        for name in ("step-1", "step-3", "step-5", "last"):
            (one,), (two,) = (sorted(place.glob(f"*/*/weights/{name}/tensors.safetensors")) for place in (tmp_path / "undisturbed", directory))  # fmt: skip
            assert one.read_bytes() == two.read_bytes(), (name, kills)
