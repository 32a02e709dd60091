"""Which teacher judges which prompt: exactly one per role, by domain. Gaps and idle teachers are errors at start-up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from opd.config import TeacherSpec
from opd.errors import RecipeError
from opd.types import Rollout


def routes(
    teachers: Mapping[str, TeacherSpec], domains: Iterable[str], roles: Iterable[str]
) -> dict[str, dict[str, str]]:
    """{role: {domain: teacher}} for every role the objective asks for.

    A teacher judges the domains it lists, else the domain it is named after, else (alone in its role) every domain.
    """
    domains, table = list(dict.fromkeys(domains)), {}
    for role in dict.fromkeys([*roles, *(spec.role for spec in teachers.values())]):
        names = [name for name, spec in teachers.items() if spec.role == role]
        if not names:
            raise RecipeError(
                f"the objective asks for the role {role!r}, but no teacher has it. Add one under `teachers:`."
            )
        table[role] = {domain: _pick(domain, role, names, teachers) for domain in domains}
        idle = [name for name in names if name not in table[role].values()]
        if idle:
            raise RecipeError(
                f"teacher {idle[0]!r} judges no domain: the prompts' domains are {', '.join(domains)}. "
                "Name it after a domain, give it `domains: […]`, or remove it."
            )
    return table


def _pick(domain: str, role: str, names: Sequence[str], teachers: Mapping[str, TeacherSpec]) -> str:
    listed = [name for name in names if domain in (teachers[name].domains or [])]
    if len(listed) > 1:
        raise RecipeError(
            f"domain {domain!r} is claimed by several teachers ({', '.join(listed)}); exactly one judges it."
        )
    if listed:
        return listed[0]
    open_ones = [name for name in names if teachers[name].domains is None]
    if domain in open_ones:
        return domain
    if len(names) == 1 and open_ones:
        return names[0]
    raise RecipeError(
        f"domain {domain!r} has no {role}: there are {', '.join(names)}. Add a teacher named {domain!r}, or list the domain "
        f"under one: `teachers: {{{names[0]}: {{model: …, domains: [{domain}]}}}}`."
    )


def by_teacher(rollouts: Sequence[Rollout], table: Mapping[str, str]) -> dict[str, list[Rollout]]:
    """The rollouts of a batch grouped by the teacher that judges them, in the order teachers first appear."""
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        if rollout.domain not in table:
            raise RecipeError(
                f"rollout {rollout.id!r} has the domain {rollout.domain!r}, which no teacher judges; known: {', '.join(table)}."
            )
        groups.setdefault(table[rollout.domain], []).append(rollout)
    return groups
