"""From prompts and answers to ids: templates that refuse, fail or never end, tokenizers that mark spaces, ids with holes."""

from __future__ import annotations

import os
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from opd.common.errors import DataError, ModelError
from opd.data import prompts as template
from opd.data.prompts import prompt_text, render_completion, render_prompt
from opd.data.sources import prompt_source
from opd.models.language_model import LanguageModel
from opd.models.tokenizers import share_vocabulary
from opd.records import Prompt
from tests.support.helpers import EOS, TEMPLATE, tiny_model, tiny_module, tiny_tokenizer

CHAT = Prompt(id="p", domain="d", messages=({"role": "user", "content": "1+1"},))


def with_template(template: Any) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ nothing.here.at_all }}", "undefined"),
        ("{{ messages[7]['content'] }}", "rejected it"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 'a' + 1 }}", "rejected it"),
        ("{{ messages.append(1) }}", "unsafe|rejected it"),
        ("{{ ''.__class__.__mro__ }}", "unsafe|rejected it"),
        ("{{ '{0.__class__.__init__.__globals__}'.format(1) }}", "unsafe|rejected it"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ range(10000000000) }}", "rejected it"),
        ("{{ ('f' * 5000) | int(0, 16) }}", "4300 digits"),
    ],
)
def test_a_template_that_rejects_a_row_is_one_sentence(template: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        render_prompt(CHAT, with_template(template))


NESTED = "{% set n = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% set a = 10 %}" + "{% set a = a*a*a*a*a*a*a*a*a*a*a*a*a %}" * 8, "did not end|memory"),
        (NESTED + "{{ n.a == n.b }}", "did not end"),  # without a line of Python, nor memory
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "did not end"),
        ("{% for a in range(99999) %}{{ range(99999) | list | sum }}{% endfor %}", "did not end"),
        ("{{ lipsum(n=100000) }}", "did not end"),
        ("{{ ('a' * 5000000) | wordwrap(1) }}", "did not end"),
        ("{{ 10 ** (10 ** 10) % 7 }}", "did not end|memory"),
        ("{{ ('a' * 3000000000) | length }}", "memory"),
        ("{{ [1] * 1000000000 }}", "memory"),
        ("{{ '%1000000000d' % 1 }}", "memory"),
        ("{{ '{:>1000000000}'.format(1) }}", "memory"),
        ("{{ 'x' | center(10 ** 10) }}", "memory"),
        ("{{ 'x'.ljust(9000000000) }}", "memory"),
        ("{{ (['a' * 1000000] * 1000000) | join }}", "memory|did not end"),
        ("{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}", "memory"),
        ("{{ ('a' * 1000000).translate({97: 'b' * 10000}) }}", "memory"),
        ("{% set n = namespace(a='xx') %}{% for i in range(60) %}{% set n.a = n.a ~ n.a %}{% endfor %}", "memory"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}xxxx{% endfor %}{% endfor %}", "memory|did not end"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurses without end"),
        ("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", "nested too deep"),
        ("{{ 'x' * 2000000 }}", "characters"),
        (r"{{ '\ud800' }}", "surrogate"),
        ("{% for a in [1] %}" * 30 + "{% endfor %}" * 30, "not a valid template"),
        ("{% for a in %}", "not a valid template"),
        ("{% if", "not a valid template"),
        ("{% endfor %}", "not a valid template"),
        ("{% nothing %}", "not a valid template"),
    ],
    ids=lambda given: given[:40],
)
def test_a_template_that_breaks_its_bounds_ends_within_them(template: str, words: str) -> None:
    """In a process of its own: this one keeps its memory, its limits and its other threads."""
    before, limits = resource.getrusage(resource.RUSAGE_SELF), resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(ModelError, match=words):
        render_prompt(CHAT, with_template(template))
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_maxrss - before.ru_maxrss < 20_000  # KiB
    assert resource.getrlimit(resource.RLIMIT_AS) == limits
    assert render_prompt(CHAT, with_template("{{ messages[0]['content'] }}")).size == 3


def test_a_rendering_has_a_bounded_process() -> None:
    """What the kernel holds it to: memory by its limit, processor time by a timer. It is kept for the next row, and replaced if it dies."""
    render_prompt(CHAT, with_template(TEMPLATE))
    process = template._processes[os.getpid()]._running
    assert process is not None
    line = next(line for line in Path(f"/proc/{process.pid}/limits").read_text().splitlines() if "address" in line)
    assert int(line.split()[3]) < 200 << 20
    with pytest.raises(DataError):
        render_prompt(CHAT, with_template("{{ raise_exception('this row alone') }}"))
    assert template._processes[os.getpid()]._running is process
    process.kill()
    process.wait()
    assert render_prompt(CHAT, with_template("{{ messages[0]['content'] }}")).size == 3
    assert template._processes[os.getpid()]._running is not process


def test_a_fork_and_threads_render_too() -> None:
    tokenizer = with_template("{{ messages[0]['content'] }}")
    texts = [f"{number}+{number}" for number in range(200)]
    prompts = [Prompt(id=text, domain="d", messages=({"role": "user", "content": text},)) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda prompt: tokenizer.decode(render_prompt(prompt, tokenizer).tolist()), prompts))
    assert found == texts
    own = template._processes[os.getpid()]._running
    assert own is not None
    child = os.fork()
    if not child:
        fine = render_prompt(CHAT, tokenizer).size == 3
        other = template._processes[os.getpid()]._running
        os._exit(0 if fine and other is not None and other.pid != own.pid else 1)
    assert os.waitpid(child, 0)[1] == 0


TOOLS = [{"type": "function", "function": {"name": "f", "description": "é ≠ <e>", "parameters": {"type": "object"}}}]
REAL = {  # what real templates do, feature by feature
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "blocks": "{%- for m in messages %}\n    {%- if m.role == 'user' %}\n  [INST] {{ m.content | trim }} [/INST]\n    {% else %}\n{{ m.content }}{{ eos_token }}\n  {% endif %}\n{%- endfor %}\n\n",
    "namespace": "{% set ns = namespace(last=-1, n=0) %}{% for m in messages[::-1] %}{% set i = messages | length - 1 - loop.index0 %}{% if ns.last < 0 and m.role == 'user' and m.content is string %}{% set ns.last = i %}{% endif %}{% endfor %}{{ ns.last }}{{ messages[0].content.split('+')[-1].lstrip('\n') }}",
    "tools": "{% if tools is not none and tools %}{% for t in tools %}{{ t | tojson }}{{ t | tojson(indent=4) }}{{ t.function.items() | list }}{% endfor %}{% else %}none{% endif %}{{ documents is none }}",
    "macro": "{% macro show(x, deep=0) %}{% if x is mapping %}{% for k, v in x | dictsort %}{{ k }}:{{ show(v, deep + 1) }},{% endfor %}{% elif x is iterable and x is not string %}{{ x | map('upper') | join(', ') }}{% else %}{{ x }}{% endif %}{% endmacro %}{{ show(messages[0]) }}{{ show(['a', 'b']) }}",
    "generation": "{{ bos_token }}{% for m in messages %}{% generation %}{{ m['content'] }}\n{% endgeneration %}{% if loop.first %}{% continue %}{% endif %}{% break %}{% endfor %}",
    "options": "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>{% endif %}{{ strftime_now('%Y') }}{{ note }}{{ pair }}{{ numbers | sum }}{{ date_string | default('26 Jul 2024', true) }}",
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_a_template_gives_what_it_gives_in_transformers(name: str) -> None:
    tokenizer = with_template(REAL[name])
    tokenizer.bos_token = "<s>"
    chat = [{"role": "user", "content": " 1+\n2 é"}, {"role": "assistant", "content": "3"}]
    options = {"tools": TOOLS, "enable_thinking": False, "note": None, "pair": (1, "2"), "numbers": [1, 2.5, True]}
    for arguments in ({"numbers": []}, options):
        wanted = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **arguments)
        assert prompt_text(Prompt(id="p", domain="d", messages=tuple(chat)), tokenizer, arguments) == wanted


def test_of_several_templates_the_default_is_taken() -> None:
    tokenizer = with_template({"default": "{{ messages[0]['content'] }}", "tool_use": "{{ tools | length }}"})
    assert prompt_text(CHAT, tokenizer, {}) == "1+1"
    assert prompt_text(CHAT, tokenizer, {"tools": TOOLS}) == "1"
    with pytest.raises(ModelError, match="cannot be chosen"):
        prompt_text(CHAT, with_template({"rag": "x"}), {})


@pytest.mark.parametrize(
    ("given", "words"), [({"x": np.zeros(2)}, "type ndarray"), ({"tools": "f"}, "tools must be a list")]
)
def test_what_a_template_cannot_be_given_is_said(given: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        prompt_text(CHAT, with_template(TEMPLATE), given)


def test_what_a_template_may_use() -> None:
    """Generation blocks, loop controls, arguments and a text that holds stars: real templates stay untouched."""
    template = "{% generation %}{% for m in messages %}{% if loop.index > 5 %}{% break %}{% endif %}{{ m['content'] * n }}{% endfor %}{% endgeneration %}**"
    tokenizer = with_template(template)
    assert tokenizer.decode(render_prompt(CHAT, tokenizer, {"n": 2}).tolist()) == "1+11+1**"


@pytest.mark.parametrize(
    "key", ["add_generation_prompt", "tokenize", "conversation", "messages", "return_dict", "chat_template"]
)
def test_arguments_that_opd_sets_are_rejected_in_the_recipe_and_in_code(key: str) -> None:
    with pytest.raises(ValueError, match=f"{key} is set by opd"):
        prompt_source("task:addition", chat_template_kwargs={key: False})
    with pytest.raises(DataError, match="is set by opd"):
        render_prompt(CHAT, with_template(TEMPLATE), {key: False})


# Completions


def metaspace(scheme: str) -> PreTrainedTokenizerFast:
    """As SentencePiece does it: a mark for every space, and one before the first word."""
    words = [
        "<unk>",
        "<eos>",
        "▁",
        "▁the",
        "▁sum",
        "▁is",
        "is",
        "42",
        "▁42",
        "4",
        "2",
        ":",
        "\n",
        "s",
        "i",
        "c",
        "at",
        "cat",
        "▁cat",
    ]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(
        models.Unigram(
            [(word, -float(len(words) - index) / 10 + len(word)) for word, index in vocabulary.items()], unk_id=0
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("answer", ["42", " 42", "is 42"])
def test_an_answer_has_the_ids_that_it_has_after_its_prompt(scheme: str, chat: bool, answer: str) -> None:
    tokenizer = metaspace(scheme)
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    text = "the sum is:"
    prompt = Prompt(
        id="p", domain="d", fields={"completion": answer},
        **({"messages": ({"role": "user", "content": text},)} if chat else {"text": text}),
    )  # fmt: skip
    ids, cut = render_completion(prompt, tokenizer, 100, (EOS,))
    before = render_prompt(prompt, tokenizer)
    assert not cut
    assert ids[-1] == EOS
    joint = tokenizer(text + answer)["input_ids"]
    assert [*before, *ids[:-1]] == joint
    assert render_completion(prompt, tokenizer, ids.size - 1, (EOS,))[1]


def test_an_answer_that_shares_a_token_with_its_prompt_leaves_the_prompt_alone() -> None:
    tokenizer = metaspace("first")
    prompt = Prompt(id="p", domain="d", text="the c", fields={"completion": "at"})  # together: the cat
    ids, _ = render_completion(prompt, tokenizer, 100, (EOS,))
    before = render_prompt(prompt, tokenizer)
    assert tokenizer.decode([*before, *ids[:-1]]) == "the cat"
    assert tokenizer.convert_ids_to_tokens(ids.tolist()) == ["at", "<eos>"]


def test_an_answer_ends_in_a_stop_id_that_the_models_know() -> None:
    tokenizer = tiny_tokenizer()
    prompt = Prompt(id="p", domain="d", text="1+1=", fields={"completion": "2"})
    assert render_completion(prompt, tokenizer, 9, (7, EOS))[0][-1] == EOS
    tokenizer.eos_token = None
    assert render_completion(prompt, tokenizer, 9, (7,))[0].tolist() == [4, 7]


# Vocabularies


def with_holes() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "1": 2, "2": 5, "<eos>": 70}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def test_ids_with_holes_count_up_to_the_highest() -> None:
    tokenizer = with_holes()
    model = LanguageModel(tiny_module("llama", eos_token_id=70), tokenizer, "holes")
    assert len(tokenizer) == 4
    assert model.size == 71
    assert model.stop_ids == (70,)
    assert model.project(torch.zeros(1, 32)).logits().shape == (1, 71)


def test_stop_ids_beyond_the_tokenizer_count_and_beyond_the_head_do_not() -> None:
    rows = tiny_module("llama").config.vocab_size
    module = tiny_module("llama", eos_token_id=[EOS, rows - 1, rows + 5])
    model = LanguageModel(module, tiny_tokenizer(), "m")
    assert model.stop_ids == (EOS, rows - 1)
    assert model.size == rows
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ModelError, match=f"id {rows + 5}"):
        LanguageModel(tiny_module("llama", eos_token_id=rows + 5), tokenizer, "m")


def test_student_and_teachers_share_one_vocabulary() -> None:
    """A stop id that only a teacher names is an event for all; none can draw what another cannot score."""
    student, teacher = tiny_model("llama"), tiny_model("llama", eos_token_id=[EOS, 79])
    assert student.size == 78
    assert share_vocabulary(student, {"t": teacher}) == (EOS, 79)
    assert student.size == teacher.size == 80
    small = tiny_model("llama", vocab_size=78)
    student = tiny_model("llama", vocab_size=90, eos_token_id=[EOS])
    assert share_vocabulary(student, {"t": small}) == (EOS,)
    assert student.size == small.size == 78
    with pytest.raises(ModelError, match="stops at id 85"):
        share_vocabulary(tiny_model("llama", vocab_size=90, eos_token_id=[85]), {"t": small})


def test_a_saved_student_carries_stop_ids_beyond_its_tokenizer(tmp_path: Path) -> None:
    model = tiny_model("llama", eos_token_id=[EOS, 79])
    model.save(tmp_path / "m")
    from opd.models import load_model

    assert load_model(str(tmp_path / "m")).stop_ids == (EOS, 79)
    assert np.isfinite(model.project(torch.zeros(1, 32)).logits().detach().numpy()).all()
