"""Everything about a stage that can be found out before weights are loaded. `opd run` and `--dry-run` both come through here."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from opd.config import Stage
from opd.data.render import render_prompt
from opd.data.source import Source, Told, silent
from opd.errors import DataError, RecipeError
from opd.models import load_config, load_tokenizer, parameter_shapes
from opd.models.language_model import context_of
from opd.models.load import locate
from opd.models.tokenizers import require_same
from opd.rewards import Rewarder, check_rewards
from opd.runner.hub import require_access
from opd.runner.prompts import Looked, look_at_prompts, open_prompts
from opd.settings import StageView
from opd.teachers.router import routes
from opd.teachers.views import SameView, View
from opd.types import Prompt


@dataclass(frozen=True)
class Checked:
    """What the checks had to read anyway."""

    device: torch.device
    sources: list[Source]
    domains: list[str]
    routes: dict[str, dict[str, str]]
    rewarder: Rewarder
    configs: dict[str, Any]  # of the student, "", and of the models of teachers
    inputs: Looked


def check_stage(
    spec: Stage,
    resolve_model: Callable[[str], str],
    told: Told = silent,
    say: Callable[[str], None] | None = None,
) -> Checked:
    """Refuse what cannot work; what takes longest comes last."""
    device = pick_device(spec.device)
    for tracker in spec.log.to:
        tracker.require()
    require_access(spec, make=False)
    if spec.student.lora is not None and importlib.util.find_spec("peft") is None:
        raise RecipeError("student.lora needs the peft package: pip install 'opd[lora]'.")
    names = {"": (resolve_model(spec.student.model), spec.student.revision)}
    refs = dict.fromkeys(ref for kind in spec.teachers.values() for ref in kind.reads())
    names |= {ref.model: (resolve_model(ref.model), ref.revision) for ref in refs}
    configs = {key: load_config(*name) for key, name in names.items()}
    tokenizers = {key: load_tokenizer(*name) for key, name in names.items()}
    for ref in refs:
        require_same(tokenizers[""], tokenizers[ref.model], spec.student.model, ref.model)
    if not any(config.eos_token_id is not None for config in configs.values()) and not any(
        tokenizer.eos_token_id is not None for tokenizer in tokenizers.values()
    ):
        _require_stop_id(spec, names.values())
    sources = open_prompts(spec, told)
    examples = [prompt for source in sources for prompt in source.examples()]
    domains = list(dict.fromkeys(prompt.domain for prompt in examples))
    where = "" if spec.name == Stage.model_fields["name"].default else f"stage {spec.name!r}: "
    table = routes(spec.teachers, domains, [role for term in spec.objective for role in term.roles], where)
    if spec.eval.prompts and spec.eval.weight_average:
        averaged = dict.fromkeys(table.get("teacher", {}).values())
        _require_same_shapes([names[ref.model] for name in averaged for ref in spec.teachers[name].reads()])
    for name, kind in spec.teachers.items():
        scored = {domain for domain, teacher in table[kind.role].items() if teacher == name}
        _require_shown(name, kind.view, scored, sources, tokenizers[""])
    rewarder = check_rewards(spec.rewards, examples, domains=domains, say=say)
    choices = [*spec.objective, *(kind.view for kind in spec.teachers.values())]
    if any(choice.needs().rewards for choice in choices) and not any(map(rewarder.covers, examples)):
        raise RecipeError(
            "the objective or a view uses rewards, but no prompt's answers can be rewarded. Give rows an `answer`, use a task, or set `rewards:`."
        )
    context = min(map(context_of, configs.values()))
    warnings = [
        f"WARNING: teachers.{name}: {line}"
        for name, kind in spec.teachers.items()
        for line in kind.warn(StageView.of(spec))
    ]
    inputs = look_at_prompts(spec, sources, tokenizers[""], rewarder.covers, context, told)
    inputs = replace(inputs, notes=(*inputs.notes, *warnings))
    return Checked(device, sources, domains, table, rewarder, configs, inputs)


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


def _require_shown(name: str, view: View, domains: set[str], sources: Sequence[Source], tokenizer: Any) -> None:
    """A view that has nothing to show for any prompt would mask them all; what it does show has to be renderable."""
    if view.name == SameView.name:
        return
    prompts = [prompt for source in sources for prompt in source.examples() if prompt.domain in domains]
    every = chain(prompts, (prompt for source in sources for prompt in _rows(source) if prompt.domain in domains))
    found = next((rewritten for prompt in every if (rewritten := view.rewrite(prompt)) is not None), None)
    if found is None:
        fields = dict.fromkeys(field for prompt in prompts for field in prompt.fields)
        raise RecipeError(
            f"teachers.{name}: the view {view.name} has nothing to show for any prompt that it scores. Their fields are "
            f"{', '.join(fields) or 'none'}. Add a column, or choose another view."
        )
    render_prompt(found, tokenizer)


def _rows(source: Source) -> Iterator[Prompt]:
    """Every prompt that can be read; of sources without end, the first ones."""
    for index in range(source.size if source.size is not None else 64):
        with suppress(DataError):  # it is told where rows are scanned
            yield source.train(index)


def _require_same_shapes(names: Iterable[tuple[str, str | None]]) -> None:
    shapes = [parameter_shapes(*name) for name in names]
    if any(other != shapes[0] for other in shapes):
        raise RecipeError(
            "eval.weight_average: the teachers do not have the same shapes, so their weights cannot be averaged. Set it to false."
        )


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", name):
        raise RecipeError(f"device {name!r}: expected auto, cpu, cuda or cuda:N.")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RecipeError(f"device {name!r}: no CUDA device is visible. Set device: cpu or auto.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise RecipeError(f"device {name!r}: there are {torch.cuda.device_count()} CUDA devices, counted from 0.")
    return device
