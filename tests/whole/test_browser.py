"""Reports and the live page in a real browser: what a reader does with them, and what hostile text cannot do."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from opd.common.files import line_of, write_sealed
from opd.evaluation import Measures
from opd.report.page import diagnosis_page, write_report
from opd.report.view import ViewServer
from opd.runner.results import StageResult
from tests.support.browser import Browser, chromium
from tests.support.reports import HOSTILE, made_up_diagnosis, make_run, sample

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium() is None, reason="no Chromium: apt-get install chromium, as `make test-browser` does"),
]
ROLLOUTS = 100_000
LIMIT = 200.0  # milliseconds of the browser's time for one interaction, on a machine that does nothing else
CHOSEN = ".viewer .token[aria-current='true']"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


def set_select(browser: Browser, label: str, value: str, within: str) -> None:
    browser.run(
        f"(() => {{ const box = document.querySelector({json.dumps(f'{within} select[aria-label={json.dumps(label)}]')}); box.value = {json.dumps(value)}; "
        "box.dispatchEvent(new Event('change')); })()"
    )


def test_a_report_is_read(browser: Browser, tmp_path: Path) -> None:
    path = write_report([make_run(tmp_path / "run", text="one two three")])
    browser.open(path.as_uri())
    text = browser.run("document.body.innerText")
    assert "12 steps on 480 tokens" in text
    assert "1 of 2 ways in which runs fail were watched, and none was seen: kl." in text
    assert "Monitors that had not all they read: token (kl_top, kl_one, kl_largest)." in text
    assert browser.run("document.querySelectorAll('.bar').length") == 6
    assert browser.run("document.querySelectorAll('.uplot canvas').length") >= 3
    # The worst token is shown first; another one when the mouse is over it; a click keeps it.
    assert browser.run(f"document.querySelector({json.dumps(CHOSEN)}).dataset.index") == "2"
    browser.hover(".viewer .token[data-index='1']")
    browser.until("document.querySelector('.numbers').innerText.includes('log-ratio -0.25')")
    shown = browser.run("document.querySelector('.detail').innerText")
    assert all(word in shown for word in ("entropy", "weight", "gate", "advantage", "OTHER", "90.5%", "95.1%"))
    browser.click(".viewer .token[data-index='1']")
    assert browser.run(f"document.querySelector({json.dumps(CHOSEN)}).dataset.index") == "1"
    browser.click(".viewer .worst")
    browser.run("document.querySelector('.tokens').focus()")
    browser.press("n")
    assert browser.run(f"document.querySelector({json.dumps(CHOSEN)}).dataset.index") == "2"
    # Filters
    assert browser.run("document.querySelectorAll('.list .item').length") == 8
    for label, value, left in (
        ("domain", "b", 4),
        ("domain", "any", 8),
        ("reward", "right", 2),
        ("teacher", "a", 2),
        ("step", "3", 1),
    ):
        set_select(browser, label, value, "#samples")
        assert browser.run("document.querySelectorAll('.list .item').length") == left
    set_select(browser, "what became of it", "mended", "#answers")
    assert browser.run("document.querySelectorAll('.question').length") == 1
    assert browser.errors == []


@pytest.mark.parametrize(("width", "dark"), [(390, False), (390, True), (1280, True)])
def test_it_fits_a_phone_and_the_dark(browser: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    path = write_report([make_run(tmp_path / "run", text="a long answer without a space: " + "x" * 400)])
    browser.open(path.as_uri(), width=width, height=844, dark=dark)
    assert browser.run("document.documentElement.scrollWidth") <= width
    light, grey = browser.run(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor].map((text) => Number(text.match(/\\d+/)[0]))"
    )
    assert (light > grey) is dark
    browser.call("Page.printToPDF")  # in light colours, and then as before
    assert browser.run("document.documentElement.dataset.theme") == ""
    browser.click(".theme")
    assert browser.errors == []


def test_names_of_any_length_fit_a_phone(browser: Browser, tmp_path: Path) -> None:
    root = make_run(
        tmp_path / "run", text="so on and on " * 400, domain="a domain whose name never ends " * 6, alarm="word" * 99
    )
    browser.open(write_report([root]).as_uri(), width=390, height=844)
    assert browser.run("document.documentElement.scrollWidth") == 390
    assert browser.run("document.querySelector('.question').offsetHeight") < 1200
    assert browser.errors == []


def test_stages_fit_and_what_skips_some_goes_past_them(browser: Browser, tmp_path: Path) -> None:
    root = make_run(tmp_path / "run")
    resolved = yaml.safe_load((root / "resolved.yaml").read_text(encoding="utf-8"))
    (stage,) = resolved["stages"]
    names = ["main", *(f"stage-{number}" for number in range(5))]
    stages = [
        stage,
        *(stage | {"name": name, "student": {"model": f"stage:{before}"}} for before, name in pairwise(names)),
    ]
    stages[-1]["teachers"] = {"a": {"kind": "frozen", "model": "stage:main"}}
    (root / "resolved.yaml").write_text(yaml.safe_dump({"stages": stages}), encoding="utf-8")
    browser.open(write_report([root]).as_uri())
    card = "document.querySelector('#pipeline .card')"
    assert browser.run(f"{card}.scrollWidth <= {card}.clientWidth")
    assert browser.run("document.querySelectorAll('#pipeline .node').length") == 6
    lowest = "Math.max(...[...document.querySelectorAll('#pipeline .node')].map((node) => node.getBoundingClientRect().bottom))"
    past = "document.querySelector('#pipeline .edge.teacher').getBoundingClientRect().bottom"
    assert browser.run(f"{past} > {lowest}")
    assert browser.errors == []


def test_runs_are_compared(browser: Browser, tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "one"), make_run(tmp_path / "two", steps=30), make_run(tmp_path / "sub" / "two")]
    browser.open(write_report(runs, tmp_path / "compared.html").as_uri())
    assert browser.run("document.querySelectorAll('#results tbody tr').length") == 3
    assert "50.0%" in browser.run("document.querySelector('#results tbody tr').innerText")
    assert browser.run(
        "[...document.querySelectorAll('#results td:first-child')].map((node) => node.innerText.trim())"
    ) == ["one", "two (2)", "two (3)"]
    assert browser.run(
        "[document.querySelectorAll('.named .goal').length, document.querySelectorAll('.named .bar.teacher').length]"
    ) == [0, 2]
    assert browser.run("document.querySelector('.named .who').clientWidth") > 100  # names are longer than "before"
    set_select(browser, "run", "two (2)", "#samples")
    assert browser.run("document.querySelectorAll('.list .item').length") == 8
    assert browser.errors == []


def test_runs_with_different_teachers_are_held_against_their_own(browser: Browser, tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "one"), make_run(tmp_path / "two")]
    summary = json.loads((runs[1] / "summary.json").read_text(encoding="utf-8"))
    summary["stages"][0]["evals"]["a"]["teacher"] = 0.95
    (runs[1] / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    browser.open(write_report(runs, tmp_path / "compared.html").as_uri())
    assert browser.run("[...document.querySelectorAll('.goal')].map((node) => node.title)") == [
        "its teacher 90.0%",
        "its teacher 95.0%",
    ]
    assert browser.run("document.querySelectorAll('.named .bar.teacher').length") == 1  # of b, where both have the same
    assert "a tick is each run's own" in browser.run("document.querySelector('#results').innerText")
    assert browser.errors == []


def test_hostile_text_stays_text(browser: Browser, tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", text=HOSTILE, domain=HOSTILE, rollouts=5, ended=False, alarm=HOSTILE)
    with served(root) as address:
        for page in (write_report([root], tmp_path / "report.html").as_uri(), address):
            browser.open(page)
            browser.until("document.querySelectorAll('.viewer .token').length > 0")
            browser.hover(".viewer .token[data-index='3']")
            assert browser.run("window.hacked") is None
            assert (
                browser.run("document.images.length + document.querySelectorAll('iframe, object, embed').length") == 0
            )
            assert browser.run("document.querySelectorAll('script').length") == 2
            text = browser.run("document.querySelector('.viewer').innerText")
            assert "<script>" in text.replace("\n", "")
            assert "\\x1b" in text
            assert "\\u202e" in text
            assert "\\U000e0041" in text
            said = browser.run("document.querySelector('#monitors').innerText")
            assert "main, step 3: kl 12.6, threshold 0.7" in said
            assert "opd run runs/x/remedy-main-kl.yaml --reuse runs/x" in said
            assert not browser.run("/[\\u001b\\u202e\\u2066]/.test(document.body.innerText)")
            assert browser.errors == []


@pytest.mark.parametrize("width", [390, 1280])
def test_a_diagnosis_is_read_and_stays_text(browser: Browser, tmp_path: Path, width: int) -> None:
    path = tmp_path / "diagnosis.html"
    path.write_text(diagnosis_page(made_up_diagnosis(HOSTILE)), encoding="utf-8")
    browser.open(path.as_uri(), width=width)
    text = browser.run("document.body.innerText")
    assert "Do they think alike?" in text
    assert "taking over after 40 tokens" in text
    assert "0%, the teacher's 50%" in text
    assert browser.run("document.querySelectorAll('.uplot canvas').length") >= 2
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run("window.hacked") is None
    assert browser.run("document.querySelectorAll('script').length") == 2
    assert not browser.run("/[\\u001b\\u202e\\u2066]/.test(document.body.innerText)")
    assert browser.errors == []


class served:
    """A live page, for as long as it lasts."""

    def __init__(self, root: Path) -> None:
        self.server = ViewServer(root)

    def __enter__(self) -> str:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self.server.address

    def __exit__(self, *told: object) -> None:
        self.server.shutdown()
        self.server.server_close()


def test_a_live_run_is_followed(browser: Browser, tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", ended=False, rollouts=80)
    before = {"a": Measures(50, greedy=0.4, greedy_stderr=0.07)}
    (root / "checkpoints" / "main").mkdir(parents=True)
    write_sealed(root / "checkpoints" / "main" / "before.json", StageResult("main", before=before).state())
    with served(root) as address:
        browser.open(address)
        browser.until("document.querySelector('.rows tbody tr')")
        assert browser.run("[...document.querySelectorAll('#results .who')].map((node) => node.innerText)") == [
            "before"
        ]
        assert "12 of 12" in browser.run("document.querySelector('.facts').innerText")
        set_select(browser, "domain", "b", "#samples")
        browser.click("#samples .item:nth-child(2)")
        browser.run("document.activeElement.blur()")
        browser.hover(".top .mark")
        chosen = browser.run("document.querySelector('#samples .item[aria-current=true] .row').innerText")
        with (root / "samples.jsonl").open("a", encoding="utf-8") as file:
            file.write(line_of(sample(13, "b", "more", 1.0)))
        with (root / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(
                line_of({"step": 13, "stage": "main", "loss": 0.1, "tokens": 40, "reverse_kl": 0.3, "eval/a": 0.65})
            )
        alarm = {"value": 9.0, "threshold": 0.7, "words": "it runs away", "remedy": "go slower", "recipe": None}
        with (root / "monitors.jsonl").open("a", encoding="utf-8") as file:
            file.write(line_of({"step": 13, "stage": "main", "monitor": "kl", **alarm}))
        browser.until("document.querySelector('.facts').innerText.includes('13 of 12')")
        browser.until("document.querySelector('#monitors').innerText.includes('it runs away')")
        assert "step 13" in browser.run("document.querySelector('#results').innerText")
        browser.until(
            "document.querySelectorAll('#samples .item').length === 5"
        )  # of domain b alone: what was chosen stays
        assert browser.run("document.querySelector('#samples .item[aria-current=true] .row').innerText") == chosen
        browser.click(".rows tbody tr")
        browser.until("document.querySelector('#rollouts .token')")
        browser.hover("#rollouts .token")
        assert "80 of 80 rollouts" in browser.run("document.querySelector('#rollouts .count').innerText")
    assert browser.errors == []
    time.sleep(2.5)  # the server has gone; what is shown stays
    assert browser.run("document.querySelectorAll('.rows tbody tr').length") == 50


def pace() -> float:
    """How many times as long as an ordinary core of its own this machine takes, at this moment."""
    begun = time.perf_counter()
    sum(number * number for number in range(1_000_000))
    return max(1.0, (time.perf_counter() - begun) / 0.06)


def test_a_hundred_thousand_rollouts_are_quick(browser: Browser, tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", ended=False, rollouts=ROLLOUTS)
    with served(root) as address:
        browser.open(address)
        browser.until("document.querySelector('.rows tbody tr')")
        assert f"{ROLLOUTS:,} of {ROLLOUTS:,} rollouts" in browser.run(
            "document.querySelector('#rollouts .count').innerText"
        )
        changed = "new Promise((done) => { new MutationObserver((_, seen) => { seen.disconnect(); requestAnimationFrame(() => done()); }).observe(document.querySelector('#rollouts .card'), { childList: true }); })"
        took = {}
        for name, act in {
            "domain": "const box = document.querySelector('#rollouts select[aria-label=domain]'); box.value = 'b'; box.dispatchEvent(new Event('change'))",
            "reward": "const box = document.querySelector('#rollouts select[aria-label=reward]'); box.value = 'right'; box.dispatchEvent(new Event('change'))",
            "sort": "const box = document.querySelector('#rollouts select[aria-label=sort]'); box.value = 'longest'; box.dispatchEvent(new Event('change'))",
            "next": "[...document.querySelectorAll('#rollouts button')].find((node) => node.innerText.startsWith('next')).click()",
        }.items():
            script = f"(async () => {{ const start = performance.now(); const changed = {changed}; {act}; await changed; return performance.now() - start; }})()"
            took[name] = math.inf
            for _ in range(20):  # the machine is used by others too
                took[name] = min(took[name], browser.run(script) / pace())
                if took[name] < LIMIT:
                    break
        expected = sum(number % 4 == 3 and number % 3 == 0 and number % 5 < 3 for number in range(ROLLOUTS))
        assert f"{expected:,} of" in browser.run("document.querySelector('#rollouts .count').innerText")
        print({name: round(value) for name, value in took.items()})
        assert max(took.values()) < LIMIT, took
    assert browser.errors == []
