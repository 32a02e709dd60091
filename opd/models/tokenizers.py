"""Tokenizer identity: what ids mean decides whether a teacher can score a student's tokens, never how many there are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opd.errors import ModelError, TokenizerMismatch

if TYPE_CHECKING:
    from opd.models.language_model import LanguageModel

GROWTH = 1000  # a text may become this many times longer before it is cut into tokens, or after
TOKEN = 100_000  # characters of the longest token


def fingerprint(tokenizer: Any) -> str:
    """Hash of the id -> token table, added tokens included."""
    table = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    digest = hashlib.sha256()
    for index, token in table:
        digest.update(f"{index}\t{token}\n".encode())
    return digest.hexdigest()[:16]


def require_same(student: Any, teacher: Any, student_name: str, teacher_name: str) -> None:
    """Refuse a teacher whose ids mean something else, and say which."""
    if fingerprint(student) == fingerprint(teacher):
        return
    ours = {index: token for token, index in student.get_vocab().items()}
    theirs = {index: token for token, index in teacher.get_vocab().items()}
    differing = [index for index in sorted(ours.keys() | theirs.keys()) if ours.get(index) != theirs.get(index)]
    shown = ", ".join(
        f"id {index}: {ours.get(index, '(none)')!r} vs {theirs.get(index, '(none)')!r}" for index in differing[:5]
    )
    raise TokenizerMismatch(
        f"student {student_name} and teacher {teacher_name} do not share a tokenizer: {len(differing)} of "
        f"{len(ours.keys() | theirs.keys())} ids differ ({shown}{', …' if len(differing) > 5 else ''}). "
        "Use a teacher with the student's own tokenizer."
    )


def stop_ids(module: Any, tokenizer: Any, rows: int, name: str) -> tuple[int, ...]:
    """Every id on which this model ends its turn: generation config, model config and tokenizer together.

    An id that the head has no row for can never be drawn, so it is left out, unless there is no other.
    """
    found: list[int] = []
    for value in (module.generation_config.eos_token_id, module.config.eos_token_id, tokenizer.eos_token_id):
        found += value if isinstance(value, list) else [] if value is None else [value]
    odd = [value for value in found if not isinstance(value, int) or isinstance(value, bool) or value < 0]
    if odd:
        raise ModelError(
            f"model {name!r}: its eos_token_id names {odd[0]!r}, which is no id. Correct generation_config.json."
        )
    known = tuple(dict.fromkeys(index for index in found if index < rows))
    if found and not known:
        raise ModelError(
            f"model {name!r}: it is to stop at id {found[0]}, and its output head has {rows} ids only. Correct eos_token_id."
        )
    return known


def vocabulary_size(tokenizer: Any, stop: Sequence[int], rows: int) -> int:
    """How many of the head's rows are ids, and not padding. Ids may have holes, so it is the highest that counts."""
    return min(max([*tokenizer.get_vocab().values(), *stop], default=-1) + 1, rows)


def share_vocabulary(student: LanguageModel, teachers: Mapping[str, LanguageModel]) -> tuple[int, ...]:
    """The stop ids of all together, one event; from now on every model has the same ids, so each can score what another drew."""
    models = [student, *teachers.values()]
    rows = min(model.head.weight.shape[0] for model in models)
    lost = [index for index in student.stop_ids if index >= rows]
    if lost:
        short = min(models, key=lambda model: model.head.weight.shape[0])
        raise ModelError(
            f"student {student.name!r} stops at id {lost[0]}, and teacher {short.name!r} has a head of {rows} ids: it cannot score "
            "the end of an answer. Use a teacher that knows the student's stop ids."
        )
    stop = tuple(dict.fromkeys(index for model in models for index in model.stop_ids if index < rows))
    size = min(rows, max([student.size, *(index + 1 for index in stop)]))
    for model in models:
        model.size = size
    return stop


def check_tokenizer(tokenizer: Any, name: str) -> None:
    """Refuse one whose replacements would blow a short text up until memory ends."""
    longest = max(tokenizer.get_vocab(), key=len, default="")
    if len(longest) > TOKEN:
        raise ModelError(
            f"model {name!r}: its tokenizer has a token of {len(longest)} characters. Use the tokenizer the model came with."
        )
    backend = tokenizer.backend_tokenizer if tokenizer.is_fast else None
    for part in (backend.normalizer, backend.decoder) if backend is not None else ():
        growth = 1.0 if part is None else _growth(json.loads(part.__getstate__()))
        if growth > GROWTH:
            raise ModelError(
                f"model {name!r}: its tokenizer's replacements make a text up to {growth:.3g} times longer. "
                "Use the tokenizer the model came with."
            )
    tokenizer("a")  # a damaged one fails at its first text


def _growth(part: dict[str, Any]) -> float:
    """By how much a normaliser or decoder can lengthen a text, at most."""
    if part["type"] == "Sequence":
        total = 1.0
        for inner in part.get("normalizers") or part.get("decoders") or []:
            total *= _growth(inner)
        return total
    if part["type"] == "Replace":
        pattern = part["pattern"].get("String")
        return max(1.0, len(part["content"]) / len(pattern) if pattern else len(part["content"]) + 1.0)
    if part["type"] == "Prepend":
        return 1.0 + len(part["prepend"])
    return 1.0
