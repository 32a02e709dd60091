"""Sizes that a recipe leaves open: tokens of a micro-batch and of a teacher's pass, slots of the sampler; and whether it compiles.

On a CPU they are constants. On a GPU they are the largest that fit its memory, by the plan's own estimate. A run keeps what was
chosen in `sizes.json`, so that it goes on with the same after a restart, on another device as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import TypedDict

import torch

from opd.config import Stage
from opd.config.stage import MICRO_TOKENS
from opd.files import json_text, write_whole
from opd.models.directory import read_json
from opd.teachers.kinds import BATCH_TOKENS

NAME = "sizes.json"
FULL = 0.85  # of a device's memory; the rest is for what no estimate knows of
MOST_SLOTS = 256
LEAST_SLOTS = 8
MOST_TOKENS = 32_768  # of a micro-batch: beyond it nothing is faster
LEAST_TOKENS = 1024
PASS = 100  # decode steps that a pass over a micro-batch takes at least, however small: both wait for launches
MOST_SCORED = 16_384
SCORED_WIDTHS = 24  # bytes of a teacher's pass, per token and width
COMPILED_STEPS = (
    100_000  # decode steps that compiling, about a minute, is worth: it takes a millisecond or two off each
)


class Sizes(TypedDict):
    micro_tokens: int
    batch_tokens: int
    slots: int | None  # None: as the sampler chooses
    compile: bool


def choose_sizes(
    stage: Stage, estimate: Callable[[Stage], int], device: torch.device, width: Callable[[], int], written: bool
) -> Sizes:
    """`estimate`: bytes that a stage with these sizes takes. `width`: of the teachers' hidden states, about. `written`: whether
    decode steps go through layers written out, which are faster than what torch compiles.
    """
    if device.type != "cuda":
        return Sizes(micro_tokens=MICRO_TOKENS, batch_tokens=BATCH_TOKENS, slots=None, compile=False)
    share = torch.cuda.get_per_process_memory_fraction(device.index)  # 1, unless this process was told to take less
    total = int(share * torch.cuda.get_device_properties(device).total_memory)
    return fit_sizes(stage, estimate, total, width(), written)


def fit_sizes(stage: Stage, estimate: Callable[[Stage], int], total: int, width: int, written: bool = False) -> Sizes:
    """Of the slots and micro-batches that fit, those with the fewest rounds of sampling and passes, weighed by what each takes."""
    rollouts, longest = stage.rollout.prompts * stage.rollout.samples, stage.rollout.max_new_tokens
    found = Sizes(micro_tokens=LEAST_TOKENS, batch_tokens=MOST_SCORED, slots=LEAST_SLOTS, compile=False)

    def steps(pair: tuple[int, int]) -> int:
        slots, tokens = pair
        return -(-rollouts // slots) * longest + -(-rollouts * longest // tokens) * PASS

    pairs = product(
        _halves(min(-(-rollouts // 8) * 8, MOST_SLOTS), LEAST_SLOTS), _halves(MOST_TOKENS, LEAST_TOKENS)
    )  # the largest first, which wins where nothing else tells them apart
    for slots, tokens in sorted(pairs, key=steps):
        tried = Sizes(micro_tokens=tokens, batch_tokens=MOST_SCORED, slots=slots, compile=False)
        if estimate(with_sizes(stage, tried)) <= FULL * total:
            found = tried
            break
    while found["batch_tokens"] > LEAST_TOKENS and found["batch_tokens"] * width * SCORED_WIDTHS > total / 20:
        found["batch_tokens"] //= 2
    found["compile"] = not written and decode_steps(with_sizes(stage, found)) >= COMPILED_STEPS
    return found


def _halves(most: int, least: int) -> list[int]:
    found = [most]
    while found[-1] > least:
        found.append(max(found[-1] // 2, least))
    return found


def decode_steps(stage: Stage) -> int:
    """Of a whole stage, if every answer is as long as it may be; none where it samples in another process."""
    if not stage.sampler.sequences():
        return 0
    rounds = -(-stage.rollout.prompts * stage.rollout.samples // stage.sampler.sequences())
    return stage.train.steps * rounds * stage.rollout.max_new_tokens


def with_sizes(stage: Stage, sizes: Sizes) -> Stage:
    """The stage with what it left open filled in."""
    train = stage.train
    if train.micro_tokens is None:
        train = train.model_copy(update={"micro_tokens": sizes["micro_tokens"]})
    teachers = {name: kind.sized(sizes["batch_tokens"]) for name, kind in stage.teachers.items()}
    sampler = stage.sampler.sized(sizes["slots"], sizes["compile"])
    return stage.model_copy(update={"train": train, "sampler": sampler, "teachers": teachers})


def kept_sizes(directory: Path, stage: str, choose: Callable[[], Sizes]) -> Sizes:
    """What the run has kept, or chooses now and keeps."""
    known = _read(directory)
    if stage not in known:
        known = {**known, stage: choose()}
        write_whole(directory / NAME, json_text(known, indent=1))
    return known[stage]


def told_of_memory(directory: Path, stage: str, say: Callable[[str], None], tokens: int) -> None:
    """A budget that had to be halved stays so after a restart."""
    say(f"{stage}: memory ran out; micro-batches have {tokens:,} tokens from now on")
    known = _read(directory)
    write_whole(directory / NAME, json_text({**known, stage: {**known[stage], "micro_tokens": tokens}}, indent=1))


def _read(directory: Path) -> Mapping[str, Sizes]:
    path = directory / NAME
    return read_json(path) if path.exists() else {}


def sizes_in_words(stage: Stage) -> str:
    """Of a stage whose sizes are settled, for the plan."""
    scored = sorted({tokens for kind in stage.teachers.values() if (tokens := kind.scored_at_once()) is not None})
    parts = [f"micro-batches of {stage.train.micro_tokens:,} tokens"]
    parts += [f"teachers read {' or '.join(f'{tokens:,}' for tokens in scored)} at once"] if scored else []
    steps = decode_steps(stage)
    worth = [f"{steps:,} decode steps; compiling is worth it from {COMPILED_STEPS:,} on a GPU"] if steps else []
    return "; ".join([*parts, *stage.sampler.in_words(), *worth])
