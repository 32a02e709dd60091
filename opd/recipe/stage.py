"""The keys of a stage, with their defaults. Every key exists once, is read once and does something."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, Field, WithJsonSchema, field_validator, model_validator

from opd.common.short_forms import SHORT_FORMS
from opd.data.prompts import DOMAIN
from opd.data.sources import SOURCES, PromptSource
from opd.data.stream import Curriculum, SelectionRule, Shares, StaticShares
from opd.engines.kinds import SAMPLERS, BuiltInSampler, SamplerKind
from opd.models.merging import Merge
from opd.models.modules import AnyModule
from opd.models.optimisers import AdamW, AnyOptimiser
from opd.models.settings import Lora
from opd.monitors.monitor import Monitors
from opd.objective.stopping import STOP_RULES, StopRule
from opd.objective.term import AnyTerm, Direct, Term
from opd.recipe.paths import check_name
from opd.registry import SETTINGS, Address, Choice, Count, Dtype, Family, Positive, Word
from opd.rewards.reward import AnyRewards, Rewards
from opd.rollouts.settings import Rollouts
from opd.teachers.kinds import AnyTeacher, TeacherKind
from opd.teachers.pool import TeacherPool, movable

# cluster


PARAMETERS = r"^([0-9]{1,12}(?:\.[0-9]{1,6})?)([KMBT]?)$"
UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def in_numbers(value: Any) -> Any:
    """Read `32B`, `0.6B` or `135M` as a number of parameters."""
    found = re.fullmatch(PARAMETERS, value.strip()) if isinstance(value, str) else None
    return round(float(found[1]) * UNITS[found[2]]) if found is not None else value


Parameters = Annotated[
    int,
    BeforeValidator(in_numbers),
    Field(ge=1, le=10**15),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": PARAMETERS}]}),
]


class ModelSize(BaseModel):
    """The size of a model that is not on this machine, only for the plan. Missing keys are guessed from `parameters`."""

    model_config = SETTINGS
    parameters: Parameters = Field(description="for example 32B")
    active: Parameters | None = Field(None, description="parameters that one token uses; default: all of them")
    width: Positive | None = Field(None, description="of the hidden states")
    layers: Positive | None = None
    vocabulary: Positive | None = None
    key_values: Positive | None = Field(None, description="numbers that a layer keeps per token, keys and values")
    tied: bool | None = Field(None, description="whether the head is the embedding")


AnySize = Annotated[ModelSize, SHORT_FORMS["cluster.sizes.NAME"]]


class Cluster(BaseModel):
    """How a run is split over ranks, and where its parts are placed: docs/scale.md."""

    model_config = SETTINGS
    shard: Literal["full", "hybrid"] = Field(
        "full",
        description="full: over all ranks; hybrid: over the ranks of a group, each group a replica of the others",
    )
    group: Positive | None = Field(
        None, le=65_536, description="ranks of a group of shard: hybrid; default: those of one machine"
    )
    teachers: Literal["whole", "shard"] = Field(
        "whole", description="frozen teachers on several ranks: a full copy on each, or layers sharded over all"
    )
    trainers: Positive = Field(
        1, le=65_536, description="ranks, with `opd run --on ray`; for torchrun, set --nproc-per-node"
    )
    samplers: Count = Field(
        0, le=65_536, description="workers that sample, with --on ray, at most one per trainer; 0: the trainers sample"
    )
    servers: Count = Field(
        0, le=65_536, description="workers that serve the frozen teachers, with --on ray; 0: the trainers load them"
    )
    rewards: Count = Field(
        0, le=65_536, description="CPUs kept for reward workers next to the first trainer, with --on ray"
    )
    sizes: dict[Word, AnySize] = Field(
        default_factory=dict,
        max_length=1000,
        description="model -> size, for `opd cluster plan` where the model is not on this machine",
    )

    @property
    def placement(self) -> tuple[int, int, int, int]:
        return self.trainers, self.samplers, self.servers, self.rewards

    @model_validator(mode="after")
    def _groups(self) -> Cluster:
        if self.group is not None and self.shard != "hybrid":
            raise ValueError(f"group {self.group} is for shard: hybrid; with {self.shard} all ranks are one group")
        return self

    def check(
        self, kinds: Mapping[str, TeacherKind], pool: TeacherPool, drawn: Iterable[str], evaluated: bool
    ) -> Iterable[str]:
        """`drawn`: keys of the recipe that sample from teachers, or read all their weights at once."""
        if self.teachers == "whole":
            return
        if not movable(kinds):
            yield "cluster.teachers shard: only frozen teachers can be sharded over ranks, and there is none. Drop it."
        if pool.resident is not None:
            yield (
                f"cluster.teachers shard with pool.resident {pool.resident}: their weights are either sharded over ranks or "
                "paged. Choose one."
            )
        for key in [*drawn, *(["eval.teachers"] if evaluated else [])]:
            yield (
                f"{key} needs all weights of a teacher on every rank, but cluster.teachers shard gives each rank a part. Drop "
                f"{key}, or set cluster.teachers: whole."
            )


def usual_objective() -> list[Term]:
    return [Direct()]


MERGED = "merge:"  # `merge:NAME` is the merged model that stage NAME starts from


class Student(BaseModel):
    """The model that is trained: a directory, a hub id, a .gguf file, `smol` or `tiny/NAME`; or a merge of several."""

    model_config = SETTINGS
    model: Address
    merge: Annotated[Merge, Family("merge", default="average")] | None = Field(
        None, description="start from several models, merged: average, task_arithmetic, ties, stack"
    )
    revision: Word | None = None
    lora: Lora | None = None
    gradient_checkpointing: bool = False


class Data(BaseModel):
    """What to do with rows that cannot be used: malformed, too long, or without a required completion."""

    model_config = SETTINGS
    bad_rows: Literal["stop", "skip"] = Field(
        "stop", description="stop: do not start, and name them; skip: leave them out, and count"
    )


Precision = Literal["auto", "mixed", "float32", "autocast", "bfloat16"]
WEIGHTS: Mapping[str, Dtype] = {  # the dtype that the student's weights are loaded in
    "mixed": "bfloat16",
    "float32": "float32",
    "autocast": "float32",
    "bfloat16": "bfloat16",
}


MICRO_TOKENS = 4096  # on a CPU


class Train(BaseModel):
    model_config = SETTINGS
    steps: Positive = 100
    tokens: Positive | None = Field(
        None,
        description="end after the step in which the stage reaches so many response tokens; null: only `steps` count",
    )
    optimiser: AnyOptimiser = Field(AdamW(), description="adamw, muon, adamw8bit, or one of your own")
    lr: float = Field(1e-4, gt=0, le=1e9)
    warmup: Count = Field(0, description="steps")
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: float = Field(0.0, ge=0, le=1000)
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    eps: float = Field(1e-8, ge=1e-30, le=1)
    clip: float | None = Field(1.0, gt=0, description="largest gradient norm; null: no clipping")
    epochs: Positive = Field(1, le=10_000, description="passes over each batch")
    minibatches: Positive = Field(1, description="updates per pass; groups are never split")
    learn: bool = Field(
        True,
        description="false: only sample, reward and score, and keep the scores for teachers of kind cached",
    )
    micro_tokens: Positive | None = Field(
        None, description="token budget of one micro-batch; default: what fits a GPU, 4096 on a CPU"
    )
    precision: Precision = Field(
        "auto",
        description="mixed: bf16 weights to compute with, fp32 masters to train; auto: mixed on CUDA, else float32",
    )

    @property
    def micro_budget(self) -> int:
        """`micro_tokens`, or its default."""
        return self.micro_tokens or MICRO_TOKENS

    @property
    def updates(self) -> int:
        """Updates per batch."""
        return self.epochs * self.minibatches

    def precision_on(self, device: str) -> Precision:
        """The precision on a device (`cuda`, `cuda:1`, `cpu`), with `auto` resolved."""
        return self.precision if self.precision != "auto" else "mixed" if device.startswith("cuda") else "float32"


class Eval(BaseModel):
    """pass@1 and pass@k on held-out prompts, before, after and every `every` steps."""

    model_config = SETTINGS
    every: Count = Field(0, description="steps; 0: only before and after")
    prompts: Count = Field(200, le=20_000, description="held-out prompts per domain; 0: no evaluation")
    further: Annotated[list[Annotated[PromptSource, SOURCES]], SHORT_FORMS["eval.further"]] = Field(
        default_factory=list,
        max_length=1000,
        description="further sources to evaluate on: domains that the stage does not train on and may forget",
    )
    greedy: bool = True
    k: Count = Field(0, le=65_536, description="samples per prompt for pass@1 (sampled) and pass@k; 0: greedy only")
    temperature: float = Field(1.0, ge=0.01, le=100, description="of the sampled evaluation")
    max_new_tokens: Positive | None = Field(None, description="default: rollout.max_new_tokens")
    loss: bool = Field(
        False, description="measure the loss on held-out worked answers (`completion`) too, in nats per token"
    )
    teachers: bool = Field(True, description="evaluate the teachers too, before training")
    weight_average: bool = Field(False, description="evaluate the plain average of the teachers' weights")
    metric: Word = Field("pass@1", description="what `best` and early stopping watch: pass@1, or pass@1/DOMAIN")
    early_stop: Annotated[StopRule, STOP_RULES] | None = Field(
        None, description="when to stop before the last step: patience, target, or a rule of your own"
    )
    answers: Literal["all"] | Count = Field(
        "all", description="answers per domain that every evaluation writes to answers.jsonl: all, or so many; 0: none"
    )
    answers_mib: Positive = Field(
        64, le=1 << 20, description="MiB of answers.jsonl; beyond it answers are written without their texts"
    )
    plateau: Positive = Field(
        3, description="evaluations without a better metric that a coefficient's `until: plateau` waits for"
    )

    @model_validator(mode="after")
    def _something(self) -> Eval:
        if self.prompts and not self.greedy and not self.k:
            raise ValueError("greedy: false needs k: at least 1")
        return self


class Checkpoint(BaseModel):
    model_config = SETTINGS
    every: Count = Field(0, description="steps; the last step is always saved")
    keep: Positive = Field(2, description="how many step checkpoints stay, in addition to the best one")
    keep_every: Count = Field(0, description="checkpoints of steps divisible by this are kept forever; 0: none")
    background: bool = Field(True, description="copy the state to memory and write it while training continues")
    resume: Literal["prefill", "exact"] = Field(
        "prefill",
        description="unfinished rollouts: prefill their tokens and continue, or replay them one by one (bit-identical on a CPU)",
    )
    grace: float = Field(30, gt=0, le=604_800, description="seconds between SIGTERM and the end of the process")


class Store(BaseModel):
    """The rollout log: how soon tokens are durable, and what else is kept."""

    model_config = SETTINGS
    commit_ms: Positive = Field(50, le=60_000, description="tokens wait at most this long for the group commit")
    fsync: Literal["commit", "never"] = Field(
        "commit", description="never: safe when the process is killed, not when the power fails"
    )
    hidden: bool = Field(False, description="keep teachers' hidden states too (large); otherwise they are recomputed")
    retain: Count | None = Field(
        None,
        description="keep the tokens of at least this many steps before the oldest checkpoint; null: all tokens, forever",
    )


class Log(BaseModel):
    model_config = SETTINGS
    to: Annotated[list[Annotated[Any, Family("tracker")]], SHORT_FORMS["log.to"]] = Field(
        default_factory=list, max_length=100, description="trackers that get the metrics of every step"
    )
    project: Word = "opd"
    samples: Count = Field(2, le=10_000, description="sample completions per domain written to samples.jsonl")
    samples_every: Positive = 10
    overlap: Count = Field(
        0, le=1000, description="log the share of so many likeliest ids that student and teacher have in common; 0: no"
    )
    start_table: bool = Field(
        True, description="compare every teacher with the student on a few answers before the first step"
    )


class Hub(BaseModel):
    """Push the trained model to the Hugging Face hub when the run is done."""

    model_config = SETTINGS
    repo: str = Field(pattern=r"^[\w.-]{1,96}(/[\w.-]{1,96})?$", description="NAME or OWNER/NAME")
    private: bool = True


class Stage(BaseModel):
    """One stage with every default filled in, as the trainer reads it."""

    model_config = SETTINGS
    name: Word = "main"
    student: Annotated[Student, SHORT_FORMS["student"]]
    teachers: Annotated[dict[Word, AnyTeacher], SHORT_FORMS["teachers"]] = Field(default_factory=dict)
    pool: TeacherPool = TeacherPool()
    prompts: Annotated[list[Annotated[PromptSource, SOURCES]], SHORT_FORMS["prompts"]] = Field(min_length=1)
    select: Annotated[SelectionRule, Family("select", default="flat")] | None = Field(
        None, description="train only on domains that the evaluations of an earlier stage select: flat, score"
    )
    shares: Annotated[Shares, Family("shares", default=StaticShares.name)] = Field(
        StaticShares(), description="how prompts are divided among domains: static, or by tokens, length, gap"
    )
    curriculum: Annotated[Curriculum, Family("curriculum")] | None = Field(
        None, description="which prompts of a pass are taken, by what earlier passes showed: pass_rate, kl, overlap"
    )
    route: Word = Field(DOMAIN, description="the column of a prompt's row that says which teacher scores it")
    data: Data = Data()
    rollout: Rollouts = Rollouts()
    sampler: Annotated[SamplerKind, SAMPLERS] = BuiltInSampler()
    modules: dict[Word, AnyModule] = Field(
        default_factory=dict, max_length=100, description="name -> trainable module that terms use: a value head"
    )
    objective: Annotated[list[AnyTerm], SHORT_FORMS["objective"]] = Field(default_factory=usual_objective)
    rewards: AnyRewards = Rewards()
    train: Train = Train()
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    store: Store = Store()
    log: Annotated[Log, SHORT_FORMS["log"]] = Log()
    monitors: Annotated[Monitors, SHORT_FORMS["monitors"]] = Field(
        Monitors(), description="what is watched while it trains, and what an alarm does"
    )
    hub: Hub | None = None
    cluster: Cluster = Cluster()
    seed: int = Field(0, ge=0, lt=2**63)
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:[0-9]{1,3})?)$", description="auto | cpu | cuda | cuda:N")
    threads: Positive | None = Field(None, le=1024, description="CPU threads of torch; default: torch's own choice")

    @property
    def overlap(self) -> int:
        """How many of the likeliest ids of student and teacher are compared at each token; 0: none."""
        return (self.curriculum.compared if self.curriculum is not None else 0) or self.log.overlap

    @property
    def environments(self) -> list[Any]:
        """What answers between the student's turns, for each source of prompts that has something."""
        chosen = [source.environment or self.rollout.environment for source in self.prompts]
        return [environment for environment in chosen if environment is not None]

    @model_validator(mode="before")
    @classmethod
    def _older_precision(cls, raw: Any) -> Any:
        """Read `student.dtype` and `train.autocast`, which `train.precision` has replaced."""
        if not isinstance(raw, Mapping):
            return raw
        student, train = raw.get("student"), raw.get("train")
        dtype = student.get("dtype") if isinstance(student, Mapping) else None
        autocast = train.get("autocast") if isinstance(train, Mapping) else None
        misplaced = train is not None and not isinstance(train, Mapping)  # reported by the validation of `train`
        if misplaced or (dtype is None and autocast is None):
            return raw
        if dtype not in (None, "float32", "bfloat16") or autocast not in (None, True, False):
            raise ValueError(
                f"student.dtype {dtype!r} and train.autocast {autocast!r} are now train.precision: set that"
            )
        if autocast and dtype == "bfloat16":
            raise ValueError(
                "student.dtype bfloat16 with train.autocast: set train.precision to one of mixed and autocast"
            )
        rest = {key: value for key, value in (train or {}).items() if key != "autocast"}
        if rest.get("precision", "auto") != "auto":
            raise ValueError("train.precision replaces student.dtype and train.autocast: drop those")
        found = {**raw, "train": {**rest, "precision": "autocast" if autocast else dtype or "float32"}}
        if isinstance(student, Mapping):
            found["student"] = {key: value for key, value in student.items() if key != "dtype"}
        return found

    @model_validator(mode="after")
    def _plateau(self) -> Stage:
        moments = [moment for term in self.objective for moment in (term.coefficient.until, term.coefficient.after)]
        if "plateau" in moments and not (self.eval.every and self.eval.prompts):
            raise ValueError("a coefficient waits for a plateau of the evaluation: set eval.every and eval.prompts")
        if self.rollout.contrast and not self.uses_rewards:
            raise ValueError(
                "rollout.contrast drops groups by their rewards, but neither the objective nor a module or view uses rewards"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _merged_start(cls, raw: Any) -> Any:
        """A merge replaces a model. The merged model is named after the stage."""
        student = raw.get("student") if isinstance(raw, Mapping) else None
        if not isinstance(student, Mapping):
            return raw
        name = f"{MERGED}{raw.get('name') or cls.model_fields['name'].default}"
        given, merged = student.get("model"), student.get("merge") is not None
        if merged and given not in (None, name):
            raise ValueError(f"student: model {given!r} and merge are two starts: keep one")
        if merged and student.get("revision") is not None:
            raise ValueError("student.revision applies to one model, but merge has several: name directories")
        if not merged and isinstance(given, str) and given.startswith(MERGED):
            raise ValueError(f"student.model {given!r}: write what is merged: student: {{merge: {{models: [A, B]}}}}")
        return {**raw, "student": {**student, "model": name}} if merged else raw

    def with_defaults(self) -> Stage:
        """Add all monitors, and the correction that the objective needs for tokens from another engine or from older weights."""
        monitors = self.monitors.completed(growing=self.rollout.length_schedule is not None)
        stage = self.model_copy(update={"monitors": monitors})
        if (
            not (self.sampler.corrects or self.rollout.staleness or self.rollout.segment)
            or self.rollout.shown_to_student
        ):
            return stage
        return stage.model_copy(update={"objective": [term.corrected() for term in self.objective]})

    def inside(self, directory: Path) -> Stage:
        """The same in a run directory: rollouts and scores of `stage:NAME` are read from it."""
        prompts = [source.inside(directory) for source in self.prompts]
        teachers = {name: kind.inside(directory) for name, kind in self.teachers.items()}
        measured = self.eval.model_copy(update={"further": [source.inside(directory) for source in self.eval.further]})
        return self.model_copy(update={"prompts": prompts, "teachers": teachers, "eval": measured})

    @property
    def sampler_processes(self) -> tuple[int, int]:
        """The number of processes that sample next to the trainer, and the threads of each."""
        count = self.sampler.processes_alongside if self.rollout.staleness else 0
        return count, self.threads or max(1, (os.cpu_count() or 1) // 2 // max(1, count))

    @property
    def starts(self) -> list[str]:
        """The model that the student starts from, or the models that are merged."""
        return [self.student.model] if self.student.merge is None else self.student.merge.reads()

    @property
    def named_domains(self) -> list[str]:
        """Domains that its sources name."""
        return list(dict.fromkeys(source.domain for source in self.prompts if source.domain is not None))

    @property
    def keeps_hidden(self) -> bool:
        """Whether hidden states go into the store. A stage that only scores always keeps them."""
        return self.store.hidden or not self.train.learn

    @property
    def uses_rewards(self) -> bool:
        """Whether a term, a module, a view or a writer depends on rewards."""
        choices: list[Choice] = [*self.objective, *(kind.view for kind in self.teachers.values())]
        choices += [self.curriculum] if self.curriculum is not None else []
        wanted = self.rollout.demonstrations
        taken = self.rollout.takeover is not None and self.rollout.takeover.turn == "wrong"
        replaced = self.rollout.rescue is not None or taken or (wanted is not None and wanted.by is None)
        by_module = any(kind.reads_rewards and kind.learns for kind in self.modules.values())
        return replaced or by_module or any(choice.needs().rewards for choice in choices)

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        return check_name(value)

    @field_validator("modules")
    @classmethod
    def _modules(cls, value: dict[str, Any]) -> dict[str, Any]:
        return {check_name(name): kind for name, kind in value.items()}  # checkpoints have a folder for each


class Recipe(BaseModel):
    """A whole recipe: stages that run one after the other, each with its defaults filled in."""

    model_config = SETTINGS
    name: str
    stages: list[Stage] = Field(min_length=1, max_length=1000)
    plugins: Annotated[list[Address], SHORT_FORMS["plugins"]] = Field(
        default_factory=list, max_length=100, description="Python files or modules that define your own choices"
    )

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        return check_name(value)

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)
