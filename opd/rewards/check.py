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
        tried_on = 1 if parts[0][0].asks_elsewhere else TRIED  # somebody may have to pay for it
        some = parts[:: max(1, len(parts) // tried_on)][:tried_on]
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


def doubts(rewarder: Rewarder, prompts: Sequence[Prompt]) -> list[str]:
    """Warnings, one per domain: rewards whose every answer will very likely be wrong, by the looks of the prompts."""
    found: dict[str, list[tuple[str, str]]] = {}
    for prompt in prompts:
        for kind in rewarder.kinds(prompt) if rewarder.covers(prompt) else ():
            chosen = kind.chosen(prompt.fields)
            if not isinstance(chosen, str):
                found.setdefault(prompt.domain, []).append((chosen.label, chosen.doubt(prompt)))
    return [
        f"WARNING: rewards: {reasons[0][0]} in domain {plain(domain)!r}: {plain(reasons[0][1])}"
        for domain, reasons in found.items()
        if all(reason for _, reason in reasons)
    ]


def likely_answer(prompt: Prompt) -> str:
    """What a good answer might be: the dataset's completion, or the reference."""
    entry = prompt.fields.get("entry")
    known = [
        prompt.fields.get("completion"),
        prompt.fields.get("answer"),
        entry.get("answer") if isinstance(entry, dict) else None,
    ]
    return next((text for text in known if isinstance(text, str) and text), PLACEHOLDER)
