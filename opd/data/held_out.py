"""Which rows of a file are held out: a tenth of the questions of every domain, chosen by a hash of each question.

The choice depends on nothing but the rows: neither on their order nor on the machine. Rows that ask the same are on the same
side, whatever their answers, system prompts or spaces.
"""

from __future__ import annotations

import hashlib
import json
from itertools import groupby
from operator import itemgetter

import numpy as np

from opd.types import Message, Prompt

PART = 10  # one question in so many is held out, and one at least of a domain that has two
ENCODER = json.JSONEncoder(sort_keys=True, default=str)
KEY = b"opd held-out questions"  # of the hash; with another one, runs would hold out other rows


def question_key(prompt: Prompt) -> int:
    """64 bits of what a prompt asks: its text, or the roles and texts of its messages, without those of the system."""
    messages = [{"role": "user", "content": prompt.text or ""}] if prompt.messages is None else list(prompt.messages)
    asked = [_said(message) for message in messages if message["role"] != "system"]
    canonical = ENCODER.encode(asked or [_said(message) for message in messages])
    return int.from_bytes(hashlib.blake2b(canonical.encode(), digest_size=8, key=KEY).digest(), "big")


def _said(message: Message) -> list[object]:
    content, calls = message["content"], message.get("tool_calls")
    return [message["role"], " ".join(content.split()) if content else "", *([calls] if calls else [])]


def held_out_rows(keys: np.ndarray, domains: np.ndarray) -> np.ndarray:
    """Which rows are held out. `keys`: of their questions; `domains`: the number of each row's domain, -1 where it is unusable.

    The questions with the smallest hashes of each domain are taken. One that stands in several domains counts in all of them.
    A domain keeps a question to train on: where it has no more than one, none is held out.
    """
    usable = domains >= 0
    ordered, places_of = different(keys[usable], domains[usable])
    questions = np.bincount(places_of)
    left = np.where(questions > 1, np.maximum(questions // PART, 1), 0).tolist()  # to be held out
    spare = (questions - 1).tolist()
    short = sum(count > 0 for count in left)
    chosen: list[int] = []
    for key, found in groupby(zip(ordered.tolist(), places_of.tolist(), strict=True), key=itemgetter(0)):
        if not short:
            break
        places = [domain for _, domain in found]
        if any(left[domain] > 0 for domain in places) and all(spare[domain] > 0 for domain in places):
            chosen.append(key)
            for domain in places:
                left[domain] -= 1
                spare[domain] -= 1
                short -= left[domain] == 0
    return usable & np.isin(keys, np.asarray(chosen, dtype=np.uint64))


def different(keys: np.ndarray, domains: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The pairs of these, each once, by key."""
    order = np.lexsort((domains, keys))
    keys, domains = keys[order], domains[order]
    new = np.ones(len(keys), dtype=bool)
    new[1:] = (keys[1:] != keys[:-1]) | (domains[1:] != domains[:-1])
    return keys[new], domains[new]
