"""A small real server that speaks what vLLM's two servers speak, and scores with a real tiny model."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response

from opd.models.attention import Packed
from opd.models.language_model import LanguageModel

NAME = "served"


def app_of(model: LanguageModel, *, runner: str = "pooling", most: int = 20, token: str | None = None) -> FastAPI:
    """`runner`: pooling, generate or sglang; `most`: log-probs at a position. `app.state`: what was asked, and what to do about it."""
    app = FastAPI()
    app.state.asked, app.state.fail, app.state.noise, app.state.says = [], 0, 0.0, None
    app.state.started = None  # when, if it says so

    @app.middleware("http")
    async def guard(request: Request, call_next: Any) -> Response:
        if token is not None and request.headers.get("authorization") != f"Bearer {token}":
            return Response("who are you?", 401)
        app.state.asked.append(request.url.path)
        if app.state.fail > 0 and request.url.path != "/v1/models":
            app.state.fail -= 1
            return Response("starting", 503)
        return await call_next(request)

    @app.get("/v1/models")
    def models() -> Any:
        return {"data": [{"id": NAME, "max_model_len": 64}]}

    @app.get("/metrics")
    def metrics() -> Response:
        if app.state.started is None:
            raise HTTPException(404)
        return Response(f"# HELP …\nprocess_start_time_seconds {app.state.started}\n", media_type="text/plain")

    @torch.no_grad()
    def hidden(ids: list[int]) -> torch.Tensor:
        states = model.hidden(torch.tensor(ids), Packed.of([len(ids)]))
        return states + app.state.noise * torch.randn_like(states)

    def pooling(body: dict[str, Any]) -> Response:
        assert body["task"] == "token_embed"
        assert body["use_activation"] is False
        states = hidden(body["input"])
        raw = states.to(getattr(torch, body["embed_dtype"])).view(torch.uint8).numpy().tobytes()
        return Response(raw, media_type="application/octet-stream")

    def completions(body: dict[str, Any]) -> Any:
        k, ids = body["prompt_logprobs"], body["prompt"]
        if app.state.says is not None:
            return app.state.says
        if k > most:
            raise HTTPException(400, f"Requested prompt logprobs of {k}, which is greater than max allowed: {most}")
        logprobs = model.project(hidden(ids)).logits().log_softmax(-1)
        entries: list[Any] = [None]
        for place, token_id in enumerate(ids[1:]):
            row = logprobs[place]
            listed = dict.fromkeys([token_id, *row.topk(k).indices.tolist()])
            entries.append(
                {str(index): {"logprob": float(row[index]), "rank": 1, "decoded_token": ""} for index in listed}
            )
        return {"choices": [{"index": 0, "text": "", "prompt_logprobs": entries}]}

    def sglang(body: dict[str, Any]) -> Any:
        if app.state.says is not None:
            return app.state.says
        assert body["return_hidden_states"] is True
        return {"text": "", "meta_info": {"hidden_states": [hidden(body["input_ids"]).tolist()]}}

    if runner == "pooling":
        app.post("/pooling")(pooling)
    elif runner == "sglang":
        app.post("/generate")(sglang)
    else:
        app.post("/v1/completions")(completions)
    return app


@contextlib.contextmanager
def serving(app: FastAPI, port: int | None = None) -> Iterator[str]:
    """The address of a server that runs beside the test."""
    with socket.create_server(("127.0.0.1", port or 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = server.force_exit = True
            thread.join()
