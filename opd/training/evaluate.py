"""`opd eval`: one model on the held-out prompts of some sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from opd.config import PromptSource, SamplerSpec
from opd.data.render import render_prompt
from opd.data.sources import open_source
from opd.errors import DataError
from opd.evaluation import Question, Score, evaluate
from opd.models import load_model
from opd.rollout.engine import Engine
from opd.text import cell
from opd.training.stage import pick_device
from opd.types import Sampling


def evaluate_model(
    name: str,
    sources: Sequence[str],
    *,
    k: int,
    count: int,
    temperature: float,
    max_new_tokens: int,
    device: str,
    seed: int,
) -> dict[str, Score]:
    prompts = [prompt for source in sources for prompt in open_source(PromptSource(source=source)).held_out(count)]
    prompts = [prompt for prompt in prompts if "verifier" in prompt.fields]
    if not prompts:
        raise DataError(
            f"prompts {', '.join(sources)}: no held-out prompt has an answer to check. Give rows an `answer` column."
        )
    model = load_model(name, device=str(pick_device(device)))
    questions: dict[str, list[Question]] = {}
    for prompt in prompts:
        questions.setdefault(prompt.domain, []).append(Question(prompt, render_prompt(prompt, model.tokenizer)))
    longest = max(question.prompt_ids.size for asked in questions.values() for question in asked)
    if longest + max_new_tokens > model.context:
        raise DataError(
            f"the longest prompt has {longest} tokens; with {max_new_tokens} new ones it exceeds the context of {model.context}. Lower --max-new-tokens."
        )
    engine = Engine(model.inference_copy(), SamplerSpec(), longest + max_new_tokens, merge_stop=model.stop_ids)
    sampling = Sampling(max_new_tokens, stop_ids=model.stop_ids)
    return evaluate(engine, questions, sampling, model.tokenizer, greedy=True, k=k, temperature=temperature, seed=seed)


def scores_table(name: str, scores: Mapping[str, Score]) -> Table:
    table = Table(title=Text.assemble(cell(name), ": held-out prompts"), title_justify="left")
    sampled = any(score.k for score in scores.values())
    for column in (
        "domain",
        "n",
        "pass@1 (greedy)",
        *(("pass@1 (sampled)", f"pass@{next(iter(scores.values())).k}") if sampled else ()),
        "length",
        "truncated",
    ):
        table.add_column(column, justify="left" if column == "domain" else "right")
    for domain, score in scores.items():
        cells = [_cell(score.greedy, score.greedy_stderr)]
        if sampled:
            cells += [_cell(score.sampled, score.sampled_stderr), _cell(score.pass_at_k, score.pass_at_k_stderr)]
        table.add_row(cell(domain), str(score.n), *cells, f"{score.length:.1f}", f"{score.truncated:.0%}")
    return table


def _cell(value: float | None, stderr: float | None) -> str:
    return "–" if value is None or stderr is None else f"{value:.1%} ± {stderr:.1%}"
