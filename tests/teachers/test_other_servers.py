"""Teachers behind servers that others wrote: what they say is what the same model says here."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import opd
from opd.common.errors import (
    ModelError,
    RecipeError,
    RemoteError,
    RunDirectoryError,
    TokenizerMismatch,
    TrainingError,
)
from opd.models import load_model
from opd.models.language_model import LanguageModel, describe_head, load_head
from opd.recipe import load_recipe
from opd.records import SignalNeed, TopK
from opd.teachers.kinds import TeacherInputs
from opd.teachers.other_servers import OpenAITeacher, SglangTeacher, VllmTeacher
from opd.teachers.scoring import LocalTeacher
from opd.teachers.views import response_after
from tests.support.foreign_server import NAME, app_of, serving
from tests.support.helpers import KINDS, save_tiny, tiny_model
from tests.support.rollouts import rollout
from tests.support.servers import free_port

STOPS = (1, 3)
ROLLOUTS = [rollout("1", [5, 6, 7], [8, 9, 1]), rollout("2", [10], [11, 12, 13, 3]), rollout("3", [3] * 9, [4, 1])]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("foreign") / "teacher", seed=1)


@pytest.fixture(scope="module")
def model(directory: str) -> LanguageModel:
    return load_model(directory)


def supplies() -> TeacherInputs:
    student = tiny_model("llama", seed=2)
    return TeacherInputs(student, STOPS, load_model)  # type: ignore[arg-type]


def pooled(address: str, directory: str, **settings: Any) -> Any:
    kind = VllmTeacher(address=address, model=NAME, weights=directory, **{"patience": 5.0, **settings})
    return kind.open("t", supplies())


def asked(address: str, directory: str, **settings: Any) -> Any:
    kind = OpenAITeacher(address=f"{address}/v1", model=NAME, tokenizer=directory, **{"patience": 5.0, **settings})
    return kind.open("t", supplies())


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_is_read_without_the_model(tmp_path: Path, kind: str) -> None:
    path = save_tiny(tmp_path / kind, kind)
    whole, head = load_model(path), load_head(path)
    assert torch.equal(head.weight, whole.head.weight)  # type: ignore[arg-type]
    assert (head.stop_ids, head.scale, head.softcap) == (whole.stop_ids, whole.scale, whole.softcap)
    assert head.context == whole.context
    assert describe_head(path).weight is None
    hidden = torch.randn(3, head.width)
    assert torch.equal(head.project(hidden, whole.size).logits(), whole.project(hidden).logits())


def test_a_missing_head_is_reported(tmp_path: Path, directory: str) -> None:
    from safetensors.torch import load_file, save_file

    path = Path(save_tiny(tmp_path / "x"))
    tensors = load_file(path / "model.safetensors")
    save_file({key: value for key, value in tensors.items() if key != "lm_head.weight"}, path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        load_head(str(path))


def test_hidden_states_from_a_pooling_server_are_the_models_own(model: LanguageModel, directory: str) -> None:
    here = LocalTeacher("t", "teacher", model, 1000, STOPS)
    seen = [response_after(item.prompt_ids, item, skip=int(item.id == "2")) for item in ROLLOUTS]
    with serving(app_of(model)) as address:
        there = pooled(address, directory, batch_tokens=12, temperature=1.0)
        for need in (SignalNeed("hidden"), SignalNeed("logprobs_at"), SignalNeed("topk", k=4)):
            for one, other in zip(here.score(ROLLOUTS, need, seen), there.score(ROLLOUTS, need, seen), strict=True):
                np.testing.assert_array_equal(one.mask, other.mask)
                mine, theirs = (
                    (one.values.logprobs, other.values.logprobs) if need.kind == "topk" else (one.values, other.values)
                )
                np.testing.assert_allclose(np.asarray(theirs), np.asarray(mine), atol=1e-5)
        assert there.context == 64
        assert there.version
        halves = pooled(address, directory, transfer="bfloat16").score(ROLLOUTS, SignalNeed("hidden"))
        whole = here.score(ROLLOUTS, SignalNeed("hidden"))
        for one, other in zip(whole, halves, strict=True):
            torch.testing.assert_close(other.values, one.values.bfloat16().float())


def test_log_probs_from_a_completions_server_are_the_models_own(model: LanguageModel, directory: str) -> None:
    """As far as it knows them: of a stop event of two ids the sum, where both are listed or the other cannot matter."""
    here = LocalTeacher("t", "teacher", model, 1000, STOPS)
    with serving(app_of(model, runner="generate", most=76)) as address:
        there = asked(address, directory, max_logprobs=76)
        for need in (SignalNeed("logprobs_at"), SignalNeed("topk", k=5)):
            for one, other in zip(here.score(ROLLOUTS, need), there.score(ROLLOUTS, need), strict=True):
                if need.kind == "logprobs_at":
                    np.testing.assert_allclose(other.values[other.mask], one.values[other.mask], atol=2e-3)
                    assert other.mask[:-1].all()
                else:
                    assert other.mask.all()
                    known = ~np.isnan(other.values.stop_logprob)
                    np.testing.assert_allclose(
                        other.values.stop_logprob[known], one.values.stop_logprob[known], atol=2e-3
                    )
        assert there.context == 63


def test_a_tail_that_rounding_hides_is_not_known(model: LanguageModel, directory: str) -> None:
    with serving(app_of(model, runner="generate")) as address:
        teacher = asked(address, directory)
        nan = np.full((3, 2), np.nan, np.float32)
        tops = TopK(np.full((3, 2), -1, np.int32), nan, nan[:, 0].copy(), nan[:, 0].copy(), "")
        for place, missing in enumerate((1e-3, 1e-6, -1e-6)):
            teacher._fill(tops, place, {5: math.log(0.75), 7: math.log(0.25 - missing)}, 2)
        assert tops.tail[0] == pytest.approx(math.log(1e-3), abs=1e-3)
        assert np.isnan(tops.tail[1:]).all()


def test_a_stop_event_that_is_not_known_is_masked(model: LanguageModel, directory: str) -> None:
    with serving(app_of(model, runner="generate")) as address:
        teacher = asked(address, directory)
        nothing = teacher._stop({5: -0.1, 7: -4.0}, 2)
        assert math.isnan(nothing)
        assert math.isnan(teacher._stop({1: -3.0, 7: -4.0}, 2))  # the other may be as likely as e^-4
        assert teacher._stop({1: -0.01, 7: -20.0}, 2) == pytest.approx(-0.01)  # here it cannot be
        assert math.isnan(teacher._stop({1: -2.0, 7: -0.3, 9: -20.0}, 2))  # the token that stands there bounds nothing
        assert teacher._stop({1: -1.0, 3: -2.0, 7: -1.5}, 3) == pytest.approx(np.logaddexp(-1.0, -2.0))
        (first,) = teacher.score([rollout("0", [], [5, 6])], SignalNeed("logprobs_at"))
        assert first.mask.tolist() == [False, True]  # nothing stands before the first token
        assert np.isnan(first.values[0])


def test_hidden_states_from_sglang_are_the_models_own(model: LanguageModel, directory: str) -> None:
    here, app = LocalTeacher("t", "teacher", model, 1000, STOPS), app_of(model, runner="sglang")
    with serving(app) as address:
        kind = SglangTeacher(address=address, model=NAME, weights=directory, patience=5.0)
        there = kind.open("t", supplies())
        for one, other in zip(
            here.score(ROLLOUTS, SignalNeed("hidden")), there.score(ROLLOUTS, SignalNeed("hidden")), strict=True
        ):
            torch.testing.assert_close(other.values, one.values)
        for says, words in (
            ({"meta_info": {}}, "return-hidden-states-mode"),
            ({"meta_info": {"hidden_states": [[[0.0] * 3] * 2]}}, "disable-radix-cache"),
        ):
            app.state.says = says
            with pytest.raises(RemoteError, match=words):
                there.score(ROLLOUTS, SignalNeed("hidden"))


def test_a_server_with_another_model_is_rejected(model: LanguageModel, directory: str, tmp_path: Path) -> None:
    other = load_model(save_tiny(tmp_path / "other", seed=9))
    port = free_port()
    with serving(app_of(model), port) as address:
        teacher = pooled(address, directory)
        state = teacher.state()
        teacher.restore(teacher.version, state)
        with pytest.raises(RunDirectoryError, match="version"):
            teacher.restore(teacher.version + 1, state)
    with serving(app_of(other), port), pytest.raises(TrainingError, match="is not the one that was opened"):
        teacher.score(ROLLOUTS, SignalNeed("hidden"))  # it came back as another
    with serving(app_of(other), port), pytest.raises(RunDirectoryError, match="another model"):
        pooled(address, directory).restore(teacher.version, state)


class Restarted:
    """Behind one of the answers the server is another one, and behind a later one what it was before."""

    def __init__(self, app: Any, after: int, until: int) -> None:
        self.app, self.after, self.until = app, after, until

    def __call__(self, run: Callable[[], Any]) -> Any:
        found = run()
        self.after, self.until = self.after - 1, self.until - 1
        if self.after == 0:
            self.app.state.noise, self.app.state.started = 5.0, "200.5"
        if self.until == 0:
            self.app.state.noise, self.app.state.started = 0.0, "300.5"
        return found


@pytest.mark.parametrize("runner", ["pooling", "generate"])
def test_a_server_that_was_another_within_a_batch_is_asked_again(
    model: LanguageModel, directory: str, monkeypatch: pytest.MonkeyPatch, runner: str
) -> None:
    app = app_of(model, runner=runner)
    app.state.started = "100.5"
    with serving(app) as address:
        teacher = (pooled if runner == "pooling" else asked)(address, directory, concurrency=1)
        before = teacher.score(ROLLOUTS, SignalNeed("logprobs_at"))
        restarted = Restarted(app, 1, len(ROLLOUTS))
        signed = teacher._same._signed
        monkeypatch.setattr(teacher._same, "_signed", lambda call: restarted(partial(signed, call)))
        after = teacher.score(ROLLOUTS, SignalNeed("logprobs_at"))
        assert restarted.until < 0
        for one, other in zip(before, after, strict=True):
            np.testing.assert_allclose(one.values, other.values, rtol=1e-4)
        app.state.asked.clear()
        teacher.score(ROLLOUTS, SignalNeed("logprobs_at"))
        assert len(app.state.asked) == 3 + 3 + 1  # texts, the probe, and since when it runs


def test_several_processes_at_one_address_are_checked_by_the_probe_alone(
    model: LanguageModel, directory: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app, lines = app_of(model), list[str]()
    app.state.started = "0"
    with serving(app) as address:
        teacher = pooled(address, directory)
        ask = teacher._same._process
        monkeypatch.setattr(teacher._same, "_process", lambda: lines.append(ask()) or str(len(lines)))
        for _ in range(2):
            teacher.score(ROLLOUTS, SignalNeed("hidden"))
        assert len(lines) == 4  # of the first batch alone
    assert "every check reaches another process" in capsys.readouterr().err


def test_a_server_that_is_not_deterministic_is_rejected(model: LanguageModel, directory: str) -> None:
    app = app_of(model)
    app.state.noise = 5.0
    with serving(app) as address, pytest.raises(TrainingError, match="is not the one that was opened"):
        pooled(address, directory)


@pytest.mark.parametrize(
    ("runner", "settings", "error", "words"),
    [
        ("generate", {}, RemoteError, "--runner pooling"),
        ("pooling", {"model": "nobody"}, RemoteError, "it has served"),
    ],
)
def test_what_a_pooling_teacher_finds_wrong(
    model: LanguageModel, directory: str, runner: str, settings: dict[str, Any], error: Any, words: str
) -> None:
    with serving(app_of(model, runner=runner)) as address, pytest.raises(error, match=words):
        VllmTeacher(**{"address": address, "model": NAME, "weights": directory, "patience": 1.0, **settings}).open(
            "t", supplies()
        )


def test_what_a_completions_teacher_finds_wrong(
    model: LanguageModel, directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        serving(app_of(model, runner="generate", most=8)) as address,
        pytest.raises(RemoteError, match="max allowed: 8"),
    ):
        asked(address, directory, max_logprobs=9)
    monkeypatch.setenv("SOME_TOKEN", "secret")
    with serving(app_of(model, runner="generate", token="secret")) as address:
        with pytest.raises(RemoteError, match="token_env"):
            asked(address, directory)
        assert asked(address, directory, token_env="SOME_TOKEN").context == 63


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ({"choices": [{"text": "hello"}]}, "cannot score"),
        ({"choices": []}, "cannot score"),
        ([], "cannot score"),
        ({"choices": [{"prompt_logprobs": [None, {"5": {"logprob": 3.0}}]}]}, "cannot score"),
        ({"choices": [{"prompt_logprobs": [None] * 99}]}, "the answer covers 99"),
        ({"choices": [{"prompt_logprobs": [None] + [{"77": {"logprob": -1.0}}] * 7}]}, "another one at 1"),
    ],
    ids=str,
)
def test_invalid_answers_are_reported(model: LanguageModel, directory: str, says: Any, words: str) -> None:
    app = app_of(model, runner="generate")
    with serving(app) as address:
        teacher = asked(address, directory)
        app.state.says = says
        with pytest.raises(RemoteError, match=words):
            teacher.score(ROLLOUTS[:1], SignalNeed("logprobs_at"))


def test_another_tokenizer_is_rejected(model: LanguageModel) -> None:
    with serving(app_of(model)) as address, pytest.raises(TokenizerMismatch, match="do not share a tokenizer"):
        pooled(address, "tiny/arithmetic")


def recipe(tmp_path: Path, teacher: dict[str, Any], **objective: Any) -> dict[str, Any]:
    student = tmp_path / "student"
    return {
        "student": str(student) if student.exists() else save_tiny(student), "teachers": {"t": teacher}, "prompts": "task:addition",
        "rollout": {"prompts": 4, "max_new_tokens": 4}, "sampler": {"slots": 4}, "train": {"steps": 3, "lr": 0.001}, "eval": {"prompts": 0},
        "objective": objective, "device": "cpu",
    }  # fmt: skip


@pytest.fixture
def foreign(request: pytest.FixtureRequest, model: LanguageModel) -> Iterator[Any]:
    app = app_of(model, runner=request.param, most=30)
    with serving(app) as address:
        yield app, address


@pytest.mark.parametrize(
    ("foreign", "kind", "objective"),
    [
        ("pooling", {"kind": "vllm", "weights": ...}, {"form": "direct", "divergence": "jsd"}),
        ("generate", {"kind": "openai", "tokenizer": ...}, {"form": "direct", "support": "topk", "k": 9}),
        ("generate", {"kind": "openai", "tokenizer": ...}, {"form": "policy_gradient"}),
    ],
    indirect=["foreign"],
    ids=["hidden", "topk", "sampled"],
)
def test_a_student_trains_from_it_as_from_the_model_here(
    foreign: Any, directory: str, tmp_path: Path, kind: dict[str, Any], objective: dict[str, Any]
) -> None:
    app, address = foreign
    settings = {key: directory if value is ... else value for key, value in kind.items()}
    app.state.fail = 2  # it is being restarted when it is first asked
    there = opd.run(
        recipe(tmp_path, {**settings, "address": address, "model": NAME}, **objective), out=tmp_path / "there"
    )
    here = opd.run(recipe(tmp_path, {"model": directory}, **objective), out=tmp_path / "here")
    for one, other in zip(here.metrics, there.metrics, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-4, abs=1e-6)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
        assert other.get("tail_unknown/0:direct") == (0.0 if "support" in objective else None)


def test_a_restart_in_mid_step_loses_nothing(model: LanguageModel, directory: str, tmp_path: Path) -> None:
    port, objective = free_port(), {"form": "direct"}
    first = app_of(model)

    def restarted() -> None:
        with serving(first, port):
            part = 3 + 3 + 4 + 3 + 2  # two probes, a step and its probe, part of another
            while first.state.asked.count("/pooling") < part and not done.is_set():
                time.sleep(0.002)
        time.sleep(0.3)
        with serving(app_of(model), port):
            done.wait()

    done = threading.Event()
    thread = threading.Thread(target=restarted)
    thread.start()
    try:
        settings = {
            "kind": "vllm",
            "address": f"http://127.0.0.1:{port}",
            "model": NAME,
            "weights": directory,
            "concurrency": 1,
        }
        there = opd.run(recipe(tmp_path, settings, **objective), out=tmp_path / "there")
    finally:
        done.set()
        thread.join()
    here = opd.run(recipe(tmp_path, {"model": directory}, **objective), out=tmp_path / "here")
    assert [metric["loss"] for metric in there.metrics] == pytest.approx(
        [metric["loss"] for metric in here.metrics], rel=1e-4
    )


def test_recipes_that_ask_for_too_much_are_rejected(tmp_path: Path, directory: str) -> None:
    teacher = {"kind": "openai", "address": "http://127.0.0.1:9", "model": directory, "max_logprobs": 8}
    for objective, words in (
        ({"form": "direct"}, "needs 'hidden'"),
        ({"form": "direct", "support": "topk", "k": 9}, "max_logprobs is 8"),
        ({"form": "direct", "support": "topk", "k": 8, "temperature": 2.0}, "renormalised"),
    ):
        with pytest.raises(RecipeError, match=words):
            load_recipe(recipe(tmp_path, teacher, **objective))
    load_recipe(recipe(tmp_path, teacher, form="direct", support="topk", k=8))
    with pytest.raises(RecipeError, match="http"):
        load_recipe(recipe(tmp_path, {**teacher, "address": "ftp://x"}, form="policy_gradient"))


def test_a_plan_says_what_the_server_says_and_does_not_need_it(
    model: LanguageModel, directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def noted(address: str, **settings: Any) -> str:
        kind = OpenAITeacher(address=address, model=NAME, tokenizer=directory, **settings)
        return "\n".join(kind.inquire("t", None, "student").notes)

    with serving(app_of(model, runner="generate")) as address:
        assert "texts of up to 63 tokens" in noted(address)
        monkeypatch.delenv("NO_SUCH_TOKEN", raising=False)
        with pytest.raises(RemoteError, match="token_env 'NO_SUCH_TOKEN': this variable is not set"):
            noted(address, token_env="NO_SUCH_TOKEN")
        with pytest.raises(RemoteError, match="has no model 'other'"):
            OpenAITeacher(address=address, model="other").inquire("t", None, "student")
    assert "not reachable now" in noted(f"http://127.0.0.1:{free_port()}")
