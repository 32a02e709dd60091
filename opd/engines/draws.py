"""Random draws that depend only on the request: (seed, prompt, visit, sample, response position).

One uniform number per response position, so a rollout is the same alone, in any batch, and after an interruption.
No torch import: making requests only needs the key.

    key = request_key(seed=0, prompt_id="task:addition/train/7", visit=0, sample=3)
    uniforms(key, start=0, count=128)                     # the numbers that draw the first 128 tokens
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


# splitmix64 (Steele, Lea, Flood 2014): a counter goes in, 64 well-mixed bits come out.
GAMMA = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
BITS = 24  # of the float32 significand: every multiple of 2^-24 in [0, 1) is exact


def request_key(seed: int, prompt_id: str, visit: int, sample: int) -> int:
    """A 63-bit key, which fits into a signed 64-bit tensor."""
    digest = hashlib.blake2b(f"{seed}\0{prompt_id}\0{visit}\0{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def uniforms(key: int, start: int, count: int) -> np.ndarray:
    """(count,) float32 in [0, 1): the draws of response positions start, start + 1, …"""
    counter = np.arange(start, start + count, dtype=np.uint64)
    with np.errstate(over="ignore"):
        mixed = counter + np.uint64((key + GAMMA) % 2**64)
        for shift, multiplier in zip(SHIFTS, (*MULTIPLIERS, 1), strict=True):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(multiplier)
    return (mixed >> np.uint64(64 - BITS)).astype(np.float32) * np.float32(2.0**-BITS)


def uniforms_at(keys: Tensor, positions: Tensor) -> Tensor:
    """The same numbers from int64 tensors, on their device: `uniforms_at(k, p) == uniforms(k, p, 1)[0]`, bit for bit.

    Tensor addition and multiplication wrap like unsigned ones; a right shift has to drop the copied sign bits.
    """
    mixed = keys + positions + _signed(GAMMA)
    for shift, multiplier in zip(SHIFTS, (*MULTIPLIERS, 1), strict=True):
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * _signed(multiplier)
    return ((mixed >> (64 - BITS)) & ((1 << BITS) - 1)).float() * 2.0**-BITS


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
