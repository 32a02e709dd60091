"""A teacher behind `opd serve`: hidden states come over HTTP and the head comes once, so that divergences stay exact. No torch here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from opd.errors import RemoteError, ServerAway, TokenizerMismatch
from opd.remote import Addresses, Remote, Variable
from opd.settings import Positive, Word
from opd.teachers.kinds import Outlook, Supplies, Surroundings, TeacherKind
from opd.teachers.wire import PROTOCOL
from opd.text import plain
from opd.types import TeacherLike

if TYPE_CHECKING:
    from opd.models.tokenizers import Elsewhere

GLANCE = 3.0  # seconds for a first look, which need not succeed


class LimitFacts(BaseModel):
    """What the server takes in one request."""

    bytes: int = Field(ge=1)
    tokens: int = Field(ge=1)
    sequences: int = Field(ge=1)


class ServedFacts(BaseModel):
    """What a server says about a model."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    protocol: int
    weights: str = Field(pattern="^[0-9a-f]{64}$")
    head: str = Field(pattern="^[0-9a-f]{64}$")
    tokenizer: str
    stop_ids: tuple[int, ...]
    rows: int = Field(ge=1)
    width: int = Field(ge=1)
    context: int = Field(ge=1)
    dtype: str
    device: str
    scale: float
    softcap: float | None
    instance: str
    limits: LimitFacts

    @property
    def version(self) -> int:
        """Of what is served; every signal carries it, so that a resume with other weights is refused."""
        return int(self.weights[:12], 16)


class ServedTeacher(TeacherKind):
    """A model behind `opd serve`."""

    name = "served"
    stands_still = True
    offers = frozenset({"logprobs_at", "hidden", "topk"})

    address: Addresses = Field(
        description="where `opd serve` listens: http://HOST:PORT; or several that serve the same"
    )
    model: Word = Field(description="what it is called there")
    token_env: Variable | None = Field(
        "OPD_TOKEN", description="the environment variable that holds the server's token"
    )
    batch_tokens: Positive = Field(8192, description="tokens in one request")
    temperature: float = Field(1.0, ge=0.01, le=100, description="of the teacher's distribution alone")
    concurrency: int = Field(4, ge=1, le=256, description="requests at once")
    timeout: float = Field(300.0, gt=0, le=86_400, description="seconds for one answer")
    patience: float = Field(3600.0, ge=0, le=31_536_000, description="seconds that the server may be away")
    exact: bool | None = Field(
        None,
        description="every request a forward pass of its own, for the same bits; default: where it computes on a CPU",
    )

    @property
    def title(self) -> str:
        return f"{self.model} at {', '.join(self.address)}"

    def connect(self, around: Surroundings, patience: float | None = None) -> Remote:
        return Remote(
            self.address,
            self.token_env,
            timeout=self.timeout if patience is None else GLANCE,
            patience=self.patience if patience is None else patience,
            concurrency=self.concurrency,
            say=around.say,
            check=around.check,
        )

    def facts(self, remote: Remote) -> ServedFacts:
        """What is served under the name now."""
        found = remote.json("GET", f"/models/{self.model}")
        try:
            facts = ServedFacts.model_validate(found)
        except ValidationError as error:
            raise RemoteError(
                f"{remote.address}: what it says about {self.model!r} cannot be read ({error.error_count()} mistakes, the first at "
                f"{'.'.join(map(str, error.errors()[0]['loc']))}). Is it `opd serve`?"
            ) from None
        if facts.protocol != PROTOCOL:
            raise RemoteError(
                f"{remote.address} speaks protocol {facts.protocol}, and this is {PROTOCOL}. Use the same version of opd on both sides."
            )
        return facts

    def inquire(self, name: str, tokenizer: Any, student: str) -> Outlook:
        from opd.models.tokenizers import fingerprint

        where = f"teachers.{name}: {plain(self.title)}"
        try:
            facts = self.facts(self.connect(Surroundings(say=lambda line: None), patience=0.0))
        except ServerAway as error:
            return Outlook(notes=(f"{where}: not reachable now ({plain(error, 300)}). A run waits for it",))
        if facts.tokenizer != fingerprint(tokenizer):
            raise TokenizerMismatch(
                f"{where} has the tokenizer {facts.tokenizer}, and student {student} has {fingerprint(tokenizer)}: their ids mean "
                "different tokens. Serve a teacher with the student's own tokenizer."
            )
        known = f"weights {facts.weights[:12]}, {facts.dtype} on {facts.device}, width {facts.width}, context {facts.context:,}"
        return Outlook(min(facts.context, facts.limits.tokens), (f"{where}: {known}",))

    def vocabulary(self, around: Surroundings) -> Elsewhere | None:
        from opd.models.tokenizers import Elsewhere

        facts = self.facts(self.connect(around))
        return Elsewhere(self.title, facts.stop_ids, facts.rows)

    def open(self, name: str, supplies: Supplies) -> TeacherLike:
        from opd.teachers.served_scoring import ServedScorer

        return ServedScorer(name, self, supplies)
