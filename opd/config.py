"""The recipe: its schema, how it is read, and how the command line overrides it. No torch here.

A recipe is YAML. Every key exists once, is read once and does something. Unknown keys are refused with the
nearest known one named.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from opd.errors import RecipeError
from opd.overrides import apply_override, merge

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Dtype = Literal["float32", "bfloat16"]
SETTINGS = ConfigDict(extra="forbid", frozen=True)


class Lora(BaseModel):
    """Low-rank adapters through peft."""

    model_config = SETTINGS
    rank: Positive = 16
    alpha: float = Field(32, gt=0)
    dropout: Fraction = 0.0
    targets: str | list[str] = Field("all-linear", description="peft target modules; never the output head")


class Student(BaseModel):
    """The model that learns: a directory, a hub id, a .gguf file, `smol`, or `tiny/NAME`."""

    model_config = SETTINGS
    model: str
    revision: str | None = None
    dtype: Dtype = "float32"
    lora: Lora | None = None
    gradient_checkpointing: bool = False


class TeacherSpec(BaseModel):
    """A model that judges. It judges the domain it is named after, unless `domains` says otherwise."""

    model_config = SETTINGS
    model: str
    revision: str | None = None
    role: str = Field("teacher", description="terms ask for signals by role")
    domains: list[str] | None = Field(
        None, description="default: its own name, or every domain if it is alone in its role"
    )
    dtype: Dtype = "float32"
    batch_tokens: Positive = Field(8192, description="tokens scored in one forward pass")


class PromptSource(BaseModel):
    """Where prompts come from: `task:NAME`, `reasoning_gym:NAME`, a .jsonl or .parquet file, or a Hugging Face dataset."""

    model_config = SETTINGS
    source: str
    domain: str | None = Field(None, description="default: the row's own `domain` column, else the source's name")
    share: float = Field(1.0, gt=0, description="relative share of the prompts of a step")
    split: str = Field("train", description="split of a Hugging Face dataset")
    eval_source: str | None = Field(
        None, description="held-out prompts; default: the task's own held-out split, else the last rows"
    )
    limit: Positive | None = Field(None, description="use at most this many rows")
    options: dict[str, Any] = Field(default_factory=dict, description="arguments of a task or reasoning_gym generator")
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class Rollouts(BaseModel):
    """Who writes the tokens of a step, how many, and how they are drawn."""

    model_config = SETTINGS
    prompts: Positive = 64
    samples: Positive = Field(1, description="rollouts per prompt (the group)")
    max_new_tokens: Positive = 128
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: Count = Field(0, description="0: no limit")
    stop: list[str] = Field(default_factory=list, description="stop strings, beside the models' stop ids")
    data_share: Fraction = Field(
        0.0, description="share of prompts answered by the dataset's completion (GKD: 1 - lambda)"
    )
    teacher_share: Fraction = Field(0.0, description="share of prompts answered by the prompt's own teacher")
    max_prompt_tokens: Positive | None = Field(
        None, description="refuse longer prompts; default: what the context leaves"
    )

    @model_validator(mode="after")
    def _shares(self) -> Rollouts:
        if self.data_share + self.teacher_share > 1:
            raise ValueError("data_share + teacher_share is above 1")
        return self


class SamplerSpec(BaseModel):
    """The built-in engine. `null` means: chosen from the model and the device, and printed in the plan."""

    model_config = SETTINGS
    slots: Positive | None = Field(None, description="sequences decoded side by side")
    prefill_rows: Positive | None = Field(None, description="rows of one prefill call")
    prefill_chunk: Positive | None = Field(None, description="prompt tokens per prefill row")
    dtype: Dtype | None = Field(None, description="default: the student's")
    compile: bool = Field(False, description="torch.compile the decode step (GPU; about a minute at first use)")


class Term(BaseModel):
    """One summand of the objective."""

    model_config = SETTINGS
    form: Literal["direct", "policy_gradient", "cross_entropy"] = "direct"
    divergence: Literal[
        "reverse_kl", "forward_kl", "jsd", "skew_kl", "skew_reverse_kl", "alpha", "tvd", "hellinger", "acceptance"
    ] = Field("reverse_kl", description="of a direct term")
    beta: float = Field(0.5, ge=0, le=1, description="jsd: 0 is forward KL, 1 is reverse KL")
    alpha: float | None = Field(
        None,
        ge=-2,
        le=3,
        description="skew_kl, skew_reverse_kl (share of the first argument, default 0.1) and alpha (default 0.5)",
    )
    support: Literal["full"] = Field("full", description="of a direct term: the exact full vocabulary")
    temperature: float = Field(1.0, gt=0, description="of the divergence; sampling has its own")
    role: str = Field("teacher", description="whose signal")
    on: list[Literal["student", "teacher", "data"]] | None = Field(
        None,
        description="authors of the tokens trained on; default: all, but student for policy_gradient, data and teacher for cross_entropy",
    )
    coefficient: float = 1.0
    aggregate: Literal["token_mean", "sequence_mean", "prompt_mean", "constant"] = "token_mean"
    denominator: float = Field(1.0, gt=0, description="of aggregate: constant")

    @model_validator(mode="after")
    def _alpha(self) -> Term:
        if self.alpha is not None and self.divergence not in ("skew_kl", "skew_reverse_kl", "alpha"):
            raise ValueError(f"alpha belongs to skew_kl, skew_reverse_kl and alpha, not to {self.divergence}")
        if self.alpha is not None and self.divergence != "alpha" and not 0 <= self.alpha < 1:
            raise ValueError(f"alpha of {self.divergence} must be at least 0 and below 1")
        return self

    @property
    def parameters(self) -> dict[str, Any]:
        """Those of the divergence, by the names `opd.objectives.divergence` gives them."""
        if self.divergence == "jsd":
            return {"beta": self.beta}
        return {} if self.alpha is None else {"alpha": self.alpha}

    @property
    def authors(self) -> tuple[str, ...]:
        if self.on is not None:
            return tuple(self.on)
        return {
            "direct": ("student", "teacher", "data"),
            "policy_gradient": ("student",),
            "cross_entropy": ("data", "teacher"),
        }[self.form]


class Train(BaseModel):
    model_config = SETTINGS
    steps: Positive = 100
    lr: float = Field(1e-4, gt=0)
    warmup: Count = Field(0, description="steps")
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    clip: float | None = Field(1.0, gt=0, description="largest gradient norm; null: no clipping")
    micro_tokens: Positive = Field(4096, description="token budget of one micro-batch; lower it when memory runs out")
    autocast: bool = Field(False, description="bf16 autocast of the student's forward pass")


class EarlyStop(BaseModel):
    model_config = SETTINGS
    patience: Positive = Field(3, description="evaluations without a better metric")


class Eval(BaseModel):
    """pass@1 and pass@k on held-out prompts, before, after and every `every` steps."""

    model_config = SETTINGS
    every: Count = Field(0, description="steps; 0: only before and after")
    prompts: Count = Field(200, description="held-out prompts per domain; 0: no evaluation")
    greedy: bool = True
    k: Count = Field(0, description="samples per prompt for pass@1 (sampled) and pass@k; 0: greedy only")
    temperature: float = Field(1.0, gt=0, description="of the sampled evaluation")
    max_new_tokens: Positive | None = Field(None, description="default: rollout.max_new_tokens")
    teachers: bool = Field(True, description="evaluate the teachers too, before training")
    weight_average: bool = Field(False, description="evaluate the plain average of the teachers' weights")
    metric: str = Field("pass@1", description="what `best` and early stopping watch: pass@1, or pass@1/DOMAIN")
    early_stop: EarlyStop | None = None

    @model_validator(mode="after")
    def _something(self) -> Eval:
        if self.prompts and not self.greedy and not self.k:
            raise ValueError("greedy: false needs k: at least 1")
        return self


class Checkpoint(BaseModel):
    model_config = SETTINGS
    every: Count = Field(0, description="steps; the last step is always saved")
    keep: Positive = Field(2, description="how many step checkpoints stay; the best one stays beside them")


class Log(BaseModel):
    model_config = SETTINGS
    to: list[Literal["tensorboard", "wandb", "trackio"]] = Field(default_factory=list)
    project: str = "opd"
    samples: Count = Field(2, description="sample completions per domain written to samples.jsonl")
    samples_every: Positive = 10


class Hub(BaseModel):
    """Push the trained model to the Hugging Face hub when the run is done."""

    model_config = SETTINGS
    repo: str
    private: bool = True


class Stage(BaseModel):
    """One stage with every default filled in: what the trainer reads."""

    model_config = SETTINGS
    name: str = "main"
    student: Student
    teachers: dict[str, TeacherSpec] = Field(default_factory=dict)
    prompts: list[PromptSource] = Field(min_length=1)
    rollout: Rollouts = Rollouts()
    sampler: SamplerSpec = SamplerSpec()
    objective: list[Term] = Field(default_factory=lambda: [Term()], min_length=1)
    train: Train = Train()
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()
    hub: Hub | None = None
    seed: int = 0
    device: str = Field("auto", description="auto | cpu | cuda | cuda:N")
    threads: Positive | None = Field(None, description="CPU threads of torch; default: torch's own choice")

    @field_validator("student", mode="before")
    @classmethod
    def _student(cls, value: Any) -> Any:
        return {"model": value} if isinstance(value, str) else value

    @field_validator("teachers", mode="before")
    @classmethod
    def _teachers(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: {"model": spec} if isinstance(spec, str) else spec for name, spec in value.items()}
        return value

    @field_validator("prompts", mode="before")
    @classmethod
    def _prompts(cls, value: Any) -> Any:
        rows = value if isinstance(value, list) else [value]
        return [{"source": row} if isinstance(row, str) else row for row in rows]

    @field_validator("objective", mode="before")
    @classmethod
    def _objective(cls, value: Any) -> Any:
        return [value] if isinstance(value, Mapping) else value

    @field_validator("log", mode="before")
    @classmethod
    def _log(cls, value: Any) -> Any:
        return {"to": value if isinstance(value, list) else [value]} if isinstance(value, (str, list)) else value


class Recipe(BaseModel):
    """A whole recipe: stages that run one after the other, each with its defaults filled in."""

    model_config = SETTINGS
    name: str
    stages: list[Stage] = Field(min_length=1)

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


STAGE_PREFIX = "stage:"  # `student: stage:NAME` is the model that stage NAME saved


def load_recipe(recipe: str | Path | Mapping[str, Any], overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe from a file, a shipped name or a mapping, apply `key=value` overrides, and validate it."""
    if isinstance(recipe, Mapping):
        name, raw = str(recipe.get("name", "run")), dict(recipe)
    else:
        path = find_recipe(str(recipe))
        name, raw = path.stem, parse_yaml(path.read_text(encoding="utf-8"), str(path))
    for override in overrides:
        apply_override(raw, override)
    return resolve(raw, name)


def resolve(raw: Mapping[str, Any], name: str) -> Recipe:
    """Spread top-level defaults over the stages. A later stage without a student of its own continues the one before."""
    defaults = {key: value for key, value in raw.items() if key not in ("stages", "name")}
    overrides = raw.get("stages") or [{}]
    if not isinstance(overrides, list) or not all(isinstance(stage, Mapping) for stage in overrides):
        raise RecipeError(
            f"stages: expected a list of mappings, got {overrides!r}. Write `stages: [{{name: warm-up, …}}, …]`."
        )
    if "stages" in raw and any("name" not in stage for stage in overrides):
        raise RecipeError("stages: every stage needs a name. Write `stages: [{name: warm-up, train: {steps: 50}}, …]`.")
    stages: list[Stage] = []
    for override in overrides:
        merged = merge(defaults, override)
        if stages and "student" not in override:
            merged["student"] = merge(
                _mapping(merged.get("student"), "model"), {"model": STAGE_PREFIX + stages[-1].name}
            )
        where = f"stages.{override['name']}." if "stages" in raw else ""
        stages.append(validate(merged, where))
    names = [stage.name for stage in stages]
    if len(set(names)) < len(names):
        raise RecipeError(f"stages: names must differ, got {', '.join(names)}.")
    return Recipe(name=str(raw.get("name", name)), stages=stages)


def validate(raw: Mapping[str, Any], where: str = "") -> Stage:
    try:
        return Stage.model_validate(raw)
    except ValidationError as error:
        lines = [_explain(detail, where) for detail in error.errors(include_url=False)]
        raise RecipeError("\n".join(lines)) from None


def _explain(detail: Any, where: str) -> str:
    path = where + ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        *parents, key = detail["loc"]
        known = _fields_at(parents)
        near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
        hint = f"Did you mean {near[0]!r}?" if near else f"Known keys here: {', '.join(known)}."
        return f"{path}: unknown key. {hint}"
    if detail["type"] == "missing":
        return f"{path}: missing, and the recipe needs it."
    message = detail["msg"].removeprefix("Value error, ")
    return f"{path}: {message[0].lower() + message[1:]}; got {detail['input']!r}."


def _fields_at(location: Iterable[Any]) -> list[str]:
    """Field names of the settings model at a location such as ("prompts", 0)."""
    schema = Stage.model_json_schema()
    node: Mapping[str, Any] = schema
    for part in location:
        if isinstance(part, int):
            node = node.get("items", {})
        elif part in node.get("properties", {}):
            node = node["properties"][part]
        else:
            node = node.get("additionalProperties", {})
        options = [option for option in node.get("anyOf", []) if "$ref" in option]
        reference = node.get("$ref") or (options[0]["$ref"] if options else None)
        if reference:
            node = schema["$defs"][reference.rsplit("/", 1)[1]]
    return list(node.get("properties", {}))


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    try:
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise RecipeError(
            f"{where}: a recipe is a mapping of keys, got {type(raw).__name__}. See `opd recipes show quickstart`."
        )
    return raw


def _mapping(value: Any, key: str) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {key: value}


# Shipped recipes


def shipped_recipes() -> dict[str, Path]:
    """Name -> file of every recipe in the package: `quickstart`, `methods/gkd`, …"""
    root = Path(str(resources.files("opd") / "recipes"))
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in sorted(root.rglob("*.yaml"))}


def find_recipe(name: str) -> Path:
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if path.is_file():
            return path
        raise RecipeError(f"recipe {name!r}: no such file. `opd recipes list` names the shipped ones.")
    shipped = shipped_recipes()
    if name in shipped:
        return shipped[name]
    near = difflib.get_close_matches(name, shipped, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise RecipeError(
        f"recipe {name!r}: neither a .yaml file nor a shipped recipe.{hint} `opd recipes list` shows all."
    )


def recipe_schema() -> dict[str, Any]:
    """JSON schema of a recipe file, for editors: a stage's keys, plus `name` and `stages` (partial stages)."""
    schema = Stage.model_json_schema()
    properties = schema["properties"]
    short = {"type": "string"}
    properties["student"] = {"anyOf": [short, properties["student"]]}
    properties["teachers"]["additionalProperties"] = {"anyOf": [short, properties["teachers"]["additionalProperties"]]}
    properties["prompts"]["items"] = {"anyOf": [short, properties["prompts"]["items"]]}
    term = properties["objective"]["items"]
    properties["objective"] = {"anyOf": [term, {"type": "array", "items": term}]}
    properties["log"] = {"anyOf": [short, {"type": "array", "items": short}, properties["log"]]}
    stage = {"type": "object", "additionalProperties": False, "properties": dict(properties), "required": ["name"]}
    schema["properties"] = {**properties, "name": {"type": "string"}, "stages": {"type": "array", "items": stage}}
    schema["title"] = "opd recipe"
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["required"] = ["prompts"]
    return json.loads(json.dumps(schema))
