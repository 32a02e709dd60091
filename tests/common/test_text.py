"""Whatever data holds, nothing that a terminal or a page acts on comes out."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import unicodedata
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from opd import cli
from opd.common.text import PlainFormatter, cell, inline_code, plain, printable
from opd.evaluation import Measures
from opd.recipe import load_recipe
from opd.runner.checkpoint import model_card
from opd.runner.evaluate import measures_table
from opd.runner.progress import Progress
from opd.runner.results import StageResult, results_table
from opd.runner.trackers import Experiment, TensorBoard, Wandb, open_trackers
from tests.support.reports import METRICS

HOSTILE = ["[/x]", "[red]", "[link=file:///]x", ":smile:", "\x1b]0;owned\x07", "\x1b[2J", "\x9b2J", "\u202eabc", "a\u200bb",
           "\ud800", "x\ny", "x\r", "\x00", "\u2028", "\u3164", "`", "``", "](x)", "---", "<b>", "x" * 3000]  # fmt: skip
texts = st.lists(st.one_of(st.sampled_from(HOSTILE), st.text(max_size=8)), max_size=5).map("".join)
SCORE = Measures(n=4, greedy=0.5, greedy_stderr=0.1)


def raw(text: str, allowed: str = "\n") -> list[str]:
    """What a terminal would act on, or what would be shown as nothing."""
    return [
        letter
        for letter in text
        if letter not in allowed and unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    ]


def styled(text: str) -> str:
    """A terminal's output without the colours that rich itself puts there, and without its cursor movements."""
    return re.sub(r"\x1b\[[0-9;?]*[mKAlh]|\r", "", text)


@given(texts)
def test_nothing_raw_is_left(text: str) -> None:
    assert not raw(plain(text), "")
    assert not raw(printable(text), "\n\t")
    assert not raw(inline_code(text), "")
    assert len(plain(text, 50)) <= 50
    assert cell(text).spans == []  # no markup was read
    record = logging.LogRecord("opd", logging.WARNING, "", 0, "%s", (text,), None)
    assert not raw(PlainFormatter().format(record), "\n\t")


@given(
    st.text(
        st.characters(categories=["L", "N", "P", "S", "Zs"], exclude_characters="\u115f\u1160\u2800\u3164\uffa0"),
        max_size=60,
    )
)
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    assert plain(text) == text
    assert printable(f"{text}\n\t{text}") == f"{text}\n\t{text}"


@given(texts)
def test_code_cannot_be_left(text: str) -> None:
    shown = inline_code(text)
    fence = re.match("`+", shown)
    assert fence
    assert fence[0] not in [run for run in re.findall("`+", shown)[1:-1]]
    assert shown.endswith(fence[0])


@settings(max_examples=25, deadline=None)
@given(texts, texts)
def test_tables_read_no_markup(domain: str, teacher: str) -> None:
    result = StageResult(domain, {domain: SCORE}, {domain: SCORE}, {teacher: {domain: SCORE}}, {domain: teacher})
    for table in (results_table(result), measures_table(teacher, {domain: SCORE})):
        for terminal in (False, True):
            out = io.StringIO()
            Console(file=out, force_terminal=terminal, width=400).print(table)
            assert not raw(styled(out.getvalue()))


def test_panel_lines_and_log_are_plain(tmp_path: Path) -> None:
    domain = "".join(HOSTILE[:-1])
    metrics = METRICS | {f"kl/{name}": 0.5 for name in HOSTILE} | {f"eval/{domain}": 0.5}
    for terminal in (False, True):
        out = io.StringIO()
        with Progress(Console(file=out, force_terminal=terminal, width=100), tmp_path / "log.txt") as progress:
            progress.start_stage(domain, 3)
            progress.phase(domain)
            progress.evaluated(0, {domain: 0.5})
            progress.step(metrics)
            progress.say(domain)
            if progress._live:
                progress._live.refresh()
        assert "[/x]" in out.getvalue()
        assert not raw(styled(out.getvalue()))
    assert not raw((tmp_path / "log.txt").read_text(encoding="utf-8"))


def test_model_card_and_tags_are_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "a`b\n---\ntags: [evil]\n# x\x1b[2J<b>"
    stage = load_recipe("quickstart").stages[0]
    card = model_card(
        stage.model_copy(update={"name": name, "student": stage.student.model_copy(update={"model": name})}), 1, {}
    )
    assert not raw(card)
    assert card.count("\n---\n") == 1
    assert yaml.safe_load(card.split("---\n")[1]) == {
        "library_name": "transformers",
        "tags": ["on-policy-distillation", "opd"],
    }
    assert [line for line in card.splitlines() if line.startswith("#")] == [f"# {inline_code(name)}, step 1"]

    logged: dict[str, float] = {}

    module = ModuleType("wandb")
    module.init = module.finish = lambda **settings: None  # type: ignore[attr-defined]
    module.log = lambda values, step: logged.update(values)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    with open_trackers([Wandb()], Experiment(tmp_path, "run", "project", {})) as write:
        write(1, {name: 0.5})
    assert logged
    assert not raw("".join(logged), "")


def test_tensorboard_tags_are_plain(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with open_trackers([TensorBoard()], Experiment(tmp_path, "run", "project", {})) as write:
        write(1, {"kl/\x1b]0;owned\x07[/x]": 0.5})
    written = next(
        (tmp_path / "tensorboard").glob("events*")
    ).read_bytes()  # binary: a lone 0x1b may be part of a number
    assert b"owned" in written
    assert b"\x1b]0;" not in written


def test_a_run_on_hostile_data_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A closing tag in a domain's name used to end a finished run with an error."""
    domain = "[/x]\x1b]0;owned\x07\u202e"
    rows = [{"prompt": f"{n}+{n}=", "answer": str(n + n), "domain": domain} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    recipe = {
        "student": "tiny/generalist",
        "teachers": {"[/red]": {"model": "tiny/arithmetic"}},
        "prompts": str(tmp_path / "rows.jsonl"),
        "rollout": {"prompts": 2, "max_new_tokens": 4},
        "train": {"steps": 2},
        "eval": {"prompts": 2},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["opd", "run", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "run")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    shown = "".join(capfd.readouterr())
    assert ended.value.code in (0, None), shown
    log = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    card = next((tmp_path / "run").glob("checkpoints/*/step-*/README.md")).read_text(encoding="utf-8")
    for text in (shown, log, card):
        assert not raw(styled(text))
    assert "pass@1, greedy, 2 held-out prompts per domain" in log  # the result table is in the log too
    assert plain(domain) in log
    assert plain(domain) in shown


def test_errors_quote_data_plainly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["opd", "run", "no\x1b[2J\u202e[/x]recipe"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert not raw(shown)
    assert "[/x]recipe" in shown
