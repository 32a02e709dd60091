"""Requests of agents, and answers to them, as client libraries write and read them.

    POST /v1/chat/completions        OpenAI: messages and tools
    POST /v1/messages                Anthropic: the same in other words
    POST /inference/v1/generate      vLLM: token ids

Everything is read into one `ChatRequest`; a `ChatReply` is written in the words of the request. Nothing here needs a tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from opd.common.text import shortened
from opd.records import Message
from opd.rollouts.tool_calls import Call, Tool

DEPTH = 60  # levels of lists and objects in a request
MOST_MESSAGES = 10_000
MOST_TOOLS = 1000
ROLES = ("system", "user", "assistant", "tool")
Protocol = Literal["openai", "anthropic", "ids"]
Finish = Literal["stop", "tool_calls", "length"]


class ChatError(Exception):
    """A request that is answered with an error. `code`: a word for programs."""

    def __init__(self, status: int, message: str, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True)
class ChatRequest:
    """What an agent asks. Either `messages` or, with the protocol `ids`, the token ids of everything that is to be read."""

    protocol: Protocol
    model: str = ""
    messages: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()
    ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    usage: bool = False  # whether a stream ends with the number of tokens
    logprobs: bool = False
    token_ids: bool = False  # whether the answer names the ids that were read and written, as vLLM's does

    @property
    def digest(self) -> str:
        """Equal for equal requests."""
        tools = [tool.schema() for tool in self.tools]
        said = [self.messages, tools, self.ids, self.max_tokens, self.stop, self.token_ids]
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()

    @property
    def tools_text(self) -> str:
        return json.dumps([tool.schema() for tool in self.tools], sort_keys=True) if self.tools else ""


@dataclass(frozen=True)
class ChatReply:
    """The student's turn. `logprobs`: of its tokens; `tokens`: each as text, if the request wants log-probs."""

    content: str
    thinking: str
    calls: Sequence[Call]
    finish: Finish
    read: int  # tokens of the prompt
    ids: Sequence[int]
    logprobs: Sequence[float]
    tokens: Sequence[str] = ()
    prompt_ids: Sequence[int] = ()  # if the request wants ids


# --- Reading ---


def read_body(body: bytes) -> dict[str, Any]:
    """The JSON object of a request."""
    try:
        found = json.loads(body, parse_constant=_no_constant)
        if re.search(rb"\\u[dD][89a-fA-F]", body):  # halves of surrogate pairs cannot be encoded
            found = json.loads(json.dumps(found, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        raise ChatError(400, f"the body is not JSON: {shortened(error)}") from None
    if not isinstance(found, dict):
        raise ChatError(400, f"the body must be a JSON object, got {shortened(found)}")
    _check_depth(found)
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not valid JSON")


def _check_depth(value: Any) -> None:
    level: list[Any] = [value]
    for _ in range(DEPTH):
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return
    raise ChatError(400, f"the body is nested more than {DEPTH} levels deep")


def read_openai(body: Mapping[str, Any]) -> ChatRequest:
    """A request for a chat completion."""
    _refuse(
        body,
        n=(1, "one answer per request is given; ask again for another"),
        logit_bias=({}, "tokens are drawn by the run's policy"),
        top_logprobs=(0, "only the log-prob of each drawn token is given"),
    )
    form = body.get("response_format")
    if isinstance(form, dict) and form.get("type") not in (None, "text"):
        raise ChatError(
            400, f"response_format {shortened(form.get('type'))} is not available: answers are not constrained"
        )
    messages = [_openai_message(one) for one in _listed(body, "messages", MOST_MESSAGES)]
    options = body.get("stream_options")
    return ChatRequest(
        "openai", _text(body.get("model"), "model"), _checked_messages(messages), _openai_tools(body),
        max_tokens=_limit(body.get("max_completion_tokens") or body.get("max_tokens")), stop=_stops(body.get("stop")),
        stream=bool(body.get("stream")), usage=isinstance(options, dict) and bool(options.get("include_usage")),
        logprobs=bool(body.get("logprobs")), token_ids=bool(body.get("return_token_ids")),
    )  # fmt: skip


def _openai_tools(body: Mapping[str, Any]) -> tuple[Tool, ...]:
    choice = body.get("tool_choice")
    if choice == "none":
        return ()
    if choice not in (None, "auto"):
        raise ChatError(
            400, f"tool_choice {shortened(choice)} is not available: the student chooses itself. Use auto or none"
        )
    tools = []
    for one in _listed(body, "tools", MOST_TOOLS, optional=True):
        function = one.get("function")
        if one.get("type", "function") != "function" or not isinstance(function, dict):
            raise ChatError(400, f"a tool must be {{type: function, function: {{name, …}}}}, got {shortened(one)}")
        tools.append(_tool(function.get("name"), function.get("description"), function.get("parameters")))
    return tuple(tools)


def _openai_message(given: Mapping[str, Any]) -> dict[str, Any]:
    role = {"developer": "system", "function": "tool"}.get(str(given.get("role")), given.get("role"))
    message: dict[str, Any] = {"role": role, "content": _content(given.get("content"))}
    if role == "assistant" and given.get("tool_calls"):
        message["tool_calls"] = [_openai_call(call) for call in _listed(given, "tool_calls", MOST_TOOLS)]
    if role == "tool":
        message["tool_call_id"] = _text(given.get("tool_call_id"), "tool_call_id")
        message |= {"name": given["name"]} if isinstance(given.get("name"), str) else {}
    return message


def _openai_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ChatError(400, f"a tool call must have a function with a name, got {shortened(call)}")
    return _call(call.get("id"), function["name"], function.get("arguments"))


def _call(id: Any, name: str, arguments: Any) -> dict[str, Any]:
    if isinstance(arguments, str):  # JSON as text; what is not is kept as it is
        try:
            arguments = json.loads(arguments or "{}", parse_constant=_no_constant)
        except (ValueError, RecursionError):
            arguments = {"arguments": arguments}
    if isinstance(arguments, (dict, list)):
        _check_depth(arguments)
    found = arguments if isinstance(arguments, dict) else {"arguments": arguments}
    return {"type": "function", "id": str(id or ""), "function": {"name": name, "arguments": found}}


def read_anthropic(body: Mapping[str, Any]) -> ChatRequest:
    """A request for a message."""
    messages: list[dict[str, Any]] = []
    if body.get("system"):
        messages.append({"role": "system", "content": _content(body["system"])})
    for one in _listed(body, "messages", MOST_MESSAGES):
        messages += _anthropic_messages(one)
    choice = body.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind not in (None, "auto", "none"):
        raise ChatError(
            400, f"tool_choice {shortened(kind)} is not available: the student chooses itself. Use auto or none"
        )
    tools = []
    for one in _listed(body, "tools", MOST_TOOLS, optional=True) if kind != "none" else ():
        if one.get("type", "custom") != "custom":
            raise ChatError(
                400, f"a tool of type {shortened(one.get('type'))} runs on a server of its own. Leave it out"
            )
        tools.append(_tool(one.get("name"), one.get("description"), one.get("input_schema")))
    return ChatRequest(
        "anthropic", _text(body.get("model"), "model"), _checked_messages(messages), tuple(tools),
        max_tokens=_limit(body.get("max_tokens")), stop=_stops(body.get("stop_sequences")), stream=bool(body.get("stream")),
    )  # fmt: skip


def _anthropic_messages(given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One message of Anthropic's holds text, calls and results; results are messages of their own elsewhere."""
    role, content = given.get("role"), given.get("content")
    if not isinstance(content, list):
        yield {"role": role, "content": _content(content)}
        return
    blocks = [block for block in content if isinstance(block, dict)]
    for block in blocks:
        if block.get("type") == "tool_result":
            yield {
                "role": "tool",
                "content": _content(block.get("content")),
                "tool_call_id": _text(block.get("tool_use_id"), "tool_use_id"),
            }
    rest = [
        block
        for block in blocks
        if block.get("type") not in ("tool_result", "tool_use", "thinking", "redacted_thinking")
    ]
    calls = [
        _call(block.get("id"), _text(block.get("name"), "name"), block.get("input"))
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    if rest or calls or role == "assistant":
        yield {"role": role, "content": _content(rest), **({"tool_calls": calls} if calls else {})}


def read_ids(body: Mapping[str, Any]) -> ChatRequest:
    """A request of vLLM's token endpoint."""
    ids = body.get("token_ids")
    if not isinstance(ids, list) or not ids or not all(type(one) is int and 0 <= one < 1 << 31 for one in ids):
        raise ChatError(400, f"token_ids must be a list of token ids, got {shortened(ids)}")
    sampling = body.get("sampling_params")
    sampling = {} if sampling is None else sampling
    if not isinstance(sampling, dict):
        raise ChatError(400, f"sampling_params must be an object, got {shortened(sampling)}")
    _refuse(
        sampling,
        n=(1, "one answer per request is given; ask again for another"),
        prompt_logprobs=(None, "the log-probs of what is read are not computed"),
    )
    if body.get("stream"):
        raise ChatError(400, "stream is not available at this endpoint: the answer comes in one piece")
    return ChatRequest(
        "ids", _text(body.get("model"), "model"), ids=tuple(ids), max_tokens=_limit(sampling.get("max_tokens")),
        stop=_stops(sampling.get("stop")), logprobs=sampling.get("logprobs") is not None,
    )  # fmt: skip


def _refuse(body: Mapping[str, Any], **known: tuple[Any, str]) -> None:
    for name, (value, why) in known.items():
        if body.get(name) not in (None, value):
            raise ChatError(400, f"{name} {shortened(body[name])} is not available: {why}")


def _listed(body: Mapping[str, Any], name: str, most: int, optional: bool = False) -> list[dict[str, Any]]:
    found = body.get(name)
    if found is None and optional:
        return []
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ChatError(400, f"{name} must be a list of objects, got {shortened(found)}")
    if len(found) > most:
        raise ChatError(400, f"{name} has {len(found):,} entries; at most {most:,} are accepted")
    return found


def _checked_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    if not messages:
        raise ChatError(400, "messages is empty. Send at least one")
    for message in messages:
        if message["role"] not in ROLES:
            raise ChatError(
                400, f"a message's role must be one of {', '.join(ROLES)}, got {shortened(message['role'])}"
            )
    return tuple(messages)


def _content(given: Any) -> str:
    """Text, or parts of which all are text."""
    if given is None or isinstance(given, str):
        return given or ""
    if not isinstance(given, list):
        raise ChatError(400, f"a message's content must be text or a list of parts, got {shortened(given)}")
    texts = []
    for part in given:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise ChatError(400, f"a part of type {shortened(kind)} cannot be read: the student reads text only")
        texts.append(text)
    return "".join(texts)


def _tool(name: Any, description: Any, parameters: Any) -> Tool:
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]{1,128}", name, re.ASCII):
        raise ChatError(400, f"the name of a tool must be letters, digits, '_', '.' and '-', got {shortened(name)}")
    if parameters is None:
        return Tool(name, str(description or ""))
    if not isinstance(parameters, dict):
        raise ChatError(400, f"the parameters of tool {name} must be a JSON schema, got {shortened(parameters)}")
    return Tool(name, str(description or ""), parameters)


def _text(given: Any, name: str) -> str:
    if given is not None and not isinstance(given, str):
        raise ChatError(400, f"{name} must be text, got {shortened(given)}")
    return given or ""


def _limit(given: Any) -> int | None:
    if given is not None and (type(given) is not int or given < 1):
        raise ChatError(400, f"the limit of tokens must be a positive whole number, got {shortened(given)}")
    return given


def _stops(given: Any) -> tuple[str, ...]:
    found = [given] if isinstance(given, str) else given or []
    if not isinstance(found, list) or len(found) > 16 or not all(isinstance(one, str) and one for one in found):
        raise ChatError(400, f"stop must be at most 16 texts, got {shortened(given)}")
    return tuple(found)


# --- Writing ---


def reply_body(request: ChatRequest, reply: ChatReply) -> dict[str, Any]:
    """The body of an answer."""
    writers = {"openai": _write_openai, "anthropic": _write_anthropic, "ids": _write_ids}
    return writers[request.protocol](request, reply)


def events(request: ChatRequest, reply: ChatReply) -> Iterator[str]:
    """A whole answer as a stream of events: it is sent when it is durable, so it comes at once."""
    chunks = _anthropic_events if request.protocol == "anthropic" else _openai_events
    yield from chunks(request, reply)


def error_body(protocol: Protocol, error: ChatError) -> dict[str, Any]:
    inner = {"type": error.code, "code": error.code, "message": str(error)}
    return {"type": "error", "error": inner} if protocol == "anthropic" else {"error": inner}


def _usage(reply: ChatReply) -> dict[str, int]:
    return {
        "prompt_tokens": reply.read,
        "completion_tokens": len(reply.ids),
        "total_tokens": reply.read + len(reply.ids),
    }


def _write_openai(request: ChatRequest, reply: ChatReply) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.content or (None if reply.calls else "")}
    if reply.thinking:
        message["reasoning_content"] = reply.thinking
    if reply.calls:
        message["tool_calls"] = _written_calls(reply.calls)
    choice = {"index": 0, "message": message, "logprobs": _logprobs(request, reply), "finish_reason": reply.finish}
    read, written = _token_ids(request, reply)
    return {**_openai_head(request, "chat.completion"), "choices": [choice | written], "usage": _usage(reply), **read}


def _token_ids(request: ChatRequest, reply: ChatReply) -> tuple[dict[str, Any], dict[str, Any]]:
    """The ids that were read and written, under vLLM's names."""
    return ({"prompt_token_ids": reply.prompt_ids}, {"token_ids": reply.ids}) if request.token_ids else ({}, {})


def _openai_head(request: ChatRequest, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": request.model or "student",
    }


def _written_calls(calls: Sequence[Call]) -> list[dict[str, Any]]:
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)},
        }
        for call in calls
    ]


def _logprobs(request: ChatRequest, reply: ChatReply) -> dict[str, Any] | None:
    if not request.logprobs:
        return None
    pairs = zip(reply.tokens, reply.logprobs, strict=True)
    return {
        "content": [
            {"token": token, "logprob": value, "bytes": list(token.encode("utf-8", "replace")), "top_logprobs": []}
            for token, value in pairs
        ]
    }


def _openai_events(request: ChatRequest, reply: ChatReply) -> Iterator[str]:
    head = _openai_head(request, "chat.completion.chunk")

    def chunk(delta: Mapping[str, Any], finish: str | None = None, top: Mapping[str, Any] = {}, **more: Any) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, **more}
        return f"data: {json.dumps({**head, 'choices': [choice], **top})}\n\n"

    read, written = _token_ids(request, reply)
    yield chunk({"role": "assistant", "content": ""}, top=read)
    if reply.thinking:
        yield chunk({"reasoning_content": reply.thinking})
    if reply.content:
        yield chunk({"content": reply.content}, logprobs=_logprobs(request, reply))
    if reply.calls:
        yield chunk({"tool_calls": [{"index": n, **call} for n, call in enumerate(_written_calls(reply.calls))]})
    yield chunk({}, reply.finish, **written)
    if request.usage:
        yield f"data: {json.dumps({**head, 'choices': [], 'usage': _usage(reply)})}\n\n"
    yield "data: [DONE]\n\n"


ANTHROPIC_STOPS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}


def _blocks(reply: ChatReply) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if reply.thinking:
        found.append({"type": "thinking", "thinking": reply.thinking, "signature": ""})
    if reply.content or not reply.calls:
        found.append({"type": "text", "text": reply.content})
    calls = [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)} for call in reply.calls
    ]
    return found + calls


def _write_anthropic(request: ChatRequest, reply: ChatReply) -> dict[str, Any]:
    return {
        "id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": request.model or "student",
        "content": _blocks(reply), "stop_reason": ANTHROPIC_STOPS[reply.finish], "stop_sequence": None,
        "usage": {"input_tokens": reply.read, "output_tokens": len(reply.ids)},
    }  # fmt: skip


def _anthropic_events(request: ChatRequest, reply: ChatReply) -> Iterator[str]:
    def event(kind: str, **facts: Any) -> str:
        return f"event: {kind}\ndata: {json.dumps({'type': kind, **facts})}\n\n"

    whole = _write_anthropic(request, reply)
    usage = {"input_tokens": reply.read, "output_tokens": 0}
    yield event("message_start", message={**whole, "content": [], "stop_reason": None, "usage": usage})
    for index, block in enumerate(whole["content"]):
        empty, delta = _anthropic_delta(block)
        yield event("content_block_start", index=index, content_block=empty)
        yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    stop = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield event("message_delta", delta=stop, usage={"output_tokens": len(reply.ids)})
    yield event("message_stop")


def _anthropic_delta(block: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """An empty block, and what fills it."""
    if block["type"] == "thinking":
        return {**block, "thinking": ""}, {"type": "thinking_delta", "thinking": block["thinking"]}
    if block["type"] == "text":
        return {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
    return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}


def _write_ids(request: ChatRequest, reply: ChatReply) -> dict[str, Any]:
    found: dict[str, Any] | None = None
    if request.logprobs:
        found = {
            "content": [
                {"token": f"token_id:{index}", "logprob": value, "bytes": None, "top_logprobs": []}
                for index, value in zip(reply.ids, reply.logprobs, strict=True)
            ]
        }
    finish = "length" if reply.finish == "length" else "stop"
    choice = {"index": 0, "logprobs": found, "finish_reason": finish, "token_ids": list(reply.ids)}
    return {
        "request_id": uuid.uuid4().hex,
        "choices": [choice],
        "prompt_logprobs": None,
        "kv_transfer_params": None,
        "usage": _usage(reply),
    }
