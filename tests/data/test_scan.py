"""Every prompt is looked at before the first token: lengths, domains, completions; and what becomes of bad rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import opd
from opd.common.errors import DataError, RecipeError
from opd.data import sources as scanning
from opd.data.sources import open_source, open_sources, prompt_source, scan
from opd.data.stream import PromptStream
from opd.recipe import load_recipe
from opd.records import Prompt
from opd.runner import checks
from opd.runner.plan import make_plan
from tests.support.helpers import TEMPLATE, save_tiny, tiny_tokenizer

LIMIT = 40


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "opd" / "scans"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {name: save_tiny(root / name, seed=seed) for seed, name in enumerate(("student", "one"))}


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_with(late: dict[str, Any], count: int = 100) -> list[Any]:
    return [{"prompt": f"{number}+1="} for number in range(count - 1)] + [late]


def look(path: Path, **settings: Any) -> Any:
    spec = prompt_source(str(path), domain="a")
    sources = open_sources([spec], bad_rows=settings.get("bad_rows", "stop"))
    return scan(sources, [spec], tiny_tokenizer(), **{"limit": LIMIT, "why": "so it is", **settings})


def test_the_last_row_counts_like_the_first(tmp_path: Path) -> None:
    found = look(write(tmp_path / "rows.jsonl", rows_with({"prompt": "1" * 30})))
    assert (found.longest, found.open_ended) == (30, False)
    assert found.room(0, LIMIT, None) == 30
    assert found.room(35, LIMIT, None) == 35  # a held-out prompt is longer
    lengths = [len(f"{number}+1=") for number in range(99)] + [30]
    assert found.mean == pytest.approx(np.mean(lengths))


def test_rows_that_are_too_long_or_lack_a_completion(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "completion": "2"}, {"prompt": "2" * 41, "completion": "2"}, {"prompt": "3+3="}]
    path = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(
        DataError, match=r"1 of 3 rows(?s:.*)bad_rows: skip(?s:.*)line 2: 41 tokens, and at most 40 fit .so it is"
    ):
        look(path)
    with pytest.raises(DataError, match=r"2 of 3 rows(?s:.*)line 2: 41 tokens(?s:.*)line 3: no `completion`"):
        look(path, columns=("completion",))
    found = look(path, columns=("completion",), bad_rows="skip")
    assert found.unusable[0].tolist() == [False, True, True]
    assert found.longest == 4
    assert "2 of 3 rows are skipped" in found.notes[0]
    with pytest.raises(DataError, match="3 of 3 rows cannot be used"):
        look(path, limit=2, bad_rows="skip")


def test_rows_that_lack_a_rejected_answer(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}, {"prompt": "2+2=", "completion": "4"}]
    path = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match="line 2: no `rejected`, which the writer `rejected` needs"):
        look(path, columns=("completion", "rejected"))
    spec = prompt_source("task:reverse")
    with pytest.raises(DataError, match=r"task:reverse.*no `rejected`"):
        scan(open_sources([spec]), [spec], tiny_tokenizer(), limit=LIMIT, why="", columns=("rejected",))


def test_many_bad_rows_are_counted_and_a_few_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n' + "{\n" * 1000)
    with pytest.raises(DataError) as caught:
        look(path)
    assert "1,000 of 1,001 rows" in str(caught.value)
    assert "… and 995 more" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 7
    found = look(path, bad_rows="skip")
    assert "line 2: not valid JSON" in found.notes[0]


def test_lengths_are_remembered_by_content(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "rows.jsonl", rows_with({"prompt": "1" * 30}))
    first = look(path)
    (entry,) = cache.iterdir()
    calls: list[int] = []
    render = scanning.render_prompts
    monkeypatch.setattr(
        scanning,
        "render_prompts",
        lambda prompts, *rest, **more: calls.append(len(prompts)) or render(prompts, *rest, **more),
    )
    assert look(path).longest == first.longest
    assert not calls
    good = entry.read_bytes()
    for damaged in (b"", b"{}", good[:-20], good.replace(b'"lengths": "', b'"lengths": "A'), b"\xff" * 9):
        entry.write_bytes(damaged)
        calls.clear()
        assert look(path).longest == first.longest
        assert calls
        assert entry.read_bytes() == good
    calls.clear()
    write(path, rows_with({"prompt": "1" * 31}))
    assert look(path).longest == 31
    assert calls
    other = tiny_tokenizer()
    other.chat_template = TEMPLATE
    spec = prompt_source(str(path))
    calls.clear()
    scan([open_source(spec)], [spec], other, limit=LIMIT, why="")
    assert calls


def test_a_cache_that_cannot_be_written_costs_nothing(tmp_path: Path, cache: Path) -> None:
    cache.parent.parent.mkdir(parents=True)
    cache.parent.write_text("a file in the way")
    assert look(write(tmp_path / "rows.jsonl", rows_with({"prompt": "1" * 30}))).longest == 30


def test_a_skipped_row_has_its_visit(tmp_path: Path) -> None:
    """Whatever is skipped, the others come in the order in which they would have come; resuming changes nothing."""
    spec = prompt_source(str(write(tmp_path / "rows.jsonl", [{"prompt": str(number)} for number in range(10)])))
    unusable = np.isin(np.arange(10), [2, 7, 8])

    def stream(skip: bool) -> PromptStream:
        made = PromptStream([open_source(spec)], [1.0], seed=5)
        made.leave_out([unusable if skip else None], None)
        return made

    whole = [visit for visit in stream(False).take(30) if not unusable[int(visit.prompt.text or "")]]
    first = stream(True)
    assert [*first.take(8), *first.take(13)] == whole
    assert first.skipped == 9
    half = stream(True)
    half.take(8)
    again = stream(True)
    again.restore(json.loads(json.dumps(half.state())))
    assert again.take(13) == whole[8:]
    assert again.skipped == 9
    old = stream(True)
    old.restore({"taken": [4]})  # as runs kept it before rows could be skipped
    assert old.skipped == 0


class Growing:
    """A source without end whose later prompts are longer: one of every four has 30 tokens more."""

    name, size = "growing", None

    def train(self, index: int) -> Prompt:
        long = index >= scanning.PROBE and index % 4 == 0
        return Prompt(id=f"growing/{index}", domain="a", text="1" * (40 if long else 10))

    def held_out(self, count: int, wanted: Any = None) -> list[Prompt]:
        return []

    def prompts(self, split: Any, count: int | None, wanted: Any = None) -> list[Prompt]:
        return []

    def examples(self) -> list[Prompt]:
        return [self.train(0)]

    def scan(self, scan: Any) -> scanning.ScannedSource:
        return scanning.scan_endless(self, scan)

    def keep_apart(self, others: Any) -> None:
        pass


def settings(models: dict[str, str], path: Path | None = None, **changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "student": models["student"],
        "teachers": {"a": models["one"]},
        "prompts": [{"source": str(path), "domain": "a"}] if path else [{"source": "task:addition", "domain": "a"}],
        "rollout": {"prompts": 5, "max_new_tokens": 4},
        "sampler": {"slots": 5},
        "train": {"steps": 2},
        "eval": {"prompts": 0},
        "device": "cpu",
    }
    return base | changes


def test_prompts_without_end_that_do_not_fit_are_skipped(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scanning, "PROBE", 6)
    monkeypatch.setattr(checks, "open_prompts", lambda *_: [Growing()])
    run = opd.run(settings(models), out=tmp_path / "run")
    assert [line.get("prompts/skipped") for line in run.metrics] == [None, 1]  # 8 of 0 … 10
    assert run.summary["stages"][0]["skipped_prompts"] == 1
    log = (run.directory / "log.txt").read_text()
    assert log.count("'growing/8' has 40 tokens, and the sampler has room for 20") == 1
    wide = opd.run(
        settings(models, rollout={"prompts": 5, "max_new_tokens": 4, "max_prompt_tokens": 40}), out=tmp_path / "wide"
    )
    assert wide.summary["stages"][0]["skipped_prompts"] == 0


def test_bad_rows_in_a_run(models: dict[str, str], tmp_path: Path) -> None:
    rows: list[Any] = [{"prompt": f"{number}+1="} for number in range(8)] + [{"prompt": "1" * 300}, {"question": "x"}]
    path = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match="line 10: no `prompt`"):
        opd.run(settings(models, path), out=tmp_path / "stop")
    with pytest.raises(DataError, match="line 10: no `prompt`"):
        make_plan(load_recipe(settings(models, path)))
    skip = settings(models, path, data={"bad_rows": "skip"}, train={"steps": 4})
    run = opd.run(skip, out=tmp_path / "skip")
    assert run.summary["stages"][0]["skipped_prompts"] == run.metrics[-1]["prompts/skipped"] >= 4
    assert "2 of 10 rows are skipped (line 9: 300 tokens" in (run.directory / "log.txt").read_text()
    assert any("2 of 10 rows" in line for line in make_plan(load_recipe(skip))[0].lines())
    short = settings(models, write(path, rows[:8]), rollout={"prompts": 2, "max_new_tokens": 4, "max_prompt_tokens": 3})
    with pytest.raises(DataError, match=r"rollout\.max_prompt_tokens is 3"):
        opd.run(short, out=tmp_path / "short")


def test_a_domain_in_the_last_row_needs_its_teacher(models: dict[str, str], tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", rows_with({"prompt": "1+1=", "domain": "late"}))
    recipe = settings(models, path, teachers={"a": {"model": models["one"], "domains": ["a"]}})
    for start in (lambda: opd.run(recipe, out=tmp_path / "run"), lambda: make_plan(load_recipe(recipe))):
        with pytest.raises(RecipeError, match="domain 'late' has no teacher"):
            start()


def test_evaluation_is_decided_row_by_row(models: dict[str, str], tmp_path: Path) -> None:
    """A first row without an answer switches nothing off; rows that cannot be rewarded are left out, and counted."""
    rows = [{"prompt": f"{number}+1="} | ({"answer": str(number + 1)} if number % 2 else {}) for number in range(40)]
    path = write(tmp_path / "rows.jsonl", rows)
    source = open_source(prompt_source(str(path)))
    assert (source.size, len(source.held_out(100))) == (36, 4)
    run = opd.run(settings(models, path, eval={"prompts": 10}, train={"steps": 1}), out=tmp_path / "run")
    assert run.summary["stages"][0]["evals"]["a"]["n"] == 2
    assert "2 prompts of" in (run.directory / "log.txt").read_text()
    write(path, [{"prompt": f"{number}+1="} for number in range(10)])
    run = opd.run(settings(models, path, eval={"prompts": 10}, train={"steps": 1}), out=tmp_path / "none")
    assert (run.directory / "log.txt").read_text().count("no answer to a held-out prompt can be rewarded") == 1
