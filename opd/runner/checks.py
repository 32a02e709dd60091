"""Checks of a stage before any weights are loaded. `opd run` and `--dry-run` share them."""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
import torch

from opd.common.errors import DataError, RecipeError
from opd.common.http import token_of
from opd.common.text import plain
from opd.data.prompts import DOMAIN, fields_of, render_prompt
from opd.data.rows import BadRow
from opd.data.sources import (
    BadRows,
    OnProgress,
    Opening,
    PromptSource,
    Scanned,
    Source,
    open_sources,
    opened_by,
    routed,
    scan,
    silent,
)
from opd.data.stream import PromptStream
from opd.evaluation import Question
from opd.models import load_config, load_tokenizer, parameter_shapes
from opd.models.files import reading_model
from opd.models.language_model import context_of
from opd.models.load import empty_model, locate, untrained_notes
from opd.models.tokenizers import require_same, vocabulary_size
from opd.objective.term import scored_domains, vocabulary_mistakes
from opd.recipe import Stage
from opd.recipe.stage import WEIGHTS
from opd.records import Prompt
from opd.registry import MANY, StageView
from opd.rewards import Rewarder, check_rewards
from opd.rewards.rewarder import reward_warnings
from opd.rollouts.replay import require_drawn_alike
from opd.rollouts.settings import EXPERIENCE, HINT, KEPT, TRAJECTORIES, Experience
from opd.runner.checkpoint import require_access
from opd.runner.results import watched_domains
from opd.teachers.kinds import ModelRef, RemoteFacts, chooser, one_per_domain, require_known_domains, routes
from opd.teachers.quantised import require_quantiser
from opd.teachers.views import QUESTION, View, question

LR_LEAST, LR_MOST = 1e-9, 1e-2  # AdamW moves each weight by about the learning rate per step; weights are about 0.02
RevisionOf = Callable[[str, str | None], str | None]  # (model, revision) -> the revision to read


def as_named(model: str, revision: str | None) -> str | None:
    return revision


@dataclass(frozen=True)
class Checked:
    """Facts that the checks had to read anyway."""

    device: torch.device
    sources: list[Source]
    domains: list[str]
    routes: dict[str, dict[str, str]]  # role -> value of the route's column -> teacher
    teacher_of: dict[str, str]  # domain -> teacher, if one teacher scores the whole domain
    rewarder: Rewarder
    student: Any  # the student's config
    inputs: PromptScan
    templates: dict[str, Any]  # teacher -> the tokenizer whose chat template its view uses


def check_stage(
    spec: Stage,
    resolve_model: Callable[[str], str],
    on_progress: OnProgress = silent,
    say: Callable[[str], None] | None = None,
    revision_of: RevisionOf = as_named,
) -> Checked:
    """Reject what cannot work; slow checks come last. Servers may be offline, but they must use our tokenizer."""
    device = pick_device(spec.device)
    for tracker in spec.log.to:
        tracker.require()
    for optimiser in (spec.train.optimiser, *(module.optimiser for module in spec.modules.values())):
        optimiser.require()
    require_access(spec, make=False)
    _require_devices(spec, device)
    refs = dict.fromkeys(ref for kind in spec.teachers.values() for ref in kind.reads())
    own = ModelRef(spec.student.model, spec.student.revision)
    names = {ref: (resolve_model(ref.model), revision_of(ref.model, ref.revision)) for ref in (own, *refs)}
    configs = {name: load_config(*name) for name in names.values()}
    tokenizers = {name: load_tokenizer(*name) for name in names.values()}
    tokenizer, config = tokenizers[names[own]], configs[names[own]]
    sampled = [*_sampler_notes(spec, config), *_untrained(spec, own.model, config)]
    for ref in dict.fromkeys(ref for kind in spec.teachers.values() if not kind.view.crosses for ref in kind.reads()):
        require_same(tokenizer, tokenizers[names[ref]], own.model, ref.model)
    _require_tokenizers_of_modules(spec, tokenizer, resolve_model, revision_of)
    _require_known_ids(spec, tokenizer, config)
    if not any(found.eos_token_id is not None for found in (*configs.values(), *tokenizers.values())):
        _require_stop_id(spec, names.values())
    remotes = _require_teachers(spec, tokenizer)
    sources = open_prompts(spec, on_progress)
    examples = [prompt for source in sources for prompt in source.examples()]
    domains = list(dict.fromkeys(prompt.domain for prompt in examples))
    where = "" if spec.name == Stage.model_fields["name"].default else f"stage {spec.name!r}: "
    require_known_domains(spec.teachers, domains, where)
    found = routed(sources, spec.route)
    table = _routes(spec, found, domains, where)
    if spec.eval.prompts and spec.eval.weight_average:
        averaged = dict.fromkeys(table.get("teacher", {}).values())
        _require_same_shapes([names[ref] for name in averaged for ref in spec.teachers[name].reads()])
    read = {name: [names[ref] for ref in kind.reads()] or [names[own]] for name, kind in spec.teachers.items()}
    templates = {
        name: tokenizers[read[name][0]] if kind.view.chat_template == "teacher" else tokenizer
        for name, kind in spec.teachers.items()
    }
    contexts = {name: min(context_of(configs[model]) for model in models) for name, models in read.items()}
    _require_views(spec, table, sources, templates, contexts)
    extra_sources = open_further(spec, sources, on_progress)
    further = [prompt for source in extra_sources for prompt in source.examples()]
    measured = list(dict.fromkeys([*domains, *(prompt.domain for prompt in further)]))
    rewarder = check_rewards(spec.rewards, [*examples, *further], domains=measured, say=say)
    covers = rewarded_by(rewarder)
    _require_rewards(spec, map(covers, examples))
    context = min([*map(context_of, configs.values()), *(remote.context for remote in remotes)])
    inputs = scan_prompts(spec, sources, extra_sources, tokenizer, covers, context, on_progress)
    warned = _warnings(spec, remotes, reward_warnings(rewarder, [*examples, *further]))
    inputs = replace(inputs, notes=(*inputs.notes, *sampled, *warned))
    alone = one_per_domain(table.get("teacher", {}), found)
    return Checked(device, sources, domains, table, alone, rewarder, config, inputs, templates)


def _routes(
    spec: Stage, found: Mapping[tuple[str, str], str], domains: Sequence[str], where: str
) -> dict[str, dict[str, str]]:
    """Which teacher scores which value of the route's column, by role. `found`: (domain, value) -> its first place."""
    for number, term in enumerate(spec.objective):
        unknown = [domain for domain in term.domains or () if domain not in domains]
        if unknown:
            raise RecipeError(
                f"{where}objective term {number}: no prompt has the domain {unknown[0]!r}; they have {', '.join(domains[:SHOWN])}. "
                "Correct `domains`."
            )
    places = _first_places(found)
    roles = [role for term in spec.objective for role in term.roles]
    unscored = {
        role: _unscored(spec, role, found) for role in {*roles, *(kind.role for kind in spec.teachers.values())}
    }
    first = {} if spec.route == DOMAIN else places
    return routes(spec.teachers, places, roles, where, spec.route, first, unscored)


def _unscored(spec: Stage, role: str, found: Iterable[tuple[str, str]]) -> set[str]:
    """Values of the route's column that only domains have which no term of the role trains on. `found`: (domain, value)."""
    wanted = scored_domains(spec.objective, role)
    if wanted is None:
        return set()
    pairs = list(found)
    return {value for _, value in pairs} - {value for domain, value in pairs if domain in wanted}


def _untrained(spec: Stage, model: str, config: Any) -> list[str]:
    with reading_model(model, "its config", None):
        return untrained_notes(empty_model(config), spec.student.lora)


def _require_rewards(spec: Stage, covered: Iterable[bool]) -> None:
    if spec.uses_rewards and not any(covered):
        raise RecipeError(
            "the objective or a view uses rewards, but no prompt's answers can be rewarded. Give rows an `answer`, use a task, or set `rewards:`."
        )


def rewarded_by(rewarder: Rewarder) -> Callable[[Prompt], bool]:
    """Whether answers to a prompt can be rewarded: always, if its environment gives rewards."""
    return lambda prompt: (
        not prompt.plain
        and ((prompt.environment is not None and prompt.environment.rewards) or rewarder.covers(prompt))
    )


def _sampler_notes(spec: Stage, config: Any) -> list[str]:
    """Check that the sampler is available, and how it receives the student's adapters. `config`: the student's."""
    wanted = spec.rollout.demonstrations
    if wanted is not None:
        if wanted.endpoint is not None:
            token_of(wanted.endpoint.token_env, wanted.endpoint.address)
        if wanted.by is not None:
            wanted.by.require(spec.rewards.sandbox)
    found = list(spec.sampler.inquire())
    if spec.student.lora is None:
        return found
    if importlib.util.find_spec("peft") is None:
        raise RecipeError("student.lora needs the peft package: pip install 'opd[lora]'.")
    return [*found, *spec.sampler.adapter_notes(config, spec.student.lora)]


def _first_places(found: Mapping[tuple[str, str], str]) -> dict[str, str]:
    """The first place of each value of the route's column."""
    places: dict[str, str] = {}
    for (_, value), place in found.items():
        places.setdefault(value, place)
    return places


def _require_teachers(spec: Stage, tokenizer: Any) -> list[RemoteFacts]:
    """Check that teachers' other inputs exist and offer the needed signals, and that servers' answers fit."""

    def with_hidden(role: str) -> bool:
        return all("hidden" in kind.offers for kind in spec.teachers.values() if kind.role == role)

    needs = [need for term in spec.objective for need in term.needs(spec.train.updates).chosen(with_hidden)]
    for name, kind in spec.teachers.items():
        kind.require(name, tokenizer, {signal for role, signal in needs if role == kind.role})
    return [kind.inquire(name, tokenizer, spec.student.model) for name, kind in spec.teachers.items()]


def _train_warnings(spec: Stage) -> Iterator[str]:
    """Warn about optimiser settings that are valid but probably not intended."""
    train = spec.train
    if not train.learn:
        return
    if train.warmup > train.steps:
        yield (
            f"WARNING: train.warmup {train.warmup} is longer than train.steps {train.steps}: the learning rate ends at "
            f"{train.lr * train.steps / train.warmup:.2g} and never reaches train.lr {train.lr:g}. Lower warmup."
        )
    usual = (
        "1e-5 to 1e-3 for LoRA adapters" if spec.student.lora is not None else "1e-6 to 1e-4 for all weights of a model"
    )
    if not LR_LEAST <= train.lr <= LR_MOST:
        effect = "will hardly move" if train.lr < LR_LEAST else "will very likely destroy"
        yield f"WARNING: train.lr {train.lr:g} {effect} the student. Usual values are {usual}."


def _warnings(spec: Stage, remotes: Iterable[RemoteFacts], doubtful: Sequence[str]) -> list[str]:
    """`doubtful`: warnings about rewards that hardly any answer can get."""
    view = StageView.of(spec)
    notes = [note for remote in remotes for note in remote.notes]
    notes += [*_train_warnings(spec), *(doubtful if spec.uses_rewards or spec.eval.prompts else ())]
    seen = [*spec.environments, *(source.environment for source in spec.eval.further if source.environment is not None)]
    if spec.eval.prompts and any(environment.effects == "outside" for environment in seen):
        notes.append(
            "WARNING: evaluation also plays environments with effects outside, and does not log their steps: an interrupted one is "
            "repeated with all its effects. If that must not happen, set eval.prompts: 0."
        )
    return notes + [
        f"WARNING: teachers.{name}: {line}" for name, kind in spec.teachers.items() for line in kind.warn(view)
    ]


def _require_stop_id(spec: Stage, names: Iterable[tuple[str, str | None]]) -> None:
    """Require a stop id in some generation config, for models without one in config and tokenizer."""
    from transformers import GenerationConfig

    for location in (locate(*name) for name in names):
        with suppress(OSError):  # the model has no generation config
            if GenerationConfig.from_pretrained(location.path, **location.arguments).eos_token_id is not None:
                return
    raise RecipeError(
        f"student {spec.student.model!r} and its teachers name no stop id. Set eos_token_id in a generation_config.json."
    )


def _require_views(
    spec: Stage,
    table: Mapping[str, Mapping[str, str]],
    sources: Sequence[Source],
    templates: Mapping[str, Any],
    contexts: Mapping[str, int],
) -> None:
    """Every teacher's view, and every view of the student, must have something to show that its reader can take."""
    for name, kind in spec.teachers.items():
        scored = partial(_scores, name, chooser(table[kind.role], spec.route))
        known = kind.reads() or kind.of_student  # the context of others is known when they are opened
        context, written = contexts[name] if known else MANY, spec.rollout.experience is not None
        require_shown(name, kind.view, scored, sources, templates[name], context, written)
    require_further_texts(spec, sources)


def _scores(name: str, chosen: Callable[[Prompt], str], prompt: Prompt) -> bool:
    with suppress(BadRow, RecipeError):  # such a row is skipped, or no term compares it with a teacher
        return chosen(prompt) == name
    return False


def _require_same_shapes(names: Iterable[tuple[str, str | None]]) -> None:
    shapes = [parameter_shapes(*name) for name in names]
    if any(other != shapes[0] for other in shapes):
        raise RecipeError(
            "eval.weight_average: the teachers do not have the same shapes, so their weights cannot be averaged. Set it to false."
        )


def _require_tokenizers_of_modules(
    spec: Stage, tokenizer: Any, resolve_model: Callable[[str], str], revision_of: RevisionOf
) -> None:
    """Modules with a model of their own read the student's token ids."""
    start = spec.student.model, spec.student.revision
    for model, revision in (ref for module in spec.modules.values() for ref in module.reads(*start)):
        read = load_tokenizer(resolve_model(model), revision_of(model, revision))
        require_same(tokenizer, read, spec.student.model, model)


def _require_known_ids(spec: Stage, tokenizer: Any, config: Any) -> None:
    """Ids that the objective names exist. Stop ids may be beyond those of the tokenizer."""
    stops = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    known = [stop for stop in stops if stop is not None]
    mistakes = vocabulary_mistakes(spec.objective, vocabulary_size(tokenizer, known, MANY))
    if mistakes:
        raise RecipeError("\n".join(mistakes))


def _require_devices(spec: Stage, device: torch.device) -> None:
    """Check that every teacher's device exists and can do what is asked of it."""
    usual = WEIGHTS[spec.train.precision_on(str(device))]
    for name, ref in ((name, ref) for name, kind in spec.teachers.items() for ref in kind.reads()):
        if ref.device is not None:
            pick_device(ref.device, f"teachers.{name}: ")
        if ref.quantise is not None:
            require_quantiser(f"teachers.{name}", ref.quantise, ref.dtype or usual, ref.device or str(device))


def pick_device(name: str, whose: str = "") -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", name):
        raise RecipeError(f"{whose}device {name!r}: expected auto, cpu, cuda or cuda:N.")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RecipeError(f"{whose}device {name!r}: no CUDA device is visible. Set device: cpu or auto.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise RecipeError(
            f"{whose}device {name!r}: there are {torch.cuda.device_count()} CUDA devices, counted from 0."
        )
    return device


# --- The prompts of a stage: check every training prompt and choose the held-out ones ---
#
# `opd run` and `--dry-run` both call `open_prompts`, which needs no tokenizer, and then `scan_prompts`.


SHOWN = 20  # domains listed in one line


@dataclass(frozen=True)
class PromptScan:
    """The result of the scan."""

    scanned: Scanned
    questions: dict[str, list[Question]]  # by domain
    room: int  # tokens that a prompt may have in the sampler
    notes: tuple[str, ...]  # what is skipped, for the user


def open_prompts(spec: Stage, on_progress: OnProgress = silent) -> list[Source]:
    sources = open_sources(
        spec.prompts,
        bad_rows=spec.data.bad_rows,
        rewarded=spec.rewards.need_no_answer,
        route=spec.route,
        on_progress=on_progress,
        environment=spec.rollout.environment,
    )
    require_drawn_alike(sources, spec.rollout)
    open_stream(spec, sources)  # what it rejects is rejected by `--dry-run`, too
    return sources


def open_stream(spec: Stage, sources: list[Source]) -> PromptStream:
    """The order in which a stage takes prompts: by fixed shares, a rule, or a curriculum."""
    stream = PromptStream(sources, [source.share for source in spec.prompts], spec.seed)
    stream.steer(spec.shares)
    stream.follow(spec.curriculum)
    return stream


def further_sources(spec: Stage) -> list[PromptSource]:
    """The sources of `eval.further` that the stage does not also train on."""
    own = [source.model_copy(update={"share": 1.0}) for source in spec.prompts]
    return [source for source in spec.eval.further if source.model_copy(update={"share": 1.0}) not in own]


def open_further(spec: Stage, sources: list[Source], on_progress: OnProgress = silent) -> list[Source]:
    """Open the sources of `eval.further`. Their held-out prompts are kept out of training."""
    labels, opened = [source.label for source in spec.prompts], []
    for further in further_sources(spec):
        labels.append(further.label)
        again = labels.count(further.label)  # ids differ if the same source is asked with other options
        label = f"{further.label}#{again}" if again > 1 else further.label
        opened.append(
            further.open(
                Opening(
                    label,
                    spec.data.bad_rows,
                    spec.rewards.need_no_answer,
                    on_progress=on_progress,
                    opened=opened_by(further, spec.rollout.environment),
                )
            )
        )
    for source in sources if opened else ():
        source.keep_apart([*sources, *opened])
    return opened


def scan_prompts(
    spec: Stage,
    sources: Sequence[Source],
    further: Sequence[Source],
    tokenizer: Any,
    covers: Callable[[Prompt], bool],
    context: int,
    on_progress: OnProgress = silent,
) -> PromptScan:
    """`context`: the shortest of student and teachers. `covers`: whether answers to a prompt can be rewarded."""
    limit, why = prompt_limit(spec, context)
    bad_rows, count = spec.data.bad_rows, spec.eval.prompts
    found = scan(
        sources,
        spec.prompts,
        tokenizer,
        limit=limit,
        why=why,
        columns=tuple(dict.fromkeys(writer.reads for writer in spec.rollout.everyone if writer.reads)),
        bad_rows=bad_rows,
        on_progress=on_progress,
    )
    held = HeldOut()
    if count:
        held = choose_held_out(
            sources, spec.prompts, covers, tokenizer, count=count, limit=limit, why=why, bad_rows=bad_rows
        )
        if further:
            held.add(
                choose_held_out(
                    further,
                    further_sources(spec),
                    covers,
                    tokenizer,
                    count=count,
                    limit=limit,
                    why=why,
                    bad_rows=bad_rows,
                ),
                count,
            )
    questions = {domain: asked for domain, asked in held.questions.items() if asked}
    if questions:
        watched_domains(spec.eval.metric, list(questions))
    room = found.room(held.longest, limit, spec.rollout.max_prompt_tokens)
    notes = [*found.notes, *held.notes, *asked_in_words(questions, sources)]
    return PromptScan(found, questions, room, tuple(notes))


def response_limit(spec: Stage) -> int:
    return max(spec.rollout.max_new_tokens, spec.eval.max_new_tokens or 0)


def prompt_limit(spec: Stage, context: int) -> tuple[int, str]:
    """The most tokens a prompt may have, and the setting that limits it."""
    response, wanted = response_limit(spec), spec.rollout.max_prompt_tokens
    if wanted is not None and wanted <= context - response:
        return wanted, f"rollout.max_prompt_tokens is {wanted:,}"
    return context - response, f"the context is {context:,} and rollout.max_new_tokens {response:,}"


# --- Held-out prompts ---


def asked_in_words(questions: Mapping[str, Sequence[Question]], sources: Sequence[Source]) -> list[str]:
    """How many prompts each domain asks, and which trained domains ask none."""
    if not questions:
        return []
    trained = dict.fromkeys(prompt.domain for source in sources for prompt in source.examples())
    missing = [plain(domain) for domain in trained if domain not in questions]
    asked = [f"{len(some):,} of {plain(domain)}" for domain, some in questions.items()]
    lines = [f"evaluation: held-out prompts: {_first_few(asked)}"]
    if missing:
        lines.append(
            f"WARNING: evaluation: no held-out prompts of {_first_few(missing)}, which is trained on. A domain needs two "
            "different questions, with answers that can be rewarded"
        )
    return lines


def _first_few(words: Sequence[str]) -> str:
    more = f" and {len(words) - SHOWN:,} more domains" if len(words) > SHOWN else ""
    return ", ".join(words[:SHOWN]) + more


@dataclass
class HeldOut:
    """Questions by domain, and notes on what was left out of each source."""

    questions: dict[str, list[Question]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, other: HeldOut, count: int) -> None:
        """Add questions, up to `count` per domain, without duplicates."""
        for domain, asked in other.questions.items():
            own = self.questions.setdefault(domain, [])
            known = {question.prompt_ids.tobytes() for question in own}
            own += [question for question in asked if question.prompt_ids.tobytes() not in known][: count - len(own)]
        self.notes += other.notes

    @property
    def longest(self) -> int:
        return max((question.prompt_ids.size for asked in self.questions.values() for question in asked), default=0)


@dataclass
class HeldOutFilter:
    """Decides whether a prompt of a source is asked. Keeps the ids of those asked and counts the others."""

    spec: PromptSource
    covers: Callable[[Prompt], bool]
    tokenizer: Any
    limit: int
    why: str
    remedy: str = ""  # what to do about a prompt that is too long; empty: leave it out
    ids: dict[str, np.ndarray] = field(default_factory=dict)
    unrewarded: int = 0
    too_long: int = 0
    unreadable: int = 0

    def __call__(self, prompt: Prompt) -> bool:
        if not self.covers(prompt):
            self.unrewarded += 1
            return False
        try:
            ids = render_prompt(prompt, self.tokenizer, self.spec.chat_template_kwargs, whole=not self.spec.older)
        except DataError:
            if self.remedy:
                raise
            self.unreadable += 1
            return False
        if ids.size > self.limit:
            if self.remedy:
                fit = f"at most {max(self.limit, 0):,} fit ({self.why})"
                raise DataError(f"prompt {prompt.id!r} has {ids.size:,} tokens, and {fit}. {self.remedy}")
            self.too_long += 1
            return False
        self.ids[prompt.id] = ids
        return True

    def notes(self, source: str) -> list[str]:
        """What was left out, for the user."""
        left = {
            "cannot be rewarded": self.unrewarded,
            f"are too long ({self.why})": self.too_long,
            "cannot be rendered by the chat template": self.unreadable,
        }
        return [f"evaluation: {count:,} prompts of {plain(source)} {words}" for words, count in left.items() if count]


def choose_held_out(
    sources: Sequence[Source],
    specs: Sequence[PromptSource],
    covers: Callable[[Prompt], bool],
    tokenizer: Any,
    *,
    count: int,
    limit: int,
    why: str,
    bad_rows: BadRows,
) -> HeldOut:
    """Choose at most `count` questions per domain. Users cannot fix the rows of an endless source, so prompts that are too long are left out there."""
    found = HeldOut()
    for spec, source in zip(specs, sources, strict=True):
        fix = bad_rows == "stop" and source.size is not None
        remedy = "Shorten it, or leave such rows out: `data: {bad_rows: skip}`." if fix else ""
        chosen = HeldOutFilter(spec, covers, tokenizer, limit, why, remedy)
        for prompt in source.held_out(count, chosen):
            asked = found.questions.setdefault(prompt.domain, [])
            if len(asked) < count:
                asked.append(Question(prompt, chosen.ids[prompt.id], spec.chat_template_kwargs))
        found.notes += chosen.notes(source.name)
    if not any(found.questions.values()):
        found.notes.append(
            "evaluation: none, because no answer to a held-out prompt can be rewarded. Give rows an `answer`, set `rewards`, or eval.prompts: 0"
            if any(source.size != 1 for source in sources)
            else "evaluation: none, because no prompt is held out: a file holds out a tenth of its questions, and none if it has a "
            "single question. Set eval.further to a source of prompts, or eval.prompts: 0"
        )
    return found


# --- Whether each view has anything to show ---


FIRST = 64  # prompts checked in an endless source
LOOKED = 1000  # rendered prompts that are too long before all are assumed to be


def require_shown(
    name: str,
    view: View,
    scored: Callable[[Prompt], bool],
    sources: Sequence[Source],
    tokenizer: Any,
    context: int,
    written: bool = False,
) -> None:
    """Reject a view that has nothing to show for any prompt, or more than the teacher can read: it would mask all of them.

    `written`: whether an experience will be written.
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
    """The end of a sentence: the missing field, a similar name, and the fields that rows have."""
    fields = dict.fromkeys(field for prompt in prompts for field in prompt.fields)
    missing = [name for name in sorted(named) if name not in fields]
    near = difflib.get_close_matches(missing[0], [QUESTION, *fields], n=1) if missing else []
    which = f": none has the field {missing[0]!r}" if missing else ""
    meant = f"; did you mean {near[0]!r}?" if near else "."
    remedy = "Correct the name, or add a column." if missing else "Add a column, or choose another view."
    return f"{which}{meant} Their fields are {', '.join(fields) or 'none'}. {remedy}"


def require_further_texts(spec: Stage, sources: Sequence[Source]) -> None:
    """Check that each further text shown to the student or an endpoint can be rendered for at least one row."""
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
        named = set(fields_of(wanted.template)) - {QUESTION, KEPT}
        asked.append(("rollout.demonstrations", named, lambda prompt: wanted.question("", prompt)))
    for where, named, ask in asked:
        prompts = [prompt for source in sources for prompt in source.examples()]
        every = chain(prompts, (prompt for source in sources for prompt in _rows(source)))
        if prompts and not any(ask(prompt) is not None for prompt in every):
            raise RecipeError(f"{where}: there is nothing to show for any prompt{_why_nothing(named, prompts)}")


def shown_room(spec: Stage, sources: Sequence[Source], tokenizer: Any, context: int) -> int:
    """Tokens that a sequence needs in the sampler when the student, or a hint's writer, reads more than the prompt.

    Measured on the prompts that can be read, plus a quarter. Longer texts later in the run are not shown, and are counted.
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
    """The question about answers of the greatest length, at four characters per token."""
    trajectories = "\n\n".join([question(prompt) + "x " * 2 * new_tokens] * spec.trajectories)
    found: Prompt | None = spec.question.rewrite(replace(prompt, fields={**prompt.fields, TRAJECTORIES: trajectories}))
    return found


def _rows(source: Source) -> Iterator[Prompt]:
    """All readable prompts; of endless sources, the first ones."""
    for index in range(source.size if source.size is not None else FIRST):
        with suppress(DataError):  # the scan reports such rows
            yield source.train(index)
