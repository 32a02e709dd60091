"""Tokenizer identity: a teacher can score a student's tokens if ids have the same meaning; vocabulary size does not matter."""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from opd.common.errors import ModelError, TokenizerMismatch

if TYPE_CHECKING:
    from opd.models.language_model import LanguageModel


GROWTH = 1000  # a text may become at most this many times longer, before tokenisation or after decoding
TOKEN = 100_000  # most characters of a token


def fingerprint(tokenizer: Any) -> str:
    """Hash of the id -> token table, including added tokens."""
    table = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    digest = hashlib.sha256()
    for index, token in table:
        digest.update(f"{index}\t{token}\n".encode())
    return digest.hexdigest()[:16]


def differing_ids(student: Any, teacher: Any) -> list[int]:
    """Ids that the two tokenizers map to different tokens, or that only one of them has."""
    if fingerprint(student) == fingerprint(teacher):
        return []
    ours = {index: token for token, index in student.get_vocab().items()}
    theirs = {index: token for token, index in teacher.get_vocab().items()}
    return [index for index in sorted(ours.keys() | theirs.keys()) if ours.get(index) != theirs.get(index)]


def require_same(student: Any, teacher: Any, student_name: str, teacher_name: str) -> None:
    """Reject a teacher whose ids have other meanings, and name those ids."""
    differing = differing_ids(student, teacher)
    if not differing:
        return
    ours = {index: token for token, index in student.get_vocab().items()}
    theirs = {index: token for token, index in teacher.get_vocab().items()}
    shown = ", ".join(
        f"id {index}: {ours.get(index, '(none)')!r} vs {theirs.get(index, '(none)')!r}" for index in differing[:5]
    )
    raise TokenizerMismatch(
        f"student {student_name} and teacher {teacher_name} do not share a tokenizer: {len(differing)} of "
        f"{len(ours.keys() | theirs.keys())} ids differ ({shown}{', …' if len(differing) > 5 else ''}). "
        "Use a teacher with the student's own tokenizer, or let it read the text in its own tokens: view: bytes."
    )


def stop_ids(module: Any, tokenizer: Any, rows: int, name: str) -> tuple[int, ...]:
    """Every id on which this model ends its turn: generation config, model config and tokenizer together.

    Ids without a row in the head can never be sampled, so they are left out. If no id remains, that is an error.
    """
    found: list[int] = []
    for value in (module.generation_config.eos_token_id, module.config.eos_token_id, tokenizer.eos_token_id):
        found += value if isinstance(value, list) else [] if value is None else [value]
    odd = [value for value in found if not isinstance(value, int) or isinstance(value, bool) or value < 0]
    if odd:
        raise ModelError(
            f"model {name!r}: its eos_token_id names {odd[0]!r}, which is not an id. Correct generation_config.json."
        )
    known = tuple(dict.fromkeys(index for index in found if index < rows))
    if found and not known:
        raise ModelError(
            f"model {name!r}: it stops at id {found[0]}, but its output head has only {rows} ids. Correct eos_token_id."
        )
    return known


def vocabulary_size(tokenizer: Any, stop: Sequence[int], rows: int) -> int:
    """How many of the head's rows are ids rather than padding: the highest id plus one, because ids may have gaps."""
    return min(max([*tokenizer.get_vocab().values(), *stop], default=-1) + 1, rows)


class RemoteVocabulary(NamedTuple):
    """Stop ids and vocabulary size of a model that is not in this process."""

    name: str
    stop_ids: tuple[int, ...]
    size: int


def share_vocabulary(
    student: LanguageModel, teachers: Mapping[str, LanguageModel], elsewhere: Sequence[RemoteVocabulary] = ()
) -> tuple[int, ...]:
    """The union of all stop ids, which count as one event. Sets the same size on every model, so each can score another's tokens."""
    models = [student, *teachers.values()]
    heads = {model.name: model.head.weight.shape[0] for model in models} | {one.name: one.size for one in elsewhere}
    rows = min(heads.values())
    lost = [index for index in student.stop_ids if index >= rows]
    if lost:
        short = min(heads, key=lambda name: heads[name])
        raise ModelError(
            f"student {student.name!r} stops at id {lost[0]}, and teacher {short!r} has a head of {rows} ids: it cannot score "
            "the end of an answer. Use a teacher that knows the student's stop ids."
        )
    known = [*(model.stop_ids for model in models), *(one.stop_ids for one in elsewhere)]
    stop = tuple(dict.fromkeys(index for ids in known for index in ids if index < rows))
    size = min(rows, max([student.size, *(index + 1 for index in stop)]))
    for model in models:
        model.size = size
    return stop


def check_tokenizer(tokenizer: Any, name: str) -> None:
    """Reject a tokenizer whose replacements would make a short text exhaust memory."""
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
    tokenizer("a")  # a damaged tokenizer fails at its first text


def _growth(part: dict[str, Any]) -> float:
    """The largest factor by which a normaliser or decoder can lengthen a text."""
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


# --- The bytes of tokens, and where two tokenizers split the same text in the same places ---
#
# Supports byte-level vocabularies, sentencepiece's (`▁`, byte fallback) and plain ones. A multi-byte character may be split anywhere.


FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE = "\u2581"  # sentencepiece's
READABLE = {"ByteLevel", "Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}
Span = tuple[int, int, int, int]


@lru_cache(maxsize=16)
def token_bytes(tokenizer: Any) -> tuple[bytes, ...]:
    """The bytes of every id; empty for ids without a token."""
    decoders = _decoders(tokenizer)
    unknown = decoders - READABLE
    if unknown or not tokenizer.is_fast:
        what = f"its decoder is {', '.join(sorted(unknown))}" if unknown else "it has no fast form"
        raise TokenizerMismatch(
            f"tokenizer {tokenizer.name_or_path!r}: {what}, so the bytes of its tokens are unknown. "
            "Use a byte-level or sentencepiece tokenizer, or one of plain characters."
        )
    vocabulary = tokenizer.get_vocab()
    found = [b""] * (max(vocabulary.values(), default=-1) + 1)
    added = {index: str(token) for index, token in tokenizer.added_tokens_decoder.items()}
    for token, index in vocabulary.items():
        found[index] = added[index].encode() if index in added else _bytes(token, decoders)
    return tuple(found)


def _bytes(token: str, decoders: set[str]) -> bytes:
    if "ByteLevel" in decoders:
        alphabet = _alphabet()
        return b"".join(alphabet[letter] if letter in alphabet else letter.encode() for letter in token)
    if "ByteFallback" in decoders and (byte := FALLBACK.fullmatch(token)):
        return bytes([int(byte[1], 16)])
    if decoders & {"Metaspace", "Replace"}:
        token = token.replace(SPACE, " ")
    return token.encode("utf-8", errors="surrogatepass")


def _decoders(tokenizer: Any) -> set[str]:
    """Types of the decoder's parts, which turn tokens into text."""
    decoder = tokenizer.backend_tokenizer.decoder if tokenizer.is_fast else None
    if decoder is None:
        return set()
    found = json.loads(decoder.__getstate__())
    return {part["type"] for part in found.get("decoders", [found])}


@lru_cache(maxsize=1)
def _alphabet() -> dict[str, bytes]:
    """Character -> byte in byte-level vocabularies. Printable bytes are themselves; others are numbered from 256."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): bytes([byte]) for byte in printable}
    return letters | {chr(256 + place): bytes([byte]) for place, byte in enumerate(others)}


def pieces(tokenizer: Any, ids: Sequence[int] | np.ndarray) -> list[bytes]:
    table = token_bytes(tokenizer)
    return [table[int(index)] if int(index) < len(table) else b"" for index in ids]


def readable(data: bytes) -> str:
    """The text up to the first invalid byte: an answer may end in the middle of a character."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        return data[: error.start].decode("utf-8")


def common_spans(ours: Sequence[bytes], theirs: Sequence[bytes]) -> list[Span]:
    """(s0, s1, t0, t1): tokens s0..s1 of ours and t0..t1 of theirs that cover the same bytes, as short as possible.

    Spans end where the bytes begin to differ, which happens if a tokenizer rewrites its text. A space that a tokenizer adds
    before the first word is not counted as text.
    """
    left, right = b"".join(ours), b"".join(theirs)
    if right[:1] == b" " and _common(left, right[1:]) > _common(left, right):
        first = next(number for number, piece in enumerate(theirs) if piece)
        theirs = [*theirs[:first], theirs[first][1:], *theirs[first + 1 :]]
        right = right[1:]
    same = _common(left, right)
    ends_s, ends_t = (np.cumsum([len(piece) for piece in side], dtype=np.int64) for side in (ours, theirs))
    cuts = np.intersect1d(ends_s, ends_t)
    spans: list[Span] = []
    s0 = t0 = 0
    for cut in cuts[cuts <= same]:
        s1, t1 = (int(np.searchsorted(ends, cut, side="right")) for ends in (ends_s, ends_t))
        if cut and s1 > s0 and t1 > t0:
            spans.append((s0, s1, t0, t1))
            s0, t0 = s1, t1
    return spans


def _common(left: bytes, right: bytes) -> int:
    size = min(len(left), len(right))
    different = np.frombuffer(left[:size], np.uint8) != np.frombuffer(right[:size], np.uint8)
    return int(np.argmax(different)) if different.any() else size


def open_end(tokenizer: Any, data: bytes) -> int:
    """Start of the part of a text whose tokens could change if more text followed; the text's length if there is none.

    "1" is such a part if "18" is a token, and " underst" if " understand" is.
    """
    words = _sorted_tokens(tokenizer)
    longest = max(map(len, words), default=0)
    for start in range(max(0, len(data) - longest + 1), len(data)):
        rest = data[start:]
        after = bisect_right(words, rest)
        if after < len(words) and words[after].startswith(rest):
            return start
    return len(data)


@lru_cache(maxsize=16)
def _sorted_tokens(tokenizer: Any) -> tuple[bytes, ...]:
    return tuple(sorted(token_bytes(tokenizer)))


def matching_ids(ours: Any, theirs: Any, leave_out: tuple[set[int], set[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Ids of both tokenizers with the same bytes, and special tokens of the same name. Among duplicates, the first id."""
    sides = []
    for tokenizer, without in zip((ours, theirs), leave_out, strict=True):
        special = set(tokenizer.all_special_ids)
        side: dict[tuple[bool, bytes], int] = {}
        for index, piece in enumerate(token_bytes(tokenizer)):
            if piece and index not in without:
                side.setdefault((index in special, piece), index)
        sides.append(side)
    shared = [key for key in sides[0] if key in sides[1]]
    left, right = (np.array([side[key] for key in shared], dtype=np.int64) for side in sides)
    return left, right
