"""The endpoint of environment `agent` with the client libraries themselves: `make test-agents` installs them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import opd

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
