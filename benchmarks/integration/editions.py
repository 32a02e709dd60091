"""What an edition is made of: the start, the specialists, the sizes; and the recipes that make the former two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from integration.domains import EDITIONS, Split, write

REWARD = {"kind": "exact", "extract": "last_line", "ignore": ["case", "space"]}  # `domains.right`, as a recipe says it


@dataclass
class Edition:
    """Sizes of one edition, in the directory that holds everything it makes."""

    name: str
    directory: Path
    base: str  # what everything grows from
    max_new_tokens: int
    steps: int  # of the arm that pays for sampling, scoring and training
    rollouts: int  # per step
    rates: dict[str, list[float]]  # learning rates that are tried: of arms that distil or imitate, and of RL
    counts: dict[Split, int]
    student: dict[str, Any] = field(default_factory=dict)  # further keys of the recipe's `student`
    settings: dict[str, Any] = field(default_factory=dict)  # further keys of every recipe
    train: dict[str, Any] = field(default_factory=dict)
    sampler: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    dtype: str = "float32"
    prompts: int = 1000  # of a split that are measured
    curve_prompts: int = 50  # per domain, of the evaluations on the way
    domains: list[str] = field(default_factory=list)
    draws_ahead: bool = False  # specialists answer the training questions once, for the arms that imitate them
    limit: float | None = None  # seconds of a run

    def __post_init__(self) -> None:
        self.domains = self.domains or list(EDITIONS[self.name])

    @property
    def data(self) -> Path:
        return self.directory / "data"

    @property
    def start(self) -> str:
        return self.base if self.name == "tiny" else str((self.directory / "models" / "start").absolute())

    def specialist(self, domain: str, origin: str = "start") -> str:
        if self.name == "tiny":
            return f"tiny/{domain}"
        return str((self.directory / "adapters" / f"{origin}-{domain}").absolute())

    def answers(self, specialist: str) -> str:
        """A specialist's own answers to the training questions of its domain."""
        return str((self.data / f"answers-{Path(specialist).name}.jsonl").absolute())

    def write_data(self) -> None:
        write(self.name, self.data, self.counts)

    def sources(self, domains: list[str], split: Split) -> list[dict[str, Any]]:
        data = self.data.absolute()
        return [
            {
                "source": str(data / f"{name}-train.jsonl"),
                "eval_source": str(data / f"{name}-{split}.jsonl"),
                "domain": name,
            }
            for name in domains
        ]

    def measure(self) -> dict[str, Any]:
        return {
            "device": self.device, "dtype": self.dtype, "max_new_tokens": self.max_new_tokens,
            "sampler": self.sampler, "prompts": self.prompts,
        }  # fmt: skip

    def recipe(self, student: str, domains: list[str], split: Split, seed: int) -> dict[str, Any]:
        """What all recipes of the edition share; on-policy, one sample per prompt, until an arm says otherwise."""
        return {
            "student": {"model": student, **self.student},
            "prompts": self.sources(domains, split),
            "rewards": REWARD,
            "rollout": {"prompts": self.rollouts, "max_new_tokens": self.max_new_tokens},
            "sampler": self.sampler,
            "train": {"warmup": 5, "schedule": "linear", **self.train},
            "eval": {"prompts": self.curve_prompts, "teachers": False},
            "store": {"fsync": "never"},
            "log": {"samples": 0, "start_table": False},
            "device": self.device,
            "seed": seed,
            **self.settings,
        }

    def job(self, arm: str, seed: int, split: Split, **more: Any) -> dict[str, Any]:
        name = "-".join([arm, *(str(part) for part in more.pop("tags", ())), f"seed{seed}"])
        return {
            "name": name, "arm": arm, "seed": seed, "split": split, "data": str(self.data.absolute()),
            "domains": self.domains, "measure": self.measure(), "scored": False, "settings": {}, "limit": self.limit,
            "out": str((self.directory / "runs" / name).absolute()),
            "entry": str((self.directory / "entries" / f"{name}.json").absolute()), **more,
        }  # fmt: skip


def tiny(directory: Path) -> Edition:
    return Edition(
        "tiny", directory, base="tiny/generalist", max_new_tokens=12, steps=60, rollouts=128,
        rates={"distil": [6e-4, 1.5e-3], "rl": [2e-4, 6e-4]},
        counts={"train": 4000, "screen": 100, "tune": 300, "report": 1000},
        settings={"threads": 1}, train={"micro_tokens": 8192}, prompts=500,
    )  # fmt: skip


def smol(directory: Path) -> Edition:
    return Edition(
        "smol", directory, base="smol", max_new_tokens=128, steps=100, rollouts=256,
        rates={"distil": [1e-3, 4e-3], "rl": [1e-4, 4e-4]},
        counts={"train": 4000, "screen": 200, "tune": 300, "report": 1000},
        student={"lora": {"rank": 32, "alpha": 64}, "gradient_checkpointing": True},  # a step in one pass beside other runs
        settings={"monitors": "off"}, sampler={"slots": 256}, device="cuda", dtype="bfloat16",
        curve_prompts=40, draws_ahead=True,  # 40 of six domains: one batch of slots
    )  # fmt: skip


def smallest(edition: Edition) -> None:
    """A tiny model on a CPU and a handful of questions: everything goes through, nothing is learnt."""
    edition.base, edition.device, edition.dtype, edition.sampler = "tiny/generalist", "cpu", "float32", {}
    edition.counts = dict.fromkeys(edition.counts, max(edition.prompts, 8))
    edition.curve_prompts, edition.max_new_tokens = 2, 8
    edition.rates = {name: rates[:1] for name, rates in edition.rates.items()}


SFT: dict[str, Any] = {"form": "cross_entropy"}
# Of the start's training: what is learnt quickly gets little, so that no domain is far ahead of the others.
START_SHARES = {
    "words": 0.7, "sorting": 10, "filtering": 4.5, "spiral": 1.8, "sums": 8, "legs": 1.8, "columns": 2, "cipher": 14,
}  # fmt: skip


def joint_start(edition: Edition, steps: int, rate: float, level: float, shares: Mapping[str, float]) -> dict[str, Any]:
    """Brief SFT on all domains, stopped once the mean score has reached `level`: 0 is then no matter of format."""
    recipe = edition.recipe(edition.base, edition.domains, "screen", seed=0)
    for source in recipe["prompts"]:
        source["share"] = shares[source["domain"]]
    recipe["student"] = {"model": edition.base, "lora": {"rank": 8, "alpha": 32}}
    recipe["rollout"] |= {"prompts": 64, "data_share": 1.0}
    recipe["objective"] = SFT
    recipe["train"] |= {"steps": steps, "lr": rate, "schedule": "constant"}
    recipe["eval"] |= {"prompts": 25, "every": 8, "early_stop": {"kind": "target", "value": level}}
    return recipe


def specialist(edition: Edition, domain: str, origin: str, steps: int, rate: float) -> dict[str, Any]:
    """SFT on the gold answers of one domain, from the common start or from the bare model (`foreign`)."""
    student = edition.start if origin == "start" else edition.base
    recipe = edition.recipe(student, [domain], "screen", seed=0)
    recipe["student"] = {"model": student, "lora": {"rank": 8, "alpha": 32}}
    recipe["rollout"] |= {"prompts": 64, "data_share": 1.0}
    recipe["objective"] = SFT
    recipe["train"] |= {"steps": steps, "lr": rate}
    recipe["eval"] |= {"prompts": 100}
    return recipe
