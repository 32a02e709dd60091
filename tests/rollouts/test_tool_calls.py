"""Tool calls: formats learned from chat templates, hostile text, and the check against schemas."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opd.common.errors import ModelError
from opd.data.prompts import prompt_text
from opd.records import Prompt
from opd.rollouts.tool_calls import (
    MOST_CALLS,
    BracedFormat,
    Call,
    JsonFormat,
    Malformed,
    NamedJsonFormat,
    PythonFormat,
    TaggedFormat,
    Tool,
    ToolFormat,
    tool_format,
    turn_text,
)
from tests.support.chat_templates import CHATML, OWN, real_templates, template_tokenizer

REAL = real_templates()
needs_templates = pytest.mark.skipif(not REAL, reason="TRL is not installed, whose package holds real chat templates")
ADD = Tool(
    "add", "Adds.",
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]},
)  # fmt: skip
NOTE = Tool(
    "note", "Notes.",
    {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "size": {"type": ["number", "null"]},
            "kind": {"enum": ["short", "long"]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "place": {"$ref": "#/$defs/place"},
            "urgent": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        },
        "required": ["text"],
        "$defs": {
            "place": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
        },
    },
)  # fmt: skip
TOOLS = [ADD, NOTE]
FORMATS: dict[str, ToolFormat] = {
    "json": JsonFormat(),
    "bare": JsonFormat("", "", "name", "parameters"),
    "named": NamedJsonFormat("[TOOL_CALLS]", "[ARGS]", ""),
    "xml": TaggedFormat(),
    "keys": TaggedFormat("<tool_call>", "", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>", "</tool_call>"),
    "python": PythonFormat("<|calls|>", "<|/calls|>"),
    "braced": BracedFormat("<|call>call:", "<call|>", '<|"|>'),
}

texts = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="<>|"), max_size=20)
notes = st.fixed_dictionaries(
    {"text": texts},
    optional={
        "size": st.one_of(st.none(), st.integers(-(10**6), 10**6), st.sampled_from([0.5, -1e-3])),
        "kind": st.sampled_from(["short", "long"]),
        "tags": st.lists(texts, max_size=3),
        "place": st.fixed_dictionaries({"x": st.integers(0, 9)}),
        "urgent": st.one_of(st.none(), st.booleans()),
    },
)


@pytest.mark.parametrize("name", FORMATS)
@given(arguments=notes)
@settings(max_examples=40, deadline=None)
def test_what_a_format_writes_it_reads(name: str, arguments: dict[str, Any]) -> None:
    form = FORMATS[name]
    text = form.write("note", arguments)
    if name != "bare":
        text = f"I note it.\n{text}\n" + form.write("add", {"a": 1, "b": 2})
    found = form.parse(text, TOOLS, first=3)
    assert not isinstance(found, Malformed), found
    assert found[0] == Call("note", arguments, "call00003")
    assert found[1:] == ([] if name == "bare" else [Call("add", {"a": 1, "b": 2}, "call00004")])


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_without_calls_has_none(name: str) -> None:
    for text in ("", "It is 7.", "[1, 2]", '{"answer": 7}', "<b>7</b>", "add(a=1, b=2)"):
        assert FORMATS[name].parse(text, TOOLS) == []


@pytest.mark.parametrize("name", FORMATS)
def test_a_cut_call_is_malformed(name: str) -> None:
    text = FORMATS[name].write("add", {"a": 12, "b": 34})
    begun = text.index("add")
    for end in range(begun + 3, len(text.rstrip("}> \n")) - 1):
        found = FORMATS[name].parse(text[:end], TOOLS)
        assert isinstance(found, Malformed), text[:end]
        assert found.problem.endswith("No tool was called.")


def said(text: str) -> str:
    found = JsonFormat().parse(f"<tool_call>{text}</tool_call>", TOOLS)
    assert isinstance(found, Malformed)
    return found.problem


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"name": "ad", "arguments": {}}', "no tool 'ad'; there is: add, note"),
        ('{"name": "add", "arguments": {"a": 1}}', "add: argument b is missing"),
        ('{"name": "add", "arguments": {"a": 1, "b": "2"}}', "b must be of type integer, got '2'"),
        ('{"name": "add", "arguments": {"a": 1, "b": true}}', "b must be of type integer, got True"),
        ('{"name": "add", "arguments": {"a": 1, "b": 2, "c": 3}}', "no argument 'c'; there is: a, b"),
        ('{"name": "note", "arguments": {"text": "x", "kind": "huge"}}', "kind must be one of 'short', 'long'"),
        ('{"name": "note", "arguments": {"text": "x", "tags": ["y", 1]}}', r"tags\[1\] must be of type string"),
        ('{"name": "note", "arguments": {"text": "x", "place": {}}}', r"argument place.x is missing"),
        ('{"name": "note", "arguments": {"text": "x", "place": {"x": 1, "y": 2}}}', r"no argument place.'y'"),
        ('{"name": "note", "arguments": {"text": "x", "urgent": 1}}', "urgent fits no alternative"),
        ('{"name": "add", "arguments": [1, 2]}', "must be an object"),
        ('{"name": "add", "arguments": {"a": 1, "a": 2, "b": 3}}', "same key twice"),
        ('{"name": "add", "arguments": {"a": NaN, "b": 3}}', "NaN is not valid JSON"),
        ('{"arguments": {"a": 1}}', "A call must be"),
        ('{"name": "add", "arguments": {"a": 1, "b": 2}} and so on', "Expected '</tool_call>'"),
        ("add(1, 2)", "Not valid JSON"),
        ("[" * 100_000, "nested too deep"),
        ('{"name": "add", "arguments": {"a": ' + "9" * 5000 + ', "b": 1}}', "Not valid JSON"),
    ],
)  # fmt: skip
def test_a_malformed_call_is_a_message_to_the_model(text: str, words: str) -> None:
    problem = said(text)
    assert len(problem) < 500
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(problem)


@pytest.mark.parametrize("name", FORMATS)
def test_hostile_text_takes_no_time(name: str) -> None:
    form = FORMATS[name]
    call = form.write("add", {"a": 1, "b": 2})
    begun = time.process_time()
    for text in (
        call * 20_000,
        call[: len(call) // 2] * 20_000,
        "{" * 900_000,
        "<" * 900_000,
        "[" * 900_000,
        "x" * 2_000_000,
    ):
        form.parse(text, TOOLS)
    assert time.process_time() - begun < 20  # a quadratic search would take hours
    if name != "bare":
        found = form.parse(call * (MOST_CALLS + 1), TOOLS)
        assert isinstance(found, Malformed)
        assert "More than" in found.problem


def test_calls_within_thinking_do_not_count() -> None:
    call = JsonFormat().write("add", {"a": 1, "b": 2})
    assert JsonFormat().parse(f"<think>Maybe {call}?</think>No.", TOOLS) == []
    assert JsonFormat().parse(f"<think>Maybe {call}? I go on", TOOLS) == []
    assert len(JsonFormat().parse(f"hm {call}</think>{call}", TOOLS)) == 1  # type: ignore[arg-type]


def test_python_expressions_are_not_run() -> None:
    form = FORMATS["python"]
    for text in (
        "note(text=open('/etc/passwd').read())",
        "note(text='a'*10**9)",
        "note(**{})",
        "note('x')",
        "print",
        "note(text={1})",
    ):
        found = form.parse(f"<|calls|>[{text}]<|/calls|>", TOOLS)
        assert isinstance(found, Malformed), text


# --- Learned from chat templates ---

KNOWN = {
    "qwen3": JsonFormat,
    "qwen2_5": JsonFormat,
    "llama3_1": JsonFormat,
    "qwen3_6": TaggedFormat,
    "glm4moe": TaggedFormat,
    "nemotron_3_nano": TaggedFormat,
    "gptoss": NamedJsonFormat,
    "deepseekv3": NamedJsonFormat,
    "lfm2_v2": PythonFormat,
    "gemma4": BracedFormat,
}


@needs_templates
@pytest.mark.parametrize("name", [*KNOWN, "json_calls"])
def test_the_format_of_a_real_template_is_learned(name: str) -> None:
    tokenizer, stop_ids = template_tokenizer((OWN | REAL)[name])
    form = tool_format("auto", tokenizer, stop_ids)
    assert type(form) is KNOWN.get(name, JsonFormat)
    call = Call("add", {"a": 1, "b": 2})
    assert form.parse(form.write(call.name, call.arguments), TOOLS) == [call]


@needs_templates
def test_most_real_templates_that_render_calls_are_learned() -> None:
    learned = []
    for name, template in REAL.items():
        tokenizer, stop_ids = template_tokenizer(template)
        try:
            tool_format("auto", tokenizer, stop_ids)
        except ModelError:
            continue
        learned.append(name)
    assert len(learned) >= 25


def test_an_own_template_is_learned_and_its_turns_are_read() -> None:
    """From ids, as the student samples them."""
    tokenizer, stop_ids = template_tokenizer(OWN["json_calls"])
    form = tool_format("auto", tokenizer, stop_ids)
    assert form == JsonFormat()
    calls = [Call("add", {"a": 1, "b": 2}), Call("note", {"text": "x"}, "call00001")]
    turn = {"role": "assistant", "content": "Well.", "tool_calls": [call.message() for call in calls]}
    text = prompt_text(
        Prompt("p", "", messages=({"role": "user", "content": "?"}, turn)), tokenizer, {}, open_turn=False
    )
    ids = tokenizer(text[text.find("Well.") :].rstrip(), add_special_tokens=False)["input_ids"]
    assert ids[-1] in stop_ids
    assert form.parse(turn_text(ids, tokenizer, stop_ids), TOOLS) == calls


def test_a_template_without_calls_needs_a_format() -> None:
    tokenizer, stop_ids = template_tokenizer(CHATML)
    with pytest.raises(ModelError, match="Set tool_calls to json or xml"):
        tool_format("auto", tokenizer, stop_ids)
    assert tool_format("json", tokenizer) == JsonFormat()
    assert tool_format("xml", tokenizer) == TaggedFormat()


@pytest.mark.parametrize("name", ["json", "xml"])
def test_the_description_shows_tools_and_format(name: str) -> None:
    text = FORMATS[name].describe(TOOLS)
    assert "Adds." in text
    assert '"b": {"type": "integer"}' in text
    shown = FORMATS[name].parse(
        text.split("exactly like this:")[1], [Tool("NAME", "", {"properties": {"ARGUMENT": {}}})]
    )
    assert shown == [Call("NAME", {"ARGUMENT": "VALUE"})]
