"""Choices of a recipe: one class each, with its settings, needs, checks and arithmetic. No torch here.

A `Choice` is such a class. A `Family` is the set of choices for one place of a recipe (`gate:`, `surrogate:`, …). Families find
their classes by name in `CHOICES`, so a new choice is a class and a line there, and no room imports a higher one.
"""

from __future__ import annotations

import difflib
import importlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from opd.common.errors import RecipeError
from opd.common.peer_keys import translate
from opd.common.short_forms import TEXTS, ShortForm
from opd.records import SignalKind

MANY = 1_000_000_000  # no count in a recipe is larger


def _bounded(value: int) -> int:
    """A validator, because a second `le` would replace the one of a field."""
    if value > MANY:
        raise ValueError(f"expected at most {MANY}")
    return value


Positive = Annotated[int, Field(ge=1), AfterValidator(_bounded)]
Count = Annotated[int, Field(ge=0), AfterValidator(_bounded)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Dtype = Literal["float32", "bfloat16"]
Word = Annotated[str, Field(min_length=1, max_length=200)]
Address = Annotated[
    str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00-\x1f\x7f]*$")
]  # the name or path of a model, or a source of prompts
SETTINGS = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def changed(settings: BaseModel) -> set[str]:
    """Keys whose values differ from their defaults. A resolved recipe writes all keys."""
    fields = type(settings).model_fields.items()
    return {name for name, field in fields if getattr(settings, name) != field.get_default(call_default_factory=True)}


def validate_settings(what: str, kind: Any, given: Any) -> Any:
    """Read settings from a Python program as a recipe would be read."""
    try:
        return TypeAdapter(kind).validate_python(given)
    except ValidationError as error:
        lines = []
        for detail in error.errors(include_url=False):
            place = ".".join([what, *map(str, detail["loc"])])
            message = detail["msg"].removeprefix("Value error, ")
            if detail["type"] == "extra_forbidden":
                alone = isinstance(kind, type) and issubclass(kind, BaseModel) and len(detail["loc"]) == 1
                known = kind.model_fields if alone else ()
                hint = key_hint([what, *map(str, detail["loc"])], list(known))
                message = f"unknown key; {hint}" if hint else "unknown key"
            lines.append(f"{place}: {message}; got {str(detail['input'])[:200]!r}.")
        raise RecipeError("\n".join(lines)) from None


@dataclass(frozen=True)
class Needs:
    """What a choice needs to know about a batch."""

    signals: tuple[tuple[str, SignalKind], ...] = ()  # (role, kind) that teachers are asked for
    # measured on the student before the updates, in the first pass
    student: frozenset[tuple[str | int, ...]] = frozenset()
    rewards: bool = False
    topk: tuple[
        tuple[str, int], ...
    ] = ()  # (role, k): hidden states, or the k likeliest ids if the role has no hidden states
    modules: tuple[str, ...] = ()  # heads on the student's hidden states, by the names that the recipe gives them
    scores: tuple[str, ...] = ()  # modules with their own passes, of which it reads the scores

    def __or__(self, other: Needs) -> Needs:
        signals = tuple(dict.fromkeys((*self.signals, *other.signals)))
        topk = tuple(dict.fromkeys((*self.topk, *other.topk)))
        modules = tuple(dict.fromkeys((*self.modules, *other.modules)))
        scores = tuple(dict.fromkeys((*self.scores, *other.scores)))
        return Needs(signals, self.student | other.student, self.rewards or other.rewards, topk, modules, scores)

    @cached_property
    def possible(self) -> tuple[tuple[str, SignalKind], ...]:
        """Every signal that may be asked for, with both alternatives of `topk`."""
        kinds: tuple[SignalKind, ...] = ("hidden", "topk")
        return tuple(dict.fromkeys((*self.signals, *((role, kind) for role, _ in self.topk for kind in kinds))))

    def chosen(self, with_hidden: Callable[[str], bool]) -> tuple[tuple[str, SignalKind], ...]:
        """The signals to ask for. `with_hidden` says whether a role has hidden states, which are better than the likeliest ids."""
        either: list[tuple[str, SignalKind]] = [
            (role, "hidden" if with_hidden(role) else "topk") for role, _ in self.topk
        ]
        return tuple(dict.fromkeys((*self.signals, *either)))


@dataclass(frozen=True)
class StageView:
    """What a choice sees of its stage when it checks for mistakes. `term`: the term that it is a part of, if any."""

    rollout: Any  # the keys of `rollout`, as in `opd.rollouts.settings`
    train: Any  # the keys of `train`; None for a teacher that a program opens
    terms: Sequence[Any]
    roles: frozenset[str] = frozenset({"teacher"})  # of the recipe's teachers
    term: Any = None
    device: str = "auto"
    teachers_evaluated: bool = True
    lora: bool = False  # whether the student has adapters
    sources: int = 1  # of prompts
    evaluates: bool = False  # during training
    resume: str = "prefill"  # how unfinished answers resume
    measures_loss: bool = False  # whether evaluations measure the loss on worked answers
    plain_text: bool = False  # whether a source gives plain text
    retain: int | None = None  # steps whose tokens stay in the store; None: all
    environments: Sequence[Any] = ()  # of the sources of prompts

    @classmethod
    def of(cls, stage: Any) -> StageView:
        roles = frozenset(teacher.role for teacher in stage.teachers.values())
        evaluated = bool(stage.eval.prompts and stage.eval.teachers)
        lora = stage.student.lora is not None
        return cls(
            stage.rollout,
            stage.train,
            stage.objective,
            roles,
            device=stage.device,
            teachers_evaluated=evaluated,
            lora=lora,
            sources=len(stage.prompts),
            evaluates=bool(stage.eval.every and stage.eval.prompts),
            resume=stage.checkpoint.resume,
            measures_loss=stage.eval.loss,
            plain_text=any(source.gives_plain_text for source in stage.prompts),
            retain=stage.store.retain,
            environments=stage.environments,
        )


class Choice(BaseModel):
    """One option of a recipe.

    Subclasses add fields, which are its settings, and methods, which are what it does.
    """

    model_config = SETTINGS
    family: ClassVar[str]
    name: ClassVar[str]
    key: ClassVar[str] = "kind"  # the recipe's key that names the choice
    by_default: ClassVar[bool] = False  # used if the key is missing
    flat: ClassVar[tuple[str, ...]] = ()  # fields whose settings are written next to them: `divergence: jsd, beta: 0.5`

    def needs(self) -> Needs:
        return Needs()

    def check(self, view: StageView) -> Iterable[str]:
        """Every mistake that can be seen in the recipe: what is wrong, the value given, what to do."""
        return ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "refuse" in vars(cls):
            warnings.warn(f"{cls.__name__}.refuse is now `check`: rename it.", FutureWarning, stacklevel=2)
            cls.check = cls.refuse  # type: ignore[method-assign]

    def refuse(self, view: StageView) -> Iterable[str]:
        """The former name of `check`, which the `refuse` of an old plugin calls with `super()`."""
        classes = type(self).__mro__
        below = max(place for place, cls in enumerate(classes) if "refuse" in vars(cls) and cls is not Choice)
        return next(vars(cls)["check"] for cls in classes[below + 1 :] if "check" in vars(cls))(self, view)

    def heading(self) -> dict[str, str]:
        """The keys of a recipe that select this choice."""
        return {self.key: self.name}

    @model_validator(mode="before")
    @classmethod
    def _fold(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        settings = dict(value)
        for field in cls.flat:
            family_of(cls, field).fold(settings, field, cls)
        return settings

    @model_serializer(mode="wrap")
    def _dump(self, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        """The choice's name, then all settings under their flat keys. `Family.read` reads it."""
        values: dict[str, Any] = dict(self.heading())
        for name, value in handler(self).items():
            if name in self.flat:
                part = dict(value)
                values[name] = part.pop(getattr(self, name).key)
                values |= part
            else:
                values[name] = value
        return values

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        reference = handler(schema)
        node = handler.resolve_ref_schema(reference)
        properties = node.get("properties", {})
        for field in cls.flat:
            options = family_of(cls, field).classes()
            spelled_out = [one for one in properties[field]["anyOf"] if "enum" not in one]
            properties[field] = {
                "anyOf": [{"enum": list(options)}, *spelled_out],
                **{key: properties[field][key] for key in ("description",) if key in properties[field]},
            }
            for option in options.values():
                for key, part in handler.resolve_ref_schema(schema_of(option, handler))["properties"].items():
                    if key != option.key:
                        other = properties.get(key, part)
                        properties[key] = part if part == other else {"anyOf": [other, part]}
        node["properties"] = {cls.key: {"const": cls.name}, **properties}
        node["required"] = [*node.get("required", []), *([] if cls.by_default else [cls.key])]
        return reference


class Family(ShortForm):
    """A place in a recipe and its choices. `gate: list[Annotated[Gate, Family("gate")]]`.

    A recipe writes `{kind: entropy, share: 0.3}`, or `entropy` for short.
    """

    def __init__(self, name: str, *, key: str = "kind", default: str | None = None) -> None:
        self.name, self.key, self.default = name, key, default
        self.word = name.replace("_", " ")  # in messages
        self.keeps = (
            name in TEXTS and TEXTS[name].keeps
        )  # whether a text in a stage keeps the other settings of the defaults

    @property
    def expected(self) -> str:
        """What may be written in its place, in words."""
        return f"the name of a {self.word}, or a mapping with `{self.key}`"

    def names(self) -> list[str]:
        return names(self.name)

    def classes(self) -> dict[str, type[Choice]]:
        return {name: find(self.name, name) for name in self.names()}

    def find(self, name: object) -> type[Choice]:
        if not isinstance(name, str) or name not in self.names():
            raise ValueError(f"unknown {self.word} {name!r}; {nearest(str(name), self.names())}")
        return find(self.name, name)

    def read(self, value: Any) -> Choice:
        """Read a name, or a mapping with a name."""
        if isinstance(value, Choice):
            if value.family != self.name:
                raise ValueError(f"{value.name} is a {value.family}, not a {self.name}")
            return value
        value = self.long(value)
        if not isinstance(value, Mapping):
            raise ValueError(f"expected {self.expected}")
        settings = dict(value)
        chosen = self.choose(settings)
        self._drop_idle(settings, chosen)
        try:
            return chosen.model_validate(settings)
        except ValidationError as error:
            raise _without_nesting(error, chosen) from None

    def long(self, value: Any) -> Any:
        """The mapping that a text is short for: the name of a choice, or what `TEXTS` says of the family."""
        value = TEXTS[self.name].long(value) if self.name in TEXTS else value
        return {self.key: value} if isinstance(value, str) else value

    def named(self, settings: Mapping[str, Any]) -> Any:
        return settings.get(self.key)  # None: not given

    def choose(self, settings: dict[str, Any]) -> type[Choice]:
        """The class that the settings name. The naming key is removed from them."""
        named = settings.pop(self.key, None)
        if named is None and self.default is None:
            raise ValueError(f"`{self.key}` is missing: which {self.word}? Known: {', '.join(self.names())}")
        return self.find(self.default if named is None else named)

    def fold(self, settings: dict[str, Any], field: str, parent: type[Choice]) -> None:
        """Collect the settings that are written next to a choice's name. A missing setting, or `null`, is the default."""
        given = settings.get(field, self.default)
        named = given.get(self.key, self.default) if isinstance(given, Mapping) else given
        if isinstance(named, str):
            self._require_own_keys(self.find(named), parent)
        if not isinstance(given, str):
            return
        chosen = self.find(given)
        keys = [key for key in settings if key in chosen.model_fields and key not in parent.model_fields]
        chosen_settings = {key: settings.pop(key) for key in keys}
        settings[field] = {
            self.key: given,
            **{key: value for key, value in chosen_settings.items() if value is not None},
        }
        rest = {
            key: settings.pop(key) for key in list(settings) if key not in parent.model_fields and self._owners(key)
        }
        self._drop_idle(rest, chosen)
        settings |= rest

    def _require_own_keys(self, chosen: type[Choice], parent: type[Choice]) -> None:
        """The settings of a choice are written next to those of its parent, so their names must differ."""
        taken = sorted(chosen.model_fields.keys() & parent.model_fields.keys())
        if taken:
            of = f"{parent.family} {parent.name}"
            raise ValueError(f"{self.name} {chosen.name}: its setting {taken[0]!r} is also one of {of}. Rename it.")

    def _drop_idle(self, settings: dict[str, Any], chosen: type[Choice]) -> None:
        """A key of other choices of the family is a mistake here, unless it has its default value."""
        for key in [key for key in settings if key not in keys_of(chosen)]:
            owners = self._owners(key)
            if not owners:
                continue
            if not any(_is_default(owner, key, settings[key]) for owner in owners):
                names = " and ".join(owner.name for owner in owners)
                raise ValueError(f"{key} belongs to {self.word} {names}, not to {chosen.name}")
            del settings[key]

    def _owners(self, key: str) -> list[type[Choice]]:
        return [option for option in self.classes().values() if key in keys_of(option)]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self.read, serialization=core_schema.plain_serializer_function_ser_schema(_dumped, info_arg=True)
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        options = self.classes()
        references = {name: schema_of(option, handler) for name, option in options.items()}
        text = TEXTS.get(self.name)
        short = [name for name, option in options.items() if not _required(option)] if not text or text.pattern else []
        named = [{"enum": short}] if short else []
        return {"anyOf": [*named, *([text.text] if text else []), *references.values()]}


def schema_of(model: type[BaseModel], handler: Any) -> dict[str, Any]:
    """A reference to the model's JSON schema, which is added to the definitions."""
    return handler.generate_json_schema.generate_inner(model.__pydantic_core_schema__)


def _dumped(choice: Choice, info: SerializationInfo) -> dict[str, Any]:
    return choice.model_dump(
        mode="json" if info.mode_is_json() else "python",
        exclude_defaults=info.exclude_defaults,
        exclude_unset=info.exclude_unset,
        exclude_none=info.exclude_none,
    )


def nearest(name: str, known: Sequence[str]) -> str:
    """A hint: the most similar known name, or all of them."""
    near = difflib.get_close_matches(name[:100], known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"


def key_hint(path: Sequence[str], known: Sequence[str]) -> str:
    """A hint for an unknown key: its name here if another framework has it, else the most similar known key."""
    return translate(path) or (nearest(path[-1], known) if known else "")


def family_of(model: type[BaseModel], field: str) -> Family:
    return next(mark for mark in model.model_fields[field].metadata if isinstance(mark, Family))


def keys_of(model: type[Choice]) -> set[str]:
    """Every key that a recipe may write next to the choice's name."""
    folded = [option.model_fields for field in model.flat for option in family_of(model, field).classes().values()]
    return {*model.model_fields, *(key for fields in folded for key in fields)}


def _required(model: type[BaseModel]) -> list[str]:
    return [name for name, field in model.model_fields.items() if field.is_required()]


def _is_default(model: type[Choice], key: str, value: Any) -> bool:
    """Whether a value is the model's default. `null` asks for the default."""
    if value is None:
        return True
    if key not in model.model_fields:
        options = [option for field in model.flat for option in family_of(model, field).classes().values()]
        return any(key in option.model_fields and _is_default(option, key, value) for option in options)
    default = model.model_fields[key].get_default(call_default_factory=True)
    if value == default or not isinstance(default, BaseModel):
        return bool(value == default)
    try:
        return bool(getattr(model.model_validate({key: value}), key) == default)
    except ValidationError:
        return False


def _without_nesting(error: ValidationError, chosen: type[Choice]) -> ValidationError:
    """The same mistakes, located where the recipe has them, with a hint for every unknown key."""
    lines: list[InitErrorDetails] = []
    for detail in error.errors(include_url=False):
        place = detail["loc"]
        if len(place) > 1 and place[0] in chosen.flat:
            place = place[1:]
        kind: str | PydanticCustomError = detail["type"]
        context = detail.get("ctx", {})
        if kind == "extra_forbidden":
            hint = key_hint([str(part) for part in place], sorted(_keys_at(chosen, place[:-1])))
            kind = PydanticCustomError("unknown_key", "unknown key; {hint}", {"hint": hint})
        elif kind == "unknown_key":
            kind = PydanticCustomError("unknown_key", "unknown key; {hint}", context)
        lines.append(InitErrorDetails(type=kind, loc=place, input=detail["input"], ctx=context))
    return ValidationError.from_exception_data(error.title, lines)


def _keys_at(chosen: type[BaseModel], place: Sequence[str | int]) -> set[str]:
    """Known keys at a place below a choice, such as ("coefficient",)."""
    model: type[BaseModel] = chosen
    for part in place:
        field = model.model_fields.get(str(part))
        if field is not None:
            inner = [kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type)]
            model = next((kind for kind in inner if issubclass(kind, BaseModel)), model)
    return keys_of(model) if issubclass(model, Choice) else set(model.model_fields)


# All choices, by family and name. A new one is a class and a line here; a plugin calls `register`. Strings, so imports are lazy.
CHOICES: dict[str, str] = {
    "form.direct": "opd.objective.term:Direct",
    "form.policy_gradient": "opd.objective.policy_gradient:PolicyGradient",
    "form.candidates": "opd.objective.term:Candidates",
    "form.hpd": "opd.objective.term:HPD",
    "form.uld": "opd.objective.term:ULD",
    "form.gold": "opd.objective.term:GOLD",
    "form.k2": "opd.objective.term:K2",
    "form.cross_entropy": "opd.objective.term:CrossEntropy",
    "form.representation": "opd.objective.hidden_states:Representation",
    "form.dskd": "opd.objective.hidden_states:DualSpace",
    "form.value": "opd.objective.policy_gradient:ValueLoss",
    "form.pairwise": "opd.objective.term:Pairwise",
    "divergence.reverse_kl": "opd.divergences.kinds:ReverseKL",
    "divergence.forward_kl": "opd.divergences.kinds:ForwardKL",
    "divergence.jsd": "opd.divergences.kinds:JSD",
    "divergence.skew_kl": "opd.divergences.kinds:SkewKL",
    "divergence.skew_reverse_kl": "opd.divergences.kinds:SkewReverseKL",
    "divergence.alpha": "opd.divergences.kinds:Alpha",
    "divergence.tvd": "opd.divergences.kinds:TVD",
    "divergence.hellinger": "opd.divergences.kinds:Hellinger",
    "divergence.acceptance": "opd.divergences.kinds:Acceptance",
    "support.full": "opd.divergences.kinds:Full",
    "support.topk": "opd.divergences.kinds:TopIds",
    "advantage.outcome": "opd.objective.advantages:OutcomeAdvantage",
    "advantage.teacher": "opd.objective.advantages:TeacherAdvantage",
    "advantage.reference": "opd.objective.advantages:ReferenceAdvantage",
    "advantage.fixed": "opd.objective.advantages:FixedAdvantage",
    "advantage.ketchup": "opd.objective.advantages:TeacherQ",
    "advantage.magnitude": "opd.objective.advantages:MagnitudeAdvantage",
    "advantage.anchor_rank": "opd.objective.advantages:AnchorRank",
    "advantage.score": "opd.objective.advantages:ScoreAdvantage",
    "advantage.turns": "opd.objective.advantages:TurnAdvantage",
    "advantage.probing": "opd.objective.advantages:ProbingAdvantage",
    "advantage.gae": "opd.objective.policy_gradient:GeneralisedAdvantage",
    "surrogate.importance_sampling": "opd.objective.policy_gradient:ImportanceSampling",
    "surrogate.ppo": "opd.objective.policy_gradient:PPO",
    "surrogate.cispo": "opd.objective.policy_gradient:CISPO",
    "surrogate.shaped": "opd.objective.policy_gradient:Shaped",
    "surrogate.gspo": "opd.objective.policy_gradient:GSPO",
    "surrogate.trrd": "opd.objective.policy_gradient:TRRD",
    "preference.dpo": "opd.objective.term:DPO",
    "preference.ipo": "opd.objective.term:IPO",
    "preference.orpo": "opd.objective.term:ORPO",
    "correction.icepop": "opd.objective.corrections:IcePop",
    "correction.tis": "opd.objective.corrections:TIS",
    "correction.mis": "opd.objective.corrections:MIS",
    "correction.prefix": "opd.objective.corrections:Prefix",
    "correction.none": "opd.objective.corrections:VetoOnly",
    "writer.student": "opd.rollouts.writers:StudentWriter",
    "writer.mixed": "opd.rollouts.writers:MixedWriter",
    "writer.teacher": "opd.rollouts.writers:TeacherWriter",
    "writer.shown": "opd.rollouts.writers:ShownWriter",
    "writer.data": "opd.rollouts.writers:DataWriter",
    "writer.oracle": "opd.rollouts.writers:OracleWriter",
    "writer.rejected": "opd.rollouts.writers:RejectedWriter",
    "writer.replay": "opd.rollouts.writers:ReplayWriter",
    "share_schedule.line": "opd.rollouts.pace:LineSchedule",
    "share_schedule.validation_loss": "opd.rollouts.pace:LossSchedule",
    "length_schedule.line": "opd.rollouts.pace:LineGrowth",
    "length_schedule.matched": "opd.rollouts.pace:MatchedGrowth",
    "environment.agent": "opd.environments.agent:AgentEnvironment",
    "environment.verifiers": "opd.environments.verifiers:VerifiersEnvironment",
    "environment.calculator": "opd.environments.calculator:Calculator",
    "environment.dialogue": "opd.environments.dialogue:ScriptedDialogue",
    "environment.grid": "opd.environments.grid:Grid",
    "environment.repair": "opd.environments.repair:Repair",
    "environment.search": "opd.environments.search:Search",
    "teacher.cached": "opd.teachers.cached:CachedTeacher",
    "teacher.frozen": "opd.teachers.kinds:FrozenTeacher",
    "teacher.adapter": "opd.teachers.kinds:AdapterTeacher",
    "teacher.self": "opd.teachers.kinds:SelfTeacher",
    "teacher.base": "opd.teachers.kinds:BaseTeacher",
    "teacher.ema": "opd.teachers.kinds:EmaTeacher",
    "teacher.refresh": "opd.teachers.kinds:RefreshTeacher",
    "teacher.live": "opd.teachers.kinds:LiveTeacher",
    "teacher.served": "opd.teachers.served:ServedTeacher",
    "teacher.mixture": "opd.teachers.mixture:MixtureTeacher",
    "teacher.extrapolation": "opd.teachers.mixture:ExtrapolationTeacher",
    "teacher.vllm": "opd.teachers.other_servers:VllmTeacher",
    "teacher.sglang": "opd.teachers.other_servers:SglangTeacher",
    "teacher.openai": "opd.teachers.other_servers:OpenAITeacher",
    "view.same": "opd.teachers.views:SameView",
    "view.instruction": "opd.teachers.views:InstructionView",
    "view.template": "opd.teachers.views:TemplateView",
    "view.context": "opd.teachers.views:ContextView",
    "view.bytes": "opd.teachers.views:BytesView",
    "view.sibling": "opd.teachers.views:SiblingView",
    "view.feedback": "opd.teachers.views:FeedbackView",
    "view.revision": "opd.teachers.views:RevisionView",
    "view.turns": "opd.teachers.views:TurnsView",
    "stop_rule.patience": "opd.objective.stopping:Patience",
    "stop_rule.target": "opd.objective.stopping:Target",
    "shares.static": "opd.data.stream:StaticShares",
    "shares.tokens": "opd.data.stream:TokenShares",
    "shares.length": "opd.data.stream:LengthShares",
    "shares.gap": "opd.data.stream:GapShares",
    "curriculum.pass_rate": "opd.data.stream:PassRate",
    "curriculum.kl": "opd.data.stream:TeacherDistance",
    "curriculum.overlap": "opd.data.stream:TopOverlap",
    "select.flat": "opd.data.stream:Flattened",
    "select.score": "opd.data.stream:ScoreBetween",
    "module.head": "opd.models.modules:ValueHead",
    "module.projectors": "opd.models.modules:Projectors",
    "module.reward_model": "opd.models.modules:RewardModel",
    "module.discriminator": "opd.models.modules:Discriminator",
    "optimiser.adamw": "opd.models.optimisers:AdamW",
    "optimiser.muon": "opd.models.optimisers:Muon",
    "optimiser.adamw8bit": "opd.models.optimisers:AdamW8bit",
    "merge.average": "opd.models.merging:Average",
    "merge.task_arithmetic": "opd.models.merging:TaskArithmetic",
    "merge.ties": "opd.models.merging:Ties",
    "merge.stack": "opd.models.merging:Stack",
    "reward.verifier": "opd.rewards.reward:Verifier",
    "reward.exact": "opd.rewards.texts:Exact",
    "reward.numeric": "opd.rewards.texts:Numeric",
    "reward.format": "opd.rewards.texts:Format",
    "reward.maths": "opd.rewards.texts:Maths",
    "reward.code": "opd.rewards.code:Code",
    "reward.json": "opd.rewards.texts:Json",
    "reward.chat": "opd.rewards.chat:ChatReward",
    "reward.custom": "opd.rewards.custom:Custom",
    "reward.python callable": "opd.rewards.custom:PythonCallable",
    "sampler.builtin": "opd.engines.kinds:BuiltInSampler",
    "sampler.vllm": "opd.engines.vllm:VllmSampler",
    "source.task": "opd.data.tasks:TaskPrompts",
    "source.reasoning_gym": "opd.data.tasks:GymPrompts",
    "source.episodes": "opd.data.tasks:EpisodePrompts",
    "source.run": "opd.rollouts.replay:RunPrompts",
    "source.stage": "opd.rollouts.replay:StagePrompts",
    "source.file": "opd.data.sources:FilePrompts",
    "source.dataset": "opd.data.sources:DatasetPrompts",
    "tracker.tensorboard": "opd.runner.trackers:TensorBoard",
    "tracker.wandb": "opd.runner.trackers:Wandb",
    "tracker.trackio": "opd.runner.trackers:Trackio",
    "monitor.kl": "opd.monitors.monitor:DivergenceJump",
    "monitor.diversity": "opd.monitors.monitor:LostDiversity",
    "monitor.stopping": "opd.monitors.monitor:LostStopping",
    "monitor.shortening": "opd.monitors.monitor:Shortening",
    "monitor.lengthening": "opd.monitors.monitor:Lengthening",
    "monitor.token": "opd.monitors.monitor:DominantToken",
    "monitor.mismatch": "opd.monitors.monitor:SamplerMismatch",
    "monitor.staleness": "opd.monitors.monitor:Stale",
    "monitor.calibration": "opd.monitors.monitor:Miscalibrated",
    "monitor.together": "opd.monitors.monitor:FallingTogether",
    "monitor.saturation": "opd.monitors.monitor:Saturation",
    "monitor.conflict": "opd.monitors.monitor:TeachersInConflict",
    "monitor.turns": "opd.monitors.monitor:TurnDrift",
    "monitor.prefix": "opd.monitors.monitor:FlawedPrefix",
    "gate.correct": "opd.objective.gates:Correct",
    "gate.wrong": "opd.objective.gates:Wrong",
    "gate.all_wrong": "opd.objective.gates:AllWrong",
    "gate.all_correct": "opd.objective.gates:AllCorrect",
    "gate.contrast": "opd.objective.gates:Contrast",
    "gate.finished": "opd.objective.gates:FinishedOnly",
    "gate.entropy": "opd.objective.gates:Entropy",
    "gate.unlikely": "opd.objective.gates:Unlikely",
    "gate.soft_or": "opd.objective.gates:SoftOr",
    "gate.random": "opd.objective.gates:Random",
    "gate.teacher_entropy": "opd.objective.gates:TeacherEntropy",
    "gate.selectkd": "opd.objective.gates:SelectKD",
    "gate.paced": "opd.objective.gates:Paced",
    "gate.best_of_group": "opd.objective.gates:BestOfGroup",
    "gate.perplexity": "opd.objective.gates:Perplexity",
    "gate.trust": "opd.objective.gates:Trust",
    "gate.drift": "opd.objective.gates:Drift",
    "gate.tokens": "opd.objective.gates:Tokens",
    "gate.length": "opd.objective.gates:Length",
    "gate.keep": "opd.objective.gates:Keep",
    "gate.turns": "opd.objective.gates:Turns",
    "environment.mcp": "opd.environments.mcp:McpEnvironment",
    "environment.gymnasium": "opd.environments.simulators:GymnasiumEnvironment",
    "environment.textarena": "opd.environments.simulators:TextArenaEnvironment",
    "environment.scienceworld": "opd.environments.simulators:ScienceWorldEnvironment",
    "environment.openenv": "opd.environments.simulators:OpenEnvEnvironment",
}
_registered: dict[str, type[Choice]] = {}
C = TypeVar("C", bound="type[Choice]")


def names(family: str) -> list[str]:
    every = dict.fromkeys((*CHOICES, *_registered))
    return [entry.removeprefix(f"{family}.") for entry in every if entry.startswith(f"{family}.")]


def find(family: str, name: str) -> type[Choice]:
    entry = f"{family}.{name}"
    if entry not in _registered:
        module, _, attribute = CHOICES[entry].partition(":")
        _registered[entry] = getattr(importlib.import_module(module), attribute)
    return _registered[entry]


def register(choice: C) -> C:
    """Add a choice of your own: `@opd.register` above its class. Its `family` and `name` say where recipes can use it.

    A module may register a name again, as an edited file or a cell of a notebook does; the names of other modules are taken.
    """
    _require_named(choice)
    entry = f"{choice.family}.{choice.name}"
    before = _registered.get(entry)
    if entry in CHOICES or (before is not None and before.__module__ != choice.__module__):
        raise ValueError(f"{choice.family} {choice.name!r} exists already: give yours another name")
    known = list(dict.fromkeys(entry.split(".")[0] for entry in CHOICES))
    if choice.family not in known:
        raise ValueError(f"unknown family {choice.family!r}; known: {', '.join(known)}")
    _require_usable(choice)
    _registered[entry] = choice
    return choice


def _require_named(choice: type[Choice]) -> None:
    missing = [key for key in ("family", "name") if not isinstance(getattr(choice, key, None), str)]
    if missing:
        raise ValueError(
            f"{choice.__name__} has no `{missing[0]}` (a text): derive it from Gate, Term, Reward or the like, and name it"
        )


def _require_usable(choice: type[Choice]) -> None:
    """Reject a class that could be chosen, but not used or not read again."""
    if choice.key in choice.model_fields:
        raise ValueError(
            f"{choice.family} {choice.name!r}: {choice.key!r} names the choice and cannot be a setting of it"
        )
    unwritten = sorted(choice.__abstractmethods__)
    if unwritten:
        raise ValueError(f"{choice.family} {choice.name!r} needs a method `{unwritten[0]}`")
