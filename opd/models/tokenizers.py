"""Tokenizer identity: what ids mean decides whether a teacher can judge a student's tokens, never how many there are."""

from __future__ import annotations

import hashlib
from typing import Any

from opd.errors import TokenizerMismatch


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


def stop_ids(module: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every id on which this model ends its turn: generation config, model config and tokenizer together."""
    found: list[int] = []
    for value in (module.generation_config.eos_token_id, module.config.eos_token_id, tokenizer.eos_token_id):
        found += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(found))
