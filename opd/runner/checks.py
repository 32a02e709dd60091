"""Everything about a stage that can be found out before weights are loaded. `opd run` and `--dry-run` both come through here."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from opd.config import Stage
from opd.config.stage import WEIGHTS
from opd.data.parse import BadRow
from opd.data.prompts import DOMAIN
from opd.data.source import Source, Told, silent
from opd.data.sources import routed
from opd.errors import RecipeError
from opd.models import load_config, load_tokenizer, parameter_shapes
from opd.models.directory import reading_model
from opd.models.language_model import context_of
from opd.models.load import empty_model, locate
from opd.models.tokenizers import require_same
from opd.models.untrained import untrained_notes
from opd.remote import token_of
from opd.rewards import Rewarder, check_rewards
from opd.rewards.check import doubts
from opd.runner.hub import require_access
from opd.runner.prompts import Looked, look_at_prompts, open_beside, open_prompts
from opd.runner.shown import require_asked, require_shown
from opd.settings import MANY, StageView
from opd.teachers.kinds import ModelRef, Outlook
from opd.teachers.quantised import require_quantiser
from opd.teachers.router import chooser, one_per_domain, require_known_domains, routes
from opd.types import Prompt

LR_LEAST, LR_MOST = 1e-9, 1e-2  # AdamW moves every weight by about this much in a step; weights are about 0.02
RevisionOf = Callable[[str, str | None], str | None]  # (model, revision) -> the one that it is read at


def as_named(model: str, revision: str | None) -> str | None:
    return revision


@dataclass(frozen=True)
class Checked:
    """What the checks had to read anyway."""

    device: torch.device
    sources: list[Source]
    domains: list[str]
    routes: dict[str, dict[str, str]]  # role -> value of the route's column -> teacher
    teacher_of: dict[str, str]  # domain -> teacher, where one scores all of it
    rewarder: Rewarder
    student: Any  # its config
    inputs: Looked
    templates: dict[str, Any]  # teacher -> the tokenizer whose chat template its view uses


def check_stage(
    spec: Stage,
    resolve_model: Callable[[str], str],
    told: Told = silent,
    say: Callable[[str], None] | None = None,
    revision_of: RevisionOf = as_named,
) -> Checked:
    """Refuse what cannot work; what takes longest comes last. Servers may be away for now, but have to take our tokens."""
    device = pick_device(spec.device)
    for tracker in spec.log.to:
        tracker.require()
    require_access(spec, make=False)
    _require_places(spec, device)
    refs = dict.fromkeys(ref for kind in spec.teachers.values() for ref in kind.reads())
    own = ModelRef(spec.student.model, spec.student.revision)
    names = {ref: (resolve_model(ref.model), revision_of(ref.model, ref.revision)) for ref in (own, *refs)}
    configs = {name: load_config(*name) for name in names.values()}
    tokenizers = {name: load_tokenizer(*name) for name in names.values()}
    tokenizer, config = tokenizers[names[own]], configs[names[own]]
    with reading_model(own.model, "its config", None):
        untrained = untrained_notes(empty_model(config), spec.student.lora)
    sampled = [*_sampler_notes(spec, config), *untrained]
    for ref in dict.fromkeys(ref for kind in spec.teachers.values() if not kind.view.crosses for ref in kind.reads()):
        require_same(tokenizer, tokenizers[names[ref]], own.model, ref.model)
    if not any(found.eos_token_id is not None for found in (*configs.values(), *tokenizers.values())):
        _require_stop_id(spec, names.values())
    outlooks = _require_teachers(spec, tokenizer)
    sources = open_prompts(spec, told)
    examples = [prompt for source in sources for prompt in source.examples()]
    domains = list(dict.fromkeys(prompt.domain for prompt in examples))
    where = "" if spec.name == Stage.model_fields["name"].default else f"stage {spec.name!r}: "
    require_known_domains(spec.teachers, domains, where)
    found = routed(sources, spec.route)
    places = _first_places(found)
    roles = [role for term in spec.objective for role in term.roles]
    table = routes(spec.teachers, places, roles, where, spec.route, {} if spec.route == DOMAIN else places)
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
    beside = open_beside(spec, sources, told)
    further = [prompt for source in beside for prompt in source.examples()]
    measured = list(dict.fromkeys([*domains, *(prompt.domain for prompt in further)]))
    rewarder = check_rewards(spec.rewards, [*examples, *further], domains=measured, say=say)
    if spec.uses_rewards and not any(map(rewarder.covers, examples)):
        raise RecipeError(
            "the objective or a view uses rewards, but no prompt's answers can be rewarded. Give rows an `answer`, use a task, or set `rewards:`."
        )
    context = min([*map(context_of, configs.values()), *(outlook.context for outlook in outlooks)])
    inputs = look_at_prompts(spec, sources, beside, tokenizer, rewarder.covers, context, told)
    warned = _warnings(spec, outlooks, doubts(rewarder, [*examples, *further]))
    inputs = replace(inputs, notes=(*inputs.notes, *sampled, *warned))
    alone = one_per_domain(table.get("teacher", {}), found)
    return Checked(device, sources, domains, table, alone, rewarder, config, inputs, templates)


def _sampler_notes(spec: Stage, config: Any) -> list[str]:
    """Whether what samples is there, and how the student's adapters get to it where there is a choice; `config`: the student's."""
    wanted = spec.rollout.demonstrations
    if wanted is not None:
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
    """Where each value of the route's column first stands."""
    places: dict[str, str] = {}
    for (_, value), place in found.items():
        places.setdefault(value, place)
    return places


def _require_teachers(spec: Stage, tokenizer: Any) -> list[Outlook]:
    """What they read beside models is there, and has the signals that they are asked for; what servers say fits."""

    def with_hidden(role: str) -> bool:
        return all("hidden" in kind.offers for kind in spec.teachers.values() if kind.role == role)

    needs = [need for term in spec.objective for need in term.needs(spec.train.updates).settled(with_hidden)]
    for name, kind in spec.teachers.items():
        kind.require(name, tokenizer, {signal for role, signal in needs if role == kind.role})
    return [kind.inquire(name, tokenizer, spec.student.model) for name, kind in spec.teachers.items()]


def _train_warnings(spec: Stage) -> Iterator[str]:
    """Settings of the optimiser that can be carried out, and hardly can be meant."""
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
        yield f"WARNING: train.lr {train.lr:g} {effect} the student. Usual are {usual}."


def _warnings(spec: Stage, outlooks: Iterable[Outlook], doubtful: Sequence[str]) -> list[str]:
    """`doubtful`: rewards that hardly any answer can get."""
    view = StageView.of(spec)
    notes = [note for outlook in outlooks for note in outlook.notes]
    notes += [*_train_warnings(spec), *(doubtful if spec.uses_rewards or spec.eval.prompts else ())]
    return notes + [
        f"WARNING: teachers.{name}: {line}" for name, kind in spec.teachers.items() for line in kind.warn(view)
    ]


def _require_stop_id(spec: Stage, names: Iterable[tuple[str, str | None]]) -> None:
    """Of models whose configs and tokenizers name none: one in a generation config."""
    from transformers import GenerationConfig

    for location in (locate(*name) for name in names):
        with suppress(OSError):  # there is none
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
    """Every teacher's view has something to show that the teacher can read; so has what the student is shown."""
    for name, kind in spec.teachers.items():
        scored = partial(_scores, name, chooser(table[kind.role], spec.route))
        known = kind.reads() or kind.of_student  # what others can read is seen when they are opened
        context, written = contexts[name] if known else MANY, spec.rollout.experience is not None
        require_shown(name, kind.view, scored, sources, templates[name], context, written)
    require_asked(spec, sources)


def _scores(name: str, chosen: Callable[[Prompt], str], prompt: Prompt) -> bool:
    with suppress(BadRow):  # it is skipped, and has no teacher
        return chosen(prompt) == name
    return False


def _require_same_shapes(names: Iterable[tuple[str, str | None]]) -> None:
    shapes = [parameter_shapes(*name) for name in names]
    if any(other != shapes[0] for other in shapes):
        raise RecipeError(
            "eval.weight_average: the teachers do not have the same shapes, so their weights cannot be averaged. Set it to false."
        )


def _require_places(spec: Stage, device: torch.device) -> None:
    """Every teacher's device is there, and can do what is asked of it."""
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
