"""Whether a teacher's view has anything to show, found out before weights are loaded."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any

from opd.config import Stage
from opd.data.questions import fields_of
from opd.data.render import render_prompt
from opd.data.source import Source
from opd.errors import DataError, RecipeError
from opd.sampling.experience import EXPERIENCE, TRAJECTORIES, Experience
from opd.sampling.rescue import HINT
from opd.teachers.views import QUESTION, View, question
from opd.types import Prompt

FIRST = 64  # prompts of a source without end that are looked at
LOOKED = 1000  # prompts that are rendered before all are taken to be too long


def require_shown(
    name: str,
    view: View,
    scored: Callable[[Prompt], bool],
    sources: Sequence[Source],
    tokenizer: Any,
    context: int,
    written: bool = False,
) -> None:
    """A view that has nothing to show for any prompt, or more than the teacher can read, would mask them all.

    `written`: whether an experience will be.
    """
    if view.as_sampled:
        return
    later = {EXPERIENCE: " "} if written else {}
    prompts = [prompt for source in sources for prompt in source.examples() if scored(prompt)]
    every = chain(prompts, (prompt for source in sources for prompt in _rows(source) if scored(prompt)))
    sizes: list[int] = []
    knowing = (replace(prompt, fields={**prompt.fields, **later}) for prompt in every)
    for rewritten in filter(None, map(view.rewrite, knowing)):
        sizes.append(render_prompt(rewritten, tokenizer).size)
        if sizes[-1] + view.skip < context:
            return
        if len(sizes) == LOOKED:
            break
    if sizes:
        raise RecipeError(
            f"teachers.{name}: with the view {view.name} the shortest prompt that it scores has {min(sizes):,} tokens, and the "
            f"teacher reads {context:,} with the answer: every sample would be masked. Show less, or set `longest` where the view has it."
        )
    raise RecipeError(
        f"teachers.{name}: the view {view.name} has nothing to show for any prompt that it scores"
        f"{_why_nothing(view.shows() - later.keys(), prompts)}"
    )


def _why_nothing(named: Collection[str], prompts: Iterable[Prompt]) -> str:
    """The end of a sentence: the field that is missing, the one that may have been meant, and those that rows have."""
    fields = dict.fromkeys(field for prompt in prompts for field in prompt.fields)
    missing = [name for name in sorted(named) if name not in fields]
    near = difflib.get_close_matches(missing[0], [QUESTION, *fields], n=1) if missing else []
    which = f": none has the field {missing[0]!r}" if missing else ""
    meant = f"; did you mean {near[0]!r}?" if near else "."
    remedy = "Correct the name, or add a column." if missing else "Add a column, or choose another view."
    return f"{which}{meant} Their fields are {', '.join(fields) or 'none'}. {remedy}"


def require_asked(spec: Stage, sources: Sequence[Source]) -> None:
    """Texts that the student or an endpoint is asked with beside the prompts: each can be made of some row."""
    rollout, asked = spec.rollout, list[tuple[str, Collection[str], Callable[[Prompt], object]]]()
    for key, writer in rollout.writers_by_key.items():
        if writer.shows_more:
            asked.append((f"rollout.{key}", writer.shows(), writer.asks))
    if (rescue := rollout.rescue) is not None:
        named = rescue.view.shows() - ({HINT} if rescue.hint is not None else set())
        asked.append(("rollout.rescue", named, lambda prompt: rescue.view.rewrite(rescue.shortest(prompt))))
        if rescue.hint is not None:
            asked.append(("rollout.rescue.hint", rescue.hint.question.shows(), rescue.hint.question.rewrite))
    if (wanted := rollout.demonstrations) is not None:
        named = set(fields_of(wanted.template)) - {QUESTION}
        asked.append(("rollout.demonstrations", named, lambda prompt: wanted.question("", prompt)))
    for where, named, ask in asked:
        prompts = [prompt for source in sources for prompt in source.examples()]
        every = chain(prompts, (prompt for source in sources for prompt in _rows(source)))
        if prompts and not any(ask(prompt) is not None for prompt in every):
            raise RecipeError(f"{where}: there is nothing to show for any prompt{_why_nothing(named, prompts)}")


def shown_room(spec: Stage, sources: Sequence[Source], tokenizer: Any, context: int) -> int:
    """Tokens that a sequence needs in the sampler where the student, or who writes hints, reads more than the prompt.

    Of the prompts that can be looked at, with a quarter to spare; what is longer later is not shown, and counted.
    """
    rollout, longest = spec.rollout, 0
    rescue = rollout.rescue
    reads = [(writer.asks, rollout.max_new_tokens) for writer in rollout.everyone if writer.shows_more]
    if rescue is not None:
        hint = 0 if rescue.hint is None else rescue.hint.max_new_tokens
        reads.append((lambda prompt: rescue.view.rewrite(rescue.shortest(prompt)), hint + rollout.max_new_tokens))
        if rescue.hint is not None:
            reads.append((rescue.hint.question.rewrite, hint))
    if rollout.experience is not None:
        reads.append(
            (partial(_experience, rollout.experience, rollout.max_new_tokens), rollout.experience.max_new_tokens)
        )
    for source in sources if reads else ():
        for prompt in islice(chain(source.examples(), _rows(source)), LOOKED):
            for read, new_tokens in reads:
                shown = read(prompt)
                if shown is not None:
                    longest = max(longest, render_prompt(shown, tokenizer).size + new_tokens)
                if longest >= context:
                    return context
    return min(longest + longest // 4, context)


def _experience(spec: Experience, new_tokens: int, prompt: Prompt) -> Prompt | None:
    """What is asked about answers as long as they may be; a token is taken to have four characters."""
    told = "\n\n".join([question(prompt) + "x " * 2 * new_tokens] * spec.trajectories)
    found: Prompt | None = spec.question.rewrite(replace(prompt, fields={**prompt.fields, TRAJECTORIES: told}))
    return found


def _rows(source: Source) -> Iterator[Prompt]:
    """Every prompt that can be read; of sources without end, the first ones."""
    for index in range(source.size if source.size is not None else FIRST):
        with suppress(DataError):  # it is told where rows are scanned
            yield source.train(index)
