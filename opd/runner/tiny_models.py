"""Builds the `tiny/*` models: a generalist, four specialists trained from it, and one with another tokenizer.

Small Llama models (half a million parameters, characters as tokens) for runs that take a minute on a CPU.

    generalist   learns all four tasks at once and stops while about a third of its answers are still wrong
    specialists  start from the generalist, train on one task only, and stop when they are good at it: strong on it,
                 forgetful elsewhere, and still close enough to the generalist for it to learn from them

Training uses one thread and fixed seeds, so a rebuild with the same versions on the same kind of machine gives the same
bytes. Every stop is decided by a measured score, so a rebuild elsewhere gives other bytes and the same abilities.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from opd.common.errors import ModelError
from opd.data.tasks import TASKS, Task, TaskSplit

Progress = Callable[[str], None]
Row = tuple[list[int], list[int]]  # ids of the question, ids of the answer with its stop token

DOMAINS: dict[str, Task] = {TASKS[name].domain: TASKS[name] for name in ("addition", "reverse", "sort", "caesar")}
SPECIAL = ("<pad>", "<eos>", "<unk>")
PAD, EOS = 0, 1
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '=' + message['content'] + eos_token }}"
    "{% elif message['role'] == 'system' %}{{ message['content'] + '\\n' }}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '=' }}{% endif %}"
)
SEED = 0
GENERALIST_BAND = (0.57, 0.74)  # training stops once every domain's score is in this range,
GENERALIST_STEPS = 600  # but not earlier: skills that are just forming do not move in a short distillation
SPECIALIST_GOAL = 0.97  # on training prompts
SPECIALIST_HALF = 60  # steps at the full learning rate, and the same number of decay steps
SPECIALIST_LR = 2e-3
ANCHOR = 0.08  # the generalist's share of a specialist's target
THRESHOLDS = {"generalist": [0.50, 0.80], "specialist": 0.95, "forgotten": 0.15}
EVAL_PROMPTS = 1000
PAIRS = [("1", digit) for digit in "0123456789"]  # further tokens of the model `pairs`
PAIR_STEPS = 600

# Disjoint ranges of the endless training split
TUNING, CHECK, SPECIALIST = 1_000_000, 2_000_000, 3_000_000


# --- Tokenizer and model ---


def make_tokenizer(merges: Sequence[tuple[str, str]] = ()) -> PreTrainedTokenizerFast:
    """One token per printable ASCII character: byte-pair encoding without merges, or with these."""
    characters = ["\n", *(chr(code) for code in range(32, 127)), *("".join(pair) for pair in merges)]
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *characters])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=list(merges), unk_token="<unk>"))
    backend.decoder = tokenizers.decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=512,
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE,
    )


def make_model(vocabulary: int, seed: int) -> LlamaForCausalLM:
    """Larger initial weights than usual: at width 128, the customary 0.02 costs hundreds of steps."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.06,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=PAD, do_sample=False)
    return model


def question_ids(tokenizer: PreTrainedTokenizerFast, task: Task, split: TaskSplit, index: int) -> Row:
    prompt = task.prompt(split, index)
    rendered = tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, tokenize=False)
    answer = prompt.fields["completion"]
    return tokenizer.encode(rendered), [*tokenizer.encode(answer), EOS]


def task_rows(tokenizer: PreTrainedTokenizerFast, task: Task, split: TaskSplit, start: int, n: int) -> list[Row]:
    return [question_ids(tokenizer, task, split, index) for index in range(start, start + n)]


def pad_rows(rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """Ids and labels, padded on the right: a causal model needs no mask there. Label t is the token after position t."""
    width = max(len(question) + len(answer) for question, answer in rows)
    ids, labels = torch.full((len(rows), width), PAD), torch.full((len(rows), width), -100)
    for row, (question, answer) in enumerate(rows):
        end = len(question) + len(answer)
        ids[row, :end] = torch.tensor(question + answer)
        labels[row, len(question) - 1 : end - 1] = torch.tensor(answer)
    return ids, labels


def answer_logits(model: LlamaForCausalLM, ids: Tensor, labels: Tensor) -> Tensor:
    return model.lm_head(model.model(input_ids=ids, use_cache=False).last_hidden_state[labels >= 0])


@torch.no_grad()
def accuracy(model: LlamaForCausalLM, rows: Sequence[Row]) -> float:
    """Greedy pass@1 in one forward pass: decoding gives the answer exactly when every next token is the likeliest one."""
    ids, labels = pad_rows(rows)
    likeliest = torch.full_like(labels, -100)
    likeliest[labels >= 0] = answer_logits(model, ids, labels).argmax(-1)
    return float((likeliest == labels).all(1).float().mean())


# --- Training ---


def optimiser(model: LlamaForCausalLM) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)


def update(
    model: LlamaForCausalLM, adam: torch.optim.AdamW, rows: Sequence[Row], lr: float, anchor: LlamaForCausalLM | None
) -> float:
    """One step on the answers. With an anchor, part of every target is the anchor's distribution."""
    ids, labels = pad_rows(rows)
    answers = labels[labels >= 0]
    logits = answer_logits(model, ids, labels)
    target = functional.one_hot(answers, logits.shape[-1]).to(logits.dtype)
    if anchor is not None:
        with torch.no_grad():
            opinion = answer_logits(anchor, ids, labels).softmax(-1)
        target = (1 - ANCHOR) * target + ANCHOR * opinion
    loss = functional.cross_entropy(logits, target)
    adam.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in adam.param_groups:
        group["lr"] = lr
    adam.step()
    return float(loss.detach())


def round_weights(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Round to the precision of the file, so that scores are those of the saved model."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model


def train_generalist(tokenizer: PreTrainedTokenizerFast, steps: int, progress: Progress) -> LlamaForCausalLM:
    """Train all tasks at once, the weaker ones more often, at a constant high learning rate, until all are mediocre.

    The shares steer: a task near its goal gets no prompts while the others catch up, so that all four meet in the band. The
    learning rate does not decay: specialists get this last polish, and the generalist must not have it.
    """
    model = make_model(len(tokenizer), SEED)
    adam = optimiser(model)
    low, high = GENERALIST_BAND
    seen = dict.fromkeys(DOMAINS, 0)
    smooth_score = dict.fromkeys(DOMAINS, 0.0)
    shares = dict.fromkeys(DOMAINS, 1 / len(DOMAINS))
    for step in range(1, steps + 1):
        rows: list[Row] = []
        for domain, task in DOMAINS.items():
            n = round(96 * shares[domain])
            rows += task_rows(tokenizer, task, "train", seen[domain], n)
            seen[domain] += n
        loss = update(model, adam, rows, 2e-3 * min(1.0, step / 50), None)
        if step % (10 if step < GENERALIST_STEPS else 2):  # skills come and go within ten steps at this rate
            continue
        scores = {
            domain: accuracy(model, task_rows(tokenizer, task, "train", TUNING + 10 * step, 100))
            for domain, task in DOMAINS.items()
        }
        smooth_score = {domain: (value + smooth_score[domain]) / 2 for domain, value in scores.items()}
        want = {domain: min(0.35, max(0.001, high - value)) for domain, value in smooth_score.items()}
        shares = {domain: value / sum(want.values()) for domain, value in want.items()}
        progress(f"generalist step {step}: loss {loss:.3f}, {show(scores)}")
        near = all(low - 0.1 <= value <= high + 0.1 for value in scores.values())
        if step >= GENERALIST_STEPS and near and _in_band(model, tokenizer):
            break
    return round_weights(model)


def _in_band(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> bool:
    low, high = GENERALIST_BAND
    return all(
        low <= accuracy(model, task_rows(tokenizer, task, "train", CHECK, 400)) <= high for task in DOMAINS.values()
    )


def train_specialist(
    generalist: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, domain: str, steps: int, progress: Progress
) -> LlamaForCausalLM:
    """Train one task only, until the model is good at it. Other tasks may be forgotten.

    Part of the target is the generalist's own distribution. This keeps the specialist near: what the generalist samples, right or
    wrong, never looks impossible to it. A larger part halves the KL between them, but leaves the specialist undecided on hard
    questions, where a student that minimises reverse KL tends to keep its old answer.
    """
    model = copy.deepcopy(generalist)
    adam = optimiser(model)
    task = DOMAINS[domain]
    for step in range(1, steps + 1):
        rows = task_rows(tokenizer, task, "train", SPECIALIST + 64 * step, 64)
        decay = min(1.0, step / 10) * max(0.1, min(1.0, 2 - step / SPECIALIST_HALF))
        loss = update(model, adam, rows, SPECIALIST_LR * decay, generalist)
        if step % 10 or step < 1.5 * SPECIALIST_HALF:  # not at the full rate, where the score is noisy
            continue
        reached = accuracy(model, task_rows(tokenizer, task, "train", CHECK, 400))
        progress(f"{domain} step {step}: loss {loss:.3f}, {domain} {reached:.3f}")
        if reached >= SPECIALIST_GOAL:
            break
    return round_weights(model)


def train_pairs(arithmetic: LlamaForCausalLM, steps: int, progress: Progress) -> LlamaForCausalLM:
    """The specialist for sums, trained to read and write 10 to 19 as one token: a teacher with another tokenizer.

    The new embeddings start as the mean of their digits'.
    """
    tokenizer, model = make_tokenizer(PAIRS), copy.deepcopy(arithmetic)
    table = model.get_input_embeddings().weight.detach()
    digits = torch.tensor([[len(SPECIAL) + 1 + ord(digit) - 32 for digit in pair] for pair in PAIRS])
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[table.shape[0] :] = table[digits].mean(1)
    adam, task = optimiser(model), DOMAINS["arithmetic"]
    for step in range(1, steps + 1):
        rows = task_rows(tokenizer, task, "train", SPECIALIST + 64 * step, 64)
        loss = update(model, adam, rows, SPECIALIST_LR * min(1.0, step / 10) * max(0.05, 1 - step / PAIR_STEPS), None)
        if step % 20:
            continue
        reached = accuracy(model, task_rows(tokenizer, task, "train", CHECK, 400))
        progress(f"pairs step {step}: loss {loss:.3f}, arithmetic {reached:.3f}")
        if reached >= SPECIALIST_GOAL and step >= PAIR_STEPS // 2:
            break
    return round_weights(model)


# --- Files ---


def build(
    out_dir: str | Path, progress: Progress | None = None, only: Sequence[str] | None = None, steps: int = 2000
) -> dict[str, Any]:
    """Train the models into `out_dir/NAME` and write `out_dir/manifest.json`, which is also returned.

    `only` names the models to write; the manifest lists no others. The generalist is always trained, since the others start from
    it. `steps` is the most any model may take; training stops earlier, on its scores.
    """
    names = ["generalist", *DOMAINS, "pairs"]
    unknown = set(only or ()) - set(names)
    if unknown:
        raise ModelError(f"tiny model {sorted(unknown)[0]!r}: no such model. Known: {', '.join(names)}.")
    out, say = Path(out_dir), progress or (lambda line: None)
    models: dict[str, Any] = {}
    with _reproducible():
        tokenizer = make_tokenizer()
        generalist = train_generalist(tokenizer, steps, say)
        for name in names:
            if only is None or name in only:
                model = generalist
                if name != "generalist":
                    domain = "arithmetic" if name == "pairs" else name
                    model = train_specialist(generalist, tokenizer, domain, steps, say)
                if name == "pairs":
                    model = train_pairs(model, steps, say)
                models[name] = _save(model, make_tokenizer(PAIRS) if name == "pairs" else tokenizer, out / name, say)
    manifest = {
        "seed": SEED,
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
        "eval_prompts": EVAL_PROMPTS,
        "thresholds": THRESHOLDS,
        "models": models,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return manifest


@contextmanager
def _reproducible() -> Iterator[None]:
    """Use one thread and one set of kernels; restore the caller's settings and random state afterwards."""
    threads, state, onednn = torch.get_num_threads(), torch.get_rng_state(), torch.backends.mkldnn.enabled
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = True  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(state)
        torch.backends.mkldnn.enabled = onednn


def _save(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path, progress: Progress
) -> dict[str, Any]:
    scores = {
        domain: round(accuracy(model, task_rows(tokenizer, task, "heldout", 0, EVAL_PROMPTS)), 4)
        for domain, task in DOMAINS.items()
    }
    progress(f"{folder.name}: {show(scores)} on held-out prompts")
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}
    return {"scores": scores, "parameters": model.num_parameters(), "sha256": files}


def show(scores: dict[str, float]) -> str:
    return ", ".join(f"{domain} {value:.3f}" for domain, value in scores.items())
