"""`opd eval`: evaluate one model on prompts of some sources. The result also says what was measured."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from rich.table import Table
from rich.text import Text

from opd.common.errors import DataError, RecipeError
from opd.common.files import SEALS
from opd.common.text import cell, plain
from opd.data.rows import looks_local
from opd.data.sources import SOURCES, PromptSource, RowSource, Source, Split, open_sources, prompt_source
from opd.engines.kinds import BuiltInSampler
from opd.evaluation import Measures, Question, evaluate, is_right
from opd.loop.parts import StageParts
from opd.models import load_model
from opd.models.language_model import LanguageModel, weight_average
from opd.plugins import load_plugins
from opd.recipe.overrides import apply_override
from opd.recipe.paths import read_resolved
from opd.recipe.read import read_text
from opd.records import RewardResult, Sample, Sampling, TokenSampler
from opd.rewards import Rewards, check_rewards
from opd.rewards.reward import AnyRewards
from opd.rewards.rewarder import doubts
from opd.runner.checks import HeldOutFilter, pick_device

GENERATED = 200  # prompts of an endless source


@dataclass(frozen=True)
class Evaluation:
    """The measures, the prompts they belong to, and what was left out."""

    domains: dict[str, Measures]
    splits: dict[str, str]  # domain -> all, heldout or train
    what: str  # for the user
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {domain: found.to_json() | {"split": self.splits[domain]} for domain, found in self.domains.items()}


def evaluate_model(
    name: str,
    sources: Sequence[str],
    *,
    k: int,
    count: int | None = None,
    temperature: float | None = None,
    max_new_tokens: int,
    device: str,
    seed: int,
    split: Split | None = None,
    rewards: str | None = None,
    plugins: Sequence[str] = (),
) -> Evaluation:
    """Evaluate whole files and the held-out prompts of tasks, unless `split` and `count` (per domain) say otherwise.

    `plugins`: Python files or modules with your own rewards and prompt sources.
    """
    load_plugins([str(Path(name).resolve()) if name.endswith(".py") else name for name in plugins])
    _require_k(k, temperature)
    chosen = parse_rewards(rewards)
    specs, run = _specs(name, sources, split)
    opened = open_sources(specs, rewarded=bool(chosen.domains))
    examples = [prompt for source in opened for prompt in source.examples()]
    rewarder = check_rewards(chosen, examples)
    if not any(map(rewarder.covers, examples)):
        raise DataError(
            f"prompts {', '.join(sources)}: no prompt has an answer to check. Give rows an `answer` column, or set --rewards."
        )
    model = load_model(name, device=str(pick_device(device)))
    why = f"the context is {model.context:,} and --max-new-tokens {max_new_tokens:,}"
    asked = Asked()
    for spec, source in zip(specs, opened, strict=True):
        remedy = "Shorten it, or lower --max-new-tokens."
        usable = HeldOutFilter(spec, rewarder.covers, model.tokenizer, model.context - max_new_tokens, why, remedy)
        asked.add(source, split or ("heldout" if source.size is None else "all"), count, usable)
    if not asked.questions:
        raise DataError(
            f"prompts {', '.join(sources)}: nothing in the split {split or 'heldout'} can be rewarded. "
            "Choose another --split, or set --rewards."
        )
    found = evaluate(
        BuiltInSampler().open(model.inference_copy(), asked.longest + max_new_tokens, merge_stop=model.stop_ids),
        asked.questions,
        Sampling(max_new_tokens, stop_ids=model.stop_ids),
        model.tokenizer,
        greedy=True,
        k=k,
        temperature=temperature or 1.0,
        seed=seed,
        reward=rewarder,
    )
    notes = [
        *([] if run is None else _held_out_as(run[0], opened)),
        *doubts(rewarder, examples),
        *asked.notes,
        *(note for domain, measures in found.items() for note in _left_out(domain, measures)),
    ]
    splits = {domain: "+".join(parts) for domain, parts in asked.splits.items()}
    return Evaluation(found, splits, "; ".join(asked.what), tuple(notes))


def _require_k(k: int, temperature: float | None) -> None:
    if temperature is not None and not k:
        raise RecipeError("--temperature applies to sampled answers, but --k is 0. Set --k, or drop --temperature.")


def _specs(
    model: str, sources: Sequence[str], split: Split | None
) -> tuple[list[PromptSource], tuple[Path, str] | None]:
    """The sources to ask. Rows that a run held out or trained on are split as in that run."""
    run = run_of(model) if split in ("heldout", "train") else None
    specs = [prompt_source(source) for source in sources]
    return [spec if run is None else as_trained_on(run, spec) for spec in specs], run


def _held_out_as(run: Path, sources: Sequence[Source]) -> list[str]:
    return [
        f"prompts {plain(source.name)}: held out as in {run} (held_out: {source.spec.held_out})"
        for source in sources
        if isinstance(source, RowSource)
    ]


def run_of(model: str) -> tuple[Path, str] | None:
    """The directory and stage of the run that made a checkpoint; None if no run made it."""
    path = Path(model).resolve()
    found = next((parent for parent in path.parents if (parent / SEALS).is_file()), None) if path.is_dir() else None
    if found is None or not (found / "resolved.yaml").is_file():
        return None
    inside = path.relative_to(found).parts
    return found, inside[1] if len(inside) > 1 else ""


def as_trained_on(run: tuple[Path, str], source: PromptSource) -> PromptSource:
    """The source with the run's settings, if the run reads the same file or dataset, so that the same rows are held out."""
    directory, stage = run
    stages = sorted(read_resolved(directory)["stages"], key=lambda one: one["name"] != stage)
    for settings in (one for written in stages for one in written.get("prompts") or ()):
        if _same_rows(directory, str(settings["source"]), source.source):
            trained = SOURCES.read({**settings, "source": source.source})
            assert isinstance(trained, PromptSource)
            if type(trained) is type(source):
                return trained.as_begun(settings)
    return source


def _same_rows(directory: Path, one: str, other: str) -> bool:
    if not looks_local(other):
        return one == other
    return os.path.realpath(directory / os.path.expanduser(one)) == os.path.realpath(os.path.expanduser(other))


@dataclass
class Asked:
    """The questions by domain, and a description of what they are and what was left out."""

    questions: dict[str, list[Question]] = field(default_factory=dict)
    splits: dict[str, dict[str, None]] = field(default_factory=dict)
    what: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, source: Source, split: Split, count: int | None, usable: HeldOutFilter) -> None:
        for prompt in source.prompts(split, count or (GENERATED if source.size is None else None), usable):
            self.questions.setdefault(prompt.domain, []).append(Question(prompt, usable.ids[prompt.id]))
            self.splits.setdefault(prompt.domain, {})[split] = None
        self.what.append(f"{len(usable.ids):,} prompts of {plain(source.name)} (split {split})")
        self.notes += usable.notes(source.name)

    @property
    def longest(self) -> int:
        return max(question.prompt_ids.size for asked in self.questions.values() for question in asked)


def _left_out(domain: str, found: Measures) -> list[str]:
    said = (
        (found.failed, "answers brought their reward down and count as wrong"),
        (found.unrewarded, "answers could not be rewarded, for no fault of theirs, and are left out"),
    )
    return [f"evaluation: {plain(domain)}: {count} {what}" for count, what in said if count]


def parse_rewards(text: str | None) -> Rewards:
    """Parse `--rewards`: as in a recipe, `numeric` or `{kind: format, pattern: …}`; or the name of a YAML or JSON file with that."""
    if text is None:
        return Rewards()
    path, base = Path(text), None
    if path.suffix in (".yaml", ".yml", ".json"):
        text, base = read_text(path), path.parent
    raw: dict[str, Any] = {}
    apply_override(raw, f"rewards={text}", base)
    try:
        rewards: Rewards = TypeAdapter(AnyRewards).validate_python(raw["rewards"])
        return rewards
    except ValidationError as error:
        raise RecipeError(f"--rewards: {_first(error)}") from None


def _first(error: ValidationError) -> str:
    detail = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in detail["loc"])
    return f"{where}: {detail['msg'].removeprefix('Value error, ')}; got {detail['input']!r}."


def measures_table(name: str, domains: Mapping[str, Measures], what: str = "held-out prompts") -> Table:
    table = Table(title=Text.assemble(cell(name), ": ", plain(what)), title_justify="left")
    sampled = any(found.k for found in domains.values())
    partial = any(found.partial for found in domains.values())
    for column in (
        "domain",
        "n",
        "pass@1 (greedy)",
        *(("pass@1 (sampled)", f"pass@{next(iter(domains.values())).k}") if sampled else ()),
        *(("mean reward",) if partial else ()),
        "length",
        "truncated",
    ):
        table.add_column(column, justify="left" if column == "domain" else "right")
    for domain, found in domains.items():
        cells = [_cell(found.greedy, found.greedy_stderr)]
        if sampled:
            cells += [_cell(found.sampled, found.sampled_stderr), _cell(found.pass_at_k, found.pass_at_k_stderr)]
        if partial:
            cells.append("–" if found.reward is None else f"{found.reward:.3g}")
        table.add_row(cell(domain), str(found.n), *cells, f"{found.length:.1f}", f"{found.truncated:.0%}")
    return table


def _cell(value: float | None, stderr: float | None) -> str:
    return "–" if value is None or stderr is None else f"{value:.1%} ± {stderr:.1%}"


# --- What a stage measures on its held-out questions: the student, its teachers, and the average of their weights ---


STUDENT = "student"  # author of answers in answers.jsonl; for a teacher: teacher:NAME


class Evaluator:
    """`answered`: a few answers to held-out questions that are not written to a file yet."""

    def __init__(self, parts: StageParts) -> None:
        self.parts = parts
        self.answered: list[dict[str, Any]] = []

    def student(self) -> dict[str, Measures]:
        return self._measure(self.parts.engine, STUDENT)

    def teachers(self) -> dict[str, dict[str, Measures]]:
        """Every teacher of the role `teacher` with its own model, on every domain: its own, and those it may have forgotten."""
        kinds = self.parts.spec.teachers
        return {
            name: self._measure_model(self.parts.teachers[name].model, f"teacher:{name}")
            for name in self._names()
            if kinds[name].has_model
            and not kinds[name].of_student
            and not kinds[name].view.crosses  # it would have to be asked with its own tokens
        }

    def weight_average(self) -> dict[str, Measures]:
        models = [self.parts.teachers[name].model for name in self._names()]
        return self._measure(self.parts.samplers.of(weight_average(models)), "average")

    def _names(self) -> list[str]:
        return list(dict.fromkeys(self.parts.scorer.routes.get("teacher", {}).values()))

    def _measure_model(self, model: LanguageModel, who: str) -> dict[str, Measures]:
        with model.resident() as here:
            return self._measure(self.parts.samplers.of(here), who)

    def _measure(self, sampler: TokenSampler, who: str) -> dict[str, Measures]:
        """Measures by domain; empty without questions. Keeps a few answers to write them down."""
        parts = self.parts
        if not parts.questions:
            return {}
        spec, rollout = parts.spec.eval, parts.spec.rollout

        def reward(samples: Sequence[Sample]) -> list[RewardResult]:
            with parts.rewards.lock:
                return parts.ranks.share(lambda: parts.rewards.rewarder(samples))

        return evaluate(
            sampler,
            parts.questions,
            Sampling(
                spec.max_new_tokens or rollout.max_new_tokens,
                stop_ids=parts.stop_ids,
                stop_strings=tuple(rollout.stop),
            ),
            parts.student.tokenizer,
            greedy=spec.greedy,
            k=spec.k,
            temperature=spec.temperature,
            seed=parts.spec.seed,
            check_stop=parts.context.check_stop,
            reward=reward,
            on_answers=partial(self._keep, who),
            environment=rollout.environment,
        )

    def _keep(self, who: str, domain: str, samples: Sequence[Sample], results: Sequence[RewardResult]) -> None:
        """Keep answers to the same few questions every time, so that evaluations can be compared."""
        parts = self.parts
        asked = parts.questions[domain][: parts.spec.log.samples] if parts.ranks.leads else ()
        self.answered += [
            {
                "who": who,
                "domain": domain,
                "prompt_id": question.prompt.id,
                "prompt": parts.student.tokenizer.decode(question.prompt_ids.tolist()),
                "response": sample.text,
                "reward": result.reward,
                "right": None if math.isnan(right := is_right(result)) else bool(right),
            }
            for question, sample, result in zip(asked, samples, results, strict=False)
        ]
