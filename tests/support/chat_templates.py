"""Chat templates: small ones of our own, and real ones from installed packages; with a tokenizer of one id per character."""

from __future__ import annotations

import importlib.util
import re
import string
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_TURN = "<|im_start|>{{ m.role }}\n{{ content }}<|im_end|>\n"
_TOOL_TURN = "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n{% else %}"
_OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_JSON_CALLS = (
    "{% set ns = namespace(text=m.content) %}{% for c in m.tool_calls or [] %}{% if not loop.first or m.content %}"
    "{% set ns.text = ns.text ~ '\n' %}{% endif %}{% set ns.text = ns.text ~ '<tool_call>\n{\"name\": \"' ~ c.function.name ~ "
    "'\", \"arguments\": ' ~ (c.function.arguments | tojson) ~ '}\n</tool_call>' %}{% endfor %}{% set content = ns.text %}"
)
CHATML = "{% for m in messages %}{% set content = m.content %}" + _TURN + "{% endfor %}" + _OPEN
OWN = {
    "chatml": CHATML,
    "json_calls": "{% for m in messages %}" + _TOOL_TURN + _JSON_CALLS + _TURN + "{% endif %}{% endfor %}" + _OPEN,
    # drops the thinking of earlier turns, as Qwen3 does
    "drops_thinking": (
        "{% for m in messages %}{% set content = m.content.split('</think>')[-1] if not loop.last else m.content %}"
        + _TURN + "{% endfor %}" + _OPEN
    ),
    # roles must alternate, and there is no role for tools, as in Gemma
    "alternating": (
        "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}<start_of_turn>{{ m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
        "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    # another token ends a turn once a message follows, as in gpt-oss
    "two_ends": (
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
        "{% if loop.last and m.role == 'assistant' %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    ),
}  # fmt: skip
STOPS = (
    "<|im_end|>", "<|call|>", "<|return|>", "<|eot_id|>", "<turn|>", "<|tool_response>", "<|eot|>", "<|end|>", "<end_of_turn>",
    "<|END_OF_TURN_TOKEN|>", "<｜end▁of▁sentence｜>", "<|user|>", "<|observation|>",
)  # fmt: skip
_SPECIAL = re.compile(r"<[|｜][^<>|｜\s{}'\"+]*[|｜]>|<\|[a-z_]+>|<[a-z_]+\|>|</?[a-z]+_of_[a-z]+>")


def template_tokenizer(template: str, merged: tuple[str, ...] = ()) -> tuple[Any, tuple[int, ...]]:
    """A tokenizer with one id per character and per special token of the template, and the ids that end a turn.

    `merged`: texts that have an id of their own, without being special.
    """
    letters = sorted({*string.printable, *template, "«"})
    tokenizer = Tokenizer(models.WordLevel({letter: index for index, letter in enumerate(letters)}, unk_token="«"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens(list(merged))
    tokenizer.add_special_tokens([*sorted(set(_SPECIAL.findall(template))), "<BOS>", "<EOS>"])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<BOS>", eos_token="<EOS>", pad_token="<EOS>", unk_token="«"
    )
    made.chat_template = template
    known = made.get_vocab()
    stops = [stop for stop in STOPS if stop in known and not (stop == "<|end|>" and "<|return|>" in known)]
    return made, tuple(known[stop] for stop in [*stops, "<EOS>"])


def real_templates() -> dict[str, str]:
    """The chat templates in TRL's package, which it takes from the models; none if it is not installed."""
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        return {}
    files = sorted((Path(found.origin).parent / "chat_templates").glob("*.jinja"))
    return {file.stem: file.read_text() for file in files if not file.stem.endswith("_training")}
