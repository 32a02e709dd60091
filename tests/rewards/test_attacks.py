"""Attacks on rewards, replayed: what an answer does to its scorer, to other answers, to the tests it is checked by."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opd import sandbox
from opd.common.errors import RecipeError
from opd.recipe import load_recipe
from opd.records import Prompt, RewardResult, Sample
from opd.rewards import Rewarder, check_rewards, reward, verify
from opd.rewards.reward import sandbox_here
from opd.rewards.workers import pool
from opd.sandbox import MEGABYTE, Limits

KINDS = [kind for kind in ("namespaces", "bubblewrap") if not sandbox.why_unusable(kind)]
needs_sandbox = pytest.mark.skipif(not KINDS, reason="no sandbox works on this machine")
pytestmark = pytest.mark.safety


@pytest.fixture(scope="module", autouse=True)
def close_pools() -> Iterator[None]:
    yield
    for kind in ("none", "namespaces", "bubblewrap"):
        pool(kind).close()


def rewarder(rewards: Any) -> Rewarder:
    recipe = {"student": "tiny/generalist", "prompts": ["task:addition"], "rewards": rewards}
    return Rewarder(load_recipe(recipe).stages[0].rewards)


def sample(text: str, **fields: Any) -> Sample:
    return Sample(Prompt(id="p", domain="d", text="q", fields=fields), text)


# An answer and its scorer

PATCH = "__import__('sys').modules['reasoning_gym'].__dict__.update(get_score_answer_fn=lambda name: lambda **k: 1.0)"
ATTACKS = [
    f"[{PATCH}]",
    f"({PATCH}, [[0, 0]])[1]",
    "[c for c in ().__class__.__base__.__subclasses__()]",
    "(lambda: [[1]])()",
    "[setattr(__import__('builtins'), 'float', lambda x: 1.0)]",
    "__import__('os')._exit(0)",
    "__import__('os').kill(__import__('os').getppid(), 9)",
    "[x := 1]",
    "f'{1}'",
]


@needs_sandbox
@pytest.mark.parametrize("name", ["string_insertion", "spiral_matrix", "binary_matrix", "n_queens", "countdown", "puzzle24", "polynomial_multiplication"])  # fmt: skip
def test_an_answer_does_not_own_its_scorer(name: str) -> None:
    import reasoning_gym

    entry = dict(reasoning_gym.create_dataset(name, size=1, seed=3)[0])
    fields = {"verifier": f"reasoning_gym:{name}", "entry": entry}
    alone = verify([sample("wrong", **fields)])[0].reward
    attacks = [sample(text, **fields) for text in ATTACKS]
    after = [sample(f"wrong {number}", **fields) for number in range(8)]
    found = verify([*attacks, *after, sample(entry["answer"], **fields)])
    assert found[-1].reward == 1.0
    assert all(result.reward == alone for result in found[len(attacks) : -1])
    assert all((result.reward or 0.0) < 0.2 for result in found[: len(attacks)])


def test_scorers_still_read_what_they_read() -> None:
    assert reward.calculate("[['0', 1], (2, -3.5), {'a': 1 + 1}]") == [["0", 1], (2, -3.5), {"a": 2}]
    assert reward.checked("x**2/2 + log(Abs(x)) - C", reward.FUNCTIONS)
    for text in (
        "open('x')",
        "a.b",
        "x if y else z",
        "[x for x in y]",
        "log(x, evaluate=False)",
        "__x",
        "'a'.upper()",
        "(" * 500,
    ):
        with pytest.raises(ValueError, match=r"arithmetic|expression"):
            reward.checked(text, reward.FUNCTIONS)


OWN = """
import builtins, os
GOOD = 0.0
def run(sample):
    return float(eval(sample.text)) if sample.text[0] != "w" else GOOD
def says(sample):
    return {"nan": float("nan"), "inf": float("inf"), "huge": 1e308, "text": "high", "list": [1.0], "true": True}[sample.text]
"""
HOSTILE = [
    "globals().update(GOOD=1.0) or 0",
    "setattr(builtins, 'float', lambda x: 1.0) or 0",
    "os.write(1, b'{\\\"reward\\\": 1.0}\\n') and 0",
    '[os.write(n, b\'{\\"reward\\": 1.0, \\"per_turn\\": [], \\"feedback\\": 0, \\"error\\": 0, \\"by_answer\\": 0}\\n\') for n in range(3, 5)][9]',
    "os._exit(0)",
    "os.kill(os.getppid(), 9)",
]


def test_what_an_answer_does_to_a_function_of_ones_own_ends_with_it(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    rewards = rewarder(f"{tmp_path / 'own.py'}:run")
    for text in HOSTILE:
        rewards([sample(text)])
        assert [found.reward for found in rewards([sample(f"wrong {text} {number}") for number in range(4)])] == [
            0.0
        ] * 4, text


def test_a_reply_is_a_number_in_range(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    found = rewarder(f"{tmp_path / 'own.py'}:says")(
        [sample(text) for text in ("nan", "inf", "huge", "text", "list", "true")]
    )
    assert [result.reward for result in found] == [None, None, None, None, None, 1.0]
    assert all(result.error for result in found[:-1])


# No walls


@pytest.fixture
def no_walls(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("opd.sandbox.walls.why_unusable", lambda kind: "not permitted")
    sandbox_here.cache_clear()
    yield
    sandbox_here.cache_clear()


@pytest.mark.parametrize("kind", ["maths", "code"])
def test_without_walls_rewards_that_run_text_are_rejected(no_walls: None, kind: str) -> None:
    with pytest.raises(RecipeError, match=r"not permitted.*rewards: \{sandbox: none\}"):
        rewarder(kind)
    entry = {"question": "q", "answer": "1", "metadata": {}}
    prompt = Prompt("p", "d", fields={"verifier": "reasoning_gym:countdown", "entry": entry})
    recipe = {"student": "tiny/generalist", "prompts": ["task:addition"]}
    with pytest.raises(RecipeError, match="not permitted"):
        check_rewards(load_recipe(recipe).stages[0].rewards, [prompt])
    with pytest.raises(RecipeError, match="not permitted"):
        verify([Sample(prompt, "1")])
    assert rewarder({"kind": "format", "pattern": "a"})([sample("a")])[0].reward == 1.0  # runs nothing


def test_without_walls_they_run_when_the_recipe_says_so(no_walls: None) -> None:
    rewards = rewarder({"default": "maths", "sandbox": "none"})
    assert [found.reward for found in rewards([sample("$1/2$", answer="0.5"), sample("2", answer="0.5")])] == [1.0, 0.0]


# Bombs


@needs_sandbox
def test_a_bomb_costs_its_time_once_and_is_the_answers_fault() -> None:
    rewards = rewarder({"kind": "format", "pattern": "(a+)+$", "time_limit": 0.3})
    bomb = sample("a" * 60 + "b")
    (first,) = rewards([bomb])
    assert first == RewardResult(None, error="took longer than 0.3 seconds", by_answer=True)
    assert rewards.drain()["timed_out"] == 1
    elsewhere = Sample(Prompt(id="another", domain="d"), bomb.text)
    assert rewards([bomb, elsewhere]) == [first, first]
    assert rewards.drain() == {"given": 0, "failed": 2, "timed_out": 0, "cached": 2}


@needs_sandbox
@pytest.mark.parametrize("kind", KINDS or ["none"])
def test_memory_is_limited_for_all_processes_together(kind: str) -> None:
    code = (
        "import os, time\nfor _ in range(4):\n    if os.fork() == 0:\n        held = bytearray(os.urandom(1 << 20) * 100)\n"
        "        time.sleep(3600)\ntime.sleep(3600)"
    )
    limits = Limits(seconds=600.0, memory=256 * MEGABYTE)
    outcome = sandbox.run_program([sandbox.python(), "-I", "-c", code], kind=kind, limits=limits)
    assert outcome.swollen
    assert not outcome.timed_out


# Code and its tests

FORGERIES = {
    "dishonest equality": "class Yes:\n    def __eq__(s, o): return True\n    __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __eq__\n    __hash__ = None\n    def __sub__(s, o): return 0\n    __rsub__ = __sub__\n    def __abs__(s): return 0\ndef f(x): return Yes()",
    "a subclass of int": "class Yes(int):\n    def __eq__(s, o): return True\n    def __gt__(s, o): return True\n    def __lt__(s, o): return True\n    __hash__ = int.__hash__\ndef f(x): return Yes(7)",
    "a subclass of list": "class Yes(list):\n    def __eq__(s, o): return True\n    def __contains__(s, o): return True\ndef f(x): return Yes()",
    "a subclass of str": "class Yes(str):\n    def __eq__(s, o): return True\n    __hash__ = str.__hash__\ndef f(x): return Yes('')",
    "shadowed builtins": "def abs(x): return 0\ndef sorted(x): return [1, 2]\ndef isinstance(*a): return True\ndef all(x): return True\ndef len(x): return 3\ndef f(x): return 7",
    "patched builtins": "import builtins\nbuiltins.abs = lambda x: 0\nbuiltins.isinstance = lambda *a: True\nbuiltins.all = lambda x: True\nbuiltins.AssertionError = None\nbuiltins.bool = lambda x: True\ndef f(x): return 7",
    "patched exec": "import builtins\nbuiltins.exec = lambda *a: None\nbuiltins.eval = lambda *a: True\nbuiltins.compile = lambda *a, **k: ''\ndef f(x): return 7",
    "modules": "import sys, types\nfor name in ('math', 'json', 'builtins'):\n    fake = types.ModuleType(name)\n    fake.isclose = lambda *a, **k: True\n    fake.dumps = lambda *a, **k: '{\"passed\": true}'\n    sys.modules[name] = fake\ndef f(x): return 7",
    "an early exit": "import os\ndef f(x): os._exit(0)",
    "at exit": "import atexit, os\natexit.register(lambda: os.write(1, b'{\"passed\": true}\\n'))\ndef f(x): raise SystemExit(0)",
    "every descriptor": "import os\nfor n in range(64):\n    try: os.write(n, b'{\"passed\": true}\\n' * 9)\n    except OSError: pass\ndef f(x): return 7",
    "the examiner's memory": "import os\nfor name in ('mem', 'fd/1', 'fd/0'):\n    open(f'/proc/{os.getppid()}/{name}', 'r+b')\ndef f(x): return 7",
    "the examiner's names": "import sys, gc\nframe = sys._getframe()\nwhile frame:\n    frame.f_globals.update({key: (lambda *a, **k: {'passed': True}) for key in ('examine', 'encode')})\n    frame = frame.f_back\nfor found in gc.get_objects():\n    if isinstance(found, dict) and 'work' in found: found['work'] = []\ndef f(x): return 7",
    "dishonest membership": "class Yes:\n    def __contains__(s, o): return True\n    def __len__(s): return 1\n    def __bool__(s): return True\ndef f(x): return Yes()",
    "the end of the tests' loop": "def f(x): raise StopIteration",
    "the tests' function": "def f(x): return 7\ncheck = lambda candidate: None\ncandidate = lambda x: x + 1",
}  # fmt: skip
TESTS: list[dict[str, Any]] = [
    {"tests": ["assert abs(f(1) - 2) < 1e-6"]},
    {"tests": ["assert (f(1) == 2) == True"]},
    {"tests": ["assert isinstance(f(1), int) and f(1) < 3 and all([f(1) == 2])"]},
    {"tests": ["import math\nassert math.isclose(f(1), 2)"]},
    {"tests": ["assert f(1) in (2,)"]},
    {
        "tests": "def check(candidate):\n    for n in range(3):\n        assert candidate(n) == n + 1\n",
        "entry_point": "f",
    },
    {"tests": ["assert f(1) == 2"]},
    {"cases": [{"call": "sorted([f(1), f(0)])", "output": [1, 2]}]},
    {"tests": ["for found, right in zip(map(f, (1, 2)), (2, 3)):\n    assert found == right"]},
    {"tests": ["assert all(map(lambda x: f(x) == x + 1, (1, 2)))"]},
    {"tests": ["found = f(1)\nassert found in (2,) or 2 in found"]},
]


def block(code: str) -> str:
    return f"```python\n{code}\n```"


@needs_sandbox
@pytest.mark.parametrize("name", FORGERIES)
def test_forged_tests(name: str) -> None:
    rewards = rewarder({"kind": "code", "time_limit": 30})
    found = rewards([sample(block(FORGERIES[name]), **fields) for fields in TESTS])
    assert [result.reward for result in found] == [0.0] * len(TESTS), [result.error for result in found]


@needs_sandbox
def test_honest_programs_pass() -> None:
    rewards = rewarder({"kind": "code", "time_limit": 30})
    found = rewards([sample(block("def f(x):\n    return x + 1"), **fields) for fields in TESTS])
    assert [result.reward for result in found] == [1.0] * len(TESTS), [result.feedback for result in found]


HONEST = [
    ("def sort(x):\n    x.sort()", "a = [3, 1]\nsort(a)\nassert a == [1, 3]"),
    ("def apply(g, x):\n    return g(x)", "assert apply(lambda n: n * 2, 4) == 8\nassert apply(len, 'abc') == 3"),
    ("def g(n):\n    yield from range(n)", "assert list(g(3)) == [0, 1, 2]\nassert sum(g(4)) == 6\ng = g(2)\nassert next(g) == 0"),
    ("class E(ValueError): pass\ndef f(x):\n    raise E('no')", "try:\n    f(1)\n    assert False, 'raised nothing'\nexcept E as e:\n    assert 'no' in str(e)"),
    ("class Stack:\n    def __init__(s): s.items = []\n    def push(s, x): s.items.append(x)\n    def __len__(s): return len(s.items)",
     "s = Stack()\ns.push(3)\nassert len(s) == 1\nassert s.items == [3]\ns.items = [1, 2]\nassert len(s) == 2"),
    ("from fractions import Fraction\nfrom decimal import Decimal\ndef f(): return [Fraction(1, 3), Decimal('0.1'), {1: (2, {3})}, 10 ** 5000]",
     "from fractions import Fraction\nx = f()\nassert x[0] == Fraction(1, 3) and x[2] == {1: (2, {3})}\nassert x[3] == 10 ** 5000"),
    ("from collections import Counter\nimport math\ndef f(x): return Counter(x)", "assert f('aab') == {'a': 2, 'b': 1}\nassert math.floor(1.5) == 1"),
    ("def outer(x):\n    def inner(y):\n        return x + y\n    return inner", "assert outer(1)(2) == 3"),
    ("class Bag:\n    def __init__(s): s.items = [1, 'x']\n    def __iter__(s): return iter(s.items)", "assert 'x' in Bag() and 1 in Bag() and 2 not in Bag()"),
    ("LIMIT = 3\ndef fact(n):\n    return 1 if n < 2 else n * fact(n - 1)", "assert fact(LIMIT) == 6\nprint('noise')"),
]  # fmt: skip


@needs_sandbox
def test_tests_can_use_the_program_as_if_in_one_process() -> None:
    rewards = rewarder({"kind": "code", "time_limit": 30})
    found = rewards([sample(block(code), tests=[tests]) for code, tests in HONEST])
    assert [result.reward for result in found] == [1.0] * len(HONEST), [result.feedback for result in found]
    setup = "class Node:\n    def __init__(s, v, n=None): s.v, s.n = v, n\ndef values(x):\n    return [] if x is None else [x.v, *values(x.n)]"
    program = "def rev(x):\n    out = None\n    while x:\n        out, x = Node(x.v, out), x.n\n    return out\ndef values(x): return [2, 1]"
    tests = ["assert values(rev(Node(1, Node(2)))) == [2, 1]", "assert values(rev(Node(1, Node(3)))) == [3, 1]"]
    assert rewards([sample(block(program), setup=setup, tests=tests)])[0].reward == 1.0
    given = "class T:\n    pass\nassert f(T()) == 1"
    assert "cannot leave their process" in rewards([sample(block("def f(x): return 1"), tests=[given])])[0].error


# Where packages live


@needs_sandbox
def test_workers_start_wherever_packages_live(tmp_path: Path) -> None:
    """On PYTHONPATH, in a folder of links, without the virtual environment's own site-packages."""
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    site = next(
        Path(entry) for entry in sys.path if entry.endswith("-packages") and (Path(entry) / "pydantic").is_dir()
    )
    for item in site.iterdir():
        if not item.name.endswith(".pth"):
            (libraries / item.name).symlink_to(item)
    code = (
        "from opd.rewards import verify\nfrom opd.records import Prompt, Sample\n"
        "fields = {'verifier': 'maths', 'answer': '0.5'}\n"
        "print(verify([Sample(Prompt('p', 'd', fields=fields), '$1/2$')])[0])"
    )
    path = os.pathsep.join([str(Path(sandbox.__file__).parents[2]), str(libraries)])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sandbox.python(), "-S", "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert "reward=1.0" in done.stdout, done.stdout + done.stderr
