"""What every source of prompts is: one class with its settings, its refusals, how it is opened and what it reads. No
torch here.

`source: "task:addition"`: what stands before the colon, or else the kind of address, says which class it is; `kind`
says so outright. A class of your own is added by `@opd.register`: give it rows (`opd.data.row_source.RowPrompts`), or
open what you like.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from pydantic import Field, GetJsonSchemaHandler, PrivateAttr, ValidationError, field_validator
from pydantic_core import CoreSchema

from opd.data.prompts import DOMAIN
from opd.data.rows import looks_local, on_disk
from opd.data.template import RESERVED_KWARGS
from opd.errors import DataError
from opd.settings import Address, Choice, Family, Word, nearest
from opd.types import Prompt

if TYPE_CHECKING:
    from opd.data.scan import Scan, ScannedSource

Split = Literal["all", "heldout", "train"]
BadRows = Literal["stop", "skip"]
Wanted = Callable[[Prompt], bool]
Told = Callable[[str, int, int], None]  # name of a source, rows done, rows in all
PREFIX = re.compile(r"[A-Za-z_][\w-]*:")


def silent(name: str, done: int, total: int) -> None:
    pass


def anything(prompt: Prompt) -> bool:
    return True


class Source(Protocol):
    """An open source: training prompts, and held-out prompts that do not overlap with them."""

    name: str
    size: int | None  # training prompts; None: without end

    def train(self, index: int) -> Prompt: ...

    def held_out(self, count: int, wanted: Wanted = anything) -> list[Prompt]:
        """At most this many of each domain, of those that are wanted."""

    def prompts(self, split: Split, count: int | None, wanted: Wanted = anything) -> list[Prompt]:
        """Of a split, at most `count` of each domain (None: all there are)."""

    def examples(self) -> list[Prompt]:
        """A few training prompts of every domain, with something to check answers by and without."""

    def scan(self, scan: Scan) -> ScannedSource:
        """How long its training prompts are, and which of them cannot be used."""

    def keep_apart(self, others: list[Source]) -> None:
        """Train on nothing that another source of the recipe holds out.

        Sources that cannot overlap have nothing to do.
        """


@dataclass(frozen=True)
class Opening:
    """What a source is told when it is opened."""

    label: str  # its prompts' ids begin with it; they key the draws
    bad_rows: BadRows = "stop"
    rewarded: bool = False  # rewards need no answer: rows without one can be evaluated on, too
    route: str = DOMAIN  # the column that every training row needs, since it says who scores it
    told: Told = silent


class PromptSource(Choice):
    """Where prompts come from. Settings that every source has; the classes below it add their own."""

    family = "source"
    by_default = True
    prefixed: ClassVar[bool] = True  # chosen by `NAME:` at the beginning of its address

    source: Address
    domain: Word | None = Field(None, description="default: the row's own `domain` column, else the source's name")
    share: float = Field(1.0, ge=1e-6, le=1e6, description="relative share of the prompts of a step")
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    _older: bool = PrivateAttr(default=False)

    @abstractmethod
    def open(self, opening: Opening) -> Source:
        raise NotImplementedError

    @property
    def older(self) -> bool:
        """Whether a run of an earlier version reads it, which goes on with the rows as that version read them."""
        return self._older

    def files(self) -> list[Path]:
        """Every file it reads: a run remembers their content, and does not go on with another one."""
        return []

    def fingerprint(self) -> str | None:
        """Likewise of what is no file here. None: its prompts follow from its settings alone."""
        return None

    def as_begun(self, written: Mapping[str, Any]) -> PromptSource:
        """The same in a run that may be an earlier version's, whose `resolved.yaml` has these settings of it."""
        return self

    def inside(self, directory: Path) -> PromptSource:
        """The same in a run directory: earlier stages are found there."""
        return self

    @property
    def only_domain(self) -> str | None:
        """Of all its prompts, where the settings alone say so; None: rows may have their own."""
        return None

    @property
    def address(self) -> str:
        """The source without the prefix that chose the class."""
        return self.source.removeprefix(f"{self.name}:") if self.prefixed else self.source

    @property
    def label(self) -> str:
        """What ids begin with: they key the draws, which must not depend on where a file lies."""
        path = Path(self.address)
        return self.source.removesuffix(self.address) + path.name if path.is_absolute() else self.source

    def heading(self) -> dict[str, str]:
        return {} if SOURCES.of_address(self.source) == self.name else {self.key: self.name}

    @field_validator("chat_template_kwargs")
    @classmethod
    def _free(cls, value: dict[str, Any]) -> dict[str, Any]:
        taken = sorted(RESERVED_KWARGS & value.keys())
        if taken:
            raise ValueError(f"{taken[0]} is set by opd and cannot be given here")
        return value

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        reference = super().__get_pydantic_json_schema__(schema, handler)
        node = handler.resolve_ref_schema(reference)
        prefixes = "|".join(name for name, option in SOURCES.classes().items() if _prefixed(option))
        pattern = f"^{cls.name}:" if cls.prefixed else f"^(?!({prefixes}):)"
        node["anyOf"] = [{"required": ["kind"]}, {"properties": {"source": {"pattern": pattern}}}]
        return reference


class SourceFamily(Family):
    """The address chooses: `task:addition` a task, a path or an existing file a file, any other name a dataset on the
    hub.
    """

    def __init__(self) -> None:
        super().__init__("source")

    @property
    def expected(self) -> str:
        return "an address, such as task:addition or rows.jsonl, or a mapping with `source`"

    def spelled_out(self, value: Any) -> Any:
        return {"source": value} if isinstance(value, str) else value

    def named(self, settings: Mapping[str, Any]) -> Any:
        address = settings.get("source")
        return super().named(settings) or (self.of_address(address) if isinstance(address, str) else None)

    def choose(self, settings: dict[str, Any]) -> type[Choice]:
        named, address = settings.pop(self.key, None), settings.get("source")
        if named is None and isinstance(address, str):
            named = self.of_address(address)
            if named is None:
                prefixes = [name for name, option in self.classes().items() if _prefixed(option)]
                raise ValueError(f"unknown source; {nearest(address.partition(':')[0], prefixes)}")
        return self.find(named or "file")

    def of_address(self, address: str) -> str | None:
        """None: it begins like `task:`, and nothing of that name is known."""
        name = address.partition(":")[0]
        if PREFIX.match(address) is None or on_disk(address):
            return "file" if looks_local(address) else "dataset"
        return name if name in self.names() and _prefixed(self.find(name)) else None


def _prefixed(choice: type[Choice]) -> bool:
    return issubclass(choice, PromptSource) and choice.prefixed


SOURCES = SourceFamily()


def prompt_source(source: str, **settings: Any) -> PromptSource:
    """The settings of a source, as a recipe would write them."""
    try:
        found = SOURCES.read({"source": source, **settings})
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in detail["loc"])
        raise DataError(f"prompts {source!r}: {place}: {detail['msg'].removeprefix('Value error, ')}.") from None
    except ValueError as error:
        raise DataError(f"prompts {source!r}: {error}.") from None
    assert isinstance(found, PromptSource)
    return found
