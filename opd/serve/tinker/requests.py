"""The JSON bodies of the Tinker API. What the SDK sends is named here; anything else is an error that names the key."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from opd.common.text import plain
from opd.records import Sampling
from opd.serve.tinker.sampling import SampleQuestion
from opd.serve.tinker.training import AdamSettings
from opd.serve.tinker.wire import MOST_CELLS
from opd.teachers.served import RequestLimits, WireError

KEYS = 1024  # objects or keys of one body
YEARS = 10 * 366 * 24 * 3600
Id = Annotated[str, Field(max_length=200)]
CheckpointPath = Annotated[str, Field(max_length=700)]  # the longest that can be saved has 425 characters
Count = Annotated[int, Field(ge=0, le=2**62)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    type: str = ""


class SessionBody(Body):
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class OfSession(Body):
    session_id: Id


class LoraBody(BaseModel):
    model_config = ConfigDict(extra="forbid")
    rank: int = Field(ge=0, le=65_536)
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class NewModel(OfSession):
    model_seq_id: Count
    base_model: Id
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraBody | None = None
    optimizer_config: dict[str, Any] = {"type": "adamw"}


class OfModel(Body):
    model_id: Id


class OrderedBody(OfModel):
    seq_id: Count


class AdamBody(BaseModel):
    model_config = ConfigDict(extra="forbid")
    learning_rate: float = Field(1e-4, ge=0, le=1e9)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, ge=0, le=1)
    weight_decay: float = Field(0.0, ge=0, le=1000)
    grad_clip_norm: float = Field(0.0, allow_inf_nan=False)

    def settings(self) -> AdamSettings:
        return AdamSettings(**self.model_dump())


class OptimStep(OrderedBody):
    adam_params: AdamBody


class Save(OrderedBody):
    path: Id | None = None
    ttl_seconds: Annotated[int, Field(ge=1, le=YEARS)] | None = None
    user_metadata: dict[str, str] | None = None


class SaveState(Save):
    overwrite: bool = False


class SaveForSampler(Save):
    sampling_session_seq_id: Count | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"


class LoadBody(OrderedBody):
    path: CheckpointPath
    optimizer: bool
    optimizer_config: dict[str, Any] | None = None
    weights_access_token: str | None = None


class NewSampler(OfSession):
    sampling_session_seq_id: Count
    base_model: Id | None = None
    model_path: CheckpointPath | None = None


class Chunk(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: str = "encoded_text"
    tokens: list[int] = []


class PromptBody(BaseModel):
    model_config = ConfigDict(extra="forbid")
    chunks: list[Chunk]


class SamplingBody(BaseModel):
    model_config = ConfigDict(extra="forbid")
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None
    stop: str | list[int] | list[str] | None = None
    temperature: float = Field(1.0, ge=0, le=100)
    top_k: int = Field(-1, le=2**31 - 1)
    top_p: float = Field(1.0, gt=0, le=1)

    def sampling(self, room: int, stop_ids: tuple[int, ...]) -> Sampling:
        """No stop: the model's own stop ids. An empty list: none at all. Otherwise both."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop
        own = () if given == [] else stop_ids
        ids = tuple(dict.fromkeys((*own, *(each for each in given or [] if isinstance(each, int)))))
        texts = tuple(each for each in given or [] if isinstance(each, str))
        if "" in texts:
            raise WireError(400, "sampling_params.stop: an empty text")
        new = room if self.max_tokens is None else self.max_tokens
        return Sampling(new, self.temperature, self.top_p, max(self.top_k, 0), ids, texts)


class TargetTensor(BaseModel):
    model_config = ConfigDict(extra="forbid")
    data: list[Annotated[int, Field(ge=-1, le=2**62)]]
    dtype: Literal["int64"] = "int64"
    shape: list[int]
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None

    def array(self, rows: int) -> np.ndarray:
        if self.sparse_crow_indices is not None:
            raise WireError(400, "target_prompt_logprobs: send a dense tensor; sparse ones are not served")
        fits = len(self.shape) == 2 and self.shape[0] == rows and self.shape[1] >= 1
        if not fits or math.prod(self.shape) != len(self.data) or len(self.data) > MOST_CELLS:
            raise WireError(400, f"target_prompt_logprobs: expected the shape [{rows}, K], not {self.shape[:4]}")
        return np.array(self.data, dtype=np.int64).reshape(self.shape)


class SampleBody(Body):
    num_samples: int = Field(1, ge=1)
    prompt: PromptBody
    sampling_params: SamplingBody
    base_model: Id | None = None
    model_path: Id | None = None
    sampling_session_id: Id | None = None
    seq_id: Count | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(0, ge=0, le=1024)
    topk_sample_logprobs: int = Field(0, ge=0, le=1024)
    target_prompt_logprobs: TargetTensor | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None

    def question(self, context: int, size: int, stop_ids: tuple[int, ...], limits: RequestLimits) -> SampleQuestion:
        """What is asked, for a model with this context and vocabulary."""
        if self.prompt_alt_tokens_k or self.record_stability_info:
            raise WireError(400, "prompt_alt_tokens_k and record_stability_info are not served")
        for chunk in self.prompt.chunks:
            if chunk.type != "encoded_text":
                raise WireError(400, "only chunks of tokens are served; images and sound are not")
        ids = [token for chunk in self.prompt.chunks for token in chunk.tokens]
        outside = next((token for token in ids if not 0 <= token < size), None)
        if outside is not None:
            raise WireError(400, f"prompt: id {outside} is outside the vocabulary of {size} ids")
        room = min(context, limits.tokens) - len(ids)
        if not ids or room < 1:
            raise WireError(400, f"a prompt of {len(ids)} tokens; sequences here have at most {context}")
        sampling = self.sampling_params.sampling(room, stop_ids)
        if sampling.max_new_tokens > room:
            raise WireError(
                400,
                f"{len(ids)} prompt tokens and max_tokens {sampling.max_new_tokens}: a sequence has at most {context}",
            )
        if self.num_samples * (len(ids) + sampling.max_new_tokens) > limits.tokens * limits.sequences:
            raise WireError(413, f"num_samples {self.num_samples} is too much for one request")
        if self.num_samples > limits.sequences:
            raise WireError(413, f"num_samples {self.num_samples}; at most {limits.sequences} are accepted")
        last = self.prompt_logprobs_last_n
        if last is not None and not (self.prompt_logprobs and 1 <= last <= len(ids) - 1):
            raise WireError(400, f"prompt_logprobs_last_n {last}: needs prompt_logprobs, and is 1 to {len(ids) - 1}")
        targets = None
        if self.target_prompt_logprobs is not None:
            targets = self.target_prompt_logprobs.array(len(ids) - 1)
            if targets.size and targets.max() >= size:
                raise WireError(400, f"target_prompt_logprobs: ids are 0 to {size - 1}, or -1")
        return SampleQuestion(
            np.array(ids, dtype=np.int64), self.num_samples, sampling, self.sampling_params.seed,
            bool(self.prompt_logprobs), last, self.topk_prompt_logprobs, self.topk_sample_logprobs, targets,
        )  # fmt: skip


class Retrieve(Body):
    request_id: Id
    allow_metadata_only: bool = False


class Cancel(Body):
    request_id: Id


class PathBody(Body):
    tinker_path: CheckpointPath


B = TypeVar("B", bound=BaseModel)


def parse_body(body: bytes, model: type[B], limits: RequestLimits) -> B:
    """Lists and keys are counted before anything is parsed, since they take far more memory than text."""
    if body.count(b"[") > limits.sequences or max(body.count(b":"), body.count(b"{")) > KEYS * 8:
        raise WireError(413, "the body has too many lists or keys")
    if body.count(b",") > 4 * limits.tokens + KEYS:
        raise WireError(413, f"the body has too many numbers; at most {limits.tokens} tokens are accepted")
    try:
        return model.model_validate(json.loads(body or b"{}"))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise WireError(422, plain(f"{'.'.join(map(str, first['loc']))}: {first['msg']}", 300)) from None
    except (ValueError, RecursionError) as error:
        raise WireError(400, f"the body is not JSON: {plain(error, 200)}") from None
