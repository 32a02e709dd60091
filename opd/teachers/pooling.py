"""Hidden states from servers that others wrote: the layers run there, the head is here, and nothing is lost between them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from opd.divergences import Projection
from opd.errors import RemoteError
from opd.models.head import load_head
from opd.models.tokenizers import Elsewhere, fingerprint, require_same
from opd.teachers.kinds import Supplies
from opd.teachers.reconnecting import Constancy
from opd.teachers.scoring import Page, ScoringTeacher

if TYPE_CHECKING:
    from opd.teachers.vllm import HiddenTeacher, SglangTeacher, VllmTeacher

START = "Start it with --runner pooling --convert embed --pooler-config.task token_embed, or use kind: openai."


class RemoteHidden(ScoringTeacher):
    """`_ask` says how a server is asked about a text."""

    def __init__(self, name: str, kind: HiddenTeacher, supplies: Supplies) -> None:
        student = supplies.student
        super().__init__(name, kind.role, supplies.stop_ids, kind.batch_tokens, student.device)
        self._kind, self._student, self.temperature = kind, student, kind.temperature
        dtype = kind.dtype or str(student.dtype).removeprefix("torch.")
        self._head = load_head(kind.local, kind.revision, dtype, str(student.device))
        require_same(student.tokenizer, self._head.tokenizer, student.name, f"{name} ({kind.local})")
        self.fingerprint = fingerprint(self._head.tokenizer)
        self.elsewhere = Elsewhere(kind.title, self._head.stop_ids, self._head.rows)
        self.version = int(self._head.digest[:12], 16)
        self._remote = kind.connect(supplies.around)
        self.context = min(self._head.context, kind.room(kind.longest(self._remote)))
        self._same = Constancy(self, self._remote, student.size, kind.tolerance)
        self._same.open(self.stop_ids)

    def hidden(self, page: Page) -> Tensor:
        texts = [part.tolist() for part in page.ids_T.cpu().split(list(page.layout.lengths))]
        rows = np.concatenate(self._same.map([partial(self._ask, ids) for ids in texts]))
        return torch.from_numpy(rows)[page.predicting_N.cpu()].to(self.device)

    @abstractmethod
    def _ask(self, ids: list[int]) -> np.ndarray:
        """(T, D) in fp32, after the last norm."""
        raise NotImplementedError

    @property
    def width(self) -> int:
        return self._head.width

    def project(self, hidden: Tensor) -> Projection:
        return self.tempered(self._head.project(hidden, self._student.size))

    def state(self) -> Mapping[str, Any]:
        return self._same.state()

    def restore(self, version: int, tensors: Mapping[str, Any]) -> None:
        self._same.restore(version, tensors)


class PoolingTeacher(RemoteHidden):
    """vLLM's pooling runner."""

    _kind: VllmTeacher

    def _ask(self, ids: list[int]) -> np.ndarray:
        """(T, D) in fp32, after the last norm."""
        body = {
            "model": self._kind.model,
            "input": ids,
            "task": "token_embed",
            "use_activation": False,  # else every row is scaled to length 1
            "encoding_format": "bytes_only",
            "embed_dtype": self._kind.transfer,
            "endianness": "little",
            "add_special_tokens": False,
        }
        try:
            raw, _ = self._remote.bytes("POST", "/pooling", body, load=len(ids))
        except RemoteError as error:
            if "answered with 404" in str(error) or "pooler-config" in str(error):
                raise RemoteError(f"{error} It does not give hidden states as it was started. {START}") from None
            raise
        each, shape = {"float32": 4, "bfloat16": 2}[self._kind.transfer], (len(ids), self._head.width)
        if len(raw) != each * shape[0] * shape[1]:
            raise RemoteError(
                f"{self._kind.title}: {len(ids)} tokens were answered with {len(raw)} bytes, and the head of {self._head.name} wants "
                f"{shape[1]} numbers of {each} bytes for each. Is it the same model?"
            )
        if each == 4:
            return np.frombuffer(raw, dtype="<f4").reshape(shape).astype(np.float32)
        return (np.frombuffer(raw, dtype="<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)


class SglangHidden(RemoteHidden):
    """SGLang's /generate, which has to write a token, and gives what its head read as lists of numbers."""

    _kind: SglangTeacher

    def _ask(self, ids: list[int]) -> np.ndarray:
        body = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_hidden_states": True,
        }
        found = self._remote.json("POST", "/generate", body, load=len(ids))
        try:
            rows = np.asarray(found["meta_info"]["hidden_states"][0], dtype=np.float32)
        except (KeyError, IndexError, TypeError, ValueError):
            raise RemoteError(
                f"{self._kind.title}: its answer has no `hidden_states` that can be read. Start it with --return-hidden-states-mode full "
                "(--enable-return-hidden-states in older ones)."
            ) from None
        if rows.shape != (len(ids), self._head.width):
            raise RemoteError(
                f"{self._kind.title}: {len(ids)} tokens were answered with hidden states of shape {rows.shape}, and the head of "
                f"{self._head.name} wants {self._head.width} numbers for each. Start it with --disable-radix-cache: of a prefix that it "
                "kept it tells nothing. Is it the same model?"
            )
        return rows
