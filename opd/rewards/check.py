"""Rewards are tried on a few prompts before anything is spent on sampling."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from opd.config import Rewards, RewardSpec
from opd.errors import RecipeError
from opd.rewards.judge import Judge, printable
from opd.types import Prompt, Sample

TRIED = 4  # prompts of each domain that every reward is tried on
PLACEHOLDER = "0"


def check_rewards(
    rewards: Rewards,
    prompts: Sequence[Prompt],
    *,
    domains: Collection[str] | None = None,
    say: Callable[[str], None] | None = None,
) -> Judge:
    """The judge of a stage, after each of its rewards has scored an answer to a prompt of each domain.

    Files, functions, packages and the sandbox are there, and a function takes one sample and returns a number in range; or
    the error carries what the reward said. Some of the prompts may be such that nothing can judge them, not all.
    """
    judge = Judge(rewards, domains or list(dict.fromkeys(prompt.domain for prompt in prompts)), say=say)
    judge.require(prompts)
    tried: dict[tuple[str, int], list[tuple[RewardSpec, Sample]]] = {}
    for prompt in prompts:
        if judge.judges(prompt):
            for number, spec in enumerate(judge.rewards(prompt)):
                tried.setdefault((prompt.domain, number), []).append((spec, Sample(prompt, likely_answer(prompt))))
    for (domain, _), parts in tried.items():
        some = parts[:: max(1, len(parts) // TRIED)][:TRIED]
        found = judge.parts(some)
        if all(judgement.score is None for judgement in found):
            spec, sample = some[0]
            raise RecipeError(
                f"rewards: {spec.function or spec.kind} gives no score in domain {printable(domain)!r}, tried on {len(some)} prompts. "
                f"The first, {printable(sample.prompt.id)}: {printable(found[0].error)}. Mend the reward or the prompts' fields."
            )
    judge.drain()
    return judge


def likely_answer(prompt: Prompt) -> str:
    """What a good answer might be: the dataset's completion, or the reference."""
    entry = prompt.fields.get("entry")
    known = [
        prompt.fields.get("completion"),
        prompt.fields.get("answer"),
        entry.get("answer") if isinstance(entry, dict) else None,
    ]
    return next((text for text in known if isinstance(text, str) and text), PLACEHOLDER)
