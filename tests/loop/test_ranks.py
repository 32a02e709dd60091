"""Several ranks take the step that one process takes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import opd
from opd.common.errors import RecipeError
from opd.common.messages import read_message, write_message
from opd.engines.alongside import from_columns, share_of, to_columns
from opd.loop.distributed import DistributedRanks
from opd.loop.ranks import Ranks
from opd.models.settings import layers_of_unit
from opd.recipe import load_recipe
from opd.records import Finished, Rollout, SampledToken, SampleRequest, Sampling
from opd.registry import validate_settings
from opd.runner.inputs import revision_read
from opd.teachers.kinds import AnyTeacher, RunContext
from opd.teachers.pool import open_teachers
from tests.support.ranks import Job, differences, start, together

SHORT = ["train.steps=2", "eval.prompts=0", "rollout.prompts=9", "train.micro_tokens=96"]


def rollout(name: str, size: int) -> Rollout:
    numbers = np.arange(size, dtype=np.float32)
    ids = np.arange(size, dtype=np.int32)
    author = np.zeros(size, dtype=np.uint8)
    return Rollout(
        name, "p", 0, 0, "d", "student", ids, ids, author, numbers, numbers, numbers, ids, "stop", group=name
    )


def test_messages_come_out_as_they_went_in() -> None:
    value = {
        "plain": [1, -0.1, 1 / 3, "äö", None, True, (1, ("a",))],
        ("role", 8): {"id": np.arange(6, dtype=np.float64).reshape(2, 3), "none": np.zeros(0, dtype=bool)},
        "number": np.float32(0.1),
    }
    found = read_message(write_message(value))
    assert found["plain"] == value["plain"]
    assert found["number"] == float(np.float32(0.1))
    assert found["role", 8]["id"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert found["role", 8]["none"].dtype == bool
    (again,) = read_message(write_message([rollout("a", 3)]))
    assert isinstance(again, Rollout)
    assert again.version.dtype == np.int32
    assert again.logprob.tolist() == [0.0, 1.0, 2.0]
    assert math.isnan(read_message(write_message(float("nan"))))


def test_messages_hold_no_objects() -> None:
    with pytest.raises(TypeError, match="cannot send each other a Ranks"):
        write_message(Ranks())


def test_tokens_travel_as_columns() -> None:
    events: list[SampledToken | Finished] = [
        SampledToken("a", 7, -0.1, 1 / 3, float("-inf"), 2),
        SampledToken("b", 8, -0.2, -0.3, -0.4, 3),
        Finished("a", "length"),
        SampledToken("b", 9, -0.5, -0.6, -0.7, 3),
        Finished("b", "stop"),
    ]
    for some in (events, events[:2], events[2:3], []):
        assert from_columns(read_message(write_message(to_columns(some)))) == some


def test_samples_of_one_prompt_stay_on_one_rank() -> None:
    prompts = [np.array([number // 2], dtype=np.int32) for number in range(10)]
    requests = [SampleRequest(str(number), ids, number, Sampling(4)) for number, ids in enumerate(prompts)]
    shares = [[request.id for request in share_of(requests, rank, 2)] for rank in range(2)]
    assert shares == [["0", "1", "4", "5", "8", "9"], ["2", "3", "6", "7"]]


def test_one_process_takes_everything() -> None:
    ranks, rollouts = Ranks(), [rollout("a", 2), rollout("b", 3)]
    assert ranks.deal(rollouts) == rollouts
    assert ranks.gather(3) == [3]
    assert ranks.share(lambda: 4) == 4
    assert ranks.leads


def test_complete_groups_are_dealt_by_tokens() -> None:
    rollouts = [rollout(name, size) for name, size in (("a", 8), ("b", 5), ("c", 4), ("a", 8), ("d", 3))]
    shares = [[item.group for item in DistributedRanks(None, rank, 2, rank).deal(rollouts)] for rank in range(2)]
    assert shares == [["a", "a"], ["b", "c", "d"]]


@pytest.mark.parametrize(
    ("setting", "why"), [("store.hidden=true", "store.hidden"), ("train.learn=false", "only scores")]
)
def test_what_ranks_cannot_do_is_rejected(setting: str, why: str) -> None:
    (stage,) = load_recipe("quickstart", [setting]).stages
    with pytest.raises(RecipeError, match=why):
        DistributedRanks(None, 0, 2, 0).require(stage)


def test_groups_have_to_be_of_one_size() -> None:
    (stage,) = load_recipe("quickstart", ["cluster={shard: hybrid, group: 2}"]).stages
    with pytest.raises(RecipeError, match="3 ranks do not make groups of 2"):
        DistributedRanks(None, 0, 3, 0).require(stage)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["eval.prompts=5"], "eval.teachers needs all weights"),
        (["eval.prompts=0", "rollout.teacher_share=0.5"], "rollout.teacher_share needs all weights"),
        (["eval.prompts=0", "pool.resident=2"], "or paged. Choose one"),
    ],
)
def test_spread_teachers_only_score(settings: list[str], why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        load_recipe("quickstart", ["cluster.teachers=shard", *settings])


def test_a_teacher_on_one_gpu_is_rejected() -> None:
    (stage,) = load_recipe("quickstart", ["teachers.arithmetic={model: tiny/arithmetic, device: 'cuda:1'}"]).stages
    with pytest.raises(RecipeError, match=r"teachers.arithmetic: device 'cuda:1' with several ranks"):
        DistributedRanks(None, 0, 2, 0).require(stage)


class Sharded(Ranks):
    @property
    def sharded(self) -> bool:
        return True


def test_a_live_teacher_is_rejected_if_weights_are_sharded(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="refresh with every: 1"):  # before anything is loaded
        DistributedRanks(None, 0, 2, 0).require(load_recipe("methods/hdpo").stages[0])
    student = opd.load_model("tiny/generalist")
    kind = validate_settings(
        "coach", AnyTeacher, {"kind": "live", "view": {"kind": "template", "template": "{answer}{prompt}"}}
    )
    with pytest.raises(RecipeError, match="refresh with every: 1"):
        open_teachers({"coach": kind}, student, lambda ref: student, RunContext(ranks=Sharded()))


@pytest.mark.slow
def test_two_ranks_take_the_step_of_one(tmp_path: Path) -> None:
    together(2, tmp_path / "log.txt", Job(tmp_path / "two", "quickstart", SHORT))
    opd.run("quickstart", overrides=SHORT, out=tmp_path / "one")
    assert not differences(tmp_path / "one", tmp_path / "two")


def test_a_mistake_is_reported_once_and_ends_all_ranks(tmp_path: Path) -> None:
    group = start(2, tmp_path / "log.txt", "run", "quickstart", "student=tiny/nobody", "--out", str(tmp_path / "run"))
    assert group.codes() == [2, 2]
    assert group.said().count("tiny/nobody") == 1, group.said()


@pytest.mark.parametrize(
    ("layers", "weights", "several"), [(3, 1000, 1), (9, 1000, 2), (28, 15_728_640, 4), (64, 500_000_000, 1), (1, 0, 1)]
)
def test_small_layers_are_gathered_together(layers: int, weights: int, several: int) -> None:
    assert layers_of_unit(layers, weights) == several


def test_a_stage_that_was_passed_over_gives_on_a_revision() -> None:
    stages = [
        {"name": "first", "student": {"model": "org/model", "revision": "v1"}},
        {"name": "second", "student": "stage:first"},
        {"name": "third", "student": "stage:second"},
    ]
    base = {"teachers": {"only": "tiny/spelling"}, "prompts": {"source": "task:reverse", "domain": "only"}}
    recipe = load_recipe({**base, "stages": stages})
    trained = {"first": Path("run/checkpoints/first/step-2"), "second": Path("run/checkpoints/second/step-4")}
    passed = {"first": Path("org/model"), "second": Path("org/model")}
    inputs = {"first": {"hub:org/model@v1": {"for": "student", "commit": "abc"}}}
    assert revision_read(recipe, trained, inputs, "third", "stage:second", None) is None
    assert revision_read(recipe, passed, {}, "third", "stage:second", None) == "v1"
    assert revision_read(recipe, passed, inputs, "third", "stage:second", None) == "abc"
