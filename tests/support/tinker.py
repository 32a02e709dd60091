"""A server of the Tinker API in this process, asked as the SDK asks, without the SDK."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from starlette.testclient import TestClient

from opd.models import load_model, tiny_models
from opd.models.language_model import LanguageModel
from opd.serve.tinker.checkpoints import Checkpoints
from opd.serve.tinker.routes import TinkerState, make_tinker_app
from opd.serve.tinker.sampling import BaseSampler
from opd.serve.tinker.service import ServedBase, Service
from opd.serve.tinker.start import base_hash
from opd.serve.tinker.wire import DTYPES, MESSAGES, FieldType, MessageReader, message_field, tensor_message
from opd.teachers.served import RequestLimits

TOKEN, OTHER = "tml-first", "tml-second"
NAMES = ("generalist", "arithmetic")
Array = Sequence[float] | np.ndarray


@cache
def tiny(name: str) -> LanguageModel:
    return load_model(f"tiny/{name}")


def stock(name: str) -> Any:
    """The same model as transformers loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_models()[f"tiny/{name}"], dtype=torch.float32)


class TinkerCalls:
    """`ask` sends JSON, `passes` a forward_backward; `result` fetches what a future holds."""

    def post(self, path: str, content: bytes, token: str = TOKEN) -> Any:
        raise NotImplementedError

    def ask(self, address: str, token: str = TOKEN, /, **body: Any) -> Any:
        found = self.post(address, json.dumps(body).encode(), token)
        assert found.status_code == 200, found.text
        return found.json()

    def error(self, address: str, token: str = TOKEN, /, **body: Any) -> tuple[int, str]:
        found = self.post(address, json.dumps(body).encode(), token)
        return found.status_code, str(found.json()["error"])

    def result(self, future: Mapping[str, Any], token: str = TOKEN) -> Any:
        """The JSON of a future, or its message as a dictionary of arrays. Asks again while it is not done."""
        body = json.dumps({"request_id": future["request_id"], "allow_metadata_only": True}).encode()
        for _ in range(10):  # each waits 30 seconds
            found = self.post("retrieve_future", body, token)
            assert found.status_code == 200, found.text
            if "json" not in found.headers["content-type"]:
                return read_answer(found.content)
            if found.json().get("type") != "try_again":
                break
        return found.json()

    def session(self, token: str = TOKEN) -> str:
        return str(self.ask("create_session", token, tags=[], user_metadata={}, sdk_version="0")["session_id"])

    def client(self, session: str, number: int = 0, token: str = TOKEN, **lora: Any) -> str:
        """A training client: LoRA of rank 4, or `rank=0` for all weights."""
        config = {"rank": 4, "seed": 0, **lora}
        asked = {"session_id": session, "model_seq_id": number, "base_model": "generalist", "lora_config": config}
        return str(self.result(self.ask("create_model", token, **asked), token)["model_id"])

    def passes(
        self,
        client: str,
        seq_id: int,
        data: Sequence[tuple[Array, Mapping[str, Array]]],
        loss: str = "cross_entropy",
        config: Mapping[str, float | str] | None = None,
        *,
        forward_only: bool = False,
        token: str = TOKEN,
    ) -> Any:
        body = loss_request(client, seq_id, data, loss, config or {}, forward_only)
        found = self.post("forward_backward", body, token)
        assert found.status_code == 200, found.text
        return found.json()

    def step(self, client: str, seq_id: int, learning_rate: float = 1e-3, **adam: float) -> Any:
        return self.ask(
            "optim_step", model_id=client, seq_id=seq_id, adam_params={"learning_rate": learning_rate, **adam}
        )

    def sampler(self, session: str, number: int = 0, token: str = TOKEN, **source: str) -> str:
        asked = {"session_id": session, "sampling_session_seq_id": number, **source}
        return str(self.ask("create_sampling_session", token, **asked)["sampling_session_id"])

    def sample(self, sampler: str, ids: Sequence[int], seq_id: int = 0, **asked: Any) -> Any:
        params = {"max_tokens": 4, "seed": 1, **asked.pop("params", {})}
        body = {"sampling_session_id": sampler, "seq_id": seq_id, "prompt": prompt(ids), "sampling_params": params}
        return self.result(self.ask("asample", **body, **asked))


class TinkerServer(TinkerCalls):
    """A server in this process."""

    def __init__(self, directory: Path, limits: RequestLimits | None = None, owners: int = 1) -> None:
        limits = limits or RequestLimits()
        bases = {name: self._base(name) for name in NAMES}
        self.service = Service(bases, Checkpoints(directory), limits, batch_tokens=64, waiting=1000, owners=owners)
        self.state = TinkerState(self.service, [TOKEN, OTHER], limits, 10.0)
        self.http = TestClient(make_tinker_app(self.state), raise_server_exceptions=False)

    def _base(self, name: str) -> ServedBase:
        model = tiny(name)
        return ServedBase(name, f"tiny/{name}", model, base_hash(model), BaseSampler(model), "")

    def close(self) -> None:
        self.service.close()

    def __enter__(self) -> TinkerServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def post(self, path: str, content: bytes, token: str = TOKEN) -> Any:
        return self.http.post(f"/api/v1/{path}", content=content, headers={"x-api-key": token})


def prompt(ids: Sequence[int]) -> dict[str, Any]:
    return {"chunks": [{"type": "encoded_text", "tokens": list(ids)}]}


def loss_request(
    client: str,
    seq_id: int,
    data: Sequence[tuple[Array, Mapping[str, Array]]],
    loss: str,
    config: Mapping[str, float | str],
    forward_only: bool,
) -> bytes:
    """A ForwardBackwardRequest, as the SDK writes it."""
    parts = [
        message_field(1, client),
        message_field(2, seq_id),
        message_field(4, loss),
        message_field(6, int(forward_only)),
    ]
    for ids, inputs in data:
        chunk = message_field(1, message_field(1, np.asarray(ids, dtype="<i4").tobytes()))
        entries = [
            message_field(2, message_field(1, name) + message_field(2, tensor_message(_array(name, values))))
            for name, values in inputs.items()
        ]
        parts.append(message_field(3, message_field(1, chunk) + b"".join(entries)))
    for name, value in config.items():
        shown = message_field(2, value) if isinstance(value, str) else message_field(1, float(value))
        parts.append(message_field(7, message_field(1, name) + message_field(2, shown)))
    return b"".join(parts)


def _array(name: str, values: Array) -> np.ndarray:
    if isinstance(values, np.ndarray):
        return values
    return np.asarray(values, dtype=np.int64 if name == "target_tokens" else np.float32)


# What comes back, so that the same reader reads it.
ANSWERS = {
    "LossOutput": {2: FieldType("records", "Record", True), 3: FieldType("metrics", "Metric", True)},
    "Metric": {1: FieldType("key", "string"), 2: FieldType("value", "double")},
    "Record": {2: FieldType("fields", "Entry", True), 3: FieldType("num_datums", "int")},
    "Entry": {1: FieldType("key", "string"), 2: FieldType("value", "Batched")},
    "Batched": {1: FieldType("data", "bytes"), 2: FieldType("offsets", "bytes"), 4: FieldType("shape", "int", True)},
    "Samples": {
        1: FieldType("sequences", "Sequence", True),
        2: FieldType("prompt_logprobs", "bytes"),
        3: FieldType("top", "Top"),
        5: FieldType("targets", "Tensor"),
    },
    "Sequence": {
        1: FieldType("stop_reason", "int"),
        2: FieldType("tokens", "bytes"),
        3: FieldType("logprobs", "bytes"),
        4: FieldType("top", "Top"),
    },
    "Top": {
        1: FieldType("ids", "bytes"),
        2: FieldType("logprobs", "bytes"),
        3: FieldType("k", "int"),
        4: FieldType("length", "int"),
    },
}
MESSAGES.update(ANSWERS)


def read_answer(body: bytes) -> Any:
    """A ForwardBackwardOutput as {"outputs": …, "metrics": …}, a SampleResponse with arrays."""
    if b"ArrayRecord" in body[:20]:
        found = MessageReader(body, 10**6).message("LossOutput", 0, len(body))
        outputs: list[dict[str, np.ndarray]] = []
        for record in found.get("records", ()):
            rows: list[dict[str, np.ndarray]] = [{} for _ in range(record["num_datums"])]
            for entry in record["fields"]:
                batched = entry["value"]
                offsets = np.frombuffer(batched["offsets"], dtype="<i8")
                for row, start, end in zip(rows, offsets[:-1], offsets[1:], strict=True):
                    flat = np.frombuffer(batched["data"][start:end], dtype="<f4")
                    row[entry["key"]] = flat.reshape(-1, *batched.get("shape", ()))
            outputs += rows
        return {"outputs": outputs, "metrics": {each["key"]: each["value"] for each in found.get("metrics", ())}}
    found = MessageReader(body, 10**6).message("Samples", 0, len(body))
    for sequence in found["sequences"]:
        sequence["tokens"] = np.frombuffer(sequence["tokens"], dtype=DTYPES[3])
        sequence["logprobs"] = np.frombuffer(sequence["logprobs"], dtype=DTYPES[1])
        if "top" in sequence:
            sequence["top"] = _read_top(sequence["top"])
    if "prompt_logprobs" in found:
        found["prompt_logprobs"] = np.frombuffer(found["prompt_logprobs"], dtype=DTYPES[1])
    if "top" in found:
        found["top"] = _read_top(found["top"])
    if "targets" in found:
        found["targets"] = np.frombuffer(found["targets"]["dense"], dtype=DTYPES[1]).reshape(found["targets"]["shape"])
    return found


def _read_top(top: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    shape = (top["length"], top["k"])
    return np.frombuffer(top["ids"], dtype="<i4").reshape(shape), np.frombuffer(top["logprobs"], dtype="<f4").reshape(
        shape
    )
