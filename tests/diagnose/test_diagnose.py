"""`opd diagnose`: the right verdict and remedy for each kind of pair, on tiny models; the table row by row; what is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from opd import cli
from opd.common.errors import UserError
from opd.data.tasks import TASKS
from opd.diagnose.diagnosis import Diagnosis, diagnose
from opd.diagnose.measures import (
    AnswerStatistics,
    Depth,
    PairMeasures,
    StopProbe,
    error_places,
    excess_kl,
    fork_places,
    form_of,
    stretch_edges,
    within_prompt_auroc,
)
from opd.diagnose.rules import REFINEMENTS, RULES, Advice, Case, decide, ranked, recommend, useful_depth
from opd.diagnose.words import diagnosis_lines
from opd.models.load import TINY_ROOT
from opd.recipe import load_recipe
from opd.report.page import diagnosis_page
from opd.runner.plan import make_plan
from opd.runner.tiny_models import TEMPLATE, make_tokenizer, optimiser, task_rows, update
from tests.support.reports import HOSTILE, made_up_diagnosis

PROMPTS, SAMPLES = 12, 4


def diagnosed(student: str, teachers: dict[str, Any], task: str = "addition", **more: Any) -> Diagnosis:
    settings = {
        "student": student,
        "teachers": teachers,
        "prompts": [{"source": f"task:{task}"}],
        "rollout": {"max_new_tokens": 16},
        "sampler": {"slots": 32},
        "eval": {"prompts": 0},
        "device": "cpu",
    }
    return diagnose(load_recipe(settings).stages[0], prompts=PROMPTS, samples=SAMPLES, given=False, **more)


def variant(
    to: Path, template: str | None = None, ends: int | None = None, named: bool = False, of: str = "arithmetic"
) -> str:
    """A tiny model with another chat template, or with another id in place of its stop id: named as such, or not."""
    shutil.copytree(TINY_ROOT / of, to)
    if template is not None:
        (to / "chat_template.jinja").write_text(template, encoding="utf-8")
    if ends is not None:
        tensors = load_file(to / "model.safetensors")
        table = tensors["model.embed_tokens.weight"]
        table[[1, ends]] = table[[ends, 1]]
        save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    if named:
        for name in ("config.json", "generation_config.json"):
            found = json.loads((to / name).read_text(encoding="utf-8"))
            (to / name).write_text(json.dumps(found | {"eos_token_id": ends}), encoding="utf-8")
    return str(to)


def foreign(to: Path) -> str:
    """A model of another shape and origin that knows the answers to the prompts that are asked."""
    tokenizer = make_tokenizer()
    torch.manual_seed(7)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"vocab_size": len(tokenizer), "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(**shape, **ids, max_position_embeddings=512, initializer_range=0.06))
    adam, rows = optimiser(model), task_rows(tokenizer, TASKS["addition"], "train", 0, PROMPTS)
    for step in range(60):
        update(model, adam, rows, 3e-3 * min(1.0, step / 10), None)
    model.save_pretrained(to)
    tokenizer.save_pretrained(to)
    return str(to)


def only(found: Diagnosis) -> Any:
    (decision,) = found.decisions.values()
    return decision


def test_a_good_teacher_of_the_same_origin(tmp_path: Path) -> None:
    found = diagnosed("tiny/generalist", {"sums": "tiny/arithmetic"})
    (pair,) = found.pairs
    assert (only(found).rule.number, only(found).rule.verdict) == (9, "opd")
    assert pair.gap > 0.15
    assert pair.auroc > 0.8
    assert pair.takeover[0].advantage > pair.takeover[-1].advantage
    assert pair.origin > 0.9
    assert pair.template == 0
    assert 0 < pair.kl < 1
    assert set(found.recommendation.settings) == {
        "student",
        "teachers",
        "prompts",
        "rollout",
        "sampler",
        "eval",
        "device",
        "objective",
    }
    assert found.recommendation.settings["objective"] == {"form": "direct", "divergence": "reverse_kl"}
    assert found.seconds > 0
    assert any(line.lstrip().startswith("memory") for line in found.plan)
    text = "\n".join(diagnosis_lines(found))
    for word in (
        "gap ",
        "overlap@16",
        "begin alike",
        "taking over gains",
        "KL +",
        "mass 1.00 at its own ends",
        "verdict    OPD",
    ):
        assert word in text
    json.dumps(found.to_json(), allow_nan=False)


def test_a_teacher_of_another_origin(tmp_path: Path) -> None:
    found = diagnosed("tiny/generalist", {"sums": foreign(tmp_path / "foreign")})
    assert found.pairs[0].gap > 0.2  # it is better
    assert found.pairs[0].origin is None  # no weights to compare
    assert (only(found).rule.number, only(found).rule.verdict) == (7, "cold start")
    stages = found.recommendation.settings["stages"]
    assert [stage["name"] for stage in stages] == ["cold-start", "on-policy"]
    assert stages[0]["rollout"] == {"teacher_share": 1.0}


def test_a_weaker_teacher_is_turned_away_and_the_better_one_chosen() -> None:
    found = diagnosed("tiny/generalist", {"a": "tiny/ciphers", "b": "tiny/arithmetic"})
    weaker = found.decisions["arithmetic", "a"]
    assert (weaker.rule.number, weaker.rule.verdict) == (5, "do not")
    assert "weaker" in weaker.because
    assert [name for name, _ in found.advice[0].ranking] == ["b", "a"]
    assert found.recommendation.teachers == {"arithmetic": "b"}
    assert list(found.recommendation.settings["teachers"]) == ["b"]
    assert "* teacher b" in "\n".join(diagnosis_lines(found))


def test_other_stop_tokens(tmp_path: Path) -> None:
    unnamed = diagnosed("tiny/generalist", {"sums": variant(tmp_path / "unnamed", ends=2)})
    assert (only(unnamed).rule.number, only(unnamed).rule.verdict) == (3, "fix the stops")
    assert "it predicts id 2 ('<unk>') there" in only(unnamed).because
    assert "generation_config.json" in only(unnamed).rule.remedy
    assert unnamed.recommendation.settings is None


@pytest.mark.slow
def test_other_stop_tokens_that_are_named_are_one_event(tmp_path: Path) -> None:
    named = diagnosed("tiny/generalist", {"sums": variant(tmp_path / "named", ends=2, named=True)})
    assert only(named).rule.verdict == "opd"
    assert named.pairs[0].stops.own > 0.95
    assert "other ids (2, 1, the student 1): one event" in "\n".join(diagnosis_lines(named))


OTHER_TEMPLATE = TEMPLATE.replace("{{ message['content'] }}", "Q: {{ message['content'] }}")


def test_another_template_of_the_teacher(tmp_path: Path) -> None:
    found = diagnosed("tiny/generalist", {"sums": variant(tmp_path / "other", template=OTHER_TEMPLATE)})
    assert (only(found).rule.number, only(found).rule.verdict) == (2, "fix the template")
    assert found.pairs[0].template > 0.05
    assert found.pairs[0].own_template < found.pairs[0].answers.accuracy
    assert "view" not in found.recommendation.settings["teachers"]["sums"]


@pytest.mark.slow
def test_another_template_of_the_student_and_the_teacher_is_to_read_its_own(tmp_path: Path) -> None:
    student = variant(tmp_path / "student", template=OTHER_TEMPLATE, of="generalist")
    found = diagnosed(student, {"sums": "tiny/arithmetic"})
    assert only(found).rule.number == 2
    assert found.pairs[0].own_template > found.pairs[0].answers.accuracy
    assert found.recommendation.settings["teachers"]["sums"]["view"] == {"kind": "same", "chat_template": "teacher"}


def test_a_student_that_is_too_weak(tmp_path: Path) -> None:
    found = diagnosed("tiny/arithmetic", {"words": "tiny/spelling"}, task="reverse")
    assert (only(found).rule.number, only(found).rule.verdict) == (6, "off-policy first")
    recipe = found.recommendation.recipe()
    assert recipe is not None
    assert [(stage.name, stage.rollout.teacher_share) for stage in recipe.stages] == [
        ("cold-start", 1.0),
        ("on-policy", 0.0),
    ]
    assert recipe.stages[1].student.model == "stage:cold-start"


def test_another_tokenizer(tmp_path: Path) -> None:
    found = diagnosed("tiny/generalist", {"sums": "tiny/pairs"})
    assert (only(found).rule.number, only(found).rule.verdict) == (1, "span view")
    assert found.pairs[0].aligned > 0.9
    assert found.pairs[0].answers.accuracy > 0.8  # asked in its own tokens
    assert found.recommendation.settings["objective"] == {"form": "gold"}


# The table, row by row


def answers(accuracy: float | None = 0.5, pass_at: float | None = 0.9, length: float = 200.0) -> AnswerStatistics:
    return AnswerStatistics(32, 8, length, round(2 * length), 0.0, accuracy, 0.05, pass_at)


def measured(**values: Any) -> PairMeasures:
    good: dict[str, Any] = {
        "answers": answers(0.9),
        "gap": 0.4,
        "gap_stderr": 0.05,
        "auroc": 0.8,
        "kl": 0.1,
        "overlap": 0.8,
        "overlap_mass": 0.99,
        "origin": 0.9,
        "template": 0.0,
        "excess": 0.5,
        "stops": StopProbe(0.99, 0.99, 0.9, 100),
        "takeover": (Depth(0, 99, 0.4, 0.05), Depth(50, 99, 0.3, 0.05), Depth(100, 99, 0.2, 0.05)),
    }
    return PairMeasures("t", "d", **good | values)


TABLE: list[tuple[int, str, dict[str, Any]]] = [
    (9, "opd", {}),
    (1, "span view", {"ids_differ": 5, "aligned": 0.95}),
    (1, "do not", {"ids_differ": 5, "aligned": 0.5}),
    (1, "do not", {"ids_differ": 5, "aligned": 0.5, "crosses": True}),
    (9, "opd", {"ids_differ": 5, "aligned": 0.95, "crosses": True}),
    (2, "fix the template", {"template": 0.3}),
    (3, "fix the stops", {"stops": StopProbe(0.1, 0.2)}),
    (9, "opd", {"stops": StopProbe(0.1, 0.95, 0.9, 50)}),  # cut off, but it knows where an answer ends
    (4, "cold start", {"stops": StopProbe(0.99, 0.99, 0.05, 50)}),
    (5, "do not", {"gap": 0.03, "auroc": 0.5}),
    (9, "opd", {"gap": 0.03, "auroc": 0.7}),  # no better, but it tells right from wrong
    (5, "do not", {"gap": -0.3, "auroc": 0.9}),
    (5, "do not", {"gap": None, "gap_stderr": None, "auroc": None, "kl": 0.001}),
    (7, "cold start", {"overlap": 0.6}),
    (7, "cold start", {"overlap": 0.69, "overlap_mass": 0.98}),
    (9, "opd", {"overlap": 0.69, "overlap_mass": 0.999, "origin": 0.9}),  # as tiny/spelling over few prompts
    (7, "cold start", {"kl": 0.3, "overlap_mass": 0.9}),
    (7, "cold start", {"kl": 0.3, "origin": 0.1}),
    (9, "opd", {"kl": 0.3, "overlap_mass": 0.999}),  # as on the quickstart
    (
        9,
        "opd",
        {"excess": 0.05, "takeover": (Depth(0, 8, 0.25, 0.12), Depth(50, 8, 0.16, 0.10))},
    ),  # few answers: it may help
    (8, "sft", {"excess": 0.05, "takeover": (Depth(0, 99, 0.4, 0.05), Depth(50, 99, 0.01, 0.05))}),
    (9, "opd", {"excess": 0.05}),
]


@pytest.mark.parametrize(("number", "verdict", "values"), TABLE)
def test_each_row_of_the_table(number: int, verdict: str, values: dict[str, Any]) -> None:
    decision = decide(Case(answers(), measured(**values)))
    assert (decision.rule.number, decision.rule.verdict) == (number, verdict)
    assert decision.because
    assert decision.rule.remedy
    assert decision.rule.evidence[0] in "PHn"


def test_the_rest_of_the_table() -> None:
    assert decide(Case(answers(0.0, 0.01), measured())).rule.verdict == "off-policy first"
    noise = (Depth(0, 99, 0.4, 0.05), Depth(40, 99, 0.2, 0.05), Depth(80, 99, 0.02, 0.05), Depth(120, 99, 0.04, 0.05))
    assert useful_depth(noise) == 80
    refined = decide(Case(answers(), measured(takeover=noise), target=0.95, rivals=2)).refined
    assert [one.number for one, _ in refined] == [10, 11, 12]
    assert "after 80 tokens" in refined[0][1]
    assert not decide(Case(answers(), measured(), target=0.8)).refined  # the teacher has that already
    assert [rule.number for rule in RULES] == [1, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert [one.number for one in REFINEMENTS] == [10, 11, 12]


def test_the_recommended_recipe_says_all_of_it_and_loads() -> None:
    spec = load_recipe("quickstart", ["eval={prompts: 0}"]).stages[0]
    noise = (Depth(0, 99, 0.4, 0.05), Depth(40, 99, 0.02, 0.05))
    rows = {
        "arithmetic": measured(takeover=noise, excess=0.5),
        "spelling": measured(overlap=0.5, takeover=noise),
        "sorting": measured(gap=-0.4),
        "ciphers": measured(takeover=noise),
    }
    advice = []
    for domain, pair in rows.items():
        named = PairMeasures(**{**vars(pair), "teacher": domain, "domain": domain})
        decision = decide(Case(answers(), named, target=0.99))
        advice.append(Advice(domain, named, decision, ((domain, named.signal),)))
    sources = {number: {domain} for number, domain in enumerate(rows)}
    found = recommend(spec, advice, sources, 30, given=True)
    recipe = found.recipe()
    assert recipe is not None
    assert [stage.name for stage in recipe.stages] == ["cold-start", "on-policy", "rl"]
    assert {source["domain"] for source in found.settings["prompts"]} == {"arithmetic", "spelling", "ciphers"}
    assert recipe.stages[1].rollout.max_new_tokens == 40
    assert recipe.stages[1].objective == spec.objective  # the user's own
    assert recipe.stages[2].rollout.samples == 8
    assert not recipe.stages[2].teachers
    assert make_plan(recipe)
    assert load_recipe_text(found.text()) == recipe.model_copy(update={"name": "run"})


def load_recipe_text(text: str) -> Any:
    import yaml

    return load_recipe(yaml.safe_load(text))


def test_nothing_is_recommended_if_every_teacher_is_rejected() -> None:
    pair = measured(gap=-0.4)
    advice = [Advice("d", pair, decide(Case(answers(), pair)), (("t", pair.signal),))]
    found = recommend(load_recipe("methods/opd").stages[0], advice, {0: {"d"}}, 30, given=True)
    assert (found.verdict, found.settings) == ("do not", None)
    assert "weaker" in found.left_out["d"]


def test_what_cannot_be_left_out_of_a_file_is_said() -> None:
    spec = load_recipe({"student": "tiny/generalist", "teachers": {"t": "tiny/arithmetic"}, "prompts": "mixed.jsonl"})
    advice = []
    for domain, values in (("good", {}), ("bad", {"gap": -0.4})):
        pair = PairMeasures(**{**vars(measured(**values)), "domain": domain})
        advice.append(Advice(domain, pair, decide(Case(answers(), pair)), (("t", pair.signal),)))
    told = recommend(spec.stages[0], advice, {0: {"good", "bad"}}, 30, given=False).left_out["bad"]
    assert told.endswith("mixed.jsonl': remove them from it first")
    apart = recommend(spec.stages[0], advice[1:], {0: {"bad"}}, 30, given=False).left_out["bad"]
    assert "mixed.jsonl" not in apart


def test_teachers_without_a_signal_come_last() -> None:
    strong, weak, silent = measured(), measured(auroc=0.5), measured(takeover=())
    assert ranked([silent, weak, strong]) == [strong, weak, silent]


# Arithmetic


def test_what_answers_look_like() -> None:
    thinks = ["<think>\n2 and 2\n</think>\n\\boxed{4}"] * 3
    form = form_of(["4", "7"], [*thinks, "8"])
    assert form is not None
    assert form.opening == pytest.approx(0.25)
    assert form.lines == (1.0, pytest.approx(3.25))
    assert form.marks == {"thinking": (0.0, 0.75), "\\boxed": (0.0, 0.75)}
    assert form_of(["a"], []) is None
    assert measured(form=form).to_json()["form"]["marks"]["thinking"] == (0.0, 0.75)


def test_measures_of_tokens() -> None:
    marks = np.array([1.0, 0.0, 0.0, 1.0, np.nan])
    assert within_prompt_auroc(["a", "a", "b", "b", "b"], marks, np.array([2.0, 1.0, 3.0, 3.0, 9.0])) == (0.75, 2)
    assert within_prompt_auroc(["a", "b"], np.array([1.0, 0.0]), np.array([1.0, 0.0])) == (None, 0)
    assert stretch_edges([3, 2]) == [0, 1, 2, 3]
    assert stretch_edges([800]) == [0, 100, 200, 300, 400, 500, 600, 700, 800]
    assert stretch_edges([]) == []
    own, other = [np.array([9.0, 2.0, 4.0]), np.array([9.0, 4.0])], [np.array([1.0, 2.0, 4.0])]
    assert excess_kl(own, other) == pytest.approx((2 * 3 + 4) / (2 * 2 + 4) - 1)  # position 0 is left out
    assert excess_kl(own, []) is None
    place = error_places(np.array([0.0, 1.0]), [np.array([0.0, -5.0, 0.0])] * 2, [np.array([1.0, 2.0, 3.0])] * 2)
    assert place == (3.0, 1.0)
    forks = fork_places([np.array([0.0, 0.0, 0.0, 0.0, 0.0, 9.0])], [np.array([1.0, 1.0, 1.0, 1.0, 1.0, 7.0])])
    assert forks == (7.0, 1.0)


# The command


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["diagnose", *arguments])


def test_the_command_writes_a_page_and_a_recipe_that_plans(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"add {a}+{b}"}]} for a in range(12, 18) for b in (21, 34)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    told = invoke(
        *(
            "--student",
            "tiny/generalist",
            "--teacher",
            "sums=tiny/arithmetic",
            "--prompts",
            str(tmp_path / "rows.jsonl"),
        ),
        *("--n", "4", "--samples", "2", "--max-new-tokens", "8", "--device", "cpu", "--json"),
        *("--write", str(tmp_path / "mine.yaml"), "--page", str(tmp_path / "page.html")),
    )
    assert told.exit_code == 0, told.output
    found = json.loads(told.stdout)
    assert next(iter(found["students"].values()))["accuracy"] is None  # nothing says which answers are right
    assert found["pairs"][0]["gap"] is None
    assert found["pairs"][0]["kl"] > 0
    assert make_plan(load_recipe(tmp_path / "mine.yaml"))
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in page
    again = invoke("--student", "x", "--teacher", "y", "--prompts", "z", "--write", str(tmp_path / "mine.yaml"))
    assert isinstance(again.exception, UserError)
    assert "exists already" in str(again.exception)


def test_options_and_overrides_go_together(tmp_path: Path) -> None:
    """A file whose answers the default reward would call wrong needs no recipe."""
    rows = [{"prompt": [{"role": "user", "content": f"add {a}+21"}], "answer": f"{a + 21}.0"} for a in range(12, 18)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    models = ("--student", "tiny/generalist", "--teacher", "sums=tiny/arithmetic", "--device", "cpu", "--json")
    given = (*models, "--prompts", str(tmp_path / "rows.jsonl"), "--n", "4", "--samples", "2")

    def accuracy(*overrides: str) -> float:
        told = invoke(*given, *overrides)
        assert told.exit_code == 0, told.output
        return float(json.loads(told.stdout)["pairs"][0]["answers"]["accuracy"])

    assert accuracy("rollout.max_new_tokens=8") == 0
    assert accuracy("rewards=numeric", "rollout.max_new_tokens=8") > 0.5
    cut = invoke(*given, "rollout.max_new_tokens=1", "--write", str(tmp_path / "mine.yaml"))
    assert cut.exit_code == 0, cut.output
    lengths = [one["length"] for one in json.loads(cut.stdout)["students"].values()]
    assert lengths == [1]


def test_what_models_and_rows_say_stays_text_on_the_page() -> None:
    text = diagnosis_page(made_up_diagnosis(HOSTILE))
    data = text.split('type="application/json">')[1].split("</script>")[0]
    assert "<" not in data
    assert json.loads(data)["student"] == HOSTILE
    assert "<script>window.hacked" not in text


NAMED = ["--student", "tiny/generalist", "--teacher", "tiny/arithmetic", "--prompts", "task:sort"]
MISTAKES: list[tuple[list[str], str]] = [
    (["--student", "tiny/generalist"], "--teacher, --prompts: missing"),
    (["quickstart", "--student", "tiny/generalist"], "either RECIPE or --student"),
    (["quickstart", "--stage", "no"], "the recipe has main"),
    (["quickstart", "device=cpu", "--device", "cpu"], "both set device"),
    ([*NAMED, "rollout.max_new_tokens=4", "--max-new-tokens", "8"], "both set rollout.max_new_tokens"),
    ([*NAMED, "rewards=numerik"], "numerik"),
    ([*NAMED, "quickstart"], "either RECIPE or --student"),
    (["labs/qwen3", "--stage", "on-policy"], "takes student from stage:off-policy, which has not run"),
    (["methods/sft"], "there is no teacher to measure"),
    (["quickstart", "teachers.arithmetic=/no/such/model"], "model '/no/such/model'"),
    (["quickstart", "--page", "/no/such/place/x.html"], "there is no directory"),
    (
        [
            "--student",
            "tiny/generalist",
            "--teacher",
            "tiny/arithmetic",
            "--teacher",
            "tiny/arithmetic",
            "--prompts",
            "task:sort",
        ],
        "two teachers are called",
    ),
]


def test_messages_without_a_template_are_reported(tmp_path: Path) -> None:
    shutil.copytree(TINY_ROOT / "generalist", tmp_path / "bare")
    (tmp_path / "bare" / "chat_template.jinja").unlink()
    row = {"prompt": [{"role": "user", "content": "add 1+2"}], "answer": "3"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row), encoding="utf-8")
    given = (
        "--student",
        str(tmp_path / "bare"),
        "--teacher",
        "tiny/arithmetic",
        "--prompts",
        str(tmp_path / "rows.jsonl"),
    )
    told = invoke(*given, "--max-new-tokens", "4")
    assert "the tokenizer has no chat template" in str(told.exception)


def test_rows_without_answers_are_looked_at_all_the_same(tmp_path: Path) -> None:
    rows = [{"prompt": f"add {number}1+{number}2="} for number in range(1, 5)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    settings = {
        "student": "tiny/generalist",
        "teachers": {"sums": "tiny/arithmetic"},
        "prompts": str(tmp_path / "rows.jsonl"),
        "rollout": {"max_new_tokens": 8},
        "device": "cpu",
    }
    found = diagnose(load_recipe(settings).stages[0], prompts=4, samples=2, given=False)
    text = "\n".join(diagnosis_lines(found))
    for word in ("not rewarded", "begin alike", "overlap@16", "KL ", "1.00 at the student's"):
        assert word in text
    assert "dataset" not in text


@pytest.mark.parametrize(("arguments", "words"), MISTAKES)
def test_mistakes_are_reported_before_anything_is_loaded(arguments: list[str], words: str) -> None:
    told = invoke(*arguments)
    assert isinstance(told.exception, UserError), told.output
    assert words in str(told.exception)
