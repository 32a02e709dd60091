"""Drift over turns: what a student does at turn k, before and after training by methods with and without its own history.

    OMP_NUM_THREADS=1 python benchmarks/agents.py --directory DIR          # started again, it continues where it stopped
    python benchmarks/agents.py --draw                                     # only the figure

Two worlds. `grid`: fetch a key and carry it to a door, at most 12 moves. `dialogue`: four sums one after another. In both, SFT on the
oracle's turns makes a start from `tiny/generalist`, and more of it, from the start, the teacher. Arms begin at the start and end with the
step in which the student has sampled `--tokens` tokens; turns that others wrote do not count, and attempts that SCoRe discards do.

    first turn     single-turn OPD: episodes have one turn
    one turn       single-turn OPD after recorded turns: the oracle takes the turns before one that the prompt draws
    all turns      multi-turn OPD
    backward       multi-turn OPD; at first the oracle takes all turns but one, and then fewer and fewer (TCOD)
    forward        multi-turn OPD; episodes begin with one turn and grow (TCOD)
    score          SCoRe: SFT on episodes with corrected turns for half of its steps, then RL from the corrected turns
    rl             GRPO on the reward of the whole episode, eight episodes per prompt

The four OPD arms minimise the exact reverse KL and differ only in the turns before a trained one. Then each model plays held-out episodes at
temperature 1. By turn: how often it is right (the grid's oracle knows all moves that shorten the way), the KL to the teacher, and both apart for
turns before and after the episode's first mistake. The same for its distributions after the oracle's turns, which have no mistakes.
Writes benchmarks/results/agents.json and docs/figures/agents.svg.

    python benchmarks/agents.py --untrained smol           # agents-untrained.json

What a model that knows neither world does in ScienceWorld (needs the package and Java) and in code repair.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from runs import save, save_figure, saved
from zoo import Here

import opd
from opd.data.prompts import render_prompt
from opd.data.tasks import Dice, get_task
from opd.engines.kinds import BuiltInSampler
from opd.engines.requests import request_key
from opd.environments.dialogue import ScriptedDialogue
from opd.environments.grid import Grid
from opd.environments.repair import Repair
from opd.environments.simulators import ScienceWorldEnvironment
from opd.models.language_model import LanguageModel, Pack
from opd.objective.batch import own_turns
from opd.records import Author, Prompt, Rollout, SampleRequest, Sampling
from opd.rollouts.environments import Environment, Episode, Step, Turn
from opd.rollouts.episodes import TAKEOVER
from opd.rollouts.rollouter import answers
from opd.runner.run import Run
from opd.store import RolloutStore
from opd.store.rollouts import iterate

WORLDS: dict[str, dict[str, Any]] = {
    "grid": {"options": {"size": 3, "walls": 1}, "environment": {"turns": 12, "turn_tokens": 2}, "room": 128, "length": 4},
    "dialogue": {"options": {"digits": 2, "turns": 4}, "environment": {"turns": 4, "turn_tokens": 4}, "room": 64, "length": 4},
}  # fmt: skip
DOMAINS = {"grid": "grid", "dialogue": "arithmetic"}
ARMS = ("first turn", "one turn", "all turns", "backward", "forward", "score", "rl")
OPD = {"form": "direct", "divergence": "reverse_kl"}
CLONING = {"form": "cross_entropy"}
OUTCOME = {
    "form": "policy_gradient",
    "advantage": {"teacher_weight": 0, "outcome_weight": 1, "baseline": "group", "std": True},
    "surrogate": "ppo",
}
SAMPLER = {"slots": 64, "prefill_rows": 32}  # turns are short, so most calls begin turns: many at the same time
GROUP = 8  # episodes per prompt of RL
Played = tuple[Prompt, Rollout, list[float]]


# --- One turn after the oracle's ---


class OneTurn(Environment):
    """The oracle takes the turns before one that the prompt draws; the student takes that one, and the episode is over."""

    def oracle_turns(self, prompt: Prompt, step: int | None) -> Sequence[str]:
        known = (self.oracle(prompt) or ())[: self.turns]
        return known[: self.place(prompt, len(known))]

    def place(self, prompt: Prompt, turns: int) -> int:
        return Dice(f"agents/{prompt.id}").below(turns)

    def open(self, prompt: Prompt, key: int) -> Episode:
        return EndsAfter(super().open(prompt, key), len(self.oracle_turns(prompt, None)))  # type: ignore[safe-super]


class EndsAfter(Episode):
    """An episode that is over after turn `last`, from 0."""

    def __init__(self, inner: Episode, last: int) -> None:
        self.inner, self.last = inner, last

    def step(self, turn: Turn) -> Step:
        step = self.inner.step(turn)
        assert isinstance(step, Step)
        return replace(step, messages=(), done=True) if turn.number == self.last else step


@opd.register
class GridTurn(OneTurn, Grid):
    name = "grid-turn"


@opd.register
class DialogueTurn(OneTurn, ScriptedDialogue):
    name = "dialogue-turn"


class LastTurn(OneTurn):
    """Only the last turn is the student's: the oracle's whole episode, to look at."""

    def place(self, prompt: Prompt, turns: int) -> int:
        return turns - 1


class GridLast(LastTurn, Grid):
    name = "grid-last"


class DialogueLast(LastTurn, ScriptedDialogue):
    name = "dialogue-last"


PLAYED: dict[str, tuple[type[Environment], type[Environment]]] = {
    "grid": (Grid, GridLast),
    "dialogue": (ScriptedDialogue, DialogueLast),
}


# --- Recipes ---


def base(world: str, seed: int) -> dict[str, Any]:
    settings = WORLDS[world]
    source = {"source": f"task:{world}", "options": settings["options"], "domain": DOMAINS[world]}
    return {
        "prompts": [source],
        "rollout": {
            "environment": {"kind": world, **settings["environment"]},
            "max_new_tokens": settings["room"],
        },
        "sampler": SAMPLER,
        "eval": {"prompts": 0}, "seed": seed, "device": "cpu", "threads": 1, "log": {"start_table": False}, "monitors": "off",
    }  # fmt: skip


def preparation(world: str, args: argparse.Namespace) -> dict[str, Any]:
    """The start and, from there, the teacher."""
    recipe = base(world, 0)
    recipe["rollout"] |= {"writers": [{"kind": "oracle", "share": 1}], "prompts": 32}
    start, teacher = (dict(zip(("grid", "dialogue"), steps, strict=True))[world] for steps in (args.start_steps, args.teacher_steps))  # fmt: skip
    rate = {"lr": 2e-3, "warmup": 10}
    return recipe | {
        "student": "tiny/generalist", "objective": CLONING,
        "stages": [
            {"name": "start", "train": {**rate, "steps": start, "schedule": "constant"}},
            {"name": "teacher", "student": "stage:start", "train": {**rate, "steps": teacher, "schedule": "linear"}},
        ],
    }  # fmt: skip


def recipe_of(world: str, arm: str, seed: int, start: str, teacher: str, args: argparse.Namespace) -> dict[str, Any]:
    """An arm takes about `--steps` steps, each with about the same number of sampled tokens."""
    recipe, settings = base(world, seed), WORLDS[world]
    rollout, environment = recipe["rollout"], recipe["rollout"]["environment"]
    turns = args.rollouts * settings["length"]  # of the student, in a step
    steps = 4 * args.steps  # tokens end it before
    recipe |= {"student": start, "objective": OPD, "train": {"steps": steps, "lr": args.rate, "warmup": 5}}
    rollout["prompts"] = args.rollouts
    if arm == "rl":
        rollout |= {"prompts": max(1, args.rollouts // GROUP), "samples": GROUP}
        return recipe | {"objective": OUTCOME}
    if arm == "score":
        return recipe | score(recipe, args)
    recipe["teachers"] = {DOMAINS[world]: teacher}
    if arm == "first turn":
        environment["turns"], rollout["prompts"] = 1, turns
    elif arm == "one turn":
        environment["kind"], rollout["prompts"] = f"{world}-turn", turns
    elif arm in ("backward", "forward"):
        # the student has all turns of a usual episode after two thirds of the steps
        growth = max(1, round(2 / 3 * args.steps / settings["length"]))
        environment |= {"curriculum": arm, "growth": growth}
    return recipe


def score(recipe: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    corrections = {
        "name": "corrections",
        "rollout": {"takeover": {"turn": "wrong", "by": "environment", "attempts": 5}},
        "objective": {**CLONING, "on": ["student", "teacher"], "gate": {"kind": "correct", "threshold": 1}},
        "train": {"steps": max(1, args.steps // 4)},  # a step samples about twice as much as others
    }
    rl = {
        "name": "rl", "student": "stage:corrections", "objective": OUTCOME,
        "prompts": [{"source": "stage:corrections", "turn_into": "turns", "where": {"least_reward": 1}}],
        "rollout": {"prompts": max(1, args.rollouts // 4), "samples": 4},
    }  # fmt: skip
    return {"stages": [corrections, rl]}


def sampled(rollout: Rollout) -> int:
    """Tokens that the student sampled for it. The turns before a takeover were copied."""
    own = rollout.author == Author.STUDENT
    if TAKEOVER in rollout.extras:
        _, end = own_turns(rollout)[rollout.extras[TAKEOVER]["turn"]]
        own = own[end:]
    return int(own.sum())


def carry_out(recipe: dict[str, Any], out: Path, tokens: int | None = None) -> None:
    """One recipe in this process, ended after so many sampled tokens."""
    shutil.rmtree(out, ignore_errors=True)  # what an interrupted study left
    count, stage = [0], [""]

    def add(run: Any, rollouts: list[Rollout]) -> None:
        if run.stage != stage[0] and stage[0]:  # attempts that were discarded are only in the store
            count[0] = drawn(run.directory)
        else:
            count[0] += sum(map(sampled, rollouts))
        stage[0] = run.stage

    def end(run: Any, metrics: dict[str, Any]) -> None:
        if tokens is not None and count[0] >= tokens:
            run.stop()

    opd.run(recipe, out=out, on_rollouts=add, on_step=end)


def drawn(directory: Path) -> int:
    with closing(RolloutStore(directory / "rollouts", read_only=True)) as store:
        return sum(sampled(rollout) for rollout in iterate(store))


# --- What a model does, turn by turn ---


def play(model: LanguageModel, environment: Environment, world: str, count: int) -> list[Played]:
    """Held-out episodes at temperature 1."""
    task = get_task(world, **WORLDS[world]["options"])
    prompts = [environment.opened(task.prompt("heldout", number), {}) for number in range(count)]
    return answered(model, prompts, WORLDS[world]["room"], seed=1)


def answered(model: LanguageModel, prompts: Sequence[Prompt], room: int, seed: int) -> list[Played]:
    """Each prompt with its episode and the rewards of the turns."""
    sampling = Sampling(room, stop_ids=model.stop_ids)
    requests = [
        SampleRequest(prompt.id, render_prompt(prompt, model.tokenizer), request_key(seed, prompt.id, 0, 0), sampling)
        for prompt in prompts
    ]
    longest = max(request.prompt_ids.size for request in requests) + room
    sampler = BuiltInSampler(**SAMPLER).open(model.inference_copy(), longest, merge_stop=model.stop_ids)
    notes: dict[str, dict[str, Any]] = {}
    by_name = {prompt.id: prompt for prompt in prompts}
    found = answers(sampler, requests, prompts=by_name, tokenizer=model.tokenizer, notes=notes)
    return [
        (prompt, rollout, [reward or 0.0 for reward in notes[rollout.id]["turn_rewards"]])
        for prompt, rollout in zip(prompts, found, strict=True)
    ]


@torch.no_grad()
def log_probs(model: LanguageModel, rollouts: Sequence[Rollout]) -> list[torch.Tensor]:
    """(T, V) of every response."""
    pack = Pack.of(rollouts)
    return list(model.predict(pack).logits(model.size).log_softmax(-1).split(pack.response_lengths))


def move(world: str, text: str) -> str:
    return text.strip()[:1] if world == "grid" else text.strip()


def look(model: LanguageModel, teacher: LanguageModel, world: str, count: int, own: bool) -> dict[str, Any]:
    """By turn, after the model's own turns or after the oracle's. `first`: probability of the first tokens of right turns.

    A cell has [turns, right turns, KL in nats per token, first, first of the teacher], each a sum over turns.
    """
    environment = PLAYED[world][0 if own else 1](**WORLDS[world]["environment"])
    played = play(model, environment, world, count)
    rollouts = [rollout for _, rollout, _ in played]
    width = WORLDS[world]["environment"]["turns"]
    cells = {name: np.zeros((width, 5)) for name in ("clean", "after")}
    marks, solved = "", [0] * width
    for (prompt, rollout, rewards), ours, theirs in zip(
        played, log_probs(model, rollouts), log_probs(teacher, rollouts), strict=True
    ):
        kl = (ours.exp() * (ours - theirs)).sum(-1)
        said, clean = list[str](), True
        for turn, (first, end) in enumerate(own_turns(rollout)[:width]):
            ids = rollout.response_ids[first:end].tolist()
            text = str(model.tokenizer.decode(ids, skip_special_tokens=True))
            advice = environment.advice(prompt, said)
            starts = sorted({model.tokenizer.encode(one, add_special_tokens=False)[0] for one in advice})
            right = move(world, text) in advice
            values = [1.0, right, float(kl[first:end].mean()), *(float(one[first].exp()[starts].sum()) for one in (ours, theirs))]  # fmt: skip
            cells["clean" if clean else "after"][turn] += values
            clean, said = clean and right, [*said, text]
        won = sum(rewards) >= 1 - 1e-6
        marks += str(int(won))
        if won:
            solved[len(rewards) - 1] += 1
    by_turn = {name: np.round(table, 4).tolist() for name, table in cells.items()}
    return by_turn | ({"marks": marks, "solved": solved} if own else {})


def measured(name: str, teacher: str, world: str, count: int) -> dict[str, Any]:
    model, other = opd.load_model(name), opd.load_model(teacher)
    torch.set_num_threads(1)
    return {"own": look(model, other, world, count, True), "oracle": look(model, other, world, count, False)}


# --- Worlds that the tiny models cannot enter ---

PROGRAMS = {  # name and arguments -> what it returns, tests
    "add(a, b)": ("the sum of a and b", ["add(2, 3) == 5", "add(-1, 1) == 0"]),
    "double(x)": ("two times x", ["double(4) == 8", "double(0) == 0"]),
    "is_even(n)": ("whether n is even", ["is_even(4) is True", "is_even(7) is False"]),
    "last(items)": ("the last item of a list", ["last([1, 2, 3]) == 3", "last(['a']) == 'a'"]),
    "count(text, letter)": ("how often the letter is in the text", ["count('banana', 'a') == 3", "count('', 'b') == 0"]),
    "largest(items)": ("the largest number, and None for an empty list", ["largest([3, 9, 2]) == 9", "largest([]) is None"]),
    "backwards(text)": ("the text backwards", ["backwards('abc') == 'cba'", "backwards('') == ''"]),
    "squares(n)": ("a list of the squares of 1 to n", ["squares(3) == [1, 4, 9]", "squares(0) == []"]),
}  # fmt: skip
SCIENCE = ("find-living-thing", "power-component", "boil", "identify-life-stages-1")
COMMANDS = "Answer with one short command, such as: open door to kitchen, go to kitchen, look around, focus on picture, pick up pot."


def untrained(args: argparse.Namespace) -> None:
    """Episodes at temperature 1: the reward of each, and what the model wrote in its first turns."""
    model, found = opd.load_model(args.untrained), dict[str, Any]()
    for name, asked in (("repair", programs(args.episodes)), ("scienceworld", experiments(args.episodes))):
        turns, room = (2, 300) if name == "repair" else (5, 900)
        played = answered(model, asked, room, 0)
        rows: list[dict[str, Any]] = [
            {
                "prompt": prompt.id,
                "reward": sum(rewards),
                "turns": len(rewards),
                "wrote": written(model, rollout, turns),
            }
            for prompt, rollout, rewards in played
        ]
        found[name] = {"episodes": len(rows), "rewarded": sum(row["reward"] > 0 for row in rows), "rows": rows}
        print(f"{name}: {found[name]['rewarded']} of {len(rows)} episodes have a reward", flush=True)
    save("agents-untrained.json", {"model": args.untrained, "worlds": found})


def programs(count: int) -> list[Prompt]:
    environment = Repair(turns=2, turn_tokens=80)
    found = []
    for head, (what, tests) in list(PROGRAMS.items())[:count]:
        text = f"Write a Python function {head} that returns {what}. Answer with a Python code block."
        fields = {"tests": [f"assert {test}" for test in tests]}
        prompt = Prompt(head, "repair", messages=({"role": "user", "content": text},), fields=fields)
        found.append(environment.opened(prompt, {}))
    return found


def experiments(count: int) -> list[Prompt]:
    found = []
    for number in range(count):
        environment = ScienceWorldEnvironment(
            task=SCIENCE[number % len(SCIENCE)], turns=5, turn_tokens=16, workers=1, call_seconds=600
        )
        prompt = Prompt(f"science/{number}", "science", messages=({"role": "system", "content": COMMANDS},))
        found.append(environment.opened(prompt, {}))
    return found


def written(model: LanguageModel, rollout: Rollout, turns: int) -> list[str]:
    parts = [rollout.response_ids[first:end].tolist() for first, end in own_turns(rollout)[:turns]]
    return [str(model.tokenizer.decode(ids, skip_special_tokens=True))[:200] for ids in parts]


# --- The study ---


def kept(path: Path, make: Any) -> dict[str, Any]:
    if not path.is_file():
        values = make()
        path.write_text(json.dumps(values) + "\n", encoding="utf-8")
    return dict(json.loads(path.read_text(encoding="utf-8")))


def prepared(world: str, directory: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The start and the teacher, and what they do."""

    def make() -> dict[str, Any]:
        out = directory / f"{world}-preparation"
        carry_out(preparation(world, args), out)
        paths = {name: str(sorted((out / "checkpoints" / name).glob("step-*"))[-1]) for name in ("start", "teacher")}
        return {name: {"path": path, **measured(path, paths["teacher"], world, args.prompts)} for name, path in paths.items()}  # fmt: skip

    return kept(directory / f"{world}-preparation.json", make)


def trained(world: str, arm: str, seed: int, paths: dict[str, str], directory: Path, args: argparse.Namespace) -> dict[str, Any]:  # fmt: skip
    name = f"{world}-{arm.replace(' ', '-')}-seed{seed}"

    def make() -> dict[str, Any]:
        out = directory / name
        try:
            carry_out(recipe_of(world, arm, seed, paths["start"], paths["teacher"], args), out, args.tokens)
        except opd.OpdError as error:
            return {"failed": f"{type(error).__name__}: {error}"}
        run = Run(out)
        facts = {"tokens": drawn(out), "steps": len(run.metrics)}
        return facts | measured(str(run.model), paths["teacher"], world, args.prompts)

    return kept(directory / f"{name}.json", make)


def share(marks: str) -> float:
    return marks.count("1") / len(marks)


def total(look: dict[str, Any], first: int = 0, end: int | None = None, part: str = "all") -> dict[str, float]:
    """Means over turns: of all, of those before (`clean`) or after the first mistake."""
    tables = [np.array(look[name])[first:end] for name in (("clean", "after") if part == "all" else (part,))]
    turns, *sums = sum(table.sum(0) for table in tables)
    names = ("right", "kl", "first", "teacher_first")
    return {"turns": float(turns)} | {name: float(one / max(turns, 1)) for name, one in zip(names, sums, strict=True)}


def summary(look: dict[str, Any]) -> dict[str, Any]:
    own, width = look["own"], len(look["own"]["clean"])
    found = {
        "solved": share(own["marks"]),
        "right": total(own)["right"],
        "kl": total(own)["kl"],
        "kl_early": total(own, 0, width // 3)["kl"],
        "kl_late": total(own, width - width // 3)["kl"],
        "kl_oracle": total(look["oracle"])["kl"],
        **{f"{key}_{part}": total(own, part=part)[key] for part in ("clean", "after") for key in ("right", "kl", "teacher_first")},
    }  # fmt: skip
    return {name: round(value, 4) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="+", choices=list(WORLDS), default=list(WORLDS))
    parser.add_argument("--arms", nargs="+", help="with hyphens for spaces; default: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=10_000, help="that the student samples in an arm")
    parser.add_argument("--steps", type=int, default=40, help="in which an arm is to reach them, about")
    parser.add_argument("--rollouts", type=int, default=24, help="episodes per step")
    parser.add_argument("--rate", type=float, default=5e-4)
    parser.add_argument("--start-steps", type=int, nargs=2, default=[30, 10], help="of the grid and of the dialogue")
    parser.add_argument("--teacher-steps", type=int, nargs=2, default=[150, 60])
    parser.add_argument("--prompts", type=int, default=100, help="held-out episodes")
    parser.add_argument("--workers", type=int, default=0, help="processes, one thread each; 0: in this process")
    parser.add_argument("--directory", type=Path, help="keep the runs here, and continue with those that are there")
    parser.add_argument("--name", default="agents", help="of the result and of the figure")
    parser.add_argument("--untrained", metavar="MODEL", help="only play ScienceWorld and code repair with it")
    parser.add_argument("--episodes", type=int, default=8, help="of --untrained, in each world")
    parser.add_argument("--draw", action="store_true", help="only draw the figure, from the results that are there")
    args = parser.parse_args()
    if args.draw:
        return draw(args.name)
    if args.untrained:
        return untrained(args)
    arms = [arm for arm in ARMS if args.arms is None or arm.replace(" ", "-") in args.arms]
    directory = (args.directory or Path(tempfile.mkdtemp())).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    spawn = multiprocessing.get_context("spawn")  # torch does not like to be forked
    pool: Executor
    with ProcessPoolExecutor(args.workers, spawn) if args.workers else Here() as pool:
        starts = {world: pool.submit(prepared, world, directory, args) for world in args.worlds}
        before = {world: future.result() for world, future in starts.items()}
        for world, models in before.items():
            for name, values in models.items():
                tell(f"{world}: {name}", values)
        paths = {world: {name: values.pop("path") for name, values in models.items()} for world, models in before.items()}  # fmt: skip
        # all arms with the first seed come first, so that an interrupted study has a result for each
        waiting = {
            (world, arm, seed): pool.submit(trained, world, arm, seed, paths[world], directory, args)
            for seed in range(args.seeds)
            for world in args.worlds
            for arm in arms
        }
        worlds: dict[str, Any] = {world: {**models, "arms": {arm: [] for arm in arms}} for world, models in before.items()}  # fmt: skip
        for (world, arm, seed), future in waiting.items():
            values = future.result()
            worlds[world]["arms"][arm].append({"seed": seed, **values})
            tell(f"{world}: {arm}, seed {seed}", values)
    for models in worlds.values():
        for run in (models["start"], models["teacher"], *(run for runs in models["arms"].values() for run in runs)):
            if "failed" not in run:
                run["summary"] = summary(run)
    settings = {key: value for key, value in vars(args).items() if key not in ("directory", "name", "draw", "workers", "worlds", "arms", "untrained", "episodes")}  # fmt: skip
    save(f"{args.name}.json", {"settings": settings, "worlds": worlds})
    return draw(args.name)


def tell(name: str, values: dict[str, Any]) -> None:
    if "failed" in values:
        print(f"{name}: failed: {values['failed']}", flush=True)
        return
    found = {key: round(value, 3) for key, value in summary(values).items()}
    cost = f" {values['tokens']:,} tokens in {values['steps']} steps" if "tokens" in values else ""
    print(f"{name}:{cost} {found}", flush=True)


def draw(name: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    worlds = saved(f"{name}.json")["worlds"]
    figure, axes = plt.subplots(len(worlds), 3, figsize=(11, 3.6 * len(worlds)), width_ratios=(5, 5, 1), squeeze=False)
    for (world, found), (left, right, legend) in zip(worlds.items(), axes, strict=True):
        lines = {"start": [found["start"]], "teacher": [found["teacher"]], **found["arms"]}
        for number, (line, every) in enumerate(lines.items()):
            runs = [run for run in every if "failed" not in run]
            style = {"color": "black", "linestyle": "--" if line == "start" else ":"} if number < 2 else {"color": f"C{number - 2}"}  # fmt: skip
            if runs and line != "teacher":
                curve(left, [by_turn(run["own"], 2) for run in runs], style)
            if runs:
                curve(right, [success(world, run["own"]) for run in runs], style)
            legend.plot([], [], label=line, **style)
        what = "episodes solved by this turn" if world == "grid" else "right answers"
        left.set(title=f"{world}: KL to the teacher", xlabel="turn", ylabel="nats per token", yscale="log")
        right.set(title=f"{world}: {what}", xlabel="turn", ylim=(0, 1))
        for axis in (left, right):
            axis.grid(alpha=0.3)
            axis.xaxis.get_major_locator().set_params(integer=True)
        legend.set_axis_off()
    save_figure(figure, axes[-1][-1], f"{name}.svg")


def by_turn(own: dict[str, Any], column: int) -> list[float]:
    """Means at every turn that at least ten episodes came to."""
    table = np.array(own["clean"]) + np.array(own["after"])
    return [float(line[column] / line[0]) if line[0] >= 10 else float("nan") for line in table]


def success(world: str, own: dict[str, Any]) -> list[float]:
    if world == "grid":
        return list(np.cumsum(own["solved"]) / len(own["marks"]))
    return by_turn(own, 1)


def curve(axis: Any, lines: list[list[float]], style: dict[str, Any]) -> None:
    """The mean over seeds, and each seed as a thin line."""
    places = range(1, len(lines[0]) + 1)
    for line in lines if len(lines) > 1 else ():
        axis.plot(places, line, linewidth=0.6, alpha=0.3, **style)
    axis.plot(places, [mean(values) for values in zip(*lines, strict=True)], **style)


if __name__ == "__main__":
    main()
