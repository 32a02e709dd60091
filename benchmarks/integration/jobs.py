"""A job is a recipe to carry out and a split to measure its student on, in a process of its own; its entry is one JSON file.

An entry that is there is read, not repeated: a study goes on where it was left, on this machine or another one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from integration.models import marks, pack

SCRIPT = Path(__file__).parent.parent / "integrate.py"


def work(job: dict[str, Any]) -> None:
    """Carry out one job in this process and write its entry."""
    import opd

    started, out = time.monotonic(), Path(job["out"])
    found: dict[str, Any] = {"arm": job["arm"], "seed": job["seed"], "settings": job["settings"]}
    model = str(job.get("model", ""))
    if "recipe" in job:
        shutil.rmtree(out, ignore_errors=True)  # what an interrupted study left
        run = opd.run(job["recipe"], out=out)
        model = str(out / "merged" / "main") if job.get("merged") else str(run.model)
        found["cost"] = cost(run, scored=job["scored"])
        if job.get("merged"):
            found["cost"] = dict.fromkeys(found["cost"], 0)  # nothing was trained: a run in name only
        found["curve"] = curve(run.metrics, run.summary["stages"][-1]["evals"])
        found["last"] = run.metrics[-1]
        found["evals"] = {stage["name"]: stage["evals"] for stage in run.summary["stages"]}
        if job.get("pack"):
            pack(Path(model) / "adapter", Path(job["pack"]), job["base"])
            model = str(job["pack"])
        if job.get("save"):
            opd.load_model(model).save(Path(job["save"]))
    _measure(job, model, found, started)
    for other in job.get("references", ()):  # further splits of the same model: one process less for each
        _measure(other, model, {key: other[key] for key in ("arm", "seed", "settings")}, time.monotonic())
    if "recipe" in job and not job.get("keep"):
        shutil.rmtree(out, ignore_errors=True)  # hundreds of megabytes; the entry has what is needed


def _measure(job: dict[str, Any], model: str, found: dict[str, Any], started: float) -> None:
    """Marks of the job's split; with them the entry is complete."""
    found["split"] = job["split"]
    found |= marks(model, Path(job["data"]), job["domains"], job["split"], job["measure"])
    found["seconds"] = round(time.monotonic() - started, 1)
    entry = Path(job["entry"])
    partial = entry.with_suffix(".partial")
    partial.write_text(json.dumps(found) + "\n", encoding="utf-8")
    partial.replace(entry)


def cost(run: Any, *, scored: bool) -> dict[str, int]:
    """Tokens that a run read, drew, had scored and trained on; `scored`: teachers read all of them."""
    everything = run.rollouts.where()
    prompt, response = everything.column("prompt_length").astype(int), everything.column("length").astype(int)
    drawn = everything.column("source") != "data"
    whole = int((prompt + response).sum())
    return {
        "prefill": int(prompt[drawn].sum()), "sampled": int(response[drawn].sum()),
        "scored": whole if scored else 0, "trained": whole, "rollouts": len(everything),
    }  # fmt: skip


def curve(metrics: list[dict[str, Any]], last: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Every evaluation on the way and the one at the end: tokens of answers so far, and the score by domain."""
    points, tokens = [], 0
    for line in metrics:
        tokens += line["tokens"]
        scores = {key.removeprefix("eval/"): value for key, value in line.items() if key.startswith("eval/")}
        if scores:
            points.append({"step": line["step"], "tokens": tokens, "scores": scores})
    ends = {domain: scores["after"] for domain, scores in last.items()}
    return [*points, {"step": metrics[-1]["step"], "tokens": tokens, "scores": ends}]


def run_all(jobs: list[dict[str, Any]], directory: Path, workers: int) -> dict[str, dict[str, Any]]:
    """Name -> entry, of every job. One that fails is told about and left out; the others go on. No workers: in this process."""
    (directory / "jobs").mkdir(parents=True, exist_ok=True)
    (directory / "entries").mkdir(exist_ok=True)
    started, found = time.monotonic(), {}
    for job in jobs if not workers else ():
        if not Path(job["entry"]).is_file():
            work(job)
    with ThreadPoolExecutor(workers or 1) as pool:
        futures = {job["name"]: pool.submit(_in_process, job, directory) for job in jobs}
        for number, (name, future) in enumerate(futures.items(), 1):
            entry = future.result()
            if entry is not None:
                found[name] = entry
                scores = {domain: round(text.count("1") / len(text), 3) for domain, text in entry["marks"].items()}
                said = f"{number}/{len(futures)} {name} ({time.monotonic() - started:.0f} s): {scores}"
                print(said, flush=True)
    return found


def _in_process(job: dict[str, Any], directory: Path) -> dict[str, Any] | None:
    entry, path = Path(job["entry"]), directory / "jobs" / f"{job['name']}.json"
    if not entry.is_file():
        path.write_text(json.dumps(job, indent=1) + "\n", encoding="utf-8")
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        with (directory / "jobs" / f"{job['name']}.log").open("w", encoding="utf-8") as log:
            command = [sys.executable, str(SCRIPT), "one", str(path)]
            subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
    if not entry.is_file():
        tail = (directory / "jobs" / f"{job['name']}.log").read_text(encoding="utf-8")[-1500:]
        print(f"{job['name']}: no entry. {tail}", flush=True)
        return None
    return dict(json.loads(entry.read_text(encoding="utf-8")))
