"""The command `opd serve`: load models, open a socket, and serve until a signal.

SIGTERM and Ctrl-C drain: accepted requests are answered, later ones get 503, then the process ends. A second signal ends it at once.
"""

from __future__ import annotations

import importlib.util
import re
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.common.errors import UserError
from opd.common.http import LOOPBACK, token_of
from opd.common.text import plain
from opd.teachers.served import RequestLimits

if TYPE_CHECKING:
    from opd.models.language_model import LanguageModel


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class ServeSettings:
    """Options of the command line. `waiting`: requests that may wait; seconds: to receive a request, and to shut down."""

    host: str = "127.0.0.1"
    port: int = 8200
    token_env: str | None = None
    device: str = "auto"
    dtype: str | None = None
    batch_tokens: int = 8192
    waiting: int = 4096
    limits: RequestLimits = field(default_factory=RequestLimits)
    body_seconds: float = 30.0
    drain_seconds: float = 60.0
    revisions: Sequence[str] = ()  # NAME=COMMIT
    checkpoints: Path | None = None  # serve the Tinker API, and save its checkpoints there


def serve(models: Sequence[str], adapters: Sequence[str], settings: ServeSettings, say: Callable[[str], None]) -> None:
    missing = [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"serving needs {' and '.join(missing)}: pip install 'opd[serve]'.")
    named = served_names(models, adapters)
    revisions = _revisions(settings.revisions, named)
    if settings.checkpoints is None:
        token = secrets.token_urlsafe(32) if settings.token_env is None else token_of(settings.token_env, "this server")
        assert token is not None
    else:
        from opd.serve.tinker.start import run_tinker, tinker_tokens

        tokens = tinker_tokens(settings.token_env)
        token = tokens[0]
    listening = _listen(settings)
    loaded = _load(named, revisions, settings, say)
    from opd.serve.app import BACKLOG, ServerState, make_app, run_until_signal

    def ready() -> None:
        listening.listen(BACKLOG)
        _announce(listening.getsockname()[1], loaded, token, settings, say)

    if settings.checkpoints is not None:
        run_tinker(loaded, named, tokens, settings.checkpoints, listening, settings, ready)
        return
    from opd.serve.models import ScoringThread, ServedModel

    served = {name: ServedModel(name, model, settings.batch_tokens) for name, model in loaded.items()}

    most = 64 * settings.limits.tokens
    worker = ScoringThread(served, batch_tokens=settings.batch_tokens, waiting=settings.waiting, tokens=most)
    front = ServerState(served, worker, token, settings.limits, settings.body_seconds)
    ready()
    try:
        run_until_signal(make_app(front), front, listening, settings.body_seconds, settings.drain_seconds)
    finally:
        worker.close()
    say("every request that was accepted has been answered")


def _announce(
    port: int, models: Iterable[str], token: str, settings: ServeSettings, say: Callable[[str], None]
) -> None:
    if not LOOPBACK.fullmatch(settings.host):
        say(
            f"WARNING: listening on {settings.host}, beyond this machine, without encryption: anybody who can read the traffic has "
            "the token. Put it behind a tunnel or a proxy with TLS"
        )
    if settings.token_env is None:
        say(f"token: {token}")
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    say(f"serving {', '.join(models)} at http://{host}:{port}")


def served_names(models: Sequence[str], adapters: Sequence[str]) -> dict[str, str]:
    """Name -> model. `maths=Qwen/Qwen3-8B`, or a model whose name is the last part of its address."""
    pairs = [_named(text) for text in models] + [_named(text, adapter=True) for text in adapters]
    found: dict[str, str] = {}
    for name, model in pairs:
        if not NAME.fullmatch(name):
            raise UserError(
                f"name {plain(name, 120)!r}: letters, digits, '.', '_' and '-' only. Give it one: NAME={plain(model, 120)}"
            )
        if name in found:
            raise UserError(f"two models are called {name!r}. Give one another name: NAME={plain(model, 120)}")
        found[name] = model
    if not found:
        raise UserError("there is nothing to serve. Name a model: opd serve tiny/arithmetic")
    return found


def _named(text: str, adapter: bool = False) -> tuple[str, str]:
    name, given, model = text.partition("=")
    if not given and adapter:
        raise UserError(f"--adapter {plain(text, 200)!r}: expected NAME=DIRECTORY.")
    return (name, model) if given else (text.rstrip("/").rpartition("/")[2], text)


def _revisions(texts: Sequence[str], named: Mapping[str, str]) -> dict[str, str]:
    """Name -> revision of a model on the hub."""
    found: dict[str, str] = {}
    for text in texts:
        name, _, revision = text.partition("=")
        if name not in named or not revision:
            known = ", ".join(named)
            raise UserError(f"--revision {plain(text, 200)!r}: expected NAME=REVISION, NAME being one of {known}.")
        found[name] = revision
    return found


def _load(
    named: Mapping[str, str], revisions: Mapping[str, str], settings: ServeSettings, say: Callable[[str], None]
) -> dict[str, LanguageModel]:
    """Load each model once, under all its names."""
    from opd.models import load_model
    from opd.runner.checks import pick_device

    device = str(pick_device(settings.device))
    dtype = settings.dtype or ("float32" if device == "cpu" else "bfloat16")
    loaded: dict[tuple[str, str | None], Any] = {}
    served = {}
    for name, model in named.items():
        path = Path(model).expanduser()
        same = (str(path.resolve()) if path.is_dir() else model, revisions.get(name))
        if same not in loaded:
            say(f"loading {plain(model, 200)} ({dtype}, {device})")
            loaded[same] = load_model(model, dtype=dtype, device=device, revision=revisions.get(name))
        served[name] = loaded[same]
    return served


def _listen(settings: ServeSettings) -> socket.socket:
    """Open the socket before anything is loaded, so a taken address fails at once."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        raise UserError(
            f"{settings.host}:{settings.port} is not available: {error.strerror or error}. Choose another --port."
        ) from None
    return listening
