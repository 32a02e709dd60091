"""The bytes that tokens stand for, and where two tokenizers cut the same text in the same places. No torch here.

Byte-level vocabularies, sentencepiece's (`▁`, byte fallback) and plain ones are read; a multi-byte character may be cut anywhere.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from opd.errors import TokenizerMismatch

FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE = "\u2581"  # sentencepiece's
READABLE = {"ByteLevel", "Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}
Span = tuple[int, int, int, int]


@lru_cache(maxsize=16)
def token_bytes(tokenizer: Any) -> tuple[bytes, ...]:
    """Of every id; ids that are no token have none."""
    decoders = _decoders(tokenizer)
    unknown = decoders - READABLE
    if unknown or not tokenizer.is_fast:
        what = f"its decoder is {', '.join(sorted(unknown))}" if unknown else "it has no fast form"
        raise TokenizerMismatch(
            f"tokenizer {tokenizer.name_or_path!r}: {what}, so which bytes a token stands for cannot be told. "
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
    """Kinds of the parts that turn tokens into text."""
    decoder = tokenizer.backend_tokenizer.decoder if tokenizer.is_fast else None
    if decoder is None:
        return set()
    found = json.loads(decoder.__getstate__())
    return {part["type"] for part in found.get("decoders", [found])}


@lru_cache(maxsize=1)
def _alphabet() -> dict[str, bytes]:
    """The letters that byte-level vocabularies write bytes with: printable ones are themselves, others moved up."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): bytes([byte]) for byte in printable}
    return letters | {chr(256 + place): bytes([byte]) for place, byte in enumerate(others)}


def pieces(tokenizer: Any, ids: Sequence[int] | np.ndarray) -> list[bytes]:
    table = token_bytes(tokenizer)
    return [table[int(index)] if int(index) < len(table) else b"" for index in ids]


def readable(data: bytes) -> str:
    """The text up to the first byte that is none: an answer may be cut in the middle of a character."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        return data[: error.start].decode("utf-8")


def common_spans(ours: Sequence[bytes], theirs: Sequence[bytes]) -> list[Span]:
    """(s0, s1, t0, t1): tokens s0..s1 of ours and t0..t1 of theirs that cover the same bytes, as short as possible.

    It ends where the two begin to differ, as they do behind a tokenizer that rewrites its text. A space that a tokenizer
    puts before a text's first word is none of the text.
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
    """Where the part of a text begins that could be cut into other tokens if more text followed; its length if none could.

    "1" is such a part where "18" is a token, and " underst" where " understand" is.
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
    """Ids of both that stand for the same bytes, and special tokens of the same name; of several, the first."""
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
