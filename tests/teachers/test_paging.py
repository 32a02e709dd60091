"""Paging: many teachers, few of them in memory, and the same losses bit for bit."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

import opd
from opd.common.context import RunContext
from opd.common.errors import DiskError, RecipeError, TrainingError
from opd.loop.ranks import Ranks
from opd.loop.scorer import Scorer
from opd.models import load_model
from opd.recipe import load_recipe
from opd.records import SignalNeed
from opd.teachers.paging import (
    CopiedLoad,
    DiskShelf,
    FlatLayout,
    MemoryShelf,
    PagedModel,
    PagedTeacher,
    Pager,
    Staging,
    pinned,
    unpin,
)
from opd.teachers.pool import probe_rollouts
from opd.teachers.views import SameView, response_after
from tests.support.helpers import save_tiny, tiny_model

TASKS = {"arithmetic": "task:addition", "spelling": "task:reverse", "sorting": "task:sort", "ciphers": "task:caesar"}


def recipe(**keys: Any) -> dict[str, Any]:
    return {
        "log": {"samples": 0},
        "student": "tiny/generalist",
        "teachers": {name: f"tiny/{name}" for name in TASKS},
        "prompts": [{"source": source, "domain": name} for name, source in TASKS.items()],
        "rollout": {"prompts": 8, "samples": 1, "max_new_tokens": 8},
        "train": {"steps": 2, "micro_tokens": 64},
        "eval": {"prompts": 0},
        "device": "cpu",
        "threads": 1,
        **keys,
    }


def losses(tmp_path: Path, name: str, spec: dict[str, Any]) -> list[tuple[float, ...]]:
    path = tmp_path / f"{name}.yaml"
    path.write_text(yaml.safe_dump(spec), encoding="utf-8")
    run = opd.run(path, out=tmp_path / name)
    lines = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    keys = ["loss", "reverse_kl", "grad_norm", *sorted(key for key in lines[0] if key.startswith("kl/"))]
    assert ("pages" in lines[0]) == ("pool" in spec)
    if "pool" in spec:
        assert all(line["pages"] == 4 for line in lines)  # each once per step, whatever is asked of it
        assert all(line["time/page"] > 0 and line["page_rate"] > 0 for line in lines)
    return [tuple(line[key] for key in keys) for line in lines]


@pytest.mark.slow
def test_losses_are_those_of_teachers_that_are_all_resident(tmp_path: Path) -> None:
    """Hidden states and log-probs of each, a gate that looks at its head, and a second name in another role."""
    spec = recipe(
        teachers={
            **{name: f"tiny/{name}" for name in TASKS},
            **{f"r{name}": {"model": f"tiny/{name}", "role": "reference", "domains": [name]} for name in TASKS},
        },
        objective=[
            {"divergence": "jsd", "gate": {"kind": "teacher_entropy", "above": 0.01}},
            {"form": "policy_gradient"},
            {"divergence": "forward_kl", "role": "reference"},
        ],
        eval={"prompts": 1, "max_new_tokens": 2},
        rollout={"prompts": 4, "samples": 1, "max_new_tokens": 4},
    )
    expected = losses(tmp_path, "all", spec)
    assert losses(tmp_path, "two", {**spec, "pool": {"resident": 2}}) == expected
    once = {"pool": {"resident": 1}, "eval": {"prompts": 0}, "train": {"steps": 1, "micro_tokens": 64}}
    assert losses(tmp_path, "one", {**spec, **once}) == expected[:1]
    evals = [
        json.loads((tmp_path / name / "summary.json").read_text())["stages"][0]["evals"] for name in ("two", "all")
    ]
    assert evals[0] == evals[1]
    starts = [json.loads((tmp_path / name / "start.json").read_text())["main"] for name in ("two", "all")]
    assert starts[0] == starts[1]
    assert all(pair["origin"] is not None for pair in starts[0])
    assert not [path for path in (tmp_path / "two").iterdir() if path.name.startswith("tmp")]


@pytest.mark.slow
def test_parts_of_mixtures_come_and_go_as_well(tmp_path: Path) -> None:
    """All their heads are here at once where the loss needs them, and one that another kind reads stays."""
    spec = recipe(
        teachers={
            "all": {
                "kind": "mixture",
                "combine": "sum",
                "parts": {**{name: f"tiny/{name}" for name in TASKS}, "start": {"kind": "ema"}},
            }
        },
        rollout={"prompts": 4, "samples": 1, "max_new_tokens": 4},
        train={"steps": 2, "micro_tokens": 32},
    )
    expected = losses(tmp_path, "all", spec)
    assert losses(tmp_path, "two", {**spec, "pool": {"resident": 2}}) == expected
    kinds = load_recipe(spec | {"pool": {"resident": 1}}).stages[0]
    assert [ref.model for ref in kinds.pool.paged(kinds.teachers)] == [f"tiny/{name}" for name in TASKS]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"pool": {"keep": "disk"}}, "pool.keep disk .* Set pool.resident"),
        ({"pool": {"resident": 1}, "teachers": {"t": {"kind": "self"}}}, "only frozen teachers can be paged out"),
        ({"pool": {"resident": 2}, "rollout": {"teacher_mix": 0.5}}, "rollout.teacher_mix needs the weights of teachers"),
        ({"pool": {"resident": 2}, "rollout": {"teacher_share": 0.5}}, "rollout.teacher_share needs the weights"),
        ({"pool": {"resident": 2}, "eval": {"weight_average": True}}, "eval.weight_average needs the weights"),
        ({"pool": {"resident": 0}}, "pool.resident"),
        ({"pool": {"resident": 1, "keep": "tape"}}, "pool.keep"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_rejected_when_the_recipe_is_read(tmp_path: Path, keys: dict, words: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**recipe(), "objective": {"on": ["student", "teacher"]}, **keys}), encoding="utf-8")
    with pytest.raises(RecipeError, match=words):
        load_recipe(path)


def paged(pager: Pager, kind: str = "llama_tied", seed: int = 0) -> tuple[PagedModel, torch.Tensor]:
    model = tiny_model(kind, seed)
    ids, layout = torch.tensor([3, 5, 7, 9, 4]), opd.models.attention.Packed.of([5])
    expected = model.hidden(ids, layout).detach()
    return pager.add_model(model, None), expected


@pytest.mark.parametrize("keep", ["memory", "disk"])
@pytest.mark.parametrize("resident", [1, 2, 3])
def test_at_most_so_many_are_resident_and_each_says_what_it_said(tmp_path: Path, keep: Any, resident: int) -> None:
    pager = Pager(resident, keep, tmp_path)
    kinds = ["llama_tied", "qwen3", "gpt2", "gemma2", "qwen3_moe"]
    models = [paged(pager, kind, seed) for seed, kind in enumerate(kinds)]
    ids, layout = torch.tensor([3, 5, 7, 9, 4]), opd.models.attention.Packed.of([5])
    for order in (range(5), [4, 2, 0], [1]):  # the last two: not all are asked
        with pager.scoring([models[number][0] for number in order]):
            for number in order:
                model, expected = models[number]
                assert torch.equal(model.hidden(ids, layout), expected)
                held = [found.stay for found, _ in models if found.stay.flat is not None or found.stay in pager._coming]
                assert len(held) <= resident
                assert model.stay in held
        assert all(model.stay.flat is None for model, _ in models)
        for model, expected in models:  # the head alone
            logits = model.project(expected).logits()
            assert torch.isfinite(logits).all()
            assert model.stay.flat is None
            assert len(pager._heads) == 1
        pager.release()
        assert model.project(expected).hidden is expected
    assert torch.isnan(next(models[0][0].module.parameters())).all()
    pager.close()


def test_weights_that_came_back_different_stop_the_run(tmp_path: Path) -> None:
    pager = Pager(1, "memory", tmp_path)
    model, _ = paged(pager)
    model.stay.shelf._pieces[0][100:2000] = 0  # type: ignore[attr-defined]
    teacher, asked = PagedTeacher("t", "teacher", model, None, (1,)), probe_rollouts(78, (1,))
    for kind in ("hidden", "logprobs_at"):
        with pytest.raises(TrainingError, match="is not the one that was opened"):
            teacher.score(asked, SignalNeed(kind))
        pager.release()
    other, _ = paged(pager, seed=1)
    ids, layout = torch.tensor([3, 5]), opd.models.attention.Packed.of([2])
    for using in (partial(other.hidden, ids, layout), other.resident().__enter__):  # whoever else asks for weights
        model.hidden(ids, layout)
        with pytest.raises(TrainingError, match="is not the one that was opened"):
            using()
        pager.release()
    with pytest.raises(TrainingError, match="is not the one that was opened"), pager.scoring([model]):
        model.hidden(ids, layout)
    assert model.stay.flat is None


def test_a_batch_is_scored_without_waiting_for_the_probe_which_is_compared_at_its_end(tmp_path: Path) -> None:
    pager = Pager(2, "memory", tmp_path)
    models = [paged(pager, seed=seed)[0] for seed in range(3)]
    teachers = [PagedTeacher(f"t{number}", "teacher", model, None, (1,)) for number, model in enumerate(models)]
    models[0].stay.shelf._pieces[0][100:2000] = 0  # type: ignore[attr-defined]
    asked, scored = probe_rollouts(78, (1,)), []
    with pytest.raises(TrainingError, match="is not the one that was opened"), pager.scoring(models):
        scored.extend(teacher.score(asked, SignalNeed("hidden")) for teacher in teachers)
    assert len(scored) == 3  # by then its weights had gone
    with pager.scoring(models[1:]):  # the others are not to blame
        teachers[1].score(asked, SignalNeed("hidden"))


@pytest.mark.parametrize(("kind", "kept"), [("hidden", True), ("hidden", False), ("logprobs_at", False)])
def test_nothing_is_written_down_before_the_probe_was_compared(tmp_path: Path, kind: Any, kept: bool) -> None:
    pager, asked, written, told = Pager(1, "memory", tmp_path), probe_rollouts(78, (1,)), [], []
    model, _ = paged(pager)
    model.stay.shelf._pieces[0][100:2000] = 0  # type: ignore[attr-defined]
    teacher = PagedTeacher("t", "teacher", model, None, (1,))
    spec = SimpleNamespace(
        teachers={"t": SimpleNamespace(view=SameView(), reads=lambda: ())},
        checkpoint=SimpleNamespace(resume="prefill"),
        keeps_hidden=kept,
        route="domain",
    )
    store = SimpleNamespace(record_signal=lambda *facts, **more: written.append(facts))
    given: Any = (spec, {"t": teacher}, {}, {}, None, store, Ranks(), RunContext(), pager)
    scorer = Scorer(*given)
    seen, mine = [response_after(rollout.prompt_ids, rollout) for rollout in asked], {rollout.id for rollout in asked}
    with pytest.raises(TrainingError, match="is not the one that was opened"), pager.scoring([model]):
        told.append(scorer._ask(teacher, asked, seen, SignalNeed(kind), mine, False))
    assert not written
    assert len(told) == (kind == "hidden" and not kept)  # that is told before, and trained on by nobody


class Queue:
    """A stream that notes what is put into it, and how far the other one had come then."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Queue) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Moment) -> None:
        self.log.append(f"{self.name} waits for {event.place}")


class Moment:
    place = ""

    def record(self, queue: Queue) -> None:
        self.place = f"{queue.name} at {len(queue.log)}"


def test_copies_wait_for_the_memory_and_computing_for_the_copies(tmp_path: Path) -> None:
    """As on a GPU, but for the streams: the next copy begins behind the teacher before, beside the one that scores."""
    log: list[str] = []
    computing, copying = Queue("computing", log), Queue("copying", log)

    class Copying(Pager):
        def _load(self, stay: Any, reader: Any) -> CopiedLoad:
            log.append(f"copy {stay.name}")
            flat = torch.empty(stay.layout.size, dtype=torch.uint8)
            return CopiedLoad(stay.shelf, flat, lambda: computing, copying, Moment, lambda queue: nullcontext())

        def _account(self) -> None:
            """There is no clock."""

    pager = Copying(2, "memory", tmp_path)
    models = []
    for number in range(4):
        model = tiny_model("llama_tied", number)
        model.name = str(number)
        models.append(pager.add_model(model, None))
    ids, layout = torch.tensor([3, 5]), opd.models.attention.Packed.of([2])
    with pager.scoring(models):
        for model in models:
            model.hidden(ids, layout)
            log.append(f"score {model.name}")
    waits = [line for line in log if line.startswith("computing waits for copying at ")]
    order = [line for line in log if line not in waits]
    assert order == [
        "copy 0", "copying waits for computing",
        "copy 1", "copying waits for computing", "score 0",
        "copy 2", "copying waits for computing", "score 1",
        "copy 3", "copying waits for computing", "score 2",
        "score 3",
    ]  # fmt: skip
    for number, wait in enumerate(waits):  # each before its model scores, for the end of its own copy
        assert log.index(wait) < log.index(f"score {number}")
        assert log.index(f"copy {number}") < int(wait.split()[-1]) <= log.index(f"copy {number}") + 2
    assert len(waits) == 4
    pager.close()


@pytest.mark.gpu
@pytest.mark.parametrize("keep", ["memory", "disk"])
@pytest.mark.parametrize("resident", [1, 2, 3])
def test_on_a_gpu_each_gives_its_own_scores_without_waiting(tmp_path: Path, keep: Any, resident: int) -> None:
    pager, device = Pager(resident, keep, tmp_path), torch.device("cuda")
    ids, layout = torch.arange(2, 70, device=device), opd.models.attention.Packed.of([68], device)
    models, expected = [], []
    for seed in range(5):
        save_tiny(tmp_path / str(seed), seed=seed)
        model = load_model(str(tmp_path / str(seed)), dtype="bfloat16", device="cuda")
        expected.append(model.hidden(ids, layout).detach().clone())
        models.append(pager.add_model(model, tmp_path / str(seed)))
    for order in (range(5), [4, 2, 0, 1, 3]) * 3:
        said = {}
        with pager.scoring([models[number] for number in order]):
            for number in order:
                for _ in range(20):  # the device is busy while the next is on its way
                    said[number] = models[number].hidden(ids, layout)
        assert all(torch.equal(said[number], expected[number]) for number in order)
        assert pager.metrics()["page_rate"] > 0
    if keep == "memory":
        models[2].stay.shelf._pieces[0][100:2000] = 0  # type: ignore[attr-defined]
        with pytest.raises(TrainingError, match="is not the one that was opened"), pager.scoring(models):
            said |= {number: model.hidden(ids, layout) for number, model in enumerate(models)}
    pager.close()


def test_files_of_a_checkpoint_are_read_where_they_hold_the_very_bytes(tmp_path: Path) -> None:
    for shards in ("10GB", "20KB"):
        directory = tmp_path / shards
        save_tiny(directory)
        load_model(str(directory)).module.save_pretrained(directory, max_shard_size=shards)
        model = load_model(str(directory))
        tensors = dict(model.module.named_parameters())
        layout = FlatLayout(tensors)
        shelf = DiskShelf.of(layout, tensors, directory, tmp_path / "scratch", Staging())
        assert {Path(extent.path).parent for extent in shelf._extents} == {directory}
        flat = torch.empty(layout.size, dtype=torch.uint8)
        shelf.fill(flat, 0)
        views = layout.views(flat)
        assert all(torch.equal(views[name], tensor) for name, tensor in tensors.items())
        assert all(view.data_ptr() % 64 == 0 for view in views.values())
        place = layout.places["lm_head.weight"]
        part = torch.empty(place.size, dtype=torch.uint8)
        shelf.fill(part, place.start)
        assert torch.equal(place.of(part, 0), tensors["lm_head.weight"])
        shelf.close()
    half = load_model(str(directory), dtype="bfloat16")
    tensors = dict(half.module.named_parameters())
    other = DiskShelf.of(FlatLayout(tensors), tensors, directory, tmp_path / "scratch", Staging())
    assert [extent.path for extent in other._extents] == [f"a file in {tmp_path / 'scratch'}"]
    assert not list((tmp_path / "scratch").iterdir())  # it has no name, so nothing is left behind
    flat = torch.empty(FlatLayout(tensors).size, dtype=torch.uint8)
    other.fill(flat, 0)
    assert all(torch.equal(view, tensors[name]) for name, view in FlatLayout(tensors).views(flat).items())


def test_a_file_that_became_shorter_is_named(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "llama")
    model = load_model(str(tmp_path / "model"))
    pager = Pager(2, "disk", tmp_path)
    model = pager.add_model(model, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").open("r+b").truncate(1000)
    with pytest.raises(DiskError, match=r"model\.safetensors: it has become shorter"):
        model.hidden(torch.tensor([3, 5]), opd.models.attention.Packed.of([2]))
    pager.close()


def test_memory_that_spans_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opd.teachers.paging.PIECE", 1024)
    tensors = {"a": torch.randn(700), "b": torch.randn(31, 17).bfloat16(), "c": torch.randn(9, 40).t()}
    layout = FlatLayout(tensors)
    shelf = MemoryShelf(layout, tensors, torch.device("cpu"))
    flat = torch.empty(layout.size, dtype=torch.uint8)
    shelf.fill(flat, 0)
    views = layout.views(flat)
    assert all(torch.equal(views[name], tensor) for name, tensor in tensors.items())
    assert views["c"].stride() == tensors["c"].stride()


@pytest.mark.skipif(not Path("/proc/meminfo").is_file(), reason="nobody says how much memory is free")
def test_more_than_the_memory_that_is_free_is_not_pinned() -> None:
    with pytest.raises(TrainingError, match=r"needs 1073741824\.0 GiB .* Set pool\.keep: disk"):
        pinned(1 << 60, 1 << 28, torch.device("cpu"))


@pytest.mark.gpu
def test_pinned_pieces_are_read_by_the_device_itself() -> None:
    device = torch.device("cuda")
    pieces = pinned((3 << 20) + 512, 1 << 20, device)
    assert [piece.numel() for piece in pieces] == [1 << 20] * 3 + [512]
    assert all(piece.is_pinned() for piece in pieces)
    for number, piece in enumerate(pieces):
        piece.copy_(torch.full((piece.numel(),), number, dtype=torch.uint8, device=device))
        assert piece.to(device).unique().tolist() == [number]
    unpin(pieces)
    assert not any(piece.is_pinned() for piece in pieces)
    before = torch.randn(700_001, device=device)
    shelf = MemoryShelf(FlatLayout({"x": before}), {"x": before}, device)
    there = torch.empty(FlatLayout({"x": before}).size, dtype=torch.uint8, device=device)
    shelf.fill(there, 0)
    assert torch.equal(there[: 4 * 700_001].view(torch.float32), before)
    shelf.close()
