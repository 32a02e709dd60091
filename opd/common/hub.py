"""The Hugging Face hub from a distance: whether it answers at all, and what its client raises where it does not.

The client tries for half a minute per file before it says that there is no network. Asking once, briefly, says so at once.
"""

from __future__ import annotations

from functools import cache

from opd.common.text import first_line

PATIENCE = 5.0  # seconds for one small answer


def errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """What the client raises. Its own errors are of the first two kinds, those of its HTTP library have a root of their own."""
    from huggingface_hub.errors import HfHubHTTPError

    return OSError, ValueError, HfHubHTTPError.__bases__[0], *others


def unreachable() -> str | None:
    """Why the hub cannot be asked for anything now, or None where it answers."""
    from huggingface_hub import constants

    return "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _no_answer(constants.ENDPOINT)


@cache
def _no_answer(endpoint: str) -> str | None:
    from huggingface_hub.utils import get_session

    try:
        get_session().head(endpoint, timeout=PATIENCE)
    except errors() as error:
        return f"no answer from {endpoint}: {first_line(error)}"
    return None
