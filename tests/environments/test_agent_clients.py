"""The endpoint of environment `agent` with the client libraries themselves: `make test-agents` installs them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import socket
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import opd
from opd.environments.agent import AgentEnvironment
from opd.environments.chat_server import AgentSessions
from opd.rollouts.episodes import PARTS, split_conversations

TOKEN, NUMBERS = "0123456789abcdef", itertools.count()

pytestmark = pytest.mark.agents

OPENAI = """
import json, sys
from openai import OpenAI, BadRequestError, AuthenticationError

facts, client = json.loads(sys.stdin.readline()), OpenAI()
assert [model.id for model in client.models.list()] == ["student"]
messages = list(facts["messages"])
known = dict(model="student", messages=messages, max_tokens=6)
whole = client.chat.completions.create(**known, logprobs=True).choices[0]
assert len(whole.logprobs.content) >= 1
pieces = [choice.delta.content or "" for chunk in client.chat.completions.create(**known, stream=True) for choice in chunk.choices]
assert "".join(pieces) == whole.message.content  # the same request: the recorded answer
messages += [whole.message.model_dump(exclude_none=True), {"role": "user", "content": "add 1+2"}]
client.chat.completions.create(**{**known, "messages": messages})
for wrong, error in ((dict(n=2), BadRequestError), (dict(messages=[]), BadRequestError)):
    try:
        client.chat.completions.create(**{**known, **wrong})
        raise SystemExit("accepted")
    except error as refused:
        assert refused.message
try:
    OpenAI(api_key="wrong").models.list()
    raise SystemExit("accepted")
except AuthenticationError:
    pass
print(json.dumps({"reward": 1.0}))
"""
ANTHROPIC = """
import json, sys
from anthropic import Anthropic, BadRequestError

facts, client = json.loads(sys.stdin.readline()), Anthropic()
known = dict(model="student", max_tokens=6, messages=[{"role": "user", "content": facts["prompt"]}])
whole = client.messages.create(**known)
with client.messages.stream(**known) as stream:
    assert stream.get_final_message().content[0].text == whole.content[0].text
said = [*known["messages"], {"role": "assistant", "content": whole.content}, {"role": "user", "content": "add 1+2"}]
client.messages.create(**{**known, "messages": said})
try:
    client.messages.create(**known, tool_choice={"type": "any"}, tools=[])
    raise SystemExit("accepted")
except BadRequestError as refused:
    assert refused.message
print(json.dumps({"reward": 1.0}))
"""


@pytest.mark.parametrize("source", [OPENAI, ANTHROPIC], ids=["openai", "anthropic"])
def test_a_run_trains_through_a_client_library(source: str, tmp_path: Path) -> None:
    file = tmp_path / "agent.py"
    file.write_text(source)
    environment: dict[str, Any] = {"kind": "agent", "command": [sys.executable, str(file)], "call_seconds": 120}
    run = opd.run({
        "student": "tiny/generalist", "teachers": {"arithmetic": "tiny/arithmetic"},
        "prompts": [{"source": "task:addition", "domain": "arithmetic"}],
        "rollout": {"prompts": 1, "samples": 2, "max_new_tokens": 60, "environment": environment},
        "objective": [{"divergence": "reverse_kl"}, {"form": "policy_gradient", "advantage": {"outcome_weight": 1}}],
        "train": {"steps": 2, "lr": 1e-3}, "eval": {"prompts": 0}, "log": {"start_table": False}, "device": "cpu",
    }, out=tmp_path / "run")  # fmt: skip
    notes = [entry.notes for entry in run.rollouts.entries.values()]
    assert [noted.get("feedback") for noted in notes] == [None] * 4
    assert all(noted["reward"] == 1.0 for noted in notes)
    assert all(noted["retries"] == noted["conversations"] == 1 for noted in notes)
    assert all(np.isfinite(line["loss"]) for line in run.metrics)


def converse_through_openenv(environment: AgentEnvironment, turns: list[Any], over: threading.Event) -> None:
    """An agent that speaks OpenAI's Responses API, which only OpenEnv's capture server understands. `turns`: what that has recorded."""
    from openai import OpenAI
    from openenv.core.harness.capture import CaptureServer, to_training_trace
    from openenv.core.harness.capture.export import export_session

    key = {"Authorization": f"Bearer {TOKEN}"}
    while not over.is_set():
        address = f"{environment.server().url}/conversations/openenv{next(NUMBERS)}/v1"
        with contextlib.suppress(OSError):  # 503: no prompt waits
            facts = json.loads(urllib.request.urlopen(urllib.request.Request(f"{address}/prompt", headers=key)).read())
            with socket.create_server(("0.0.0.0", 0)) as free:
                port = free.getsockname()[1]
            server = CaptureServer(llm_url=address, model="student", api_key=TOKEN, port=port)
            server.start()
            session = server.registry.create()
            client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=session.session_id)
            said = [{"role": "user", "content": facts["prompt"]}]
            answer = client.responses.create(model="student", input=said, max_output_tokens=6)
            said += [{"role": "assistant", "content": answer.output_text}, {"role": "user", "content": "add 1+2"}]
            client.responses.create(model="student", input=said, max_output_tokens=6)
            turns += to_training_trace(session.graph, export_session(session, include_messages=True)).turns
            server.stop()
            urllib.request.urlopen(urllib.request.Request(f"{address}/end", b"{}", key)).close()


def test_kl_falls_behind_openenvs_capture_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it records the ids and log-probs that are trained on."""
    monkeypatch.setenv("AGENT_TOKEN", TOKEN)
    monkeypatch.setattr(AgentSessions, "claimed", functools.partialmethod(AgentSessions.claimed, seconds=1.0))
    settings: dict[str, Any] = {"port": 0, "token_env": "AGENT_TOKEN", "call_seconds": 120}
    over, turns = threading.Event(), list[Any]()
    agents = [
        threading.Thread(target=converse_through_openenv, args=(AgentEnvironment(**settings), turns, over), daemon=True)
        for _ in range(2)
    ]
    for agent in agents:
        agent.start()
    run = opd.run({
        "student": "tiny/spelling", "teachers": {"arithmetic": "tiny/arithmetic"},
        "prompts": [{"source": "task:addition", "domain": "arithmetic"}],
        "rollout": {"prompts": 6, "max_new_tokens": 100, "environment": {"kind": "agent", **settings}},
        "objective": {"divergence": "forward_kl"}, "train": {"steps": 8, "lr": 1e-3}, "eval": {"prompts": 0},
        "log": {"start_table": False}, "device": "cpu",
    }, out=tmp_path / "run")  # fmt: skip
    over.set()
    for agent in agents:
        agent.join()
    assert all(line["env/lost"] == line.get("env/refused", 0) == 0 for line in run.metrics)
    trained = [
        ((*part.prompt_ids.tolist(), *part.response_ids.tolist()), part.logprob)
        for rollout in run.rollouts.load(list(run.rollouts.entries))
        for part in split_conversations(rollout, run.rollouts.entries[rollout.id].notes[PARTS])
    ]
    assert len(turns) == 2 * 6 * 8
    for turn in turns:
        ids, logprobs = (*turn.prompt_token_ids, *turn.completion_token_ids), np.float32(turn.per_token_logps).tolist()
        ends = [(found, len(ids) - len(whole) + found.size) for whole, found in trained if whole[: len(ids)] == ids]
        assert any(found[end - len(logprobs) : end].tolist() == logprobs for found, end in ends)
    kl = [line["loss"] for line in run.metrics]  # the forward KL
    assert np.mean(kl[-3:]) < 0.7 * np.mean(kl[:2]), kl
