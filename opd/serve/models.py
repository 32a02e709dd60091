"""What a server serves: a model, the frame of its head, and hashes that name both."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opd.divergences import Projection, likeliest_ids, token_logprobs
from opd.divergences.projection import canonical_ids, log_probs
from opd.divergences.upload import upload
from opd.models.language_model import LanguageModel
from opd.models.packing import pack
from opd.models.tokenizers import fingerprint
from opd.teachers.scoring import Page, tempered
from opd.teachers.wire import PROTOCOL, ScoreRequest, write_answer
from opd.types import Rendered

ROWS = 1024  # rows of log-probs at once, where ids other than the text's own are asked about


class ServedModel:
    """A model that only scores. Everything about it that a client has to know is in `facts`."""

    def __init__(self, name: str, model: LanguageModel, batch_tokens: int) -> None:
        self.name, self.model, self._batch_tokens = name, model, batch_tokens
        model.module.requires_grad_(False)
        embedded = model.module.get_input_embeddings().weight.shape[0]
        self.rows = min(model.head.weight.shape[0], embedded)
        self.context = model.context
        self.weights = tensors_hash(dict(chain(model.module.named_parameters(), model.module.named_buffers())))
        self.head_hash = hashlib.sha256(self.head()).hexdigest()

    def head(self) -> bytes:
        """The matrix that turns hidden states into logits, as a frame; made anew each time, since it is large."""
        head = self.model.head
        parts = {"weight": head.weight} | ({} if head.bias is None else {"bias": head.bias})
        return write_answer({name: part.detach().cpu() for name, part in parts.items()})

    @property
    def facts(self) -> dict[str, Any]:
        model = self.model
        return {
            "protocol": PROTOCOL,
            "name": self.name,
            "weights": self.weights,
            "head": self.head_hash,
            "tokenizer": fingerprint(model.tokenizer),
            "stop_ids": list(model.stop_ids),
            "rows": self.rows,
            "width": model.head.weight.shape[1],
            "context": self.context,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": model.device.type,
            "scale": model.scale,
            "softcap": model.softcap,
        }

    @torch.no_grad()
    def answer(self, group: Sequence[ScoreRequest]) -> tuple[list[bytes], int]:
        """The frames of several questions, and how many forward passes they took together."""
        texts = [_Text(str(number), text) for number, text in enumerate(chain(*(asked.texts for asked in group)))]
        pages = [Page.of([each.text for each in batch], self.model.device) for batch in pack(texts, self._batch_tokens)]
        hidden_ND = torch.cat([self.model.predict(page).hidden for page in pages])
        tokens_N = torch.cat([page.tokens_N for page in pages])
        counts = [asked.count for asked in group]
        parts = zip(group, hidden_ND.split(counts), tokens_N.split(counts), strict=True)
        return [write_answer(self._tensors(asked, hidden, tokens)) for asked, hidden, tokens in parts], len(pages)

    def _tensors(self, asked: ScoreRequest, hidden_ND: Tensor, tokens_N: Tensor) -> Mapping[str, Tensor]:
        question = asked.question
        if question.want == "hidden":
            return {"hidden": hidden_ND.cpu()}
        whole = self.model.project(hidden_ND.to(self.model.dtype))
        projection = tempered(replace(whole, size=question.size or self.model.size), question.temperature)
        if question.want == "topk":
            assert question.k is not None
            ids, logprobs, tail, stop = likeliest_ids(projection, question.k, question.stop_ids)
            found = {"ids": ids.int(), "logprobs": logprobs, "tail": tail, "stop": stop}
            return {name: part.cpu() for name, part in found.items()}
        if asked.tokens_NM is None:
            found_N = token_logprobs(projection, tokens_N, merge=(question.stop_ids,), trusted=True)
            return {"logprobs": found_N.cpu()}
        return {"logprobs": _given(projection, upload(asked.tokens_NM, hidden_ND.device), question.stop_ids).cpu()}


class _Text(NamedTuple):
    """As `pack` cuts texts into passes, in their order."""

    id: str
    text: Rendered

    @property
    def length(self) -> int:
        return self.text.length


def _given(projection: Projection, tokens_NM: Tensor, stop_ids: tuple[int, ...]) -> Tensor:
    """(N, M) log-probs of ids that a client names; a few rows of the vocabulary at a time."""
    ids = canonical_ids(tokens_NM, (stop_ids,))
    rows = [slice(start, start + ROWS) for start in range(0, max(projection.count, 1), ROWS)]
    parts = [
        log_probs(projection.rows(part), projection.vocabulary, (stop_ids,)).gather(-1, ids[part]) for part in rows
    ]
    return torch.cat(parts)


def tensors_hash(tensors: Mapping[str, Tensor]) -> str:
    """Names, types, shapes and bytes of all weights: two servers with the same hash score alike, but for rounding."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}\t{tensor.dtype}\t{tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
