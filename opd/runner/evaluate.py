"""`opd eval`: evaluate one model on prompts of some sources. The result also says what was measured."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from rich.table import Table
from rich.text import Text

from opd.common.errors import DataError, RecipeError
from opd.common.files import SEALS, json_text, write_atomic
from opd.common.text import cell, plain
from opd.data.prompts import render_completion, render_prompts
from opd.data.rows import BadRow, looks_local
from opd.data.sources import SOURCES, PromptSource, RowSource, Source, Split, open_sources, prompt_source
from opd.divergences import token_logprobs
from opd.engines.kinds import BuiltInSampler
from opd.engines.requests import request_key
from opd.evaluation import Measures, Question, evaluate, is_right
from opd.loop.oom_retry import micro_batches
from opd.loop.parts import StageParts
from opd.models import load_model
from opd.models.language_model import LanguageModel, Pack, weight_average
from opd.objective.micro import autocast_head
from opd.plugins import load_plugins
from opd.recipe.overrides import apply_override
from opd.recipe.paths import read_resolved
from opd.recipe.read import read_text
from opd.records import Author, Prompt, RewardResult, Rollout, Sample, SampleRequest, Sampling, TokenSampler
from opd.report.answers import STUDENT
from opd.rewards import Rewards, check_rewards
from opd.rewards.reward import AnyRewards
from opd.rewards.rewarder import reward_warnings
from opd.rollouts.rollouter import answers
from opd.runner.checks import HeldOutFilter, pick_device, rewarded_by
from opd.teachers.kinds import chooser
from opd.teachers.table import K, Pair, Samples, compare
from opd.teachers.views import Group

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
    if not any(map(rewarded_by(rewarder), examples)):
        raise DataError(
            f"prompts {', '.join(sources)}: no prompt has an answer to check. Give rows an `answer` column, or set --rewards."
        )
    model = load_model(name, device=str(pick_device(device)))
    why = f"the context is {model.context:,} and --max-new-tokens {max_new_tokens:,}"
    asked = SourceQuestions()
    for spec, source in zip(specs, opened, strict=True):
        remedy, limit = "Shorten it, or lower --max-new-tokens.", model.context - max_new_tokens
        usable = HeldOutFilter(spec, rewarded_by(rewarder), model.tokenizer, limit, why, remedy)
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
        *reward_warnings(rewarder, examples),
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
    for written, settings in ((each, one) for each in stages for one in each.get("prompts") or ()):
        if _same_rows(directory, str(settings["source"]), source.source):
            played = settings.get("environment") or (written.get("rollout") or {}).get("environment")
            trained = SOURCES.read({**settings, "source": source.source, "environment": played})
            assert isinstance(trained, PromptSource)
            if type(trained) is type(source):
                return trained.as_begun(settings)
    return source


def _same_rows(directory: Path, one: str, other: str) -> bool:
    if not looks_local(other):
        return one == other
    return os.path.realpath(directory / os.path.expanduser(one)) == os.path.realpath(os.path.expanduser(other))


@dataclass
class SourceQuestions:
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
    counted = (
        (found.failed, "answers made their reward fail and count as wrong"),
        (found.unrewarded, "answers could not be rewarded, through no fault of their own, and are left out"),
    )
    return [f"evaluation: {plain(domain)}: {count} {what}" for count, what in counted if count]


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


class Evaluator:
    """`answered`: answers to held-out questions that are not written to a file yet."""

    def __init__(self, parts: StageParts) -> None:
        self.parts = parts
        self.answered: list[dict[str, Any]] = []

    def student(self) -> dict[str, Measures]:
        found = self._measure(self.parts.engine, STUDENT)
        if not self.parts.spec.eval.loss:
            return found
        losses = self._losses()
        return {
            domain: replace(one, loss=losses[domain][0], loss_tokens=losses[domain][1]) if domain in losses else one
            for domain, one in found.items()
        }

    def _losses(self) -> dict[str, tuple[float, int]]:
        """The student's loss on the worked answers to held-out questions, in nats per token, and their tokens; by domain."""
        parts, student = self.parts, self.parts.student
        worked = [_worked(parts, question) for asked in parts.questions.values() for question in asked]
        rollouts = [rollout for rollout in worked if rollout is not None]
        if not rollouts:
            raise DataError(
                "eval.loss: no held-out prompt has a worked answer. Give rows a `completion`, or set eval.loss: false."
            )
        packs = micro_batches(parts.ranks.deal(rollouts), parts.spec.train.micro_budget, student.device, {})
        sums: dict[str, list[float]] = {}
        with torch.no_grad():
            for pack in student.passes(packs):
                logprobs = student.inside(partial(_logprobs, student, pack, parts.stop_ids))
                ends = np.cumsum(pack.response_lengths)[:-1]
                for rollout, values in zip(pack.rollouts, np.split(logprobs, ends), strict=True):
                    of_domain = sums.setdefault(rollout.domain, [0.0, 0.0])
                    of_domain[0] -= float(values.sum(dtype=np.float64))
                    of_domain[1] += values.size
                parts.context.check_stop()
        every = parts.ranks.gather(sums)
        found = {}
        for domain in dict.fromkeys(rollout.domain for rollout in rollouts):
            nats, tokens = np.sum([part[domain] for part in every if domain in part], 0).tolist()
            found[domain] = nats / tokens, int(tokens)
        return found

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
        """Measures by domain; empty without questions. Keeps answers to write them down."""
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
        )

    def _keep(self, who: str, domain: str, samples: Sequence[Sample], results: Sequence[RewardResult]) -> None:
        """Keep answers to the same questions every time, so that evaluations can be compared."""
        parts, count = self.parts, self.parts.spec.eval.answers
        asked = parts.questions[domain][: None if count == "all" else count] if parts.ranks.leads else ()
        self.answered += [
            {
                "who": who,
                "domain": domain,
                "prompt_id": question.prompt.id,
                "question": question_hash(question.prompt),
                "prompt": parts.student.tokenizer.decode(question.prompt_ids.tolist()),
                "response": sample.transcript or sample.text,
                "reward": result.reward,
                "right": None if math.isnan(right := is_right(result)) else bool(right),
            }
            for question, sample, result in zip(asked, samples, results, strict=False)
        ]


def question_hash(prompt: Prompt) -> str:
    """The same for the same question, whatever the template and the tokenizer: runs are compared on questions they share."""
    said = json.dumps([prompt.text, prompt.messages], sort_keys=True, default=str)
    return hashlib.sha256(said.encode(errors="surrogatepass")).hexdigest()[:12]


# --- The start-up table: compares every teacher with the student on a few answers before the first step ---
#
# Draws have their own seed and nothing goes into the store, so a run is the same with and without the table.


START_FILE = "start.json"
START_PROMPTS, START_TOKENS = 4, 32  # prompts per teacher; tokens of an answer
START_VISIT = -2  # keys draws that no step uses


def read_start(directory: Path) -> dict[str, Any]:
    """The existing tables of stages, by name."""
    place = directory / START_FILE
    found: dict[str, Any] = json.loads(place.read_text(encoding="utf-8")) if place.is_file() else {}
    return found


def start_table(parts: StageParts) -> list[Pair]:
    """Compare every teacher of the stage that can be asked about answers."""
    asked = [name for name, kind in parts.spec.teachers.items() if kind.scores_any and parts.teachers[name].offers]
    probe = probe_of(parts, asked) if asked else None
    found = []
    student = (
        (parts.samplers.copy or parts.student) if parts.ranks.sharded else parts.student
    )  # not sharded, if all ranks have it so
    for name in asked if probe is not None and probe.rollouts else []:
        assert probe is not None
        kind, teacher = parts.spec.teachers[name], parts.teachers[name]
        chosen = chooser(parts.scorer.routes[kind.role], parts.spec.route)
        part = probe.of(lambda prompt, chosen=chosen, name=name: chosen(prompt) == name)  # type: ignore[misc]
        part = replace(part, groups=parts.scorer.groups_for(name, part.groups))
        found.append(student.inside(partial(compare, student, name, teacher, kind.view, part, parts.stop_ids)))
        parts.context.check_stop()
    return found


def probe_of(parts: StageParts, teachers: Sequence[str]) -> Samples:
    """The student's answers to a few prompts of every teacher."""
    prompts = dict(_prompts(parts, teachers))
    size = min(START_TOKENS, parts.spec.rollout.max_new_tokens)
    sampling = replace(parts.rollouter.sampling, max_new_tokens=size)
    requests = [
        SampleRequest(name, ids, request_key(parts.spec.seed, name, START_VISIT, 0), sampling)
        for name, (_, _, ids) in prompts.items()
    ]
    rollouts = answers(parts.engine, requests, parts.context.check_stop) if requests else []
    groups = {
        rollout.group: Group(
            [rollout], parts.student.tokenizer, {}, parts.spec.prompts[prompts[rollout.id][0]].chat_template_kwargs, parts.stop_ids
        )
        for rollout in rollouts
    }  # fmt: skip
    by_id = {name: prompt for name, (_, prompt, _) in prompts.items()}
    reference = [_reference(parts, *found, size) for found in prompts.values() if found[1].fields.get("completion")]
    return Samples(rollouts, by_id, groups, reference)


def _prompts(parts: StageParts, teachers: Sequence[str]) -> Iterator[tuple[str, tuple[int, Prompt, np.ndarray]]]:
    """The first few prompts that each teacher scores, by id: (number of the source, prompt, ids)."""
    roles = {parts.spec.teachers[name].role for name in teachers}
    wanted = [(parts.scorer.routes[role], chooser(parts.scorer.routes[role], parts.spec.route)) for role in roles]
    taken: dict[str, int] = {}
    for number, source in enumerate(parts.sources):
        kwargs = parts.spec.prompts[number].chat_template_kwargs
        examples = source.examples()
        for prompt, ids in zip(examples, render_prompts(examples, parts.student.tokenizer, kwargs), strict=True):
            scored = any(parts.scorer.scores(role, prompt.domain) for role in roles)
            if isinstance(ids, DataError) or ids.size > parts.room or prompt.plain or not scored:
                continue
            try:
                names = [chosen(prompt) for _, chosen in wanted]
            except BadRow:  # such a row is skipped
                continue
            if any(taken.get(name, 0) < START_PROMPTS for name in names):
                taken |= {name: taken.get(name, 0) + 1 for name in names}
                yield prompt.id, (number, prompt, ids)


def _worked(parts: StageParts, question: Question) -> Rollout | None:
    """The worked answer to a held-out question as a rollout; None if its row has none."""
    if not question.prompt.fields.get("completion"):
        return None
    size = parts.spec.eval.max_new_tokens or parts.spec.rollout.max_new_tokens
    return _data_rollout(parts, question.template_kwargs, question.prompt, question.prompt_ids, size)


def _logprobs(student: LanguageModel, pack: Pack, stop_ids: tuple[int, ...]) -> np.ndarray:
    """Log-probs of the response tokens of a pack."""
    projection = autocast_head(student.predict(pack))
    ids = torch.cat([torch.from_numpy(rollout.response_ids.astype(np.int64)) for rollout in pack.rollouts])
    values = token_logprobs(projection, ids.to(projection.hidden.device), merge=(stop_ids,), trusted=True)
    return values.float().cpu().numpy()


def _reference(parts: StageParts, number: int, prompt: Prompt, ids: np.ndarray, size: int) -> Rollout:
    """The dataset's own answer to a training prompt as a rollout."""
    return _data_rollout(parts, parts.spec.prompts[number].chat_template_kwargs, prompt, ids, size)


def _data_rollout(parts: StageParts, kwargs: Mapping[str, Any], prompt: Prompt, ids: np.ndarray, size: int) -> Rollout:
    response, cut = render_completion(prompt, parts.student.tokenizer, size, parts.stop_ids, kwargs)
    nothing = np.full(response.size, np.nan, dtype=np.float32)
    return Rollout(
        id=f"{prompt.id}/data", prompt_id=prompt.id, visit=START_VISIT, sample=0, domain=prompt.domain, source="data",
        prompt_ids=ids, response_ids=response, author=np.full(response.size, Author.DATA, dtype=np.uint8), logprob=nothing,
        logprob_sampled=nothing, logprob_stop=nothing, version=np.zeros(response.size, dtype=np.int32),
        stop="length" if cut else "stop", group=prompt.id,
    )  # fmt: skip


# --- What is shown and kept ---


def write_start(directory: Path, stage: str, pairs: Sequence[Pair], before: dict[str, Any]) -> None:
    """`start.json`: the measurements of every teacher, by stage."""
    found = before | {stage: [pair.to_json() for pair in pairs]}
    write_atomic(directory / START_FILE, json_text(found, indent=1))


def table_of(stage: str, pairs: Sequence[Pair]) -> Table:
    table = Table(
        box=None, padding=(0, 1, 0, 0), title=plain(f"{stage}: teachers next to the student"), title_justify="left"
    )
    for column in ("teacher", "tokenizer", "template", "stop ids", "stop mass", "KL", f"top {K}", "origin", "memory"):
        table.add_column(column, justify="left" if column in ("teacher", "tokenizer") else "right")
    for pair in pairs:
        table.add_row(cell(pair.teacher), *_cells(pair))
    table.caption = (
        "template, KL: nats per token; top: agreement of the likeliest tokens; origin: cosine of the weights"
    )
    table.caption_justify = "left"
    return table


def _cells(pair: Pair) -> list[str]:
    def number(value: float | None, form: str = ".2f") -> str:
        return "–" if value is None else f"{value:{form}}"

    tokenizer = "–" if pair.ids_differ is None else "same" if not pair.ids_differ else "other"
    if pair.aligned is not None:
        tokenizer += f", {pair.aligned:.0%} aligned"
    stops = "–" if pair.stop_ids is None else "same" if set(pair.stop_ids[0]) == set(pair.stop_ids[1]) else "other"
    kl = number(pair.kl, ".3f") + ("~" if pair.sampled and pair.kl is not None else "")
    memory = "–" if pair.memory is None else f"{pair.memory / 2**20:,.0f} MiB"
    share = "–" if pair.overlap is None else f"{pair.overlap:.0%}"
    return [tokenizer, number(pair.template), stops, number(pair.stop_mass), kl, share, number(pair.origin), memory]
