"""Builds the `tiny/*` models: a generalist, and four specialists that grow out of it.

Real Llama models in miniature (half a million parameters, characters as tokens) for runs that take a minute on a CPU.

    generalist   learns all four tasks at once and is stopped while it still gets about a third of the answers wrong
    specialists  start from the generalist, see one task only, and stop as soon as they are good at it: strong at home,
                 forgetful elsewhere, and still close enough to the generalist for it to learn from them

Training is one thread with fixed seeds, so a rebuild with the same versions on the same kind of machine gives the same
bytes. Every stop is decided by a measured score, so a rebuild elsewhere gives other bytes and the same abilities.
"""

from __future__ import annotations

from collections.abc import Callable

import tokenizers
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from opd.data.tasks import TASKS, Task

Progress = Callable[[str], None]
Row = tuple[list[int], list[int]]  # ids of the question, ids of the answer with its stop token

DOMAINS: dict[str, Task] = {task.domain: task for task in TASKS.values()}
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
GENERALIST_BAND = (0.62, 0.76)  # training stops once every domain's score lies in here
THRESHOLDS = {"generalist": (0.50, 0.80), "specialist": 0.95, "forgotten": 0.15}
EVAL_PROMPTS = 1000

# Disjoint stretches of the endless training split
TUNING, CHECK, SPECIALIST = 1_000_000, 2_000_000, 3_000_000


# Tokenizer and model


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character: byte-pair encoding without a single merge."""
    characters = ["\n", *(chr(code) for code in range(32, 127))]
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *characters])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
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
    """The initial weights are larger than usual: at width 128 the customary 0.02 costs hundreds of steps."""
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


def question_ids(tokenizer: PreTrainedTokenizerFast, task: Task, split: Split, index: int) -> Row:
    prompt = task.prompt(split, index)
    rendered = tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, tokenize=False)
    answer = prompt.fields["completion"]
    return tokenizer.encode(rendered), [*tokenizer.encode(answer), EOS]


def rows_of(tokenizer: PreTrainedTokenizerFast, task: Task, split: Split, start: int, n: int) -> list[Row]:
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
def score(model: LlamaForCausalLM, rows: Sequence[Row]) -> float:
    """Greedy pass@1 in one forward pass: decoding gives the answer exactly when every next token is the likeliest one."""
    ids, labels = pad_rows(rows)
    likeliest = torch.full_like(labels, -100)
    likeliest[labels >= 0] = answer_logits(model, ids, labels).argmax(-1)
    return float((likeliest == labels).all(1).float().mean())
