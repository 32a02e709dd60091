"""Which teacher scores which prompt: exactly one per role, by domain or by another column of its row.

Gaps and idle teachers are errors at start-up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from opd.common.errors import RecipeError
from opd.data.prompts import DOMAIN, route_value
from opd.records import Prompt, Rollout
from opd.teachers.kinds import TeacherKind

Routes = Mapping[str, Mapping[str, str]]  # role -> value of the column -> teacher


def routes(
    teachers: Mapping[str, TeacherKind],
    values: Iterable[str],
    roles: Iterable[str],
    where: str = "",
    column: str = DOMAIN,
    places: Mapping[str, str] | None = None,
) -> dict[str, dict[str, str]]:
    """{role: {value: teacher}} for every role the objective asks for. `where` names the stage, if there are several;
    `places`: where each value first occurs, for messages.

    A teacher scores the values in its `domains`, else the value with its name, else all if it is alone in its role.
    """
    known, table = list(dict.fromkeys(values)), {}
    for role in dict.fromkeys([*roles, *(kind.role for kind in teachers.values())]):
        names = [name for name, kind in teachers.items() if kind.role == role]
        if not names:
            raise RecipeError(
                f"{where}the objective asks for the role {role!r}, but no teacher has it. Add one under `teachers:`."
            )
        table[role] = {value: _pick(value, role, names, teachers, where, column, places or {}) for value in known}
        idle = [name for name in names if name not in table[role].values()]
        if idle:
            raise RecipeError(
                f"{where}teacher {idle[0]!r} scores no {column}: {_why_idle(idle[0], teachers, table[role], column)}"
            )
    return table


def require_known_domains(teachers: Mapping[str, TeacherKind], domains: Sequence[str], where: str) -> None:
    """Raises if a mixture has weights for unknown domains."""
    for name, kind in teachers.items():
        unknown = [domain for domain in kind.weighed_domains() if domain not in domains]
        if unknown:
            raise RecipeError(
                f"{where}teacher {name!r} has a weight for the domain {unknown[0]!r}, which no prompt has; they have "
                f"{', '.join(domains)}. Correct it."
            )


def _why_idle(name: str, teachers: Mapping[str, TeacherKind], table: Mapping[str, str], column: str) -> str:
    if teachers[name].domains is None and name in table:
        other = table[name]
        return f"{name!r} is listed under `domains` of {other!r}. Take it out of that list, or remove teacher {name!r}."
    if column == DOMAIN:
        return f"the prompts' domains are {', '.join(table)}. Name it after a domain, give it `domains: […]`, or remove it."
    shown = ", ".join(list(table)[:20])
    return (
        f"the values of that column are {shown}. Name it after one, list some under its `domains: […]`, or remove it."
    )


def _pick(
    value: str,
    role: str,
    names: Sequence[str],
    teachers: Mapping[str, TeacherKind],
    where: str,
    column: str,
    places: Mapping[str, str],
) -> str:
    listed = [name for name in names if value in (teachers[name].domains or [])]
    if len(listed) > 1:
        raise RecipeError(
            f"{where}{column} {value!r} is claimed by several teachers ({', '.join(listed)}); exactly one scores it."
        )
    if listed:
        return listed[0]
    open_ones = [name for name in names if teachers[name].domains is None]
    if value in open_ones:
        return value
    if len(names) == 1 and open_ones:
        return names[0]
    place = f" ({places[value]})" if value in places else ""
    raise RecipeError(
        f"{where}{column} {value!r}{place} has no {role}: there are {', '.join(names)}. Add a teacher named {value!r}, or list "
        f"it under one: `teachers: {{{names[0]}: {{…, domains: [{value}]}}}}`."
    )


def chooser(table: Mapping[str, str], column: str) -> Callable[[Prompt], str]:
    """The teacher of a prompt. Raises for values that were not known at start-up."""

    def choose(prompt: Prompt) -> str:
        value = route_value(prompt, column)
        if value not in table:
            raise RecipeError(
                f"prompt {prompt.id!r} has the {column} {value!r}, which no teacher scores; known: {', '.join(table)}."
            )
        return table[value]

    return choose


def one_per_domain(table: Mapping[str, str], found: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Domain -> teacher, for domains scored by a single teacher. `found`: (domain, value) of every prompt."""
    owners: dict[str, set[str]] = {}
    for domain, value in found:
        owners.setdefault(domain, set()).update([table[value]] if value in table else [])
    return {domain: next(iter(names)) for domain, names in owners.items() if len(names) == 1}


def by_teacher(
    rollouts: Sequence[Rollout], table: Mapping[str, str], value_of: Callable[[Rollout], str] = lambda item: item.domain
) -> dict[str, list[Rollout]]:
    """The rollouts of a batch grouped by the teacher that scores them, in the order teachers first appear."""
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        value = value_of(rollout)
        if value not in table:
            raise RecipeError(
                f"rollout {rollout.id!r} belongs to {value!r}, which no teacher scores; known: {', '.join(table)}."
            )
        groups.setdefault(table[value], []).append(rollout)
    return groups
