"""A job is a recipe to carry out and a split to measure its student on, several side by side; its entry is one JSON file.

An entry that is there is read, not repeated: a study goes on where it was left, on this machine or another one.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import os
import shutil
import time
from collections import deque
from contextlib import suppress
from functools import cache
from importlib import import_module
from math import inf
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from signal import Signals
from threading import Thread
from typing import Any

from integration.models import CONFIG, build, marks, pack, write_answers

MEMORY = 0.9  # of a GPU that workers share; the rest is for their contexts and graphs


def work(job: dict[str, Any]) -> None:
    """Carry out one job in this process and write its entry."""
    import opd
    from opd.recipe.paths import model_of_run

    started, out = time.monotonic(), Path(job["out"])
    found: dict[str, Any] = {"arm": job["arm"], "seed": job["seed"], "settings": job["settings"]}
    model = str(job.get("model", ""))
    if "recipe" in job:
        shutil.rmtree(out, ignore_errors=True)  # what an interrupted study left
        run = opd.run(job["recipe"], out=out)
        model = str(out / "merged" / "main") if job.get("merged") else str(run.model)
        found["cost"] = cost(run, scored=job["scored"], drawn_ahead=job.get("drawn_ahead", False))
        if job.get("merged"):
            found["cost"] = dict.fromkeys(found["cost"], 0)  # nothing was trained: a run in name only
        found["curve"] = curve(run.metrics, run.summary["stages"][-1]["evals"])
        found["last"] = run.metrics[-1]
        found["evals"] = {stage["name"]: stage["evals"] for stage in run.summary["stages"]}
        if job.get("pack"):
            pack(Path(model) / "adapter", Path(job["pack"]), job["base"])
            model = str(job["pack"])
            if job.get("build"):
                build(Path(model), Path(job["build"]))
        if job.get("save"):
            opd.load_model(model).save(Path(job["save"]))
        for stage, path in job.get("save_stages", {}).items():
            opd.load_model(model_of_run(out, stage)).save(Path(path))
    found |= _measured(job, model, started)
    for other in job.get("references", ()):  # further splits of the same model: one process less for each
        known = {key: other[key] for key in ("arm", "seed", "settings")}
        _write(other, known | _measured(other, model, time.monotonic()))
    if job.get("answers"):
        _tidy()
        write_answers(model, Path(job["data"]), job["domains"][0], job["measure"], Path(job["answers"]))
    _write(job, found)  # the last of all: a job that has its entry is done
    if "recipe" in job:
        shutil.rmtree(out, ignore_errors=True)  # hundreds of megabytes; the entry has what is needed


def _measured(job: dict[str, Any], model: str, started: float) -> dict[str, Any]:
    """Marks of the job's split."""
    _tidy()
    found = marks(model, Path(job["data"]), job["domains"], job["split"], job["measure"])
    return {"split": job["split"], **found, "seconds": round(time.monotonic() - started, 1)}


def _write(job: dict[str, Any], found: dict[str, Any]) -> None:
    entry = Path(job["entry"])
    partial = entry.with_suffix(".partial")
    partial.write_text(json.dumps(found) + "\n", encoding="utf-8")
    partial.replace(entry)


def cost(run: Any, *, scored: bool | str, drawn_ahead: bool = False) -> dict[str, int]:
    """Tokens that a run read, drew, had scored and trained on. `scored`: teachers read all of them, or those of one source;
    `drawn_ahead`: the answers of its dataset are samples, and cost what samples do.
    """
    everything = run.rollouts.where()
    prompt, response = everything.column("prompt_length").astype(int), everything.column("length").astype(int)
    source = everything.column("source")
    drawn, whole = (source != "data") | drawn_ahead, prompt + response
    return {
        "prefill": int(prompt[drawn].sum()), "sampled": int(response[drawn].sum()),
        "scored": int(whole[source == scored if isinstance(scored, str) else scored].sum()), "trained": int(whole.sum()), "rollouts": len(everything),
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


def run_all(
    jobs: list[dict[str, Any]], directory: Path, workers: int, *, whole: bool = True
) -> dict[str, dict[str, Any]]:
    """Name -> entry, of every job. One that fails is told about, and the others go on; then the study ends, unless it can do
    without (not `whole`). No workers: in this process.
    """
    (directory / "jobs").mkdir(parents=True, exist_ok=True)
    (directory / "entries").mkdir(exist_ok=True)
    missing = [job for job in jobs if not _done(job)]
    if missing and workers:
        _side_by_side(missing, directory, workers)
    started = time.monotonic()
    for job in missing if not workers else ():
        work(job)
        _tell(job, started)
    there = [job for job in jobs if _done(job)]
    if whole and len(there) < len(jobs):
        left = [job["name"] for job in jobs if job not in there]
        raise SystemExit(
            f"{len(left)} of {len(jobs)} runs have no entry: {', '.join(left)}. The same command tries them again."
        )
    return {job["name"]: dict(json.loads(Path(job["entry"]).read_text(encoding="utf-8"))) for job in there}


def _done(job: dict[str, Any]) -> bool:
    """With all that it makes: a study directory of before, or one that was carried, may have its entry alone."""
    made = [job["entry"], *(other["entry"] for other in job.get("references", ()))]
    made += [job["answers"]] if "answers" in job else []
    made += [str(Path(job["pack"]) / CONFIG)] if "pack" in job else []
    return all(Path(path).is_file() for path in made)


class Worker:
    """A process with one thread that imports torch once and carries out one job after the other."""

    def __init__(self, beside: int) -> None:
        """`beside`: how many of them there are."""
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, os.getpid(), MEMORY / beside))
        self._process.start()
        theirs.close()  # so that the pipe ends with the process
        self.job: dict[str, Any] | None = None
        self.until = inf

    def give(self, job: dict[str, Any], directory: Path) -> None:
        self.job, self.until = job, time.monotonic() + (job["limit"] or inf)
        with suppress(ConnectionError):  # it died while it had nothing to do: the pipe says so when it is read
            self.pipe.send((job, str(directory)))

    def failure(self) -> str:
        """Of a job that has ended or takes too long: why it has no entry, or nothing."""
        if not self.pipe.poll():
            self.end()
            return "it took longer than its limit, and was ended"
        try:
            self.pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            code = self._process.exitcode or 0
            return f"its process was ended by {Signals(-code).name}" if code < 0 else f"its process ended with {code}"
        self.job = None
        return ""

    def end(self) -> None:
        """One that has nothing to do ends by itself."""
        self.pipe.close()
        self._process.join(0 if self.job else 2)
        self._process.kill()


@cache
def _workers(number: int) -> list[Worker]:
    """All of them begin to import at the same time. What they say is in their logs at once: who is killed says nothing more."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    found = [Worker(number) for _ in range(number)]
    atexit.register(_end_all, found)
    return found


def _end_all(workers: list[Worker]) -> None:
    for worker in workers:
        worker.pipe.close()  # all at the same time
    for worker in workers:
        worker.end()


def _side_by_side(jobs: list[dict[str, Any]], directory: Path, number: int) -> None:
    """A process that dies takes its job with it, and nothing else: another one takes its place."""
    started, workers, waiting = time.monotonic(), _workers(number), deque(jobs)
    while waiting or any(worker.job for worker in workers):
        for worker in workers:
            if worker.job is None and waiting:
                worker.give(waiting.popleft(), directory)
        ready = wait([worker.pipe for worker in workers if worker.job], timeout=1)
        for place, worker in enumerate(workers):
            job = worker.job
            if job is None or not (worker.pipe in ready or time.monotonic() > worker.until):
                continue
            if failure := worker.failure():
                print(f"{job['name']}: no entry; {failure}. {_end_of(_log(job, directory))}", flush=True)
                workers[place] = Worker(number)
            else:
                _tell(job, started)


def _serve(pipe: Connection, parent: int, share: float) -> None:
    """What a worker does. A job that fails ends it: who knows what state a device is in."""
    _end_with(parent)
    for name in ("models.load", "rollouts.sampler", "loop.learner"):
        import_module(f"opd.{name}")
    while True:
        try:
            job, directory = pipe.recv()
        except EOFError:  # the study has ended
            return
        _in_worker(job, Path(directory), share)
        pipe.send(job["name"])


def _end_with(parent: int) -> None:
    """A study that is killed leaves no workers behind."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def _in_worker(job: dict[str, Any], directory: Path, share: float) -> None:
    """One job, all that it says in a file of its own, with its share of a GPU's memory: sizes are chosen to fit that."""
    import torch

    log = _log(job, directory)
    log.with_suffix(".json").write_text(json.dumps(job, indent=1) + "\n", encoding="utf-8")
    with log.open("w", encoding="utf-8") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    if str(job["measure"]["device"]).startswith("cuda"):
        torch.cuda.set_per_process_memory_fraction(share)
    if job["limit"]:
        faulthandler.dump_traceback_later(0.9 * job["limit"], file=2)  # where it stands, if it is to be ended
    work(job)
    faulthandler.cancel_dump_traceback_later()
    _tidy()


def _tidy() -> None:
    """What the last run or measurement held must not stand in the next one's way."""
    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _log(job: dict[str, Any], directory: Path) -> Path:
    return directory / "jobs" / f"{job['name']}.log"


def _end_of(log: Path, lines: int = 12) -> str:
    if not log.is_file():
        return "It said nothing."
    return "\n".join([f"The end of {log}:", *log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]])


def _tell(job: dict[str, Any], started: float) -> None:
    entry = json.loads(Path(job["entry"]).read_text(encoding="utf-8"))
    scores = {domain: round(text.count("1") / len(text), 3) for domain, text in entry["marks"].items()}
    print(f"{time.strftime('%H:%M:%S')} {job['name']} ({time.monotonic() - started:.0f} s): {scores}", flush=True)
