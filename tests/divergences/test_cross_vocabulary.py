"""Teachers with another tokenizer: which tokens cover the same bytes, sums over spans, ULD and GOLD."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import opd
from opd.common.errors import RecipeError, TokenizerMismatch
from opd.divergences import Projection
from opd.divergences.compute import cross_vocabulary_loss, matched_distance, sorted_distance
from opd.divergences.kinds import jsd
from opd.models.attention import Packed
from opd.models.load import load_model, load_tokenizer
from opd.models.tokenizers import common_spans, matching_ids, pieces, readable, token_bytes
from opd.objective.batch import Batch, over_spans
from opd.objective.gates import Gate
from opd.objective.objective import prepare_term
from opd.recipe import load_recipe
from opd.records import Prompt, Signal, StopReason
from opd.runner.plan import make_plan
from opd.teachers.scoring import span_sums
from opd.teachers.views import BytesView, Group, aligned_bytes, texts_for
from tests.support.helpers import term, tiny_model, tiny_tokenizer
from tests.support.rollouts import rollout


def fast(backend: Tokenizer, **special: str) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", **special)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}="
    return tokenizer


def byte_level(*merges: tuple[str, str]) -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<eos>", *letters, *("".join(pair) for pair in merges)]
    backend = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return fast(backend)


def sentencepiece(*words: str) -> PreTrainedTokenizerFast:
    """`▁` for spaces, one before the text, and bytes for letters it does not know: Llama's kind."""
    vocabulary = [
        ("<unk>", 0.0),
        ("<eos>", 0.0),
        *((f"<0x{byte:02X}>", -20.0) for byte in range(256)),
        *((word, -1.0) for word in words),
    ]
    backend = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return fast(backend, unk_token="<unk>")


TEXTS = ["", "hello world", " leading", "añ→漢字", "🙂🙂", "two  spaces\n", "12+30=42"]


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_tokens_make_up_the_text(text: str) -> None:
    levels = byte_level(("h", "e"), ("l", "l"), ("Ġ", "w"))
    pieced = sentencepiece("▁", "▁hello", "wor", "ld", "a", "l", "e", "d", "i", "n", "g")
    for tokenizer in (levels, pieced):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        said = b"".join(pieces(tokenizer, ids))
        assert said.removeprefix(b" " if tokenizer is pieced and text else b"") == text.encode()
    spans = common_spans(
        pieces(levels, levels(text)["input_ids"]), pieces(pieced, pieced(text, add_special_tokens=False)["input_ids"])
    )
    covered = b"".join(piece for s0, s1, _, _ in spans for piece in pieces(levels, levels(text)["input_ids"])[s0:s1])
    assert covered == text.encode()  # every byte is in a span, whatever the cuts


def test_spans_are_as_short_as_both_sides_allow() -> None:
    assert common_spans([b"ab", b"c", b"d"], [b"a", b"bc", b"d"]) == [(0, 2, 0, 2), (2, 3, 2, 3)]
    assert common_spans([b"1", b"0", b"4"], [b"10", b"4"]) == [(0, 2, 0, 1), (2, 3, 1, 2)]
    assert common_spans([b"a", b"b"], [b" a", b"b"]) == [(0, 1, 0, 1), (1, 2, 1, 2)]  # a space before the first word
    assert common_spans([b" a"], [b" ", b"a"]) == [(0, 1, 0, 2)]
    assert common_spans([b"a", b"B"], [b"a", b"b"]) == [(0, 1, 0, 1)]  # rewritten: it ends where they differ
    assert common_spans([b"\xe6\xbc", b"\xa2"], [b"\xe6", b"\xbc\xa2"]) == [(0, 2, 0, 2)]
    assert common_spans([b"", b"a"], [b"a", b""]) == [(0, 2, 0, 2)]  # tokens without bytes go along
    assert common_spans([], []) == []


def test_an_answer_cut_within_a_character_is_read_up_to_there() -> None:
    assert readable("a漢".encode()[:-1]) == "a"
    assert readable(b"\xff") == ""
    assert readable("añ".encode()) == "añ"


def test_words_that_hold_no_bytes_are_rejected() -> None:
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(TokenizerMismatch, match="its decoder is WordPiece"):
        token_bytes(fast(backend))


# The view


def rendered(
    student: Any, teacher: Any, ids: list[int], stop_ids: tuple[int, ...] = (0,), stop: StopReason = "stop", **view: Any
) -> Any:
    one = replace(rollout("1", [1], ids), stop=stop)
    group = Group([one], teacher, {}, {}, stop_ids, {}, student)
    prompt = Prompt("1", "a", messages=({"role": "user", "content": "1+1"},))
    return texts_for(BytesView(**view), [one], {"1": prompt}, {"1": group}, 99)[0]


def test_the_stop_is_a_separate_event() -> None:
    student, teacher = byte_level(), byte_level(("4", "2"))
    answer = student("42")["input_ids"]
    text = rendered(student, teacher, [*answer, 0])
    asked = len(teacher("1+1=")["input_ids"])
    assert text.spans == ((0, 2, asked, asked + 1), (2, 3, asked + 1, asked + 2))
    assert text.ids[asked:].tolist() == [*teacher("42")["input_ids"], teacher.eos_token_id]
    assert rendered(student, teacher, answer).spans == text.spans[:1]  # cut off: no stop
    assert rendered(student, teacher, [*answer, 0], skip=1).spans == text.spans[1:]
    assert rendered(student, teacher, [0]).spans == ((0, 1, asked, asked + 1),)
    assert rendered(student, teacher, []).spans == ()


@pytest.mark.parametrize(
    ("merges", "answer", "kept"),
    [
        ([("1", "8")], "718", 3),  # what stands at the cut is no part of a longer token
        ([("1", "8")], "71", 1),  # the teacher would write "18" as one token, and puts its mass there
        ([("1", "8")], "1", 0),
        ([("b", "c"), ("a", "bc")], "zab", 1),  # "abc" is a token: neither "a" nor "b" would be cut like this
        ([("b", "c"), ("a", "bc")], "abcz", 4),
    ],
)
def test_the_end_of_a_cut_answer_is_left_out_where_more_text_would_change_it(
    merges: list[tuple[str, str]], answer: str, kept: int
) -> None:
    student, teacher = byte_level(), byte_level(*merges)
    ids = student(answer)["input_ids"]
    text = rendered(student, teacher, ids, stop="length")
    assert [span[1] for span in text.spans][-1:] == ([kept] if kept else [])
    assert text.cut == len(ids) - kept
    one = replace(rollout("1", [1], ids), stop="length")
    assert aligned_bytes(one, text, student, (0,)) == (len(answer), len(answer))
    whole = rendered(student, teacher, [*ids, 0])  # stopped: the text ends there, whatever could follow
    assert (whole.spans[-1][1], whole.cut) == (len(ids) + 1, 0)


def test_what_is_no_text_takes_no_part() -> None:
    student, teacher = byte_level(), byte_level()
    broken = student("a漢")["input_ids"][:-1]
    text = rendered(student, teacher, [*broken, 0])
    assert [span[:2] for span in text.spans] == [(0, 1)]  # neither the half character nor the stop behind it
    assert rendered(student, teacher, student("漢")["input_ids"][:1]) is None
    joined = byte_level(("a", "æ"))  # "a" and the first byte of the character
    assert rendered(student, joined, [*student("z")["input_ids"], *broken, 0]).spans[-1][1] == 1


def test_sums_over_spans_are_divided_over_the_students_tokens() -> None:
    spans = ((0, 2, 5, 6), (2, 3, 6, 8))
    values = span_sums(np.array([-1.0, -2.0, -4.0]), spans, 4)
    np.testing.assert_array_equal(values, [-0.5, -0.5, -6.0, np.nan])
    mask = np.array([True, True, True, False])
    signal = Signal("t", 0, "teacher", "bytes", spans, values, mask, crossed=np.array([7, 8, 9]))
    np.testing.assert_array_equal(over_spans(np.array([-1.0, -3.0, -1.0, -9.0]), signal), [-2.0, -2.0, -1.0, -9.0])
    plain = Signal("t", 0, "teacher", "same", ((0, 4, 5, 9),), values, mask)
    np.testing.assert_array_equal(over_spans(np.array([-1.0, -3.0, -1.0, -9.0]), plain), [-1.0, -3.0, -1.0, -9.0])


# The distances


def random(rows: int, size: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).log_softmax(-1)


def test_the_sorted_distance_knows_ranks_alone() -> None:
    student, teacher = random(5, 9, 0).exp(), random(5, 12, 1).exp()
    assert sorted_distance(student, student).abs().max() == 0
    shuffled = student[:, torch.randperm(9, generator=torch.Generator().manual_seed(2))]
    assert sorted_distance(student, shuffled).abs().max() < 1e-15
    padded = torch.nn.functional.pad(student, (0, 3))
    torch.testing.assert_close(
        sorted_distance(student, teacher),
        (padded.sort(descending=True).values - teacher.sort(descending=True).values).abs().sum(-1),
    )
    assert (sorted_distance(student, teacher, 3) <= sorted_distance(student, teacher) + 1e-12).all()


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_gold_is_the_jsd_where_all_ids_match(beta: float) -> None:
    student, teacher = random(5, 9, 0), random(5, 9, 1)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(2))
    ids = (torch.arange(9), order.argsort())
    torch.testing.assert_close(
        matched_distance(student, teacher[:, order], ids, beta, None), jsd(student, teacher, beta), atol=1e-14, rtol=0
    )
    assert matched_distance(student, student, ids[:1] * 2, beta, None).abs().max() < 1e-15
    some = (torch.arange(4), torch.arange(4))  # the others by rank
    assert matched_distance(student, student, some, beta, None).abs().max() < 1e-15


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_gold_has_no_gradient_where_both_agree_on_some_of_their_ids(beta: float) -> None:
    teacher = random(5, 9, 0)
    some = (torch.tensor([0, 2, 3]), torch.tensor([0, 2, 3]))
    logits = teacher.clone().requires_grad_()
    log_s = logits.log_softmax(-1)
    value = matched_distance(log_s, log_s.detach(), some, beta, None)
    assert value.abs().max() < 1e-12
    assert torch.autograd.grad(value.sum(), logits)[0].abs().max() < 1e-12
    assert (matched_distance(random(5, 9, 1), teacher, some, beta, (1.0, 0.0)) > 0).all()


def test_the_loss_has_the_gradient_of_its_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """Block by block, and made again in the backward pass."""
    monkeypatch.setattr("opd.divergences.compute.CROSSED_BYTES", 4 * 12 * 2)
    generator = torch.Generator().manual_seed(0)
    hidden, weight, theirs, head = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((5, 4), (9, 4), (5, 6), (12, 6))
    )
    events, before = (
        torch.rand(5, generator=generator, dtype=torch.float64),
        -torch.rand(5, generator=generator, dtype=torch.float64),
    )
    ids = (torch.tensor([0, 2, 3]), torch.tensor([1, 2, 7]))

    def distance(log_s: torch.Tensor, log_t: torch.Tensor) -> torch.Tensor:
        return matched_distance(log_s, log_t, ids, 0.5, None)

    found = []
    for whole in (True, False):
        leaves = [value.clone().requires_grad_() for value in (hidden, weight, before)]
        if whole:
            log_s = (leaves[0] @ leaves[1].T).log_softmax(-1) + leaves[2][:, None]
            log_t = (theirs @ head.T).log_softmax(-1) + before[:, None]
            loss = (events * distance(log_s, log_t)).sum()
        else:
            loss, _ = cross_vocabulary_loss(
                Projection(leaves[0], leaves[1]), Projection(theirs, head), events, distance, before=(leaves[2], before)
            )
        loss.backward()
        found.append([loss.detach(), *(leaf.grad for leaf in leaves)])
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right, atol=1e-12, rtol=0)


def test_ids_match_by_bytes_and_special_tokens_by_name() -> None:
    left, right = matching_ids(byte_level(("4", "2")), byte_level(("4", "3")), ({0}, {0}))
    assert len(left) == 256
    assert not set(left.tolist()) & {0, 257}  # neither the stop nor a token that only one has
    table = token_bytes(byte_level(("4", "2")))
    assert [table[number] for number in left] == [token_bytes(byte_level(("4", "3")))[number] for number in right]


@pytest.mark.parametrize("aggregate", ["token_mean", "sequence_mean", "prompt_mean", "constant"])
@pytest.mark.parametrize("form", ["gold", "uld"])
def test_a_span_is_one_event_however_many_tokens_it_has(form: str, aggregate: str) -> None:
    rollouts = [rollout("1", [5], [8, 9, 1], group="a"), rollout("2", [5], [8, 9, 9, 1, 1], group="b")]
    cut: list[Any] = [((0, 2, 1, 2), (2, 3, 2, 3)), ((0, 1, 1, 2), (1, 4, 2, 3))]  # the last token is in no span
    signals = {}
    for one, spans in zip(rollouts, cut, strict=True):
        mask = np.arange(one.response_ids.size) < spans[-1][1]
        signals[one.id] = Signal("t", 0, "teacher", "bytes", spans, None, mask, crossed=np.zeros(2))
    batch = Batch(rollouts, {("teacher", "hidden"): signals})
    prepared = prepare_term(term(form=form, aggregate=aggregate), "0", 1.0, batch, 9, 0)
    weights = prepared.term.weights(prepared, rollouts)
    sums = [
        float(weights[one.id][s0:s1].sum()) for one, spans in zip(rollouts, cut, strict=True) for s0, s1, _, _ in spans
    ]
    assert sums == pytest.approx([1.0 if aggregate == "constant" else 0.25] * 4)
    assert weights["2"][-1] == 0

    class Half(Gate):
        name = "half"

        def factors(self, view: Any) -> list[np.ndarray]:
            return [np.where(np.arange(one.response_ids.size) == 0, 0.0, 1.0) for one in view.rollouts]

    halved = term(form=form, aggregate=aggregate).model_copy(update={"gate": [Half()]})
    half = prepare_term(halved, "0", 1.0, batch, 9, 0)
    gated = half.term.weights(half, rollouts)
    total = sum(float(weight.sum()) for weight in gated.values())
    assert total == pytest.approx(
        2.5 if aggregate == "constant" else 1
    )  # half of the first span is closed, and all of the third


# Runs


def test_uld_is_the_mean_over_spans_of_a_plain_computation(tmp_path: Path) -> None:
    changes = {"store.hidden": True, "rollout.prompts": 16, "train.steps": 1, "eval.prompts": 0, "device": "cpu"}
    overrides = [f"{key}={str(value).lower()}" for key, value in changes.items()]
    losses = {}
    for aggregate in ("token_mean", "sequence_mean"):
        asked = [*overrides, f"objective=[{{form: uld, aggregate: {aggregate}}}]"]
        run = opd.run("methods/uld", overrides=asked, out=tmp_path / aggregate)
        losses[aggregate] = run.metrics[0]["loss"]
    models = [load_model(name, device="cpu") for name in ("tiny/generalist", "tiny/pairs")]
    found = run.rollouts.signals(list(run.rollouts.entries), "teacher", "hidden")
    by_answer = []
    for name, signal in found.items():
        (one,) = run.rollouts.load([name])
        ids = torch.from_numpy(np.concatenate([one.prompt_ids, one.response_ids]).astype(np.int64))
        with torch.no_grad():
            every = models[0].project(models[0].hidden(ids, Packed.of([len(ids)]))).logits().softmax(-1)
        rows, distances = torch.from_numpy(np.asarray(signal.values)), []
        theirs, at = models[1].project(rows).logits().detach().softmax(-1), 0
        for s0, _, t0, t1 in signal.spans:
            p, q = (side.sort(descending=True).values for side in (every[one.prompt_ids.size - 1 + s0], theirs[at]))
            distances.append(float((torch.nn.functional.pad(p, (0, q.numel() - p.numel())) - q).abs().sum()))
            at += t1 - t0
        by_answer.append(distances)
    assert sum(map(len, by_answer)) < sum(entry.length for entry in run.rollouts.entries.values())
    assert losses["token_mean"] == pytest.approx(np.mean([value for part in by_answer for value in part]), rel=1e-4)
    assert losses["sequence_mean"] == pytest.approx(np.mean([np.mean(part) for part in by_answer]), rel=1e-4)


def test_a_step_counts_what_was_left_out_of_partly_aligned_and_of_cut_answers(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("a", "b")  # the teacher rewrites its text
    teacher = {"model": save(tmp_path / "teacher", tokenizer, seed=1), "view": "bytes"}
    recipe = {**RECIPE, "student": save(tmp_path / "student"), "train": {"steps": 1}, "eval": {"prompts": 0}}
    recipe |= {"teachers": {"sums": teacher}, "objective": {"form": "policy_gradient"}}
    recipe["rollout"] = {"prompts": 8, "samples": 4, "max_new_tokens": 24}
    run = opd.run(recipe, out=tmp_path / "run")
    letter = tiny_tokenizer()("a")["input_ids"][0]
    answers = [run.rollouts.load([name])[0].response_ids.tolist() for name in run.rollouts.entries]
    scored = [ids for ids in answers if ids[0] != letter]
    after = [len(ids) - ids.index(letter) for ids in scored if letter in ids]
    (line,) = run.metrics
    assert after
    assert line["unaligned/sums"] == pytest.approx(sum(after) / sum(map(len, scored)))
    assert line["cut_off/sums"] == 0  # letters are all that it has
    assert line["unshown/sums"] == pytest.approx(1 - len(scored) / len(answers))

    student, lines = load_tokenizer("tiny/generalist"), {}
    for limit in (1, 3):
        overrides = [
            f"rollout.max_new_tokens={limit}",
            "rollout.prompts=24",
            "train.steps=1",
            "eval.prompts=0",
            "device=cpu",
        ]
        run = opd.run("methods/simct", overrides=overrides, out=tmp_path / str(limit))
        entries, (lines[limit],) = run.rollouts.entries, run.metrics
        texts = {name: student.decode(run.rollouts.load([name])[0].response_ids.tolist()) for name in entries}
        open_ends = {name for name, text in texts.items() if text[-1] == "1"}  # 10 to 19 are tokens of the teacher
        assert 0 < len(open_ends) < len(texts)
        found = run.rollouts.signals(list(entries), "teacher", "logprobs_at")
        assert {name for name in texts if name not in found or not found[name].mask.all()} == open_ends
        tokens = sum(entry.length for entry in entries.values())
        assert lines[limit]["cut_off/arithmetic"] == pytest.approx(len(open_ends) / tokens)
        assert lines[limit]["unaligned/arithmetic"] == 0
    assert lines[1]["unshown/arithmetic"] == lines[1]["cut_off/arithmetic"]
    assert lines[3]["unshown/arithmetic"] == 0


def save(directory: Path, tokenizer: Any = None, seed: int = 0, order: torch.Tensor | None = None) -> str:
    model = tiny_model("llama_tied", seed)
    if order is not None:  # the same model, whose ids are called otherwise
        with torch.no_grad():
            table = model.module.get_input_embeddings().weight
            table[:78] = table[:78][order].clone()
    model.tokenizer = tokenizer or tiny_tokenizer()
    model.tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}="
    model.save(directory)
    return str(directory)


def shuffled() -> tuple[Any, torch.Tensor]:
    """The tokenizer of the tests with its letters in another order; and which row each id had."""
    plain = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    vocabulary = plain["model"]["vocab"]
    letters = [word for word in vocabulary if len(word) == 1]
    order = torch.arange(78)
    for number, word in enumerate(reversed(letters)):
        order[2 + number] = vocabulary[word]
    plain["model"]["vocab"] = {"<pad>": 0, "<eos>": 1} | {
        word: 2 + number for number, word in enumerate(reversed(letters))
    }
    backend = Tokenizer.from_str(json.dumps(plain))
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>"), order


RECIPE: dict[str, Any] = {
    "prompts": [{"source": "task:addition", "domain": "sums"}],
    "rollout": {"prompts": 4, "samples": 2, "max_new_tokens": 6},
    "train": {"steps": 2},
    "eval": {"prompts": 2},
    "sampler": {"slots": 4},
    "device": "cpu",
}


@pytest.mark.parametrize(
    "objective",
    [
        {"form": "policy_gradient"},
        {"form": "gold", "beta": 0.5},
        pytest.param({"form": "uld"}, marks=pytest.mark.slow),
    ],
    ids=["policy_gradient", "gold", "uld"],
)
def test_the_same_teacher_under_other_ids_teaches_the_same(objective: dict[str, Any], tmp_path: Path) -> None:
    """Through the view, and plainly."""
    tokenizer, order = shuffled()
    student, plain = save(tmp_path / "student"), save(tmp_path / "plain", seed=1)
    other = save(tmp_path / "other", tokenizer, seed=1, order=order)
    losses = {}
    for name, teacher in (("plain", plain), ("other", {"model": other, "view": "bytes"})):
        run = opd.run(
            {**RECIPE, "student": student, "teachers": {"sums": teacher}, "objective": objective},
            out=tmp_path / name / "run",
        )
        losses[name] = [(line["loss"], line["grad_norm"]) for line in run.metrics]
        found = run.summary["stages"][0]["start"][0]
    np.testing.assert_allclose(losses["plain"], losses["other"], atol=2e-6, rtol=2e-4)
    assert found["aligned"] == 1
    assert found["warnings"][0].startswith("another tokenizer: 76 ids differ, 100% of the text aligned")


def test_gold_with_one_tokenizer_is_the_direct_term(tmp_path: Path) -> None:
    student, teacher = save(tmp_path / "student"), save(tmp_path / "teacher", seed=1)
    losses = []
    for number, objective in enumerate(
        ({"form": "gold", "beta": 0.3}, {"form": "direct", "divergence": "jsd", "beta": 0.3})
    ):
        recipe = {**RECIPE, "student": student, "teachers": {"sums": teacher}, "objective": objective}
        run = opd.run(recipe, out=tmp_path / str(number))
        losses.append([(line["loss"], line["grad_norm"]) for line in run.metrics])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)


def test_another_tokenizer_stays_rejected_without_the_view(tmp_path: Path) -> None:
    crossing = {"model": "tiny/pairs", "view": "bytes"}
    spec = {
        **RECIPE,
        "student": "tiny/generalist",
        "teachers": {"sums": crossing},
        "objective": {"form": "policy_gradient"},
    }
    make_plan(load_recipe(spec))
    with pytest.raises(TokenizerMismatch, match=r"do not share a tokenizer: 10 of 109 ids differ.*view: bytes"):
        make_plan(load_recipe({**spec, "teachers": {"sums": "tiny/pairs"}}))
    refused: list[dict[str, Any]] = [
        {"objective": {"form": "direct"}},
        {"objective": {"form": "k2"}},
        {"objective": {"form": "policy_gradient", "advantage": {"kl_baseline": True}}},
        {"objective": {"form": "policy_gradient", "divergence": "forward_kl"}},
        {"objective": {"form": "gold", "gate": {"kind": "teacher_entropy", "below": 1.0}}},
        {"rollout": {**RECIPE["rollout"], "teacher_mix": 0.2}},
        {"teachers": {"sums": {"kind": "self", "view": "bytes"}}},
    ]
    for changes in refused:
        with pytest.raises(RecipeError, match=r"another tokenizer|has another|its own tokenizer"):
            load_recipe({**spec, **changes})
