"""How much mass a model leaves outside its k likeliest ids: the tail of `closure: tail`, at every token of its answers.

    python benchmarks/tails.py                    # tiny models and SmolLM2 (`make smol`): benchmarks/results/tails-cpu.json
    python benchmarks/tails.py --only arithmetic --rollouts 4

One minus a sum of fp32 probabilities is 3 % wrong at a log tail of -12.5, and says nothing below -16. For each model: the shares of
its answers' tokens whose log tail is below these, from whole rows in fp64, and the median.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from runs import save

import opd
from opd.models.attention import Packed

KS, LIMITS = (16, 64, 256), (-12.5, -16.0)
MODELS = {  # name -> who answers, whose rows are looked at, prompts, longest answer
    "arithmetic": ("tiny/arithmetic", "tiny/arithmetic", "task:addition", 16),
    "spelling": ("tiny/spelling", "tiny/spelling", "task:reverse", 16),
    "smol/words": ("smol/words", "smol/words", "task:words", 24),
    "smol/words, answers of smol": ("smol", "smol/words", "task:words", 24),
}


def answers(student: str, prompts: str, longest: int, rollouts: int) -> list[tuple[Any, Any]]:
    """(prompt ids, answer ids), sampled as in training."""
    sampler = opd.Sampler(opd.load_model(student), max_new_tokens=longest)
    found = sampler.sample(opd.prompts(prompts, rollouts))
    return [(rollout.prompt_ids, rollout.response_ids) for rollout in found]


@torch.no_grad()
def log_tails(name: str, texts: list[tuple[Any, Any]]) -> dict[int, torch.Tensor]:
    """k -> the log tail at every token of the answers, outside the model's own k likeliest ids."""
    model = opd.load_model(name)
    found: dict[int, list[torch.Tensor]] = {k: [] for k in KS if k < model.size}
    for prompt, answer in texts:
        ids = torch.cat([torch.as_tensor(part, dtype=torch.long) for part in (prompt, answer)])
        hidden = model.hidden(ids, Packed.of([len(ids)]))[len(prompt) - 1 : -1]
        logprobs = model.project(hidden).logits().double().log_softmax(-1).sort(dim=-1, descending=True).values
        for k, tails in found.items():
            tails.append(logprobs[:, k:].logsumexp(-1))
    return {k: torch.cat(tails) for k, tails in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=64)
    parser.add_argument("--only", nargs="*", choices=MODELS, default=list(MODELS))
    given = parser.parse_args()
    report: dict[str, Any] = {"rollouts": given.rollouts, "models": {}}
    for name in given.only:
        student, teacher, prompts, longest = MODELS[name]
        texts = answers(student, prompts, longest, given.rollouts)
        tails = log_tails(teacher, texts)
        report["models"][name] = {
            "tokens": sum(len(answer) for _, answer in texts),
            "k": {
                k: {"median": round(float(values.median()), 2)}
                | {f"below {limit}": round(float((values < limit).double().mean()), 4) for limit in LIMITS}
                for k, values in tails.items()
            },
        }
        print(name, report["models"][name], flush=True)
    save("tails-cpu.json", report)


if __name__ == "__main__":
    main()
