"""Push trained models to the Hugging Face hub. Access is checked before training."""

from __future__ import annotations

import shlex
from pathlib import Path

from opd.common.errors import RecipeError
from opd.common.hub import errors
from opd.common.text import first_line
from opd.recipe import Hub, Stage

LEFT_HERE = (
    "optimiser.safetensors",
    "trainer.json",
    "teachers/*",
    "modules/*",
)  # files of a checkpoint that are not part of the model


def require_access(stage: Stage, *, make: bool = True) -> None:
    """Reject a stage if its model cannot be pushed: no token, no network, no write access. `make`: also create the repository."""
    if stage.hub is None:
        return
    from huggingface_hub import HfApi, constants

    repo, where = stage.hub.repo, f"stage {stage.name!r}: hub.repo {stage.hub.repo!r}"
    if constants.HF_HUB_OFFLINE:
        raise RecipeError(f"{where}: HF_HUB_OFFLINE is set, so nothing can be pushed. Unset it, or leave `hub` out.")
    api = HfApi()
    try:
        api.whoami()
        if make:
            api.create_repo(repo, private=stage.hub.private, exist_ok=True)
    except errors() as error:
        raise RecipeError(
            f"{where} cannot be written to ({first_line(error)}). Log in with `hf auth login` and a token that may write, name "
            "a repository of your own, or leave `hub` out."
        ) from None


def push(directory: Path, hub: Hub) -> str | None:
    """Upload a model. Returns None on success, otherwise the error and the command that pushes it later."""
    from huggingface_hub import HfApi

    try:
        HfApi().upload_folder(repo_id=hub.repo, folder_path=directory, ignore_patterns=list(LEFT_HERE))
    except errors(RuntimeError) as error:
        excluded = " ".join(f"--exclude {shlex.quote(name)}" for name in LEFT_HERE)
        return f"the model was not pushed to {hub.repo} ({first_line(error)}). Later: hf upload {hub.repo} {directory} . {excluded}"
    return None
