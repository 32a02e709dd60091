"""The command `opd serve --student`: a run whose agents others start. They find its student at the port."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from opd.common.errors import UserError
from opd.common.http import LOOPBACK, token_of


def serve_student(
    given: Sequence[str], host: str, port: int, token_env: str | None, say: Callable[[str], None], **options: Any
) -> None:
    """`given`: a recipe and its overrides. `options`: of `opd.run`."""
    from rich.console import Console

    from opd.runner.run import run

    if not given or "=" in given[0]:
        raise UserError("--student needs a recipe: opd serve --student my.yaml --token-env AGENT_TOKEN")
    if token_env is None or port == 0:
        missing = (
            "--token-env, the variable with the token that agents send"
            if token_env is None
            else "a --port other than 0"
        )
        raise UserError(f"--student needs {missing}.")
    address = f"{host}:{port}"
    token_of(token_env, address)
    settings = {"kind": "agent", "port": port, "host": host, "token_env": token_env}
    overrides = [*given[1:], *(f"rollout.environment.{key}={value}" for key, value in settings.items())]
    if not LOOPBACK.fullmatch(host):
        say(
            f"WARNING: listening on {host}, beyond this machine, without encryption: put a proxy with TLS in front of it"
        )
    say(f"agents find the student at http://{address}/conversations/NAME/v1 once the first step has begun")
    run(given[0], overrides=overrides, **{"quiet": False, "console": Console(), **options})
