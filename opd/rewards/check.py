"""Rewards are tried on a few prompts before anything is spent on sampling."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from opd.errors import RecipeError
from opd.rewards.reward import RewardKind
from opd.rewards.rewarder import Rewarder
from opd.rewards.settings import Rewards
from opd.text import plain
from opd.types import Prompt, Sample

TRIED = 4  # prompts of each domain that every reward is tried on
PLACEHOLDER = "0"


def check_rewards(
    rewards: Rewards,
    prompts: Sequence[Prompt],
    *,
    domains: Collection[str] | None = None,
    say: Callable[[str], None] | None = None,
) -> Rewarder:
    """The rewarder of a stage, after each of its rewards has been tried on an answer to a prompt of each domain.

    Files, functions, packages and the sandbox are there, and a function takes one sample and returns a number in range; or
    the error carries what the reward said. Some of the prompts may be such that nothing can reward them, not all.
    """
    rewarder = Rewarder(rewards, domains or list(dict.fromkeys(prompt.domain for prompt in prompts)))
    rewarder.require(prompts)
    tried: dict[tuple[str, int], list[tuple[RewardKind, Sample]]] = {}
    for prompt in prompts:
        if rewarder.covers(prompt):
            for number, kind in enumerate(rewarder.kinds(prompt)):
                tried.setdefault((prompt.domain, number), []).append((kind, Sample(prompt, likely_answer(prompt))))
    for (domain, _), parts in tried.items():
        some = parts[:: max(1, len(parts) // TRIED)][:TRIED]
        found = rewarder.each(some)
        if all(result.reward is None for result in found):
            kind, sample = some[0]
            raise RecipeError(
                f"rewards: {kind.label} gives no reward in domain {plain(domain)!r}, tried on {len(some)} prompts. "
                f"The first, {plain(sample.prompt.id)}: {plain(found[0].error)}. Mend the reward or the prompts' fields."
            )
    rewarder.drain()
    rewarder.say = say  # only now: what is wrong here is told once, by the error
    return rewarder


def likely_answer(prompt: Prompt) -> str:
    """What a good answer might be: the dataset's completion, or the reference."""
    entry = prompt.fields.get("entry")
    known = [
        prompt.fields.get("completion"),
        prompt.fields.get("answer"),
        entry.get("answer") if isinstance(entry, dict) else None,
    ]
    return next((text for text in known if isinstance(text, str) and text), PLACEHOLDER)
