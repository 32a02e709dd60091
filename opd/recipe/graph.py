"""The graph of stages: what each stage needs, the order in which they run, which ones were requested, and a drawing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from opd.common.errors import RecipeError
from opd.recipe.stage import Recipe, Stage
from opd.registry import nearest

LONGEST = 160  # characters of a text in a drawing
STAGE_PREFIX = "stage:"  # `student: stage:NAME` is the model that stage NAME saved


@dataclass(frozen=True)
class Edge:
    """Something that a stage takes from another stage."""

    stage: str  # the one it comes from
    key: str  # the key that says so
    label: str  # in a drawing
    rollouts: bool = False  # rollouts or scores, not only the model


def edges(stage: Stage) -> list[Edge]:
    """Everything that a stage names by `stage:NAME`."""
    return [edge for edge in _every(stage) if edge.stage]


def _every(stage: Stage) -> Iterator[Edge]:
    yield from (Edge(_name(model), "student", _start_label(stage, model)) for model in stage.starts)
    for name, kind in stage.teachers.items():
        yield from (Edge(_name(ref.model), f"teachers.{name}", f"teaches {name}") for ref in kind.reads())
        yield from (Edge(_name(run), f"teachers.{name}.run", f"scores as {name}", True) for run in kind.earlier())
    for number, source in enumerate(stage.prompts):
        yield Edge(_name(source.source), f"prompts.{number}.source", "rollouts", True)
    for number, source in enumerate(stage.eval.further):
        yield Edge(_name(source.source), f"eval.further.{number}.source", "questions", True)
    for name, module in stage.modules.items():
        for model, _ in module.reads("", None):
            yield Edge(_name(model), f"modules.{name}.model", f"starts {name}")
        if module.source is not None:
            yield Edge(module.source[0], f"modules.{name}.weights", f"starts {name}")
    if stage.select is not None:
        yield Edge(stage.select.stage, "select.stage", "selects prompts")


def _start_label(stage: Stage, model: str) -> str:
    merge = stage.student.merge
    return "starts" if merge is None else "base" if model == merge.start else "merged"


def _name(address: str) -> str:
    """The stage that an address names; empty if it names none."""
    return address.removeprefix(STAGE_PREFIX) if address.startswith(STAGE_PREFIX) else ""


def in_order(stages: Sequence[Stage]) -> list[Stage]:
    """Every stage after those that it needs, otherwise in the order of the recipe."""
    names = [stage.name for stage in stages]
    for number, stage in enumerate(stages):
        for edge in edges(stage):
            if edge.stage == stage.name or edge.stage not in names:
                others = names[:number] if edge.stage == stage.name else [name for name in names if name != stage.name]
                raise RecipeError(
                    f"stages.{stage.name}.{edge.key}: no other stage is called {edge.stage!r}; "
                    f"{nearest(edge.stage, others) if others else 'there are none'}"
                )
        _require_modules(stage, {other.name: other for other in stages})
    needs = {stage.name: {edge.stage for edge in edges(stage)} for stage in stages}
    found: list[Stage] = []
    left = list(stages)
    while left:
        done = {stage.name for stage in found}
        ready = next((stage for stage in left if needs[stage.name] <= done), None)
        if ready is None:
            raise RecipeError(
                f"stages: {' -> '.join(_cycle(needs, left[0].name, done))}: each needs the next, so none can begin. "
                "Let one of them start from something else (a stage without a student of its own continues the one before it)."
            )
        found.append(ready)
        left.remove(ready)
    return found


def _require_modules(stage: Stage, stages: Mapping[str, Stage]) -> None:
    """Reject weights of a module that an earlier stage does not have, or that is of another kind there."""
    for name, module in stage.modules.items():
        if module.source is None:
            continue
        source, wanted = module.source
        known = stages[source].modules
        where = f"stages.{stage.name}.modules.{name}.weights {module.weights}"
        if wanted not in known:
            raise RecipeError(
                f"{where}: stage {source!r} has no module {wanted!r}; "
                f"{nearest(wanted, list(known)) if known else 'it has none'}."
            )
        if known[wanted].name != module.name:
            raise RecipeError(
                f"{where}: it is of kind {known[wanted].name} there, and of kind {module.name} here. Use the same kind."
            )


def _cycle(needs: dict[str, set[str]], name: str, done: set[str]) -> list[str]:
    """A cycle of stages that wait for each other."""
    path = [name]
    while path.count(path[-1]) == 1:
        path.append(min(needs[path[-1]] - done))
    return path[path.index(path[-1]) :]


# The stages to run


@dataclass(frozen=True)
class ChosenStages:
    """The stages that this process runs: all, a range, or one."""

    only: str | None = None
    start: str | None = None  # --from
    until: str | None = None

    @property
    def runs_named(self) -> bool:
        """Whether the user named stages that must run rather than be reused."""
        return self.only is not None or self.start is not None

    def names(self, recipe: Recipe) -> list[str]:
        every = [stage.name for stage in recipe.stages]
        for option, name in (("only", self.only), ("from", self.start), ("until", self.until)):
            if name is not None and name not in every:
                raise RecipeError(f"--{option} {name!r}: there is no such stage; {nearest(name, every)}")
        if self.only is not None:
            if self.start is not None or self.until is not None:
                raise RecipeError("--only names the one stage that is to run: drop --from and --until.")
            return [self.only]
        first = 0 if self.start is None else every.index(self.start)
        last = len(every) - 1 if self.until is None else every.index(self.until)
        if last < first:
            raise RecipeError(
                f"--from {self.start!r} comes after --until {self.until!r}. The order is {', '.join(every)}."
            )
        return every[first : last + 1]

    def require(self, recipe: Recipe, elsewhere: bool) -> None:
        """Reject choices that can never work. `elsewhere`: missing stages may be finished in another run."""
        chosen = self.names(recipe)
        if not elsewhere:
            require_reachable(recipe, chosen, ())


def require_reachable(recipe: Recipe, chosen: Sequence[str], done: Sequence[str]) -> None:
    """Reject stages that need a stage which is not finished and will not run."""
    for stage in recipe.stages:
        for edge in edges(stage) if stage.name in chosen and stage.name not in done else ():
            if edge.stage not in chosen and edge.stage not in done:
                raise RecipeError(
                    f"stage {stage.name!r} needs stage {edge.stage!r} ({edge.key}), which is left out and not finished here. Run "
                    f"it first, or take it from a run that has it finished with the same settings and inputs: --reuse DIR."
                )


# A drawing


def mermaid(recipe: Recipe) -> str:
    """The graph in Mermaid, which GitHub and many editors draw."""
    numbers = {stage.name: f"s{number}" for number, stage in enumerate(recipe.stages)}
    outside: dict[str, str] = {}
    lines = ["flowchart LR"]
    lines += [f'  {numbers[stage.name]}["{_quoted(_title(stage))}"]' for stage in recipe.stages]
    drawn: list[str] = []
    for stage in recipe.stages:
        here, inner = numbers[stage.name], edges(stage)
        by_stage = {
            name: [edge.label for edge in inner if edge.stage == name] for name in {e.stage: None for e in inner}
        }
        for name, labels in by_stage.items():
            drawn.append(f'  {numbers[name]} -->|"{_quoted(", ".join(dict.fromkeys(labels)))}"| {here}')
        models = [(model, _start_label(stage, model)) for model in stage.starts]
        models += [(ref.model, f"teaches {name}") for name, kind in stage.teachers.items() for ref in kind.reads()]
        by_model: dict[str, list[str]] = {}
        for model, label in models:
            if not model.startswith(STAGE_PREFIX):
                by_model.setdefault(model, []).append(label)
        for model, labels in by_model.items():
            outside.setdefault(model, f"m{len(outside)}")
            drawn.append(f'  {outside[model]} -.->|"{_quoted(", ".join(dict.fromkeys(labels)))}"| {here}')
    lines += [f'  {number}(["{_quoted(model)}"])' for model, number in outside.items()]
    return "\n".join([*lines, *drawn]) + "\n"


def _title(stage: Stage) -> str:
    forms = ", ".join(dict.fromkeys(term.name for term in stage.objective) or stage.modules)
    ends = [f"{stage.train.steps} steps"]
    ends += [] if stage.train.tokens is None else [f"{stage.train.tokens} tokens"]
    ends += [] if stage.eval.early_stop is None else [stage.eval.early_stop.in_words()]
    return f"{stage.name}: {forms}, {' or '.join(ends)}"


def _quoted(text: str) -> str:
    """Text within double quotes, with Mermaid's entities."""
    return "".join(char if char.isalnum() or char in " _-.,:/@+" else f"#{ord(char)};" for char in text[:LONGEST])
