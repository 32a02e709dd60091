"""Reports and the live page in a real browser: what a reader does with them, and what hostile text cannot do."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from opd.files import line_of
from opd.report.page import diagnosis_page, write_report
from opd.report.view import ViewServer
from tests.browser import Browser, chromium
from tests.reports import HOSTILE, made_up_diagnosis, make_run

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium() is None, reason="no Chromium: apt-get install chromium, as `make test-browser` does"),
]
ROLLOUTS = 100_000
LIMIT = 200.0  # milliseconds of the browser's time for one interaction
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
    assert "Monitors that had not all they read: token (kl_top, kl_largest)." in text
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
    browser.click(".theme")
    assert browser.errors == []


def test_runs_are_compared(browser: Browser, tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "one"), make_run(tmp_path / "two", steps=30), make_run(tmp_path / "sub" / "two")]
    browser.open(write_report(runs, tmp_path / "compared.html").as_uri())
    assert browser.run("document.querySelectorAll('#results tbody tr').length") == 3
    assert browser.run(
        "[...document.querySelectorAll('#results td:first-child')].map((node) => node.innerText.trim())"
    ) == ["one", "two (2)", "two (3)"]
    set_select(browser, "run", "two (2)", "#samples")
    assert browser.run("document.querySelectorAll('.list .item').length") == 8
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
    assert "taking over behind 40 tokens" in text
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
    with served(root) as address:
        browser.open(address)
        browser.until("document.querySelector('.rows tbody tr')")
        assert "12 of 12" in browser.run("document.querySelector('.facts').innerText")
        with (root / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(line_of({"step": 13, "stage": "main", "loss": 0.1, "tokens": 40, "reverse_kl": 0.3}))
        alarm = {"value": 9.0, "threshold": 0.7, "words": "it runs away", "remedy": "go slower", "recipe": None}
        with (root / "monitors.jsonl").open("a", encoding="utf-8") as file:
            file.write(line_of({"step": 13, "stage": "main", "monitor": "kl", **alarm}))
        browser.until("document.querySelector('.facts').innerText.includes('13 of 12')")
        browser.until("document.querySelector('#monitors').innerText.includes('it runs away')")
        browser.click(".rows tbody tr")
        browser.until("document.querySelector('#rollouts .token')")
        browser.hover("#rollouts .token")
        assert "80 of 80 rollouts" in browser.run("document.querySelector('#rollouts .count').innerText")
    assert browser.errors == []
    time.sleep(2.5)  # the server has gone; what is shown stays
    assert browser.run("document.querySelectorAll('.rows tbody tr').length") == 50


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
            "older": "[...document.querySelectorAll('#rollouts button')].find((node) => node.innerText.startsWith('older')).click()",
        }.items():
            script = f"(async () => {{ const start = performance.now(); const changed = {changed}; {act}; await changed; return performance.now() - start; }})()"
            took[name] = math.inf
            for _ in range(20):  # the machine is used by others too
                took[name] = min(took[name], browser.run(script))
                if took[name] < LIMIT:
                    break
        expected = sum(number % 4 == 3 and number % 3 == 0 and number % 5 < 3 for number in range(ROLLOUTS))
        assert f"{expected:,} of" in browser.run("document.querySelector('#rollouts .count').innerText")
        print({name: round(value) for name, value in took.items()})
        assert max(took.values()) < LIMIT, took
    assert browser.errors == []
