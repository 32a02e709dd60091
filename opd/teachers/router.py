"""Which teacher scores which prompt: exactly one per role, by domain. Gaps and idle teachers are errors at start-up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from opd.errors import RecipeError
from opd.teachers.kinds import TeacherKind
from opd.types import Rollout


def routes(
    teachers: Mapping[str, TeacherKind], domains: Iterable[str], roles: Iterable[str], where: str = ""
) -> dict[str, dict[str, str]]:
    """{role: {domain: teacher}} for every role the objective asks for. `where` names the stage, if there are several.

    A teacher scores the domains it lists, else the domain it is named after, else (alone in its role) every domain.
    """
    domains, table = list(dict.fromkeys(domains)), {}
    for role in dict.fromkeys([*roles, *(kind.role for kind in teachers.values())]):
        names = [name for name, kind in teachers.items() if kind.role == role]
        if not names:
            raise RecipeError(
                f"{where}the objective asks for the role {role!r}, but no teacher has it. Add one under `teachers:`."
            )
        table[role] = {domain: _pick(domain, role, names, teachers, where) for domain in domains}
        idle = [name for name in names if name not in table[role].values()]
        if idle:
            raise RecipeError(
                f"{where}teacher {idle[0]!r} scores no domain: {_why_idle(idle[0], teachers, table[role])}"
            )
    return table


def _why_idle(name: str, teachers: Mapping[str, TeacherKind], table: Mapping[str, str]) -> str:
    if teachers[name].domains is None and name in table:
        other = table[name]
        return f"{name!r} is listed under `domains` of {other!r}. Take it out of that list, or remove teacher {name!r}."
    return f"the prompts' domains are {', '.join(table)}. Name it after a domain, give it `domains: […]`, or remove it."


def _pick(domain: str, role: str, names: Sequence[str], teachers: Mapping[str, TeacherKind], where: str) -> str:
    listed = [name for name in names if domain in (teachers[name].domains or [])]
    if len(listed) > 1:
        raise RecipeError(
            f"{where}domain {domain!r} is claimed by several teachers ({', '.join(listed)}); exactly one scores it."
        )
    if listed:
        return listed[0]
    open_ones = [name for name in names if teachers[name].domains is None]
    if domain in open_ones:
        return domain
    if len(names) == 1 and open_ones:
        return names[0]
    raise RecipeError(
        f"{where}domain {domain!r} has no {role}: there are {', '.join(names)}. Add a teacher named {domain!r}, or list the "
        f"domain under one: `teachers: {{{names[0]}: {{…, domains: [{domain}]}}}}`."
    )


def by_teacher(rollouts: Sequence[Rollout], table: Mapping[str, str]) -> dict[str, list[Rollout]]:
    """The rollouts of a batch grouped by the teacher that scores them, in the order teachers first appear."""
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        if rollout.domain not in table:
            raise RecipeError(
                f"rollout {rollout.id!r} has the domain {rollout.domain!r}, which no teacher scores; known: {', '.join(table)}."
            )
        groups.setdefault(table[rollout.domain], []).append(rollout)
    return groups
