"""The Hugging Face hub: whether it answers, and what its client raises if it does not.

The client tries for half a minute per file before it says that there is no network. Asking once, briefly, says so at once.
"""

from __future__ import annotations

from functools import cache

from opd.common.text import first_line

PATIENCE = 5.0  # seconds for one small answer


def errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """The errors that the client raises: its own are of the first two kinds; those of its HTTP library have another base class."""
    from huggingface_hub.errors import HfHubHTTPError

    return OSError, ValueError, HfHubHTTPError.__bases__[0], *others


def unreachable() -> str | None:
    """Why the hub does not answer, or None if it does."""
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
