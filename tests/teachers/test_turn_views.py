"""Views by turn: every turn is read after its own hint, and no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import opd
from opd.common.errors import RecipeError
from opd.data.prompts import render_prompt
from opd.models import load_model
from opd.objective.batch import own_turns
from opd.recipe import load_recipe
from opd.records import Author, Prompt, Rendered, Rollout, SignalNeed
from opd.registry import find
from opd.rollouts.bridge import Bridge, tool_message
from opd.rollouts.tool_calls import Call, Tool
from opd.teachers.scoring import LocalTeacher
from opd.teachers.views import Group, require_aligned, texts_for
from tests.support.chat_templates import CHATML, OWN, template_tokenizer

ASKED = ({"role": "user", "content": "add 12+30"},)


def episode(tokenizer: Any, stop_ids: tuple[int, ...], turns: list[str], said: list[str]) -> tuple[Prompt, Rollout]:
    """An episode of these turns, with the environment's messages between them."""
    prompt = Prompt("p", "d", messages=ASKED)
    bridge = Bridge(tokenizer, stop_ids, {}, ())
    ids, authors = list[int](), list[int]()
    for number, text in enumerate(turns):
        written = [*tokenizer.encode(text, add_special_tokens=False), stop_ids[0]]
        ids, authors = ids + written, authors + [int(Author.STUDENT)] * len(written)
        if number < len(turns) - 1:
            more = bridge.ids([{"role": "user", "content": said[number]}], stopped=True, calls=()).tolist()
            ids, authors = ids + more, authors + [int(Author.ENV)] * len(more)
    size = len(ids)
    nan, none = np.full(size, np.nan, np.float32), np.zeros(size, np.int32)
    asked = render_prompt(prompt, tokenizer)
    author = np.array(authors, np.uint8)
    rollout = Rollout("r", "p", 0, 0, "d", "student", asked, np.array(ids, np.int32), author, nan, nan, nan, none, "env", "g")  # fmt: skip
    return prompt, rollout


def parts(text: Rendered) -> list[np.ndarray]:
    return np.split(text.ids, text.breaks)


def shown(
    tokenizer: Any, stop_ids: tuple[int, ...], prompt: Prompt, rollout: Rollout, feedback: list[str], hint: str
) -> Any:
    view = find("view", "turns")(hint=hint)
    group = Group([rollout], tokenizer, stop_ids=stop_ids, turn_feedback={"r": feedback})
    (text,) = texts_for(view, [rollout], {"p": prompt}, {"g": group}, 10_000)
    if text is not None:
        require_aligned(view, text, rollout)
    return text


@pytest.fixture(scope="module")
def tiny() -> Any:
    return load_model("tiny/generalist")


words = st.text("0123456789", min_size=1, max_size=3)


@given(st.lists(st.tuples(words, words, st.sampled_from(["", "x+1", "y-2"])), min_size=1, max_size=4))
@settings(max_examples=40, deadline=None)
def test_every_turn_is_read_after_its_own_hint_alone(tiny: Any, turns: list[tuple[str, str, str]]) -> None:
    tokenizer, stop_ids = tiny.tokenizer, tiny.stop_ids
    feedback = [f"{said}={n}" if said else "" for n, (_, _, said) in enumerate(turns)]
    prompt, rollout = episode(tokenizer, stop_ids, [turn for turn, _, _ in turns], [said for _, said, _ in turns])
    text = shown(tokenizer, stop_ids, prompt, rollout, feedback, "?{feedback}")
    hinted = [number for number, said in enumerate(feedback) if said]
    if not hinted:
        assert text is None
        return
    whole = [*rollout.prompt_ids.tolist(), *rollout.response_ids.tolist()]
    size = rollout.prompt_ids.size
    assert len(parts(text)) == len(hinted)
    for number, read in zip(hinted, parts(text), strict=True):
        first, end = own_turns(rollout)[number]
        hint = tokenizer(f"?{feedback[number]}", add_special_tokens=False)["input_ids"]
        plain = whole[: size + end]
        place = next(n for n in range(len(read)) if read[n : n + len(hint)].tolist() == hint)
        assert [
            *read[:place].tolist(),
            *read[place + len(hint) :].tolist(),
        ] == plain  # the history as it was, without other hints
        assert place < size + first  # before its own turn
        earlier = own_turns(rollout)[number - 1][1] if number else 0
        assert place > (size + earlier if number else 0)  # and after the one before
    pairs = {position for s0, s1, _, _ in text.spans for position in range(s0, s1)}
    assert pairs == {n for number in hinted for n in range(*own_turns(rollout)[number])}


def test_a_hint_ends_the_message_before_its_turn() -> None:
    """Inside the user's message, before the mark that ends it."""
    tokenizer, stop_ids = template_tokenizer(CHATML)
    prompt, rollout = episode(tokenizer, stop_ids, ["one", "two", "three"], ["Next A.", "Next B."])
    text = shown(tokenizer, stop_ids, prompt, rollout, [], " (next: {next})")
    read = [tokenizer.decode(part.tolist()) for part in parts(text)]
    assert len(read) == 2  # nothing follows the last turn
    assert "add 12+30 (next: Next A.)" in read[0]
    assert "Next A. (next: Next B.)" in read[1]
    assert "(next: Next A.)" not in read[1]
    assert "Next B" not in read[0]


DEFAULT_SYSTEM = "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
TOOL_TURNS = (
    "{% for m in messages %}{% set content = m.content %}{% if m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|im_start|>user"
    "{% endif %}\n<tool_response>\n{{ content }}\n</tool_response>{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ content }}{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)  # results of neighbouring calls share a turn, as in Qwen3


@pytest.mark.parametrize("template", [CHATML, DEFAULT_SYSTEM + CHATML, DEFAULT_SYSTEM + TOOL_TURNS, *OWN.values()])
@pytest.mark.parametrize("stopped", [True, False])
@pytest.mark.parametrize("tools", [(), (Tool("add", "Add.", {}),)])
def test_the_next_message_is_known_for_any_template(template: str, stopped: bool, tools: tuple[Tool, ...]) -> None:
    tokenizer, stop_ids = template_tokenizer(template)
    bridge, call = Bridge(tokenizer, stop_ids, {}, tools), Call("add", {"a": "1"})
    user, result = {"role": "user", "content": "user\nNext: 0."}, tool_message(call, "It is\n\n70.")
    given = {"user\nNext: 0.": [user], "It is\n\n70.": [result], "It is\n\n70.\nuser\nNext: 0.": [result, user]}
    for text, messages in given.items():
        calls = [call for message in messages if message["role"] == "tool"]
        assert bridge.content(bridge.ids(messages, stopped=stopped, calls=calls)) == text
    assert bridge.content(np.array(tokenizer.encode("raw"), np.int32)) is None
    if "previtem" in template:
        both = bridge.ids([result, result], stopped=stopped, calls=[call, call])
        assert bridge.content(both) == "It is\n\n70.\nIt is\n\n70."


def test_a_default_system_message_is_no_part_of_a_hint() -> None:
    tokenizer, stop_ids = template_tokenizer(DEFAULT_SYSTEM + CHATML)
    prompt, rollout = episode(tokenizer, stop_ids, ["one", "two"], ["Next A."])
    (read,) = parts(shown(tokenizer, stop_ids, prompt, rollout, [], " (next: {next})"))
    assert "add 12+30 (next: Next A.)<|im_end|>" in tokenizer.decode(read.tolist())


def test_the_texts_of_one_rollout_are_scored_apart(tiny: Any) -> None:
    prompt, rollout = episode(tiny.tokenizer, tiny.stop_ids, ["42", "17", "3"], ["add 9+8", "add 1+2"])
    text = shown(tiny.tokenizer, tiny.stop_ids, prompt, rollout, ["is 42", "", "is 3"], "{feedback}")
    teacher = LocalTeacher("t", "teacher", tiny, None, tiny.stop_ids)
    (signal,) = teacher.score([rollout], SignalNeed("logprobs_at"), [text])
    at = 0
    for part, (s0, s1, t0, t1) in zip(parts(text), text.spans, strict=True):
        alone = Rendered(part, ((s0, s1, t0 - at, t1 - at),), "turns")
        (single,) = teacher.score([rollout], SignalNeed("logprobs_at"), [alone])
        assert np.allclose(signal.values[s0:s1], single.values[s0:s1], atol=1e-5)
        at += part.size
    first, end = own_turns(rollout)[1]
    assert not signal.mask[first:end].any()
    assert np.isnan(signal.values[first:end]).all()


def test_the_smallest_run_masks_turns_without_a_hint(tmp_path: Path) -> None:
    changes = ["train.steps=1", "rollout.prompts=4", "eval.prompts=0", "device=cpu", "log.start_table=false"]
    run = opd.run("methods/openclaw-rl", overrides=changes, out=tmp_path / "run")
    right = wrong = 0
    for rollout in run.rollouts.load(list(run.rollouts.entries)):
        signal = run.rollouts.signals([rollout.id], "teacher", "logprobs_at").get(rollout.id)
        said = run.rollouts.entries[rollout.id].notes.get("turn_feedback", ["", "", ""])
        for (first, end), feedback in zip(own_turns(rollout), said, strict=True):
            known = signal is not None and bool(signal.mask[first:end].all())
            assert known == bool(feedback)
            right, wrong = right + (not feedback), wrong + bool(feedback)
    assert right
    assert wrong


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["rollout.environment=null", "objective={form: policy_gradient}"], "says after a turn"),
        (["teachers.arithmetic.view.hint=see {prompt}"], "names {feedback} or {next}"),
        (["teachers.arithmetic={kind: served, model: m, address: 'http://localhost:1', view: {kind: turns}}"], "a text of its own"),
        (["teachers.arithmetic.view.chat_template=teacher"], "chat_template teacher has no effect"),
    ],
)  # fmt: skip
def test_what_a_view_by_turn_needs(changes: list[str], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        load_recipe("methods/openclaw-rl", changes)
