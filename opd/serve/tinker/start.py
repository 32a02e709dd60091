"""The command `opd serve --tinker`: tokens, base models, and the server until a signal."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from opd.common.errors import UserError
from opd.common.http import token_of

if TYPE_CHECKING:
    from opd.models.language_model import LanguageModel
    from opd.serve.server import ServeSettings

PREFIX = "tml-"  # the SDK takes no other token


def tinker_tokens(variable: str | None) -> list[str]:
    """One token, or several separated by commas: each is an owner of its own."""
    if variable is None:
        return [PREFIX + secrets.token_urlsafe(32)]
    given = token_of(variable, "this server")
    assert given is not None
    tokens = [token.strip() for token in given.split(",")]
    if len(set(tokens)) < len(tokens) or not all(len(token) > len(PREFIX) for token in tokens):
        raise UserError(f"token_env {variable!r}: expected tokens separated by commas, all different.")
    if not all(token.startswith(PREFIX) for token in tokens):
        raise UserError(f"token_env {variable!r}: the tinker SDK takes only tokens that begin with {PREFIX}")
    return tokens


def base_hash(model: LanguageModel) -> str:
    """Of what files store. Tables that are computed when a model is loaded may differ in a bit between machines."""
    from opd.serve.models import tensors_hash

    return tensors_hash(model.module.state_dict())


def run_tinker(
    models: Mapping[str, LanguageModel],
    addresses: Mapping[str, str],
    tokens: list[str],
    directory: Path,
    listening: socket.socket,
    settings: ServeSettings,
    ready: Callable[[], None],
) -> None:
    from opd.models.load import locate
    from opd.serve.app import run_until_signal
    from opd.serve.tinker.checkpoints import Checkpoints
    from opd.serve.tinker.routes import TinkerState, make_tinker_app
    from opd.serve.tinker.sampling import BaseSampler
    from opd.serve.tinker.service import ServedBase, Service

    checkpoints = Checkpoints(directory)
    hashes: dict[int, str] = {}
    samplers: dict[int, BaseSampler] = {}
    bases = {}
    for name, model in models.items():
        if id(model) not in hashes:
            hashes[id(model)] = base_hash(model)
            samplers[id(model)] = BaseSampler(model)
        location = locate(addresses[name])
        tokenizer = str(location.directory) if location.directory is not None else addresses[name]
        bases[name] = ServedBase(name, addresses[name], model, hashes[id(model)], samplers[id(model)], tokenizer)
    service = Service(bases, checkpoints, settings.limits, settings.batch_tokens, settings.waiting, len(tokens))
    front = TinkerState(service, tokens, settings.limits, settings.body_seconds)
    ready()
    try:
        run_until_signal(make_tinker_app(front), front, listening, settings.body_seconds, settings.drain_seconds)
    finally:
        service.close()
