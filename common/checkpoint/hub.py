"""Finds a checkpoint: a folder of this machine, or the name of one on the Hugging Face hub, which is downloaded."""

from __future__ import annotations

import re
from pathlib import Path

from common.errors import FieldViolation, InvalidConfig

_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_WEIGHTS = ("*.safetensors",)
_OTHER_FILES = ("*.json", "*.model", "*.txt", "*.jinja")


def is_hub_name(model: str) -> bool:
    """Return whether a name can only be one on the hub: `name` or `owner/name`, and no folder here."""
    return _HUB_NAME.fullmatch(model) is not None and not Path(model).is_dir()


def checkpoint_directory(model: str, weights: bool = True) -> Path:
    """Return the folder of a checkpoint; a hub name is downloaded, without its weights if the caller needs none.

    Raises InvalidConfig when there is neither.
    """
    directory = Path(model).expanduser()
    if directory.is_dir():
        return directory
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=[*_OTHER_FILES, *(_WEIGHTS if weights else ())]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        what = f"{model!r} is no directory here, and the hub did not give it: {' '.join(str(error).split())}"
        raise InvalidConfig(FieldViolation("--model", what)) from error
