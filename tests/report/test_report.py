"""The report: what it says of a run directory, and that whatever a model wrote stays text. No torch, no browser."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from opd.common.errors import RunDirectoryError, RunLocked, UserError
from opd.common.files import line_of, sha256, write_sealed
from opd.common.process_identity import is_running, this_process
from opd.evaluation import Measures
from opd.models.load import TINY_ROOT
from opd.report.browse import RolloutBrowser
from opd.report.facts import run_facts, stage_graph
from opd.report.page import page, run_html, write_report
from opd.report.plot import plot_runs
from opd.report.view import ViewServer
from opd.runner.directory import Run
from opd.runner.lock import RunLock
from opd.runner.results import StageResult
from tests.support.reports import HOSTILE, evaluation, make_run


class Scripts(HTMLParser):
    """What a browser would run, and every attribute there is."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


def test_the_page_is_one_file_and_what_models_wrote_is_data(tmp_path: Path) -> None:
    plain, hostile = (make_run(tmp_path / name, text=text) for name, text in (("plain", "fine"), ("hostile", HOSTILE)))
    texts = [write_report([root]).read_text(encoding="utf-8") for root in (plain, hostile)]
    assert Scripts(texts[0]).tags == Scripts(texts[1]).tags  # nothing that a model wrote is an element
    for text in texts:
        assert not [value for name, value in Scripts(text).attributes if name in ("src", "onerror", "onload")]
        assert not re.findall(r"https?://(?!github\.com/leeoniya|www\.w3\.org)[a-z]", text.split("<script>", 1)[1])
        assert "default-src 'none'" in text
        assert "'unsafe-" not in text
        data = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.S)
        assert data is not None
        assert "<" not in data[1]
        assert data[1].isascii()
    assert json.loads(data[1])["runs"][0]["samples"][0]["response"] == HOSTILE


def test_what_came_of_a_run_in_words(tmp_path: Path) -> None:
    words = run_facts(make_run(tmp_path / "run"))["words"]
    assert "12 steps on 480 tokens in 1 min 40 s." in words
    assert "from 50.0% to 75.0% on average over 2 domains, which is 83% of the way to its teachers' 80.0%." in words
    assert "b did not change by more than chance" in words
    assert "fell from 0.978 to 0.428 nats" in words
    short = run_facts(make_run(tmp_path / "short", steps=1))["words"]
    assert "1 step on 40 tokens" in short
    assert "The divergence from the teacher is 0.428 nats per token." in short
    live = make_run(tmp_path / "live", ended=False)
    assert "still running" in run_facts(live)["words"]
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (live / "run.lock").write_text(json.dumps(this_process() | {"pid": dead.pid}), encoding="utf-8")
    assert run_facts(live)["status"] == "cut off"
    assert "cut off; `opd resume` continues it" in run_facts(live)["words"]
    elsewhere = this_process() | {"pid": dead.pid, "host": "elsewhere", "boot": "another"}
    (live / "run.lock").write_text(json.dumps(elsewhere), encoding="utf-8")
    assert run_facts(live)["status"] == "running"  # which nobody can tell from here


def test_a_run_in_another_container_is_at_work_while_its_lock_is_held(tmp_path: Path) -> None:
    """Its process cannot be looked up from here: the pid is that of its own namespace."""
    live = make_run(tmp_path / "live", ended=False)
    there = json.dumps(this_process() | {"pid": 2**22 + 1, "host": "container", "namespace": "pid:[1]"})
    with RunLock(live):
        (live / "run.lock").write_text(there, encoding="utf-8")
        assert run_facts(live)["status"] == "running"
        with pytest.raises(RunLocked, match=r"in use by process 4194305 on container, since"), RunLock(live):
            pass
    (live / "run.lock").write_text(there, encoding="utf-8")  # it died, and could not take its name away
    assert run_facts(live)["status"] == "cut off"


def test_checking_whether_a_run_is_running_does_not_block_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking = os.open(tmp_path / "run.lock", os.O_RDONLY | os.O_CREAT)
    fcntl.flock(asking, fcntl.LOCK_SH)
    monkeypatch.setattr("opd.runner.lock.time.sleep", lambda seconds: os.close(asking))  # it was but a moment
    with RunLock(tmp_path):
        assert is_running(tmp_path)


def test_a_run_that_has_not_ended_shows_what_was_measured_so_far(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", ended=False)
    teacher = {"t": {"a": Measures(50, greedy=0.9, greedy_stderr=0.04), "b": Measures(50, greedy=0.1)}}
    before = {"a": Measures(50, greedy=0.4, greedy_stderr=0.07), "b": Measures(50, sampled=0.6, sampled_stderr=0.05)}
    average = {"a": Measures(50, greedy=0.5)}
    result = StageResult(
        "main", before=before, teachers=teacher, teacher_of={"a": "t", "b": "t"}, weight_average=average
    )
    folder = root / "checkpoints" / "main"
    folder.mkdir(parents=True)
    write_sealed(folder / "before.json", result.state())
    (stage,) = run_facts(root)["stages"]
    whole = result.to_json()
    flips = {domain: found.pop("flips", None) for domain, found in stage["evals"].items()}  # of the answers so far
    assert flips["a"]["gained"] == 1
    for domain, found in stage["evals"].items():  # as the summary has them
        assert found == {key: whole["evals"][domain].get(key) for key in found}
    assert stage["teachers"] == whole["teachers"]
    assert "It has not been measured after training yet." in run_facts(root)["words"]
    with (root / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(line_of({"step": 13, "stage": "main", "eval/a": 0.65, "eval_stderr/a": 0.06}))
    facts = run_facts(root)
    now = facts["stages"][0]["evals"]["a"]
    assert (now["before"], now["after"], now["teacher"], now["at"]) == (0.4, 0.65, 0.9, 13)
    assert now["normalised"] == pytest.approx(0.5)
    assert "Held-out pass@1 went from 40.0% to 65.0%, which is 50% of the way to its teachers' 90.0%." in facts["words"]
    result.after = {"a": Measures(50, greedy=0.8, greedy_stderr=0.05)}
    (folder / "step-000013").mkdir()  # a checkpoint on its way out
    (folder / "step-000012").mkdir()
    state = folder / "step-000012" / "trainer.json"
    state.write_text(json.dumps({"result": result.state()}), encoding="utf-8")
    write_sealed(state.with_name("manifest.json"), {"files": {"trainer.json": sha256(state)}})
    assert run_facts(root)["stages"][0]["evals"]["a"]["after"] == 0.8
    state.write_text(json.dumps({"result": result.state()}).replace("0.8", "0.9"), encoding="utf-8")
    assert run_facts(root)["stages"][0]["evals"]["a"]["after"] == 0.65  # what was altered is not shown


def test_only_monitors_that_had_what_they_read_are_said_to_have_watched(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run")
    resolved = yaml.safe_load((root / "resolved.yaml").read_text(encoding="utf-8"))
    (stage,) = resolved["stages"]
    stage["monitors"]["watch"] += [{"kind": "together"}, {"kind": "not-here"}]
    never = {**stage, "name": "never-begun", "monitors": {"watch": [{"kind": "mismatch"}]}}
    (root / "resolved.yaml").write_text(yaml.safe_dump({"stages": [stage, never]}), encoding="utf-8")
    facts = run_facts(root)
    assert facts["watched"] == ["kl"]
    unread = {"token": "kl_top, kl_one, kl_largest", "together": "eval/DOMAIN", "not-here": "its plugin is not loaded"}
    assert facts["unread"] == unread
    assert (
        "No alarm was raised; 1 of 4 monitors had all their metrics (not token, together and not-here)."
        in facts["words"]
    )
    with (root / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(
            line_of({"step": 13, "stage": "main", "eval/a": 0.5, "kl_top": 0.1, "kl_one": 0.1, "kl_largest": None})
        )
    facts = run_facts(root)
    assert (facts["watched"], facts["unread"]["token"], facts["partly"]) == (["kl", "together"], "kl_largest", {})
    with (root / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(line_of({"step": 1, "stage": "never-begun", "mismatch": 0.0, "mismatch_outside": 0.0}))
    facts = run_facts(root)
    assert facts["watched"] == ["kl", "together", "mismatch"]
    assert facts["partly"] == {"kl": ["main"], "together": ["main"], "mismatch": ["never-begun"]}


def test_gains_are_counted_along_the_students_line(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run")
    resolved = yaml.safe_load((root / "resolved.yaml").read_text(encoding="utf-8"))
    (stage,) = resolved["stages"]
    others = [stage | {"name": "aside"}, stage | {"name": "next", "student": {"model": "stage:main"}}]
    (root / "resolved.yaml").write_text(yaml.safe_dump({"stages": [stage, *others]}), encoding="utf-8")
    summary = json.loads((root / "summary.json").read_text(encoding="utf-8"))
    (result,) = summary["stages"]
    aside = {"b": evaluation(0.0, 1.0, 1.0)}
    last = {"a": evaluation(0.9, 0.95, 0.96), "b": evaluation(0.6, 0.7, 0.75)}
    summary["stages"] += [result | {"name": "aside", "evals": aside}, result | {"name": "next", "evals": last}]
    (root / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    facts = run_facts(root)
    assert "went from 50.0% to 82.5% on average over 2 domains" in facts["words"]
    assert [(row["domain"], row["before"], row["after"]) for row in facts["gains"]] == [
        ("a", 0.4, 0.95),
        ("b", 0.6, 0.7),
    ]


def test_stages_are_a_graph() -> None:
    stages: list[dict[str, Any]] = [
        {"name": "one", "student": {"model": "m"}},
        {"name": "two", "student": {"model": "m"}},
        {
            "name": "both",
            "student": {"model": "stage:one"},
            "teachers": {"a": {"model": "stage:one"}, "b": {"parts": [{"model": "stage:two"}]}},
        },
    ]
    graph = stage_graph(stages)
    assert [node["column"] for node in graph["nodes"]] == [0, 0, 1]
    assert graph["edges"] == [
        {"from": "two", "to": "both", "as": "teacher"},
        {"from": "one", "to": "both", "as": "student"},
    ]


def test_long_runs_are_thinned_out_and_keep_both_ends(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", steps=1100, samples=700)
    facts = run_facts(root)
    assert len(facts["metrics"]["at"]) <= 1000
    assert facts["metrics"]["at"][-1] == 1100
    steps = [line["step"] for line in facts["samples"]]
    assert len(steps) <= 610
    assert (steps[0], steps[-1]) == (1, 700)
    assert len(run_facts(root, whole=True)["metrics"]["at"]) == 1100


def test_nothing_secret_is_shown(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run")
    (root / "recipe.yaml").write_text("teachers: {a: {url: 'https://me:secret@host/v1'}}\n", encoding="utf-8")
    text = page([run_facts(root)])
    assert "secret@" not in text
    assert "host/v1" in text


def test_mistakes(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run")
    for given, words in (
        (tmp_path / "nosuch", "no such directory"),
        (tmp_path, "not the directory of a run"),
        (root / "summary.json", "not the directory of a run"),
    ):
        for show in (lambda given: write_report([given]), ViewServer):
            with pytest.raises(RunDirectoryError, match=words):
                show(given)
    with pytest.raises(UserError, match="-o FILE"):
        write_report([root, root])
    with pytest.raises(UserError, match="cannot be written"):
        write_report([root], tmp_path / "no" / "where.html")
    for altered in ("{", '{"stages": 3}', '{"stages": [{}]}'):
        (root / "summary.json").write_text(altered, encoding="utf-8")
        with pytest.raises(RunDirectoryError, match=r"summary.json.*altered"):
            write_report([root])
    (root / "resolved.yaml").write_text("stages: []", encoding="utf-8")
    with pytest.raises(RunDirectoryError, match="does not name the run's stages"):
        write_report([root])


def test_a_torn_line_is_left_out(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", ended=False)
    with (root / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(line_of({"step": 13, "stage": "main", "loss": 1.0})[:20])
    assert len(run_facts(root)["metrics"]["at"]) == 12


def test_a_notebook_shows_a_run_escaped(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", domain="<img src=x onerror=alert(1)>")
    text = Run(root)._repr_html_()
    assert text == run_html(root)
    assert "<img" not in text
    assert "75.0%" in text


def by_policy_gradient(root: Path) -> Path:
    """A run that has estimates of the entropy alone."""
    lines = [json.loads(line) for line in (root / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    for line in lines:
        del line["crc"]
        line |= {"entropy": None, "entropy_sampled": line["entropy"], "distinct": 0.5, "eval_k/a": 0.5}
    (root / "metrics.jsonl").write_text("".join(map(line_of, lines)), encoding="utf-8")
    return root


def test_an_estimate_of_the_entropy_is_read_where_there_is_no_exact_one(tmp_path: Path) -> None:
    root = by_policy_gradient(make_run(tmp_path / "run"))
    resolved = yaml.safe_load((root / "resolved.yaml").read_text(encoding="utf-8"))
    resolved["stages"][0]["monitors"]["watch"] = [{"kind": "diversity"}]
    (root / "resolved.yaml").write_text(yaml.safe_dump(resolved), encoding="utf-8")
    facts = run_facts(root)
    assert (facts["watched"], facts["unread"]) == (["diversity"], {})
    assert set(facts["metrics"]["entropy"]) == {None}  # what is shown bears its own name
    assert None not in facts["metrics"]["entropy_sampled"]


@pytest.mark.slow
def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    one, two = make_run(tmp_path / "one"), make_run(tmp_path / "two", steps=6)
    figures = [
        plot_runs([one, two], ["reverse_kl", "kl/*"], tmp_path / name, smooth=3).read_bytes()
        for name in ("a.svg", "b.svg")
    ]
    assert figures[0] == figures[1]
    assert figures[0].startswith(b"<?xml")
    drawn = plot_runs([one], ["entropy"], tmp_path / "d.svg").read_bytes()
    assert plot_runs([by_policy_gradient(one)], ["entropy"], tmp_path / "e.svg").read_bytes() == drawn
    with pytest.raises(UserError, match="did you mean 'reward'"):
        plot_runs([one], ["rewardd"], tmp_path / "c.svg")
    with pytest.raises(UserError, match=r"\.svg, \.pdf, \.png"):
        plot_runs([one], ["reward"], tmp_path / "c.gif")


def test_rollouts_of_a_hub_model_are_text_before_anything_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_run(tmp_path / "run", rollouts=2, ended=False)
    resolved = (root / "resolved.yaml").read_text(encoding="utf-8")
    (root / "resolved.yaml").write_text(resolved.replace("tiny/generalist", "some/model"), encoding="utf-8")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    rollouts = RolloutBrowser(root)
    assert rollouts.page({})["rows"][0]["prompt"] == "5 6 7"  # nowhere: ids
    kept = tmp_path / "cache" / "models--some--model"
    (kept / "snapshots" / "abc").mkdir(parents=True)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("abc", encoding="utf-8")
    shutil.copy(TINY_ROOT / "generalist" / "tokenizer.json", kept / "snapshots" / "abc")
    shown = RolloutBrowser(root).page({})["rows"][0]["prompt"]
    assert shown == RolloutBrowser(make_run(tmp_path / "tiny", rollouts=2)).page({})["rows"][0]["prompt"] != "5 6 7"


def test_rollouts_of_a_merged_student_are_shown_before_anything_is_saved(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", rollouts=2, ended=False)
    resolved = (root / "resolved.yaml").read_text(encoding="utf-8")
    (root / "resolved.yaml").write_text(resolved.replace("tiny/generalist", "merge:main"), encoding="utf-8")
    assert RolloutBrowser(root).page({})["rows"][0]["prompt"] == "5 6 7"  # still at it
    shutil.copytree(TINY_ROOT / "generalist", root / "merged" / "main")
    assert RolloutBrowser(root).page({})["rows"][0]["prompt"] != "5 6 7"


def test_no_torch_is_needed(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run")
    script = (
        "import sys; from pathlib import Path; from opd.report.page import write_report; from opd.report.view import ViewServer; "
        f"write_report([{str(root)!r}]); server = ViewServer(Path({str(root)!r})); server.server_close(); "
        "sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_the_live_page_is_for_who_has_its_address(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", rollouts=30, ended=False)
    server = ViewServer(root)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def get(path: str, **headers: str) -> tuple[int, bytes]:
        request = urllib.request.Request(f"http://127.0.0.1:{server.server_port}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as reply:
                return reply.status, reply.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    try:
        token = f"/{server.token}"
        assert server.server_address[0] == "127.0.0.1"
        for path in ("/", "/wrong/", "/wrong/api/run", token[:-1] + "/", f"{token}/../x", f"{token}/etc/passwd"):
            assert get(path) == (404, b"")
        assert get(f"{token}/", Host="evil.example") == (404, b"")
        status, text = get(f"{token}/")
        assert status == 200
        assert b"connect-src 'self'" in text
        status, body = get(f"{token}/api/run")
        stamp = json.loads(body)["stamp"]
        assert get(f"{token}/api/run?since={stamp}") == (204, b"")
        with (root / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(line_of({"step": 13, "stage": "main", "loss": 1.0}))
        assert json.loads(get(f"{token}/api/run?since={stamp}")[1])["runs"][0]["stages"][0]["steps"] == 13
        found = json.loads(get(f"{token}/api/rollouts?domain=a&reward=right&limit=3&sort=length")[1])
        assert (found["all"], len(found["rows"])) == (30, 3)
        assert {row["domain"] for row in found["rows"]} == {"a"}
        assert [row["length"] for row in found["rows"]] == sorted(
            (row["length"] for row in found["rows"]), reverse=True
        )
        one = json.loads(get(f"{token}/api/rollout?row={found['rows'][0]['row']}")[1])
        assert len(one["tokens"]["ids"]) == found["rows"][0]["length"]
        assert get(f"{token}/api/rollouts?sort=sideways")[0] == 400
        assert get(f"{token}/api/rollout?row=999")[0] == 400
    finally:
        server.shutdown()
        server.server_close()


def test_half_open_requests_to_the_live_page_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether nothing comes, half a request, or a byte now and then; and others are served meanwhile."""
    monkeypatch.setattr("opd.report.view.CONNECTIONS", 4)
    server = ViewServer(make_run(tmp_path / "run"), patience=0.3)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    with contextlib.ExitStack() as stack:
        stack.callback(server.server_close)
        stack.callback(server.shutdown)

        def connected(sent: bytes) -> socket.socket:
            raw = stack.enter_context(socket.create_connection(("127.0.0.1", server.server_port), timeout=60))
            raw.sendall(sent)
            return raw

        halves = [connected(sent) for sent in (b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\nX: ")]
        slow = connected(b"GET /")
        with contextlib.suppress(
            ConnectionError
        ):  # never silent for as long as the server waits, and ended all the same
            while not select.select([slow], [], [], 0.05)[0]:
                slow.sendall(b"x")
        assert [raw.recv(100) for raw in halves] == [b""] * 3
        while True:  # until the threads of all four are gone
            with contextlib.suppress(OSError), urllib.request.urlopen(server.address, timeout=60) as reply:
                assert reply.status == 200
                break
        assert not server._deadlines
