"""Rewards: what each accepts, where the line between wrong and not rewarded runs, and that no verification takes the run down."""

from __future__ import annotations

import json
import math
import os
import py_compile
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import opd
from opd import sandbox
from opd.common.errors import RecipeError, TrainingError
from opd.recipe import load_recipe
from opd.records import Prompt, RewardResult, Sample
from opd.rewards import Rewarder, check_rewards, verify
from opd.rewards.custom import Custom
from opd.rewards.rewarder import reward_warnings
from opd.rewards.texts import Exact, blocks
from opd.rewards.workers import (
    Pool,
    Request,
    RewardJob,
    Worker,
    _listen,
    pool,
    read_request,
    tagged,
    untagged,
    write_request,
)
from opd.runner.plan import make_plan
from tests.support.helpers import save_tiny
from tests.support.malformed import malformed

needs_sandbox = pytest.mark.skipif(
    all(sandbox.why_unusable(kind) for kind in ("namespaces", "bubblewrap")), reason="no sandbox works on this machine"
)


@pytest.fixture(scope="module", autouse=True)
def close_pools() -> Iterator[None]:
    yield
    for kind in ("none", "namespaces", "bubblewrap"):
        pool(kind).close()


def rewarder(rewards: Any, **fields: Any) -> Rewarder:
    recipe = {"student": "tiny/generalist", "prompts": ["task:addition"], "rewards": rewards}
    return Rewarder(load_recipe(recipe).stages[0].rewards, **fields)


def sample(text: str, domain: str = "d", **fields: Any) -> Sample:
    return Sample(Prompt(id="p", domain=domain, text="q", fields=fields), text)


def reward(rewards: Any, text: str, **fields: Any) -> float | None:
    return rewarder(rewards)([sample(text, **fields)])[0].reward


def only(rewards: Any, text: str, **fields: Any) -> RewardResult:
    return rewarder(rewards)([sample(text, **fields)])[0]


# Exact and numeric


@pytest.mark.parametrize(
    ("settings", "text", "answer", "expected"),
    [
        ({}, " Paris\n", "Paris", 1.0),
        ({}, "paris", "Paris", 0.0),
        ({"ignore": ["case"]}, "PARIS", "Paris", 1.0),
        ({"ignore": ["case", "articles", "punctuation"]}, "The “cat”.", "cat", 1.0),
        ({"ignore": ["space"]}, "a  b\nc", "ab c", 1.0),
        ({"extract": "last_line"}, "thinking\n\n42 \n", 42, 1.0),
        ({"extract": "boxed"}, "\\boxed{1} no, \\boxed{\\frac{1}{2}}", "\\frac{1}{2}", 1.0),
        ({"extract": "boxed"}, "42", 42, 0.0),
        ({"extract": "boxed"}, "\\boxed{42", 42, 0.0),
        ({}, "b", ["a", "b"], 1.0),
        ({}, "42", None, None),
    ],
)
def test_exact(settings: Mapping[str, Any], text: str, answer: Any, expected: float | None) -> None:
    assert reward({"kind": "exact", **settings}, text, answer=answer) == expected


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("so it is 1,234.5.", "1234.5", 1.0),
        ("first 7, then \\boxed{1234.5} and 8", 1234.5, 1.0),
        ("1/3", "0.333333333", 1.0),
        ("\\frac{1}{3}", "1/3", 1.0),
        ("-\\frac{1}{3}", "-1/3", 1.0),
        ("1.2345e3", 1234.5, 1.0),
        ("1.2345 \\times 10^{3}", 1234.5, 1.0),
        ("1.2 × 10^-3", 0.0012, 1.0),
        ("\u22123", -3, 1.0),
        ("5-3", 3, 1.0),
        ("a list:\n- 5", 5, 1.0),
        ("$1{,}000", 1000, 1.0),
        ("-$20", -20, 1.0),
        ("50%", "50%", 1.0),
        ("50%", "0.5", 1.0),
        ("50%", "50", 1.0),
        ("0.5", "50 %", 1.0),
        ("5", "50%", 0.0),
        ("GSM8K style\n#### 42", "think… #### 42", 1.0),
        ("41.99999", 42, 1.0),
        ("41.9", 42, 0.0),
        ("no number at all", 42, 0.0),
        ("42 or 1e999999", 42, 0.0),
        ("1/0", 42, 0.0),
        ("9" * 5000, 42, 0.0),
        ("42", "none", None),
        ("42", math.nan, None),
        ("42", None, None),
    ],
)
def test_numeric(text: str, answer: Any, expected: float | None) -> None:
    assert reward("numeric", text, answer=answer) == expected


def test_numeric_settings() -> None:
    assert reward({"kind": "numeric", "tolerance": 0.01}, "41.9", answer=42) == 1.0
    assert reward({"kind": "numeric", "tolerance": 0, "absolute": 0.2}, "41.9", answer=42) == 1.0
    assert reward({"kind": "numeric", "extract": "all"}, "42", answer=42) == 1.0
    assert reward({"kind": "numeric", "extract": "all"}, "it is 42", answer=42) == 0.0
    assert reward({"kind": "numeric", "extract": "last_line"}, "42\nno", answer=42) == 0.0
    assert reward({"kind": "numeric", "field": "target"}, "42", target=42) == 1.0


@given(st.integers(-(10**12), 10**12), st.integers(0, 6))
def test_every_way_to_write_a_number(digits: int, places: int) -> None:
    value = digits / 10**places
    for text in (f"{value:.{places}f}", f"{value:,.{places}f}", f"x = {value!r}", f"\\boxed{{{value:.{places}f}}}"):
        assert reward("numeric", text, answer=value) == 1.0, text


# In the workers


def test_format() -> None:
    pattern = r"<think>.*</think>\s*<answer>.*</answer>"
    text = "<think>a\nb</think>\n<answer>1</answer>"
    assert reward({"kind": "format", "pattern": pattern}, f"well {text}") == 1.0
    assert reward({"kind": "format", "pattern": pattern, "whole": True}, f"well {text}") == 0.0
    assert reward({"kind": "format", "pattern": pattern, "whole": True}, f"{text}\n") == 1.0


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("$\\frac{1}{2}$", "0.5", 1.0),
        ("so $(x+1)^2$", "x^2+2x+1", 1.0),
        ("\\boxed{\\{1,2,3\\}}", "\\{3,2,1\\}", 1.0),
        ("$\\frac{1}{3}$", "0.5", 0.0),
        ("fish", "0.5", 0.0),
        ("0.5", None, None),
    ],
)
def test_maths(text: str, answer: str | None, expected: float | None) -> None:
    assert reward("maths", text, answer=answer) == expected


def test_json() -> None:
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
    inline = {"kind": "json", "json_schema": schema}
    assert reward(inline, '{"a": 1}') == 1.0
    assert reward(inline, 'Here:\n```json\n{"a": 1}\n```') == 1.0
    assert reward(inline, '{"a": "1"}') == 0.0
    assert reward(inline, '{"a": NaN}') == 0.0
    assert reward(inline, '{"a": 1') == 0.0
    assert reward(inline, "[" * 200_000) == 0.0
    assert reward("json", '{"a": 1}', schema=schema) == 1.0
    assert reward("json", '{"a": 1}', schema=json.dumps(schema)) == 1.0
    assert reward("json", '{"a": 1}') is None
    assert "SchemaError" in only("json", '{"a": 1}', schema={"type": "nonsense"}).error


def test_reasoning_gym() -> None:
    import reasoning_gym

    entry = dict(reasoning_gym.create_dataset("knights_knaves", size=1, seed=1)[0])
    fields = {"verifier": "reasoning_gym:knights_knaves", "entry": entry}
    right, wrong = verify([sample(entry["answer"], **fields), sample("who knows", **fields)])
    assert right.reward == 1.0
    assert wrong.reward is not None
    assert wrong.reward < 1.0


@needs_sandbox
def test_a_scorer_that_evaluates_the_answer_is_confined(tmp_path: Path) -> None:
    """sympy would run what countdown is answered with."""
    import reasoning_gym

    entry = dict(reasoning_gym.create_dataset("countdown", size=1, seed=1)[0])
    fields = {"verifier": "reasoning_gym:countdown", "entry": entry}
    secret, loot = tmp_path / "secret", tmp_path / "loot"
    secret.write_text("1")
    attack = f"int(open({str(secret)!r}).read()) + __import__('os').system('touch {loot}')"
    inside = "__import__('os').getuid()"
    read, ran, right = verify([sample(text, **fields) for text in (attack, inside, entry["answer"])])
    assert right.reward == 1.0
    assert ran.reward == read.reward == 0.01  # neither is arithmetic: rejected before it runs
    assert not loot.exists()


CUSTOM = """
import os, sys, time
from opd.records import RewardResult

def length(sample):
    print("noise on stdout that must not reach the pipe")
    return len(sample.text) / sample.prompt.fields["longest"]

def detailed(sample):
    return RewardResult(0.5, (0.25, 0.75), "so so")

def misbehave(sample):
    kind = sample.text
    if kind == "hang":
        while True: pass
    if kind == "stubborn":
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)
    if kind == "die": os.kill(os.getpid(), 9)
    if kind == "exit": sys.exit(0)
    if kind == "raise": raise RuntimeError("boom")
    if kind == "memory": return len(bytearray(1 << 40))
    if kind == "recursion": return misbehave_deeply(0)
    if kind == "nothing": return None
    if kind == "nan": return float("nan")
    if kind == "text": return "high"
    if kind == "closes": os.closerange(3, 64); return 1.0
    return 1.0

def misbehave_deeply(n):
    return misbehave_deeply(n + 1)
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_rewards.py").write_text(CUSTOM)
    monkeypatch.syspath_prepend(tmp_path)
    return "my_rewards"


def test_functions_of_ones_own(own_module: str) -> None:
    assert reward(f"{own_module}:length", "abcd", longest=8) == 0.5
    assert only({"kind": "custom", "function": f"{own_module}:detailed"}, "x") == RewardResult(
        0.5, (0.25, 0.75), "so so"
    )


def test_an_edited_file_runs_as_it_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers outlive a rewarder, and bytecode may match an edit by size and second: neither makes them run other code."""
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "edited_reward.py"
    for kind in (f"{file}:level", "edited_reward:level"):
        for level in (0.25, 0.75):
            file.write_text(f"def level(sample):\n    return {level}\n")
            os.utime(file, (1e9, 1e9))
            if level == 0.25:
                py_compile.compile(str(file))  # Python takes it for the code of the next edit, too
            found = rewarder(kind)
            assert [result.reward for result in found([sample("a")])] == [level]
            file.write_text("def level(sample):\n    return 0.5\n")  # between two samples: other code than was read
            assert [result.reward for result in found([sample("b")])] == [level]


def test_a_kept_process_is_one_and_ends_with_the_rewarder(tmp_path: Path) -> None:
    file = tmp_path / "kept.py"
    file.write_text(
        "import os, time\nfrom opd.records import RewardResult\n"
        "def pid(sample):\n    time.sleep(0.05)\n    return RewardResult(1.0, feedback=str(os.getpid()))\n"
    )
    kept = rewarder({"kind": "custom", "function": f"{file}:pid", "fresh": False})
    (pid,) = {found.feedback for found in kept([Sample(Prompt("p", "d"), str(number)) for number in range(6)])}
    assert Path(f"/proc/{pid}").exists()
    kept.close()
    assert not Path(f"/proc/{pid}").exists()


def test_whatever_a_verification_does_costs_one_sample(own_module: str) -> None:
    bad = ["hang", "stubborn", "die", "exit", "raise", "memory", "recursion", "nothing", "nan", "text", "closes"]
    texts = [text for kind in bad for text in (kind, f"fine after {kind}")]
    own = {"kind": "custom", "function": f"{own_module}:misbehave"}
    rewards = rewarder({"endless": {**own, "time_limit": 1}, "default": {**own, "time_limit": 100}})
    domains = ["endless" if text in ("hang", "stubborn") else "d" for text in texts]
    asked = [sample(text, domain) for text, domain in zip(texts, domains, strict=True)]
    found = dict(zip(texts, rewards(asked), strict=True))
    for kind in bad:
        assert found[f"fine after {kind}"].reward == 1.0
        assert found[kind].reward is None, kind
        assert found[kind].error, kind
    assert rewards.drain() == {"given": len(bad), "failed": len(bad), "timed_out": 2, "cached": 0}
    assert rewards.drain()["given"] == 0
    assert "boom" in found["raise"].error


def test_a_regular_expression_that_explodes_is_not_a_zero() -> None:
    own = {"kind": "format", "pattern": "(a+)+$"}
    rewards = rewarder({"endless": {**own, "time_limit": 1}, "default": {**own, "time_limit": 100}})
    hung, fine = rewards([sample("a" * 50 + "b", "endless"), sample("aaa")])
    assert (hung.reward, fine.reward) == (None, 1.0)
    assert "longer than 1 seconds" in hung.error


def test_rewards_are_cached_by_content(own_module: str) -> None:
    rewards = rewarder(f"{own_module}:length")
    samples = [sample("ab", longest=4), sample("ab", longest=4), sample("ab", longest=8)]
    assert [found.reward for found in rewards(samples)] == [0.5, 0.5, 0.25]
    assert rewards.drain()["cached"] == 1
    rewards(samples)
    assert rewards.drain() == {"given": 3, "failed": 0, "timed_out": 0, "cached": 3}


def job(kind: Custom, length: int) -> RewardJob:
    request = Request(kind, "auto", sample("x" * length, longest=1), 100.0)
    return RewardJob(write_request(request), kind.bounds, 100.0)


def test_workers_stay_and_keep_their_order(own_module: str) -> None:
    small = Pool("none", size=2)
    try:
        kind = Custom(function=f"{own_module}:length")
        for _ in range(3):
            jobs = [job(kind, n) for n in range(20)]
            small.run(jobs)
            assert [done.reply and done.reply.result.reward for done in jobs] == [float(n) for n in range(20)]
        pids = {worker.process.pid for worker in small.workers}
        assert len(pids) == 2
        os.kill(next(iter(pids)), signal.SIGKILL)  # an idle worker dies: nobody's sample
        jobs = [job(kind, n) for n in range(20)]
        small.run(jobs)
        assert [done.reply and done.reply.result.reward for done in jobs] == [float(n) for n in range(20)]
    finally:
        small.close()
    assert all(not Path(f"/proc/{pid}").exists() for pid in pids)


def test_an_answer_that_is_there_counts_however_late_it_is_looked_at(
    own_module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine that stood still past every deadline."""
    small, read = Pool("none", size=1), Pool._read

    def stood_still(self: Pool, worker: Worker) -> bool:
        asked, heard = worker.job, read(self, worker)
        worker.deadline = 0.0 if asked and worker.job is None else worker.deadline
        return heard

    monkeypatch.setattr(Pool, "_read", stood_still)
    try:
        jobs, pids = [job(Custom(function=f"{own_module}:length"), n) for n in range(3)], set()
        for one in jobs:
            small.run([one])
            pids |= {worker.process.pid for worker in small.workers}
        assert [done.reply and done.reply.result.reward for done in jobs] == [0.0, 1.0, 2.0]
        assert (len(pids), small.failures) == (1, 0)
    finally:
        small.close()
    reading, writing = os.pipe()
    os.write(writing, b"1\n")
    assert _listen(reading, 0.0) == (b"1\n", False)
    assert _listen(reading, 0.0) == (b"", True)
    os.close(reading)
    os.close(writing)


def test_a_hanging_worker_dies_with_its_owner(own_module: str, tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(
        "from opd.rewards import Rewarder, Rewards\nfrom opd.rewards.custom import Custom\nfrom opd.records import Prompt, Sample\n"
        f"spec = Custom(function='{own_module}:misbehave', time_limit=10_000)\n"
        "Rewarder(Rewards(domains={'default': [spec]}))([Sample(Prompt('p', 'd'), 'hang')])\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    owner = subprocess.Popen([sys.executable, str(script)], env=environment)
    children = Path(f"/proc/{owner.pid}/task/{owner.pid}/children")
    deadline = time.monotonic() + 300
    while not children.read_text().split() and time.monotonic() < deadline:
        time.sleep(0.05)
    worker = int(children.read_text().split()[0])
    forked = Path(f"/proc/{worker}/task/{worker}/children")
    while not forked.read_text().split() and time.monotonic() < deadline:
        time.sleep(0.05)
    child = int(forked.read_text().split()[0])
    owner.kill()
    owner.wait()
    deadline = time.monotonic() + 600
    while (_alive(worker) or _alive(child)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(worker)
    assert not _alive(child)


def test_a_fork_whose_parent_died_before_it_was_tied_ends() -> None:
    code = """
        import os, time
        from opd.rewards.workers import _die_with
        owner = os.getpid()
        if os.fork():
            os._exit(0)
        while os.getppid() == owner:
            time.sleep(0.01)
        print(_die_with(owner), _die_with(os.getppid()), flush=True)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_workers_import_no_torch() -> None:
    code = "import sys, opd.rewards.workers, opd.rewards.rewarder; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
)


@given(values)
def test_fields_arrive_as_they_left(value: Any) -> None:
    assert untagged(json.loads(json.dumps(tagged(value)))) == value


def test_texts_arrive_as_they_left() -> None:
    for text in malformed(200, longest=2000):
        whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")  # pairs count as one
        assert read_request(write_request(Request(Exact(), "auto", sample(text, answer="x"), 1.0))).sample.text == whole


# Sums and domains


def test_weighted_sums() -> None:
    rewards = [{"kind": "exact", "weight": 0.8}, {"kind": "format", "pattern": "^\\d+$", "weight": 0.2}]
    assert reward(rewards, "42", answer=42) == 1.0
    assert reward(rewards, "43", answer=42) == pytest.approx(0.2)
    assert reward(rewards, "x", answer=42) == 0.0
    assert reward(rewards, "42") is None  # one part could not be given: nor can the whole
    three = [{"kind": "exact", "weight": weight} for weight in (0.7, 0.2, 0.1)]
    assert reward(three, "42", answer=42) == 1.0


def test_by_domain_with_a_default() -> None:
    rewards = rewarder({"sums": "numeric", "default": "exact"})
    found = rewards([sample("it is 42", "sums", answer=42), sample("it is 42", "names", answer=42)])
    assert [result.reward for result in found] == [1.0, 0.0]


def test_the_prompts_own_verifier_is_the_default() -> None:
    rewards = rewarder({"sums": "numeric"})
    own = sample("42", "other", answer=42, verifier="exact")
    nobody = sample("42", "other", answer=42)
    assert [found.reward for found in rewards([own, nobody])] == [1.0, None]
    assert rewards.covers(own.prompt)
    assert not rewards.covers(nobody.prompt)
    assert rewards.covers(sample("", "sums").prompt)
    assert verify([sample("it is 42", answer=42, verifier="numeric")])[0].reward == 1.0
    assert "unknown verifier" in verify([sample("42", verifier="os:system")])[0].error


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ("numerical", "'numeric'"),
        ({"kind": "exact", "tolerance": 0.1}, "tolerance belongs to reward numeric"),
        ({"kind": "format"}, "needs a pattern"),
        ({"kind": "format", "pattern": "("}, "not a regular expression"),
        ({"kind": "custom"}, "needs a function"),
        ("a b:c", "expected module:function"),
        ("my_rewards.brevity", "write module:function or file.py:function"),
        ("no_such_module_anywhere:f", "no module 'no_such_module_anywhere'"),
        ({"sums": {"kind": "code", "time_limt": 1}}, "did you mean 'time_limit'"),
        ({"elsewhere": "numeric"}, "no prompt has this domain"),
    ],
)
def test_mistakes_are_named(rewards: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        rewarder(rewards, domains=["sums"])


@pytest.mark.parametrize(
    "rewards", ["mine.py", {"kind": "custom", "function": "mine.py"}, {"sums": ["exact", "mine.py"]}]
)
def test_a_file_without_its_function_is_answered_with_those_it_has(rewards: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit\ndef brevity(sample): ...\ndef _inner(sample): ...\n")
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(json.dumps({"student": "tiny/generalist", "prompts": "task:addition", "rewards": rewards}))
    with pytest.raises(RecipeError, match=r"Name the function, too: mine\.py:brevity; it has brevity; got"):
        load_recipe(recipe)


@pytest.mark.parametrize(
    ("rewards", "answer", "fits"),
    [
        (None, "12 * 12 = 144\n144 + 4 = 148\n#### 148", "numeric"),  # rows with an answer are compared with it exactly
        ("exact", "#### 148", "numeric"),
        ("exact", r"so it is \boxed{x^2}", "maths"),
        ("exact", "148", None),
        ("numeric", "#### 148", None),
        ({"kind": "exact", "extract": "last_line"}, "#### 148", None),
        ({"kind": "exact", "ignore": ["punctuation"]}, "#### 148", None),
    ],
)
def test_worked_solutions_as_exact_references_are_doubted(rewards: Any, answer: str, fits: str | None) -> None:
    prompts = [sample("", answer=answer, verifier="exact").prompt]
    found = reward_warnings(rewarder(rewards, domains=[prompts[0].domain]), prompts)
    assert [f"`rewards: {fits}`" in line and line.startswith("WARNING: ") for line in found] == [True] * (
        fits is not None
    )
    assert reward_warnings(rewarder("exact"), [*prompts, sample("", answer="148").prompt]) == []


BROKEN = """
import time
def raises(sample): raise KeyError("no such thing")
def two(sample, more): return 1.0
def hangs(sample): time.sleep(3600)
def nan(sample): return float("nan")
def later(sample):
    if sample.text != sample.prompt.fields["answer"]: raise RuntimeError("\\x1b[2J broken later")
    return 1.0
"""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("absent", "has no function 'absent'; it has raises, two, hangs, nan, later"),
        ("raises", r"KeyError: 'no such thing' \(broken.py, line 3\)"),
        ("two", "missing 1 required positional argument: 'more'"),
        ("hangs", "took longer than 0.5 seconds"),
        ("nan", "gave nan; a reward is a number from"),
    ],
)
def test_broken_rewards_are_found_before_the_first_step(tmp_path: Path, function: str, message: str) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    limit = 0.5 if function == "hangs" else 100
    rewards = {"kind": "custom", "function": f"{tmp_path / 'broken.py'}:{function}", "time_limit": limit}
    recipe = load_recipe({"student": "tiny/generalist", "prompts": ["task:addition"], "rewards": rewards})
    said: list[str] = []
    prompt = Prompt("task:addition/1", "arithmetic", fields={"answer": "42"})
    with pytest.raises(RecipeError, match=message):
        check_rewards(recipe.stages[0].rewards, [prompt], say=said.append)
    assert not said  # the error says it, and nothing else does


def test_a_plan_tries_the_rewards_too(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    recipe = {
        "student": "tiny/generalist",
        "teachers": "tiny/arithmetic",
        "prompts": ["task:addition"],
        "rewards": f"{tmp_path / 'broken.py'}:raises",
    }
    with pytest.raises(RecipeError, match="gives no reward in domain 'arithmetic'"):
        make_plan(load_recipe(recipe))
    with pytest.raises(RecipeError, match="there is no file"):
        make_plan(load_recipe({**recipe, "rewards": f"{tmp_path / 'nowhere.py'}:raises"}))


@pytest.mark.parametrize("by_view", [False, True])
def test_a_run_without_rewards_stops_and_says_why(tmp_path: Path, by_view: bool) -> None:
    """A function that works on the reference and fails on everything else is found when it has failed for long enough."""
    (tmp_path / "broken.py").write_text(BROKEN)
    recipe = {
        "student": save_tiny(tmp_path / "student"),
        "prompts": ["task:addition"],
        "rewards": {"default": f"{tmp_path / 'broken.py'}:later", "stop_after": 2},
        "objective": {"form": "policy_gradient", "advantage": {"teacher_weight": 0, "outcome_weight": 1}},
        "rollout": {"prompts": 2, "samples": 2, "max_new_tokens": 4},
        "train": {"steps": 5},
        "eval": {"prompts": 2},
        "device": "cpu",
    }
    if by_view:
        recipe |= {"objective": {"form": "direct"}, "teachers": {"a": {"kind": "self", "view": "sibling"}}}
    with pytest.raises(TrainingError, match=r"nothing was rewarded for 2 steps.*RuntimeError:.*broken later"):
        opd.run(recipe, out=tmp_path / "run")
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count("broken later") >= 3
    assert "\x1b" not in log
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(), parse_constant=pytest.fail)
    assert summary["stages"][0]["evals"]["arithmetic"]["before"] == 0.0  # the answers brought the reward down: wrong
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert metrics[0]["rewards/failed"] == 4


def test_long_integers_and_odd_fields() -> None:
    long = 10**5000 + 7
    assert reward("exact", "1" + "0" * 4999 + "7", answer=long) == 1.0
    assert reward("numeric", "3", answer=long) is None
    assert reward({"kind": "format", "pattern": "a"}, "a", answer=long) == 1.0
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    assert "fields cannot be used" in only({"kind": "format", "pattern": "a"}, "a", answer=nested).error
    assert only("exact", "a", answer=[[long]]).reward is None
    assert untagged(json.loads(json.dumps(tagged({"x": long})))) == {"x": long}


@pytest.mark.parametrize("value", [math.inf, math.nan, -1, "1e999"])
@pytest.mark.parametrize("key", ["tolerance", "absolute", "time_limit", "weight"])
def test_values_that_are_not_numbers_are_rejected(key: str, value: Any) -> None:
    if (key, value) == ("weight", -1):
        return
    with pytest.raises(RecipeError, match=key):
        rewarder({"kind": "numeric", key: value})


def test_rewards_survive_a_resolved_recipe() -> None:
    for rewards in (
        "numeric",
        {"sandbox": "none"},
        {"kind": "maths", "sandbox": "none"},
        {"d": ["exact"], "stop_after": 7},
    ):
        recipe = load_recipe({"student": "tiny/generalist", "prompts": ["task:addition"], "rewards": rewards})
        again = load_recipe(yaml.safe_load(recipe.to_yaml())).stages[0].rewards
        assert again == recipe.stages[0].rewards
    assert (
        load_recipe({"student": "s", "prompts": ["p"], "rewards": {"sandbox": "none"}}).stages[0].rewards.sandbox
        == "none"
    )


OLDER = {
    "weight": 1.0,
    "time_limit": 10.0,
    "field": "answer",
    "extract": "auto",
    "ignore": [],
    "tolerance": 1e-06,
    "absolute": 0.0,
    "pattern": None,
    "whole": False,
    "json_schema": None,
    "function": None,
    "fresh": True,
    "partial": False,
    "sandbox": "auto",
    "memory": 512,
    "processes": 8,
    "disk": 16,
}


@pytest.mark.parametrize(
    "own",
    [
        *({"kind": kind} for kind in ("verifier", "exact", "maths", "json")),
        {"kind": "numeric", "tolerance": 0.5},
        {"kind": "format", "pattern": "a", "whole": True},
        {"kind": "custom", "function": "a:b", "fresh": False},
        {"kind": "code", "sandbox": "none", "memory": 64},
    ],
)
def test_rewards_of_older_runs_are_read(own: dict[str, Any]) -> None:
    """Their `resolved.yaml` has the keys of every kind in each reward."""
    base = {"student": "s", "prompts": ["p"]}
    older = {"domains": {"default": [OLDER | own]}, "sandbox": "auto", "stop_after": 5}
    now = load_recipe({**base, "rewards": [own]})
    assert load_recipe({**base, "rewards": older}).stages[0].rewards == now.stages[0].rewards
    foreign = {"ignore": ["case"]} if own["kind"] == "code" else {"disk": 7}
    with pytest.raises(RecipeError, match=r"(disk belongs to reward code|ignore belongs to reward exact), not to"):
        load_recipe({**base, "rewards": [own | foreign]})


def test_a_run_is_rewarded_by_its_rewards(tmp_path: Path) -> None:
    """In training and in evaluation: the length of an answer of random weights is known to be above 0, its sum is not right."""
    student = save_tiny(tmp_path / "student")
    recipe = {
        "student": student,
        "teachers": {"t": student},
        "prompts": [{"source": "task:addition", "domain": "sums"}, {"source": "task:reverse", "domain": "words"}],
        "rewards": {"words": {"kind": "format", "pattern": ".", "weight": 0.25}},
        "rollout": {"prompts": 4, "max_new_tokens": 6},
        "train": {"steps": 1},
        "eval": {"prompts": 4},
        "device": "cpu",
    }
    run = opd.run(recipe, out=tmp_path / "run")
    evals = run.summary["stages"][0]["evals"]
    assert evals["sums"]["after"] == 0.0
    assert evals["words"]["after"] >= 0.5  # full marks are 0.25
    assert evals["words"]["reward"] == pytest.approx(0.25, abs=0.13)
    assert 0.0 < run.metrics[0]["reward"] <= 0.125


# Code


def block(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\nDone."


@needs_sandbox
def test_code_against_tests_and_cases() -> None:
    right, wrong = block("def f(x):\n    return x + 1"), block("def f(x):\n    return 2")
    tests = ["assert f(1) == 2", "assert f(2) == 3", "assert f(-1) >= 0"]
    assert reward("code", right, tests=tests) == 1.0
    assert reward("code", wrong, tests=tests) == 0.0
    assert reward({"kind": "code", "partial": True}, wrong, tests=tests) == pytest.approx(2 / 3)
    check = "def check(candidate):\n    assert candidate(1) == 2\n"
    assert reward("code", right, tests=check, entry_point="f") == 1.0
    assert reward("code", wrong.replace("2", "3"), tests=check, entry_point="f") == 0.0
    loop = "def check(candidate):\n    for n in range(3):\n        assert candidate(n) == n + 1\n"
    assert reward("code", right, tests=loop, entry_point="f") == 1.0
    assert reward("code", wrong, tests=loop, entry_point="f") == 0.0
    assert "entry_point" in only("code", right, tests=check).error
    helper = [
        "import math\nMETADATA = {}\ndef check(c):\n    assert c(math.floor(1.5)) == 2\n    assert abs(c(1) - 2) < 1e-6\n"
    ]
    assert reward("code", right, tests=helper, entry_point="f") == 1.0
    assert (
        reward("code", block("class Solution:\n    def g(self, x): return x"), tests=["assert Solution().g(3) == 3"])
        == 1.0
    )
    assert reward("code", right, setup="import math", tests=["x = f(1)\nassert math.isclose(x, 2)"]) == 1.0
    assert reward("code", right, cases=[{"call": "[f(n) for n in range(3)]", "output": [1, 2, 3]}]) == 1.0
    cases = [{"input": "3\n", "output": "6\n"}, {"input": "4", "output": "8"}]
    assert reward("code", block("print(int(input()) * 2)"), cases=cases) == 1.0
    assert reward("code", block("print(6)"), cases=cases) == 0.0
    assert reward({"kind": "code", "partial": True}, block("print(6)"), cases=cases) == 0.5
    assert reward("code", "I cannot do that", tests=tests) == 0.0
    assert reward("code", right) is None
    assert "cannot be read" in only("code", right, tests=["assert f("]).error


@needs_sandbox
def test_values_are_compared_by_what_they_are() -> None:
    tests = ["assert f() == {'a': (1, 2.5), 'b': [None, {3}]}"]
    assert reward("code", block("def f(): return {'b': [None, {3}], 'a': (1, 2.5)}"), tests=tests) == 1.0
    counted = block("import collections\ndef f(): return collections.Counter('aab')")
    assert reward("code", counted, tests=["assert f() == {'a': 2, 'b': 1}"]) == 1.0
    assert reward("code", block("def f(): return 0.1 + 0.2"), tests=["assert f() == 0.3"]) == 1.0


@needs_sandbox
@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "print('2'); print('3'); print('OK passed True'); raise SystemExit(0)",
        "import os\nfor n in range(1, 20):\n    try: os.write(n, b\"'passed'\\nTrue\\n\")\n    except OSError: pass\nos._exit(0)",
        "class Yes:\n    def __eq__(self, other): return True\n    def __repr__(self): return 'True'\ndef f(x): return Yes()",
        "class Yes(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\ndef f(x): return Yes(7)",
        "import builtins\nbuiltins.AssertionError = None\nbuiltins.bool = lambda x: True\ndef f(x): return 7",
        "import sys\nframe = sys._getframe()\nwhile frame:\n    frame.f_locals.get('task', {})['work'] = []\n    frame = frame.f_back\ndef f(x): return 7",
        "import os, signal; os.kill(1, signal.SIGTERM); os.kill(0, signal.SIGKILL)",
        "while True: pass",
        "raise MemoryError",
        "def f(:",
        "f = 1",
        "\x00",
        "\ud800",
    ],
)  # fmt: skip
def test_forged_rewards(code: str) -> None:
    """Neither an early exit nor a marker nor a value that equals everything passes: the comparison happens outside."""
    plain = sample(block(code), tests=["assert f(1) == 2", "assert f(2) == 3"])
    check = "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(2) == 3\n"
    checked = sample(block(code), tests=check, entry_point="f")
    found = rewarder({"kind": "code", "time_limit": 1})([plain, checked])
    assert [result.reward for result in found] == [0.0, 0.0]


@needs_sandbox
@pytest.mark.parametrize("code", ["import os; os._exit(0)", "raise SystemExit", "print('passed')", "assert False"])
def test_asserts_that_never_ran_do_not_pass(code: str) -> None:
    check = "def check(candidate):\n    assert candidate(1) > 1\n"
    assert reward("code", block(f"{code}\ndef f(x): return 0"), tests=check, entry_point="f") == 0.0


# Anything at all


def everything() -> dict[str, Any]:
    return {
        "exact": "exact",
        "numeric": "numeric",
        "format": {"kind": "format", "pattern": r"<answer>\d+</answer>", "time_limit": 30},
        "json": {"kind": "json", "time_limit": 30},
        "code": {"kind": "code", "time_limit": 5},
        "maths": {"kind": "maths", "time_limit": 20},
        "gym": {"kind": "verifier", "time_limit": 30},
        "sum": [{"kind": "exact"}, {"kind": "numeric", "weight": 0.5}],
    }


COUNTS = {
    "exact": 3_000,
    "numeric": 3_000,
    "sum": 1_000,
    "format": 1_000,
    "json": 1_000,
    "code": 100,
    "maths": 20,
    "gym": 20,
}


@pytest.mark.parametrize("name", list(COUNTS))
def test_malformed_outputs(name: str) -> None:
    shower(name, malformed(COUNTS[name], longest=4_000))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(COUNTS))
def test_many_malformed_outputs(name: str) -> None:
    """COUNT of each, ten thousand by hand; by default as many as take some seconds."""
    apart = {"code": 500, "maths": 150, "gym": 150}
    shower(name, malformed(int(os.environ.get("COUNT") or apart.get(name, 4_000))))


def shower(name: str, texts: list[str]) -> None:
    """Raises nothing, hangs nothing, and every text has a reward or a reason."""
    entry = {"question": "q", "answer": "1", "metadata": {"numbers": [1, 2], "target": 918273645, "expression": "1"}}
    fields = {
        "answer": "918273645.25",
        "schema": {"type": "object", "required": ["zebra"]},
        "tests": ["assert f(1) == 2"],
        "entry": entry,
        "verifier": "reasoning_gym:countdown",
    }
    count = len(texts)
    rewards = rewarder(everything()[name])
    found = rewards([sample(text, **fields) for text in texts])
    assert len(found) == count
    failed = [result for result in found if result.reward is None]
    assert all(result.error for result in failed)
    assert all(result.reward is None or 0.0 <= result.reward < 0.1 for result in found)
    if name not in ("maths", "gym"):  # libraries that hang or trip over some texts: masked, a few in a hundred
        assert not failed
    assert len(failed) <= max(4, 0.1 * count)
    counts = rewards.drain()
    assert counts["given"] + len(failed) == count


def test_no_text_takes_long_in_process() -> None:
    """Rewards that run in the training process are linear in the text."""
    size = 60_000
    pieces = ["1,111", "\\frac{1", "\\boxed{", "1e", "1 ", "-", "1/", "```\n", "9", "."]
    texts = [*(piece * (size // len(piece)) for piece in pieces), "\\boxed{" + "{" * size, "1" + " " * size + "/"]
    for text in texts:
        begun = time.process_time()
        assert (
            reward([{"kind": "exact", "ignore": ["case", "space", "punctuation"]}, "numeric"], text, answer="3.25")
            == 0.0
        )
        blocks(text)
        assert time.process_time() - begun < 2, text[:20]
