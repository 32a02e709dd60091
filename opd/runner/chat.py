"""`opd chat`: talk to a model, optionally against a teacher that colours the model's tokens as they are written.

The teacher likes orange tokens less than the student did, and blue ones more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.console import Console
from rich.text import Text

from opd.common.errors import UserError
from opd.common.text import first_line, plain, printable
from opd.data.prompts import render_prompt, response_text
from opd.models.load import load_model
from opd.objective.batch import own_turns
from opd.plugins import load_plugins
from opd.records import Prompt, SampledToken, SampleRequest, SignalNeed
from opd.registry import validate_settings
from opd.rollouts.environments import AnyEnvironment, Environment
from opd.rollouts.rollouter import Sampler, rollout_so_far
from opd.teachers.pool import Teacher

CHUNK = 8  # tokens between two scores of the teacher
LETTER = 4  # the most tokens for one character: UTF-8 has at most 4 bytes
CUT = "\ufffd"  # marks an incomplete character
STYLES = ((3.0, "black on dark_orange"), (1.0, "dark_orange"), (0.3, "orange3"), (-0.3, ""), (-1.0, "sky_blue3"))
MOST = "bold sky_blue2"  # liked more by a nat or more


@dataclass
class StreamedAnswer:
    """An answer while it is written, shown in pieces with the teacher's scores."""

    show: Callable[[str, float | None], None]
    score: Callable[[list[SampledToken]], np.ndarray] | None
    decode: Callable[[list[int]], str]
    stops: frozenset[int]
    tokens: list[SampledToken] = field(default_factory=list)
    shown: int = 0  # number of tokens shown
    ratios: list[float] = field(default_factory=list)
    _scored: int = 0
    _text: str = ""  # the text of the tokens shown

    def take(self, token: SampledToken) -> None:
        self.tokens.append(token)
        if len(self.tokens) - self._scored >= CHUNK:
            self.flush()

    def flush(self, last: bool = False) -> None:
        """Show new tokens. Tokens that form one character wait until it is complete. `last`: no tokens follow."""
        new = self.tokens[self._scored :]
        if new and self.score is not None:
            said = self.score(self.tokens)[self._scored :]
            self.ratios += [token.logprob - float(value) for token, value in zip(new, said, strict=True)]
        self._scored = len(self.tokens)
        for end in range(self.shown + 1, len(self.tokens) + 1):
            ids = [token.token for token in self.tokens[:end] if token.token not in self.stops]
            piece = self.decode(ids)[len(self._text) :]
            waits = piece.endswith(CUT) and end - self.shown < LETTER and not (last and end == len(self.tokens))
            if waits:
                continue
            if piece:
                self.show(piece, max(self.ratios[self.shown : end]) if self.ratios else None)
            self._text, self.shown = self._text + piece, end


class Conversation:
    """A conversation. `against`: a teacher with the same tokenizer."""

    def __init__(
        self,
        model: str,
        against: str | None = None,
        *,
        console: Console,
        max_new_tokens: int = 256,
        temperature: float = 1.0,
        seed: int = 0,
        device: str = "cpu",
        environment: Environment | None = None,
    ) -> None:
        """`environment`: answers the model between its turns, such as one with tools. A teacher then answers, and does not score."""
        dtype = "float32" if device == "cpu" else "bfloat16"
        self._console, self._messages, self._turn = console, list[dict[str, str]](), 0
        self._environment = environment
        self._student = load_model(model, dtype=dtype, device=device)
        self._teacher = None if against is None else Teacher(against, self._student)
        ways = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
        self._sampler = Sampler(self._student, **ways)  # type: ignore[arg-type]
        self._other = None if self._teacher is None else Sampler(self._teacher.model, **ways)  # type: ignore[arg-type]

    def ask(self, question: str) -> None:
        """Ask one question and show both answers. The conversation continues with the student's."""
        self._messages.append({"role": "user", "content": question})
        self._turn += 1
        prompt = Prompt(id=f"chat/{self._turn}", domain="", messages=tuple(self._messages))
        if self._environment is not None:
            prompt = self._environment.opened(prompt, {})
        watched = self._teacher is not None and self._environment is None
        written = self._write("student", self._sampler, prompt, watched)
        self._messages.append({"role": "assistant", "content": written})
        if self._other is not None:
            self._write("teacher", self._other, prompt, watched=False)

    def _write(self, who: str, sampler: Sampler, prompt: Prompt, watched: bool) -> str:
        tokenizer, ids = self._student.tokenizer, render_prompt(prompt, self._student.tokenizer)

        def score(tokens: list[SampledToken]) -> np.ndarray:
            assert self._teacher is not None
            rollout = rollout_so_far(SampleRequest(prompt.id, ids, 0, sampler.sampling), tokens)
            (signal,) = self._teacher.score([rollout], SignalNeed("logprobs_at"))
            return np.asarray(signal.values, dtype=np.float64)

        stops = frozenset(sampler.sampling.stop_ids)

        def decode(ids: list[int]) -> str:
            return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))

        def begun() -> StreamedAnswer:
            self._console.print(Text(f"{who}> ", style="bold"), end="")
            return StreamedAnswer(self._show, score if watched else None, decode, stops)

        answer, notes = begun(), dict[str, dict[str, Any]]()

        def taken(token: SampledToken) -> None:
            answer.take(token)

        def ended() -> None:
            answer.flush(last=True)
            self._console.print()

        def environment(id: str, ids: np.ndarray) -> None:
            nonlocal answer
            ended()
            said = str(tokenizer.decode(ids.tolist(), skip_special_tokens=True)).strip()
            self._console.print(Text("environment> ", style="bold"), Text(printable(said)), sep="", soft_wrap=True)
            answer = begun()

        (rollout,) = sampler.sample([prompt], on_token=taken, on_environment=environment, notes=notes)
        ended()
        if answer.ratios:
            self._console.print(Text(self._summary(answer), style="dim"))
        for noted in notes.values():
            if "lost" in noted:
                self._console.print(Text(f"The environment failed: {plain(noted['feedback'])}", style="dim"))
        last = own_turns(rollout)[-1][0] if prompt.environment is not None else 0
        return response_text(rollout.response_ids[last:], tokenizer, sampler.sampling.stop_ids)

    def _show(self, text: str, ratio: float | None) -> None:
        style = "" if ratio is None else next((name for least, name in STYLES if ratio >= least), MOST)
        self._console.print(Text(printable(text), style=style), end="", soft_wrap=True)

    def _summary(self, answer: StreamedAnswer) -> str:
        worst = int(np.argmax(answer.ratios))
        text = plain(self._student.tokenizer.decode([answer.tokens[worst].token]))
        return (
            f"log-ratio {np.mean(answer.ratios):.2f} nats per token; the teacher's least liked token is {text!r}, "
            f"{answer.ratios[worst]:.2f} nats less likely than with the student"
        )


def chosen_environment(given: str | None, plugins: Sequence[str]) -> Environment | None:
    """An environment by its kind, or by its settings in YAML, as a recipe would name it.

    >>> chosen_environment("{kind: calculator, turns: 3}", ()).turns
    3
    """
    load_plugins([str(Path(name).resolve()) if name.endswith(".py") else name for name in plugins])
    if given is None:
        return None
    try:
        settings = yaml.safe_load(given)
    except yaml.YAMLError as error:
        raise UserError(f"--environment {given!r} is not YAML: {first_line(error)}") from None
    settings = {"kind": settings} if isinstance(settings, str) else settings
    found: Environment = validate_settings("environment", AnyEnvironment, settings)
    return found


def questions(ask: Callable[[], str]) -> Iterator[str]:
    """Lines until the end of the input. Empty lines are skipped, and bytes that are not text are shown as such."""
    while True:
        try:
            line = ask().strip()
        except EOFError:
            return
        if line:
            yield line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def converse(talk: Conversation, lines: Iterable[str]) -> None:
    for line in lines:
        talk.ask(line)
