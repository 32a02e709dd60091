"""Run directories as a run leaves them, made up: for tests of what is shown of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from opd.common.files import line_of
from opd.common.process_identity import this_process
from opd.diagnose.measures import AnswerStatistics, Depth, Form, PairMeasures, StopProbe, Stretch
from opd.records import Author, SampledToken
from opd.store import RolloutStore

METRICS = {
    "step": 1, "loss": 0.5, "reverse_kl": 0.25, "kl/maths": 0.25, "response_length": 4.0, "truncated": 0.5, "tokens": 100,
    "time/sample": 0.1, "time/score": 0.1, "time/update": 0.1,
}  # fmt: skip

HOSTILE = (
    '</script><script>window.hacked = 1</script><img src=x onerror="window.hacked = 2"> <!-- \x1b[31mred\x1b[0m \u202eright to left\u2066 '
    "\u2028 \U000e0041 ]]> {{constructor}} javascript:alert(1) \ud800 &lt;b&gt; \x00"
)


def make_run(
    root: Path,
    *,
    text: str = "42",
    domain: str = "a",
    steps: int = 12,
    samples: int = 4,
    rollouts: int = 0,
    ended: bool = True,
    alarm: str | None = None,
) -> Path:
    """`alarm`: what a monitor said; `text`: what the student wrote; `samples`: steps of which a completion was written down; `rollouts`: in the store."""
    root.mkdir(parents=True)
    teachers = {"a": {"kind": "frozen", "model": "tiny/arithmetic"}}
    stage = {
        "name": "main",
        "student": {"model": "tiny/generalist"},
        "teachers": teachers,
        "objective": [{"form": "direct"}],
        "train": {"steps": steps},
        "monitors": {"action": "warn", "watch": [{"kind": "kl"}, {"kind": "token"}], "ignore": []},
    }
    (root / "resolved.yaml").write_text(yaml.safe_dump({"name": "made-up", "stages": [stage]}), encoding="utf-8")
    (root / "recipe.yaml").write_text("student: tiny/generalist\n", encoding="utf-8")
    metrics = [
        {"step": step, "stage": "main", "loss": 1 / step, "reverse_kl": 1 - 0.6 * step / steps + 0.028, "reward": 0.5, "tokens": 40, "entropy": 0.1,
         "response_length": 4.0, f"kl/{domain}": 0.5, "kl/b": 0.25, "time/sample": 1.0, "time/score": 0.5, "time/update": 2.0}
        for step in range(1, steps + 1)
    ]  # fmt: skip
    lines = {"metrics": metrics, "samples": [], "tokens": [], "answers": [], "monitors": []}
    if alarm is not None:
        lines["monitors"] = [
            {"step": 3, "stage": "main", "monitor": "kl", "value": 12.6, "threshold": 0.7, "words": alarm, "remedy": alarm, "action": "warn", "recipe": "remedy-main-kl.yaml",
             "changes": [alarm], "command": "opd run runs/x/remedy-main-kl.yaml --reuse runs/x"}
        ]  # fmt: skip
    for step in range(1, samples + 1):
        lines["samples"] += [sample(step, domain, text, step % 2), sample(step, "b", f"{text} too", 0)]
        lines["tokens"] += [tokens(step, domain, text, teacher="a"), tokens(step, "b", f"{text} too", teacher="b")]
    for step, who in ((0, "student"), (0, "teacher:a"), (steps, "student")):
        lines["answers"].append(
            {"step": step, "stage": "main", "who": who, "domain": domain, "prompt_id": "q/1", "prompt": text, "response": text, "reward": float(step > 0), "right": step > 0}
        )  # fmt: skip
    for name, found in lines.items():
        (root / f"{name}.jsonl").write_text("".join(map(line_of, found)), encoding="utf-8")
    if ended:
        evals = {domain: evaluation(0.4, 0.9, 0.9), "b": evaluation(0.6, 0.6, 0.7)}
        result = {
            "name": "main",
            "evals": evals,
            "teachers": {},
            "history": [],
            "steps": steps,
            "seconds": 100.0,
            "tokens": 40 * steps,
        }
        (root / "summary.json").write_text(json.dumps({"status": "done", "stages": [result]}), encoding="utf-8")
    else:
        (root / "run.lock").write_text(json.dumps(this_process()), encoding="utf-8")
    if rollouts:
        fill_store(root / "rollouts", rollouts, domain)
    return root


def evaluation(before: float, after: float, teacher: float) -> dict[str, Any]:
    details = {side: {"greedy_stderr": 0.02} for side in ("before", "after", "teacher")}
    normalised = (after - before) / (teacher - before)
    return {
        "before": before,
        "after": after,
        "teacher": teacher,
        "n": 100,
        "stderr": 0.02,
        "normalised": normalised,
        "details": details,
    }


def sample(step: int, domain: str, text: str, reward: float) -> dict[str, Any]:
    return {"step": step, "stage": "main", "domain": domain, "source": "student", "prompt": f"ask {text}", "response": text, "stop": "stop",
            "id": f"main/{domain}/{step}", "prompt_id": f"p/{step}", "reward": reward}  # fmt: skip


def tokens(step: int, domain: str, text: str, teacher: str) -> dict[str, Any]:
    """Pieces of two letters; the third is what the teacher likes least."""
    pieces = [text[at : at + 2] for at in range(0, len(text), 2)]
    count = len(pieces)
    ratio = [3.5 if at == 2 else -0.25 for at in range(count)]
    student = [[[at, -0.1], [count, -3.0]] for at in range(count)]
    other = [[[count, -0.05], [at, -4.0]] for at in range(count)]
    return {
        "step": step, "stage": "main", "id": f"main/{domain}/{step}", "domain": domain, "teacher": teacher, "ids": list(range(count)), "author": [0] * count,
        "student": [-0.1] * count, "teacher_logprob": [-0.1 - one for one in ratio], "ratio": ratio, "entropy": [0.3] * count, "teacher_entropy": [0.1] * count,
        "reverse_kl": [0.2] * count, "student_top": student, "teacher_top": other, "texts": {str(at): piece for at, piece in enumerate([*pieces, "OTHER"])},
        "terms": {"0:direct": {"weight": [0.01 if at % 2 else 0.0 for at in range(count)], "gates": {"entropy": [float(at % 2) for at in range(count)]}}}, "left_out": 0,
    }  # fmt: skip


def made_up_diagnosis(text: str) -> dict[str, Any]:
    """What `opd diagnose` gives, with `text` wherever a name or a row could bring it in."""
    stretches = tuple(Stretch(at, at + 20, 99, 0.5, -0.1, 0.2, 0.1, 0.7) for at in range(0, 80, 20))
    depths = Depth(0, 99, 0.4, 0.05), Depth(40, 99, 0.1, 0.05)
    answers = AnswerStatistics(32, 8, 60.0, 90, 0.1, 0.6, 0.05, 0.9)
    words = {"student's words under the teacher": -0.4}
    pair = PairMeasures(
        text,
        text,
        answers=answers,
        gap=0.3,
        gap_stderr=0.05,
        auroc=0.8,
        likelihood=words,
        kl=0.2,
        overlap=0.7,
        overlap_mass=0.99,
        form=Form(0.5, (1.0, 3.0), {"code": (0.0, 0.5)}),
        stretches=stretches,
        takeover=depths,
        stops=StopProbe(0.2, 0.3, 0.4, 9, (7, text, 0.5)),
    )
    rule = {"number": 9, "when": text, "evidence": "P"}
    decided = {"rule": rule, "verdict": "opd", "because": text, "remedy": text, "refined": []}
    return {
        "student": text,
        "models": {text: text},
        "verdict": "opd",
        "k": 16,
        "students": {text: answers.to_json()},
        "pairs": [pair.to_json() | decided],
        "ranking": {text: [[text, 0.2]]},
        "recommendation": {"verdict": "opd", "reasons": [text], "recipe": {}},
        "plan": [text],
        "seconds": 90.0,
        "notes": [],
    }


def fill_store(directory: Path, count: int, domain: str = "a") -> None:
    """Finished rollouts of a few tokens; every third was rewarded, three in four belong to the first domain."""
    store = RolloutStore(directory, commit_ms=0, fsync="never")
    prompt = np.array([5, 6, 7], dtype=np.int32)
    for number in range(count):
        name = f"main/{number}"
        store.begin(
            id=name,
            prompt_id=f"p/{number}",
            visit=0,
            sample=0,
            domain="b" if number % 4 == 3 else domain,
            source="student",
            prompt_ids=prompt,
        )
        for at in range(2 + number % 5):
            store.append(SampledToken(name, 20 + at, -0.5, -0.5, -3.0, number // 64), Author.STUDENT)
        store.finish(name, "stop" if number % 7 else "length")
        if number % 3 == 0:
            store.note(name, reward=float(number % 5 < 3))
        if number % 5000 == 4999:
            store.commit(sync=True)
    store.close()
