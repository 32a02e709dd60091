"""A tiny real chat endpoint: FastAPI behind uvicorn on the loopback, with a rule in place of a model. It can add."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

TOKEN = "tok-secret-91"


@dataclass
class Served:
    """What it was asked, and how it is to behave. `fails`: how many requests get a 503 first; `says` replaces the rule."""

    address: str = ""
    asked: list[str] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    fails: int = 0
    says: str | None = None
    usage: bool = True
    most: int = 0  # requests under way at once
    _now: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


def reply(text: str) -> str:
    """A digit for an answer that is shown, else the sum."""
    a, b = map(int, re.findall(r"add (\d+)\+(\d+)", text)[0])
    shown = re.search(r"Answer:\n(.*?)\n\n", text, re.DOTALL)
    if shown is None:
        return str(a + b)
    return "Score: 9" if shown[1].strip() == str(a + b) else "Score: 1"


def application(served: Served) -> FastAPI:
    app = FastAPI()

    @app.post("/v1/chat/completions", response_model=None)
    def complete(request: Request, body: dict[str, Any]) -> JSONResponse | dict[str, Any]:
        with served.lock:
            served._now += 1
            served.most = max(served.most, served._now)
            served.tokens.append(request.headers.get("authorization", ""))
            failing, served.fails = served.fails > 0, max(served.fails - 1, 0)
            text = body["messages"][-1]["content"]
            if not failing:
                served.asked.append(text)
        try:
            if failing:
                return JSONResponse({"error": "busy"}, 503)
            said = reply(text) if served.says is None else served.says
            found: dict[str, Any] = {"choices": [{"message": {"role": "assistant", "content": said}}]}
            if served.usage:
                found["usage"] = {"prompt_tokens": len(text.split()), "completion_tokens": 1}
            return found
        finally:
            with served.lock:
                served._now -= 1

    return app


@contextmanager
def serving() -> Iterator[Served]:
    served = Served()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        served.address = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        server = uvicorn.Server(uvicorn.Config(application(served), log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield served
        finally:
            server.should_exit = True
            thread.join()
