"""From prompts and answers to ids: templates that refuse, fail or never end, tokenizers that mark spaces, ids with holes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from opd.data.render import render_completion, render_prompt
from opd.data.source import prompt_source
from opd.errors import DataError, ModelError
from opd.models.language_model import LanguageModel
from opd.models.tokenizers import share_vocabulary
from opd.types import Prompt
from tests.helpers import EOS, TEMPLATE, tiny_model, tiny_module, tiny_tokenizer

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
        ("{{ messages[7]['content'] }}", "refused it"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 'a' + 1 }}", "refused it"),
        ("{{ messages.append(1) }}", "unsafe|refused it"),
        ("{{ ''.__class__.__mro__ }}", "unsafe|refused it"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}", "did not end"),
        ("{% for a in range(99999) %}{{ range(99999) | list | sum }}{% endfor %}", "did not end"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refused it"),
        ("{{ range(10000000000) }}", "refused it"),
        ("{{ 'x' * 30000000 }}", "characters"),
        ("{{ 'x' * 9999999999999 }}", "refused it"),
    ],
)  # fmt: skip
def test_a_template_that_fails_or_never_ends_is_one_sentence(
    template: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if words == "did not end":  # the others are never short of time
        monkeypatch.setattr("opd.data.template.SECONDS", 0.5)
    with pytest.raises(ModelError if "did not end" in words else DataError, match=words):
        render_prompt(CHAT, with_template(template))


@pytest.mark.parametrize(
    "template", ["{% for a in %}", "{% if", "{{ 10 ** 10 ** 10 }}", "{% endfor %}", "{% nothing %}"]
)
def test_a_template_that_is_none_is_refused(template: str) -> None:
    with pytest.raises((ModelError, DataError), match="template"):
        render_prompt(CHAT, with_template(template))


def test_what_a_template_may_use() -> None:
    """Generation blocks, loop controls, arguments and a text that holds stars: real templates stay untouched."""
    template = "{% generation %}{% for m in messages %}{% if loop.index > 5 %}{% break %}{% endif %}{{ m['content'] * n }}{% endfor %}{% endgeneration %}**"
    tokenizer = with_template(template)
    assert tokenizer.decode(render_prompt(CHAT, tokenizer, {"n": 2}).tolist()) == "1+11+1**"


@pytest.mark.parametrize(
    "key", ["add_generation_prompt", "tokenize", "conversation", "messages", "return_dict", "chat_template"]
)
def test_arguments_that_opd_sets_are_refused_in_the_recipe_and_in_code(key: str) -> None:
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
def test_an_answer_has_the_ids_it_has_behind_its_prompt(scheme: str, chat: bool, answer: str) -> None:
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
