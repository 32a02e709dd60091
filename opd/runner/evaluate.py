"""`opd eval`: one model on prompts of some sources. What was measured is part of the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.table import Table
from rich.text import Text

from opd.config.overrides import apply_override
from opd.config.read import read_text
from opd.config.rewards import Rewards, read_rewards
from opd.data.source import Split, prompt_source
from opd.data.sources import open_sources
from opd.errors import DataError, RecipeError
from opd.evaluation import Question, Score, evaluate
from opd.models import load_model
from opd.rewards import check_rewards
from opd.runner.checks import pick_device
from opd.runner.prompts import HeldOutFilter
from opd.sampling.samplers import BuiltInSampler
from opd.text import cell, plain
from opd.types import Sampling

GENERATED = 200  # prompts of a source without end


@dataclass(frozen=True)
class Measured:
    """Scores by domain, which prompts they are of, and what was left out."""

    scores: dict[str, Score]
    splits: dict[str, str]  # domain -> all, heldout or train
    what: str  # in words
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {domain: score.to_json() | {"split": self.splits[domain]} for domain, score in self.scores.items()}


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
) -> Measured:
    """Files are measured whole and tasks on their held-out prompts, unless `split` and `count` (per domain) say otherwise."""
    if temperature is not None and not k:
        raise RecipeError("--temperature applies to sampled answers, but --k is 0. Set --k, or drop --temperature.")
    specs = [prompt_source(source) for source in sources]
    judged = parse_rewards(rewards)
    opened = open_sources(specs, rewarded=bool(judged.domains))
    examples = [prompt for source in opened for prompt in source.examples()]
    judge = check_rewards(judged, examples)
    chosen = [split or ("heldout" if source.size is None else "all") for source in opened]
    if not any(map(judge.judges, examples)):
        raise DataError(
            f"prompts {', '.join(sources)}: no prompt has an answer to check. Give rows an `answer` column, or set --rewards."
        )
    model = load_model(name, device=str(pick_device(device)))
    limit, why = (
        model.context - max_new_tokens,
        f"the context is {model.context:,} and --max-new-tokens {max_new_tokens:,}",
    )
    questions: dict[str, list[Question]] = {}
    splits: dict[str, dict[str, None]] = {}
    what, notes = [], []
    for spec, source, part in zip(specs, opened, chosen, strict=True):
        usable = HeldOutFilter(
            spec, judge.judges, model.tokenizer, limit, why, remedy="Shorten it, or lower --max-new-tokens."
        )
        for prompt in source.prompts(part, count or (GENERATED if source.size is None else None), usable):
            questions.setdefault(prompt.domain, []).append(Question(prompt, usable.ids[prompt.id]))
            splits.setdefault(prompt.domain, {})[part] = None
        what.append(f"{len(usable.ids):,} prompts of {plain(source.name)} (split {part})")
        notes += usable.notes(source.name)
    if not questions:
        raise DataError(
            f"prompts {', '.join(sources)}: nothing in the split {split or 'heldout'} can be judged. Choose another --split, or set --rewards."
        )
    longest = max(question.prompt_ids.size for asked in questions.values() for question in asked)
    engine = BuiltInSampler().open(model.inference_copy(), longest + max_new_tokens, merge_stop=model.stop_ids)
    sampling = Sampling(max_new_tokens, stop_ids=model.stop_ids)
    scores = evaluate(
        engine,
        questions,
        sampling,
        model.tokenizer,
        greedy=True,
        k=k,
        temperature=temperature or 1.0,
        seed=seed,
        reward=judge,
    )
    notes += [note for domain, score in scores.items() for note in _left_out(domain, score)]
    return Measured(
        scores, {domain: "+".join(found) for domain, found in splits.items()}, "; ".join(what), tuple(notes)
    )


def _left_out(domain: str, score: Score) -> list[str]:
    said = (
        (score.failed, "answers brought their scorer down and count as wrong"),
        (score.unjudged, "answers could not be judged, for no fault of theirs, and are left out"),
    )
    return [f"evaluation: {plain(domain)}: {count} {what}" for count, what in said if count]


def parse_rewards(text: str | None) -> Rewards:
    """`--rewards`: as in a recipe, `numeric` or `{kind: format, pattern: …}`; or the name of a YAML or JSON file with that."""
    if text is None:
        return Rewards()
    path, base = Path(text), None
    if path.suffix in (".yaml", ".yml", ".json"):
        text, base = read_text(path), path.parent
    raw: dict[str, Any] = {}
    apply_override(raw, f"rewards={text}", base)
    try:
        return Rewards.model_validate(read_rewards(raw["rewards"]))
    except ValidationError as error:
        raise RecipeError(f"--rewards: {_first(error)}") from None


def _first(error: ValidationError) -> str:
    detail = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in detail["loc"])
    return f"{where}: {detail['msg'].removeprefix('Value error, ')}; got {detail['input']!r}."


def scores_table(name: str, scores: Mapping[str, Score], what: str = "held-out prompts") -> Table:
    table = Table(title=Text.assemble(cell(name), ": ", plain(what)), title_justify="left")
    sampled = any(score.k for score in scores.values())
    partial = any(score.partial for score in scores.values())
    for column in (
        "domain",
        "n",
        "pass@1 (greedy)",
        *(("pass@1 (sampled)", f"pass@{next(iter(scores.values())).k}") if sampled else ()),
        *(("mean reward",) if partial else ()),
        "length",
        "truncated",
    ):
        table.add_column(column, justify="left" if column == "domain" else "right")
    for domain, score in scores.items():
        cells = [_cell(score.greedy, score.greedy_stderr)]
        if sampled:
            cells += [_cell(score.sampled, score.sampled_stderr), _cell(score.pass_at_k, score.pass_at_k_stderr)]
        if partial:
            cells.append("–" if score.score is None else f"{score.score:.3g}")
        table.add_row(cell(domain), str(score.n), *cells, f"{score.length:.1f}", f"{score.truncated:.0%}")
    return table


def _cell(value: float | None, stderr: float | None) -> str:
    return "–" if value is None or stderr is None else f"{value:.1%} ± {stderr:.1%}"
