"""Agents that are programs: they ask the student through an API, as they would ask any served model.

    rollout:
      environment: {kind: agent, command: [python, my_agent.py]}

For every rollout the run starts the program with the prompt on its standard input and the address of an endpoint in
`OPENAI_BASE_URL` and `ANTHROPIC_BASE_URL`. What it asks there the student answers; what the student wrote is trained on.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import queue
import shutil
import subprocess
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from pydantic import Field

from opd.common.errors import RecipeError
from opd.common.http import Variable, token_of
from opd.common.text import plain
from opd.data.prompts import question
from opd.environments.chat_protocols import ChatError
from opd.environments.chat_server import LOOPBACK, AgentEnded, AgentSession, AgentSessions, ChatServer, given_reward
from opd.records import Message, Prompt
from opd.registry import Positive, StageView
from opd.rollouts.environments import Effects, Environment, Episode

INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "USER", "VIRTUAL_ENV", "PYTHONPATH")
TAIL = 64 << 10  # bytes of a program's output that are kept
WAIT = 5.0  # seconds for its output after it has ended


class AgentEnvironment(Environment):
    """Programs that ask the student through an API."""

    name = "agent"
    bounded = True
    replays = False

    history: Literal["split"] = Field("split", description="every conversation of an agent is a rollout of its own")
    turns: Positive = Field(64, le=10_000, description="largest number of the student's turns")
    call_seconds: float = Field(
        300.0,
        gt=0,
        le=86_400,
        description="seconds that an agent may take until its next request or its end; after that it is given up",
    )
    workers: Positive = Field(32, le=4096, description="programs that run at the same time")
    command: list[str] = Field(
        default_factory=list, description="the program and its arguments; it is started for every rollout"
    )
    variables: list[Variable] = Field(
        default_factory=list,
        description="environment variables that the program gets in addition to PATH, HOME and the like",
    )
    columns: list[str] = Field(default_factory=list, description="columns of a prompt's row that the agent gets")
    program_effects: Literal["none", "outside"] = Field(
        "none",
        description="none: an interrupted run starts the program again and answers from the record while it asks the same. outside: it "
        "never starts it twice for one rollout, which ends without a reward",
    )
    repeats: Literal["answer", "sample"] = Field(
        "answer",
        description="a repeated request gets the recorded answer; with sample, only one that the client marks as a retry or whose answer "
        "was lost does, and any other is answered anew",
    )
    port: int | None = Field(
        None,
        ge=0,
        le=65_535,
        description="without a command: where agents that others start find the student (0: a free port)",
    )
    host: str = Field("127.0.0.1", min_length=1, max_length=255, description="of the port")
    token_env: Variable | None = Field(
        None, description="environment variable with the token that agents at the port must send"
    )

    @property
    def effects(self) -> Effects:  # type: ignore[override]
        return self.program_effects

    @property
    def program(self) -> Sequence[str]:
        """The program that is started for every rollout, with its arguments; empty: agents at the port are started by others."""
        return self.command

    @property
    def has_tools(self) -> bool:
        return True  # those of its requests

    def check(self, view: StageView) -> Iterable[str]:
        yield from super().check(view)
        if bool(self.program) == (self.port is not None):
            yield "agent needs one of command and port. Give the command that starts the agent, or the port at which agents of others ask."
        if self.command and shutil.which(self.command[0]) is None:
            yield f"command: there is no program {plain(self.command[0], 200)!r}. Install it, or give its path."
        if self.port is not None and self.token_env is None:
            yield "port needs token_env, the environment variable with the token that agents must send. Name one."
        if self.program and (self.token_env or self.host != LOOPBACK):
            yield "host and token_env belong to a port, and there is none. The program of a command gets a token of its own."
        if self.variables and not self.program:
            yield f"variables {self.variables[0]} are for a command, and there is none. Remove them."
        if self.curriculum != "none":
            yield f"curriculum {self.curriculum} is for environments that choose the turns; a program does. Remove it."

    def opening(self, prompt: Prompt) -> Sequence[Message]:
        return ()

    def player(self) -> Any:
        from opd.environments.agent_turns import AgentPlaying

        return AgentPlaying

    def open(self, prompt: Prompt, key: int) -> Episode:
        return AgentEpisode(self, prompt, key)

    def server(self) -> ChatServer:
        """The endpoint of this process for these settings, started when it is first needed."""
        name = (self.host, self.port, self.token_env)
        with _starting:
            if name not in _servers:
                token = token_of(self.token_env, "the port of environment agent") if self.token_env else None
                _servers[name] = ChatServer(AgentSessions(token or ""), self.host, self.port or 0)
            return _servers[name]


_servers: dict[tuple[str, int | None, str | None], ChatServer] = {}
_starting = threading.Lock()


def facts_of(prompt: Prompt, key: int, columns: Sequence[str] = ()) -> dict[str, Any]:
    """What an agent gets to know of a prompt. Other columns are not shown: they may hold the answer."""
    messages = None if prompt.messages is None else [dict(message) for message in prompt.messages]
    shown = {name: prompt.fields[name] for name in columns if name in prompt.fields}
    return {
        "id": prompt.id,
        "domain": prompt.domain,
        "prompt": question(prompt),
        "messages": messages,
        "columns": shown,
        "seed": key,
    }


class AgentEpisode(Episode):
    """A session, and the program if the run starts one."""

    def __init__(self, environment: AgentEnvironment, prompt: Prompt, key: int) -> None:
        self.environment, self._server = environment, environment.server()
        self.session: AgentSession = self._server.sessions.open(
            facts_of(prompt, key, environment.columns), own=bool(environment.program)
        )
        self._program: AgentProcess | None = None
        if environment.program:
            try:
                self._program = AgentProcess(environment, self._server.url, self.session)
            except OSError as error:
                self._server.sessions.close(self.session)
                if error.errno not in (errno.ENOENT, errno.EACCES, errno.ENOEXEC):
                    raise  # the machine has no room now; another attempt may succeed
                raise RecipeError(
                    f"environment {environment.name}: {plain(environment.program[0], 200)!r} does not start: {error.strerror or error}."
                ) from None

    def close(self) -> None:
        self._server.sessions.close(self.session)
        if self._program is not None:
            self._program.close()


class AgentProcess:
    """The process of an agent. Its last line of output may be `{"reward": 1.0}`."""

    def __init__(self, environment: AgentEnvironment, url: str, session: AgentSession) -> None:
        passed = {name: os.environ[name] for name in (*INHERITED, *environment.variables) if name in os.environ}
        passed |= {
            "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": session.token, "OPENAI_API_BASE": f"{url}/v1", "OPENAI_MODEL": "student",
            "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": session.token, "ANTHROPIC_MODEL": "student", "OPD_BASE_URL": url,
        }  # fmt: skip
        self._session = session
        self._process = subprocess.Popen(
            environment.program, env=passed, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self._tails: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        for work in (self._write, self._follow):
            threading.Thread(target=work, name="opd-agent", daemon=True).start()
        for name, pipe in (("out", self._process.stdout), ("err", self._process.stderr)):
            threading.Thread(target=self._read, args=(name, pipe), name="opd-agent", daemon=True).start()

    def close(self) -> None:
        if self._process.returncode is None:  # else its number may belong to another process by now
            self._kill()
            self._process.wait()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, 9)

    def _write(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as pipe:
            pipe.write(json.dumps(self._session.facts).encode() + b"\n")

    def _read(self, name: str, pipe: Any) -> None:
        tail = b""
        with contextlib.suppress(OSError, ValueError), pipe:
            while part := pipe.read1(TAIL):
                tail = (tail + part)[-TAIL:]
        self._tails.put((name, tail))

    def _follow(self) -> None:
        """Wait for the end of the program and pass on what it said."""
        problem = "the end of the agent could not be read"
        try:
            problem = self._ended()
        finally:
            self._session.end(AgentEnded(problem))

    def _ended(self) -> str:
        """Why the rollout is lost; empty: it is not."""
        code = self._process.wait()
        self._kill()  # what it has left running
        tails: dict[str, bytes] = {}
        with contextlib.suppress(queue.Empty):  # a process that it left behind may hold the pipes
            for _ in range(2):
                tails |= [self._tails.get(timeout=WAIT)]
        if code:
            said = tails.get("err", b"").decode(errors="replace").strip().splitlines()
            return f"the agent ended with code {code}: {plain(said[-1], 300) if said else 'it printed no reason'}"
        with contextlib.suppress(ValueError, RecursionError, ChatError):
            last = tails.get("out", b"").decode(errors="replace").strip().splitlines()[-1:]
            found = json.loads(last[0]) if last else None
            if isinstance(found, dict) and "reward" in found:
                self._session.reward = given_reward(found["reward"])
        return ""
