"""The command line, in process: what it prints, and that a user's mistake is one message and exit code 2."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from opd import cli
from opd.common.files import this_version
from opd.recipe import load_recipe
from opd.runner.plan import make_plan
from tests.support.helpers import save_tiny


def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["opd", *arguments])
    with pytest.raises(SystemExit) as leaving:
        cli.main()
    captured = capsys.readouterr()
    return int(leaving.value.code or 0), captured.out, captured.err


def test_help_is_instant() -> None:
    """What takes time is importing: nothing large is, and few modules are."""
    code = """
        import sys
        from opd import cli
        sys.argv = ["opd", "--help"]
        try:
            cli.main()
        finally:
            print(*sys.modules, file=sys.stderr)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, capture_output=True, text=True)
    loaded = set(done.stderr.split())
    assert "diagnose" in done.stdout
    assert not {"torch", "transformers", "pydantic", "numpy"} & loaded
    assert len(loaded) < 700


def test_recipes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = call(capsys, monkeypatch, "recipes", "list")
    assert code == 0
    assert "quickstart" in out
    assert "methods/gkd" in out
    code, shown, _ = call(capsys, monkeypatch, "recipes", "show", "methods/gkd")
    assert code == 0
    code, _, _ = call(capsys, monkeypatch, "recipes", "copy", "methods/gkd")
    assert (code, Path("gkd.yaml").read_text()) == (0, shown)
    assert load_recipe("gkd.yaml").name == "gkd"
    code, _, err = call(capsys, monkeypatch, "recipes", "copy", "methods/gkd")
    assert code == 2
    assert "exists already" in err


def test_version(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(capsys, monkeypatch, "--version") == (0, f"opd {this_version()}\n", "")


def test_schema(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = call(capsys, monkeypatch, "schema")
    assert code == 0
    assert "rollout" in json.loads(out)["properties"]


def test_dry_run_prints_the_plan_and_loads_no_weights(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, monkeypatch, "run", "quickstart", "train.steps=7", "--dry-run")
    assert code == 0, err
    assert "steps: 7" in out
    for words in (
        "parameters",
        "arithmetic -> arithmetic",
        "rollouts, at most",
        "memory",
        "GiB" if "GiB" in out else "MiB",
    ):
        assert words in out
    assert not Path("runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.warmup=100", "train.warmup 100 is longer than train.steps 60: the learning rate ends at 0.0006"),
        ("train.warmup=60", None),
        ("train.lr=10", "train.lr 10 will very likely destroy the student"),
        ("train.lr=1e-12", "train.lr 1e-12 will hardly move the student"),
    ],
)
def test_a_plan_warns_of_settings_that_can_hardly_be_meant(override: str, words: str | None) -> None:
    (plan,) = make_plan(load_recipe("methods/gkd", [override, "eval.prompts=0"]))
    warned = [note for note in plan.notes if note.startswith("WARNING: train.")]
    assert len(warned) == (words is not None)
    assert words is None or words in warned[0]


def test_a_plan_warns_of_worked_solutions_as_references(tmp_path: Path) -> None:
    rows = [{"prompt": f"{number} + 1", "answer": f"so\n#### {number + 1}"} for number in range(30)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = {"student": "tiny/generalist", "teachers": "tiny/arithmetic", "prompts": str(tmp_path / "rows.jsonl")}
    assert any("Set `rewards: numeric`" in note for note in make_plan(load_recipe(recipe))[0].notes)
    assert not any("WARNING" in note for note in make_plan(load_recipe(recipe, ["rewards=numeric"]))[0].notes)


def test_a_plan_counts_no_more_tokens_than_a_step_has() -> None:
    small = ["rollout.prompts=4", "eval.prompts=0"]
    recipes = [load_recipe("quickstart", [f"train.micro_tokens={size}", *small]) for size in (5_000, 500_000)]
    assert len({make_plan(recipe)[0].memory["activations"] for recipe in recipes}) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "quickstrat"], "quickstart"),
        (["run", "nowhere.yaml"], "no such file"),
        (["run", "quickstart", "train.stps=3"], "'steps'"),
        (["run", "quickstart", "train.steps=many"], "train.steps"),
        (["run", "quickstart", "student=nowhere/at/all"], "no such directory"),
        (["run", "quickstart", "prompts.0.source=task:additon"], "addition"),
        (["run", "quickstart", "prompts.0.domain=geography"], "geography"),
        (["eval", "tiny/nothing", "--prompts", "task:addition"], "no such built-in"),
        (["eval", "tiny/generalist", "--prompts", "nowhere.jsonl"], "no such file"),
        (["eval", "tiny/generalist", "--prompts", "task:addition", "--device", "mps"], "device 'mps'"),
        (["models", "export", "tiny/nothing", "somewhere"], "no such built-in"),
        (["models", "export", "tiny/generalist", "/dev/null"], "cannot be written"),
        (["models", "export", "tiny/generalist", "/dev/null/below"], "cannot be written"),
        (["run", "quickstart", "device=mps"], "device"),
        (["run", "quickstart", "--out", ""], "name a directory"),
        (["run", "quickstart", "--out", "a\nb"], "control characters"),
        (["recipes", "copy", "quickstart", "nowhere/mine.yaml"], "cannot be written"),
        (["recipes", "show", "nothing"], "shipped"),
        (["resume", "nowhere"], "not a run directory"),
        (["resume", "/dev/null"], "not a run directory"),
        (["store", "check", "/dev/null"], "no rollout log"),
        (["store", "repair", "nowhere"], "no rollout log"),
        (["serve", "--student", "quickstart", "--token-env", "A", "--device", "cpu"], "--device does not belong"),
        (["serve", "--student", "quickstart", "--token-env", "A", "--tinker"], "--tinker does not belong"),
    ],
)
def test_mistakes_are_one_message_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, monkeypatch, *arguments)
    assert code == 2, out + err
    assert words in err
    assert "Traceback" not in out + err


def test_eval_and_models(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    code, out, err = call(
        capsys, monkeypatch, "eval", model, "--prompts", "task:addition", "--k", "2", "--n", "5", "--json", "--device", "cpu", "--max-new-tokens", "8"
    )  # fmt: skip
    assert code == 0, err
    score = json.loads(out)["arithmetic"]
    assert {"greedy", "sampled", "pass_at_k", "greedy_stderr", "n"} <= score.keys()
    assert score["n"] == 5
    code, out, _ = call(capsys, monkeypatch, "models", "list")
    assert code == 0
    assert "tiny/generalist" in out
    assert "smol" in out
    code, _, _ = call(capsys, monkeypatch, "models", "export", "tiny/generalist", str(tmp_path / "exported"))
    assert code == 0
    code, out, _ = call(
        capsys,
        monkeypatch,
        "eval",
        str(tmp_path / "exported"),
        "--prompts",
        "task:addition",
        "--n",
        "5",
        "--device",
        "cpu",
    )
    assert code == 0
    assert "pass@1" in out
