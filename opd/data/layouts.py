"""Rows in the layouts of other frameworks, put into our columns: ShareGPT, Alpaca and verl.

ShareGPT    `conversations` or `messages`: a list of {from, value}
Alpaca      `instruction`, `input`, `output`, and perhaps `history`
verl        `prompt`, and the answer in `reward_model.ground_truth`; `data_source` is the domain

>>> as_ours({"instruction": "Add.", "input": "2+2", "output": "4"}, None)["prompt"]
[{'role': 'user', 'content': 'Add.\\n\\n2+2'}]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from opd.data.parse import BadRow

ASKED = ("prompt", "messages", "conversations", "instruction")  # columns that hold what is asked
SPEAKERS = {  # what ShareGPT calls those who speak -> the role that chat templates read
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "bot", "model"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation"), "tool"),
}


def as_ours(row: Mapping[str, Any], domain: str | None) -> Mapping[str, Any]:
    """The same row in our columns. `domain` is the one that the recipe gives its source, which counts for every row."""
    if row.get("prompt") is None and row.get("messages") is None:
        if row.get("conversations") is not None:
            rest = {key: value for key, value in row.items() if key not in ("conversations", "messages")}
            row = {**rest, "messages": row["conversations"]}
        elif row.get("instruction") is not None and {"input", "output"} & row.keys():
            row = {**row, **_alpaca(row)}
    reward = row.get("reward_model")
    return {**row, **_verl(row, reward, domain)} if isinstance(reward, Mapping) else row


def as_message(message: Any) -> Any:
    """ShareGPT's {from, value} as {role, content}; anything else as it is."""
    if not isinstance(message, Mapping) or "role" in message or not {"from", "value"} <= message.keys():
        return message
    speaker = message["from"]
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        raise BadRow(f"a message is from {speaker!r}; known are {', '.join(SPEAKERS)}. Rename it, or leave the row out")
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {"role": SPEAKERS[speaker], "content": message["value"], **rest}


def _alpaca(row: Mapping[str, Any]) -> dict[str, Any]:
    instruction, more = row["instruction"], row.get("input")
    if not isinstance(instruction, str) or not instruction.strip():
        raise BadRow(f"`instruction` must be text and not empty, got {str(instruction)[:80]!r}")
    if more is not None and not isinstance(more, str):
        raise BadRow(f"`input` must be text, got {str(more)[:80]!r}")
    earlier = [
        {"role": role, "content": text}
        for turn in _history(row.get("history"))
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    asked = f"{instruction}\n\n{more}" if more and more.strip() else instruction
    completion = row.get("completion") if row.get("completion") is not None else row.get("output")
    return {"prompt": [*earlier, {"role": "user", "content": asked}], "completion": completion}


def _history(turns: Any) -> Sequence[Any]:
    """Earlier questions with their answers."""
    found = turns or []
    if not isinstance(found, list) or not all(isinstance(turn, Sequence) and len(turn) == 2 for turn in found):
        raise BadRow(f"`history` must be a list of [question, answer], got {str(turns)[:80]!r}")
    return found


def _verl(row: Mapping[str, Any], reward: Mapping[str, Any], domain: str | None) -> dict[str, Any]:
    """What verl's columns say, where ours say nothing."""
    found: dict[str, Any] = {}
    truth, source = reward.get("ground_truth"), row.get("data_source")
    if row.get("answer") is None and isinstance(truth, (str, int, float)):
        found["answer"] = truth
    if row.get("domain") is None and domain is None and isinstance(source, str) and source:
        found["domain"] = source
    return found
