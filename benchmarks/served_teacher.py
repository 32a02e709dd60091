"""A served teacher against the same one in process: bytes per token on the wire, and CPU time of scoring, client and server together.

    OMP_NUM_THREADS=1 python benchmarks/served_teacher.py                       a random Llama of SmolLM2's width and vocabulary
    OMP_NUM_THREADS=1 python benchmarks/served_teacher.py --model tiny/arithmetic --name tiny

Scores the same rollouts in alternating pairs, over loopback and in process, and compares the answers. CPU time of the server is read from
/proc, so this needs Linux. Writes benchmarks/results/served-teacher-NAME.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from runs import save

import opd
from opd.common.http import Remote
from opd.models import load_model
from opd.records import Author, Rollout, SignalNeed
from opd.teachers.scoring import response_after
from opd.teachers.served import ScoreQuestion, read_answer, write_question

TOKEN_ENV = "OPD_BENCHMARK_TOKEN"
TOPS = (20, 128)
GOAL = 1.25


def random_model(directory: Path, layers: int, width: int, vocabulary: int) -> str:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    heads = width // 64
    config = AutoConfig.for_model(
        "llama", hidden_size=width, intermediate_size=width * 8 // 3, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=max(heads // 3, 1), vocab_size=vocabulary, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    tiny = load_model("tiny/arithmetic")
    config.eos_token_id = tiny.stop_ids[0]
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    tiny.tokenizer.save_pretrained(directory)
    return str(directory)


def make_rollouts(count: int, prompt: int, response: int, size: int) -> list[Rollout]:
    rng = np.random.default_rng(0)
    made = []
    for number in range(count):
        length = int(rng.integers(response // 2, response + 1))
        ids, zeros = rng.integers(0, size, prompt + length).astype(np.int32), np.zeros(length, dtype=np.float32)
        author, version = np.full(length, Author.STUDENT, dtype=np.uint8), np.zeros(length, dtype=np.int32)
        made.append(
            Rollout(f"r{number}", f"p{number}", 0, 0, "maths", "student", ids[:prompt], ids[prompt:], author, zeros, zeros, zeros, version, "length")
        )  # fmt: skip
    return made


class Server:
    def __init__(self, model: str) -> None:
        command = [
            sys.executable,
            "-m",
            "opd.cli",
            "serve",
            f"teacher={model}",
            "--port",
            "0",
            "--token-env",
            TOKEN_ENV,
        ]
        self.process = subprocess.Popen([*command, "--device", "cpu"], stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if found := re.search(r"at (http://\S+)", line):
                self.address = found[1]
                return
        raise RuntimeError("the server did not start")

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wire_bytes(remote: Remote, rollouts: list[Rollout], vocabulary: int) -> dict[str, float]:
    """Of one answer, per token that was asked about."""
    texts = [response_after(rollout.prompt_ids, rollout) for rollout in rollouts]
    count = sum(rollout.response_ids.size for rollout in rollouts)

    def answer(**question: Any) -> bytes:
        body = write_question(ScoreQuestion.model_validate(question), texts)
        return remote.bytes("POST", "/models/teacher/score", body)[0]

    asked = write_question(ScoreQuestion(want="hidden"), texts)
    found = {
        "question": len(asked),
        "hidden states": len(answer(want="hidden")),
        "log-probs": len(answer(want="logprobs")),
    }
    for k in (k for k in TOPS if k <= vocabulary):
        frame = answer(want="topk", k=k, size=vocabulary)
        tensors = read_answer(frame)
        rows = zip(tensors["ids"].tolist(), tensors["logprobs"].tolist(), strict=True)
        listed = [dict(zip(map(str, ids), logprobs, strict=True)) for ids, logprobs in rows]
        found[f"top {k}, binary"], found[f"top {k}, JSON"] = len(frame), len(json.dumps(listed))
    perfect = {name: round(size / count, 1) for name, size in found.items()}
    return {**perfect, "logits, fp32": 4.0 * vocabulary, "logits, bf16": 2.0 * vocabulary}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random")
    parser.add_argument("--name", default="cpu", help="of the result")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--vocabulary", type=int, default=49_152)
    parser.add_argument("--rollouts", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--response", type=int, default=96)
    parser.add_argument("--pairs", type=int, default=5)
    given = parser.parse_args()
    os.environ[TOKEN_ENV] = secrets.token_urlsafe(16)
    with tempfile.TemporaryDirectory() as scratch:
        model = given.model
        if model == "random":
            model = random_model(Path(scratch) / "model", given.layers, given.width, given.vocabulary)
        result = measure(model, given)
    result["settings"] = vars(given)
    save(f"served-teacher-{given.name}.json", result)
    print(json.dumps(result, indent=1))


def measure(model: str, given: argparse.Namespace) -> dict[str, Any]:
    student = load_model("tiny/generalist")
    server = Server(model)
    try:
        near: Any = opd.Teacher(model, student)
        far: Any = opd.Teacher(
            {"kind": "served", "address": server.address, "model": "teacher", "token_env": TOKEN_ENV}, student
        )
        rollouts = make_rollouts(given.rollouts, given.prompt, given.response, student.size)
        need = SignalNeed("hidden")
        same = all(
            torch.equal(one.values, other.values)
            for one, other in zip(near.score(rollouts, need), far.score(rollouts, need), strict=True)
        )
        pairs = []
        for _ in range(given.pairs):
            began = time.process_time()
            near.score(rollouts, need)
            in_process = time.process_time() - began
            began, there = time.process_time(), server.cpu_seconds()
            far.score(rollouts, need)
            pairs.append((in_process, time.process_time() - began, server.cpu_seconds() - there))
        remote = Remote(server.address, TOKEN_ENV)
        facts = remote.json("GET", "/models/teacher")
        ratio = statistics.median((client + there) / here for here, client, there in pairs)
        return {
            "answers": "equal to the bit" if same else "different",
            "cpu_ratio": round(ratio, 3),
            "goal": GOAL,
            "cpu_seconds": {
                "in process": round(statistics.median(pair[0] for pair in pairs), 3),
                "client": round(statistics.median(pair[1] for pair in pairs), 3),
                "server": round(statistics.median(pair[2] for pair in pairs), 3),
            },
            "tokens_scored": sum(rollout.response_ids.size for rollout in rollouts),
            "tokens_read": sum(rollout.length for rollout in rollouts),
            "width": facts["width"],
            "bytes_per_token": wire_bytes(remote, rollouts[:4], facts["rows"]),
        }
    finally:
        server.process.terminate()
        server.process.wait()


if __name__ == "__main__":
    main()
