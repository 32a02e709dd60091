"""Tokens per second of episodes whose tool takes a second, against those with an instant tool, in the same number of slots.

    OMP_NUM_THREADS=1 python benchmarks/episodes.py          # 8 slots, 256 episodes of 4 turns of 64 tokens: benchmarks/results/episodes.json
    python benchmarks/episodes.py --episodes 4 --turn-tokens 4 --seconds 0.01 --repeats 1

An episode that waits for its tool holds no slot, so the ratio is near 1 as long as there are enough other episodes. The two are measured in
turn, and the best of the repeats counts, since a busy machine slows either at random.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from runs import save

import opd
from opd.data.prompts import render_prompt
from opd.engines.builtin import Engine
from opd.engines.kinds import BuiltInSampler
from opd.engines.requests import request_key
from opd.records import Prompt, SampleRequest, Sampling
from opd.rollouts.environments import Environment, Episode, Step, Turn
from opd.rollouts.episodes import Dialogues, Playing
from opd.rollouts.rollouter import MemorySink, draw_into

ANSWER = [{"role": "user", "content": "12+5"}]


class Tool(Environment):
    name = "tool"
    seconds: float = 0.0

    def open(self, prompt: Prompt, key: int) -> Episode:
        return ToolEpisode(self)


class ToolEpisode(Episode):
    def __init__(self, environment: Tool) -> None:
        self.environment = environment

    def step(self, turn: Turn) -> Step:
        time.sleep(self.environment.seconds)
        return Step(messages=ANSWER, done=turn.number + 1 == self.environment.turns)


def tokens_per_second(model: Any, given: argparse.Namespace, seconds: float) -> float:
    """Of the student's tokens. No stop id ends a turn early, so both tools get the same work."""
    environment = Tool(seconds=seconds, turns=given.turns, turn_tokens=given.turn_tokens, workers=given.episodes)
    prompts = [
        environment.opened(Prompt(f"p{number}", "d", messages=({"role": "user", "content": f"{number}+{number}"},)), {})
        for number in range(given.episodes)
    ]
    room = given.turns * (given.turn_tokens + 16)
    sampling, dialogues = Sampling(room), Dialogues(model.tokenizer, model.stop_ids)
    requests = [
        SampleRequest(prompt.id, render_prompt(prompt, model.tokenizer), request_key(0, prompt.id, 0, 0), sampling)
        for prompt in prompts
    ]
    longest = max(request.prompt_ids.size for request in requests) + room
    settings = BuiltInSampler(slots=given.slots)
    engine = Engine(model.inference_copy(), settings, longest, merge_stop=model.stop_ids)
    playing = {
        request.id: Playing(dialogues.of(prompt), request, prompt)
        for request, prompt in zip(requests, prompts, strict=True)
    }
    drawn = [0]

    def count(token: Any) -> None:
        drawn[0] += 1

    began = time.perf_counter()
    draw_into(engine, requests, MemorySink(requests), playing=playing, on_token=count)
    elapsed = time.perf_counter() - began
    assert drawn[0] == given.episodes * given.turns * given.turn_tokens, drawn
    return drawn[0] / elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--turn-tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=1.0, help="that the tool takes")
    parser.add_argument("--repeats", type=int, default=2)
    given = parser.parse_args()
    model = opd.load_model("tiny/generalist")
    found: dict[str, list[float]] = {"instant": [], "slow": []}
    warm = argparse.Namespace(**{**vars(given), "episodes": given.slots, "turn_tokens": 4})
    tokens_per_second(model, warm, 0.0)  # the first calls are slower
    for _ in range(given.repeats):
        for name, seconds in (("instant", 0.0), ("slow", given.seconds)):
            found[name].append(tokens_per_second(model, given, seconds))
            print(f"{name}: {found[name][-1]:,.0f} tokens/s", flush=True)
    ratio = max(found["slow"]) / max(found["instant"])
    print(f"ratio: {ratio:.2f}")
    rounded = {name: [round(rate) for rate in rates] for name, rates in found.items()}
    save(
        "episodes.json",
        {**vars(given), "model": "tiny/generalist", "tokens_per_second": rounded, "ratio": round(ratio, 3)},
    )


if __name__ == "__main__":
    main()
