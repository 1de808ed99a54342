"""Finds a checkpoint: a folder or a GGUF file of this machine, or a name on the Hugging Face hub, downloaded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from common.checkpoint.gguf.folder import gguf_folder
from common.checkpoint.gguf.names import gguf_file, is_local_name
from common.contracts.errors import FieldViolation, InvalidConfig

_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_WEIGHTS = ("*.safetensors",)
_OTHER_FILES = ("*.json", "*.model", "*.txt", "*.jinja")


def is_hub_name(model: str) -> bool:
    """Return whether a name can only be one on the hub: `name` or `owner/name`, and nothing that is here."""
    return _HUB_NAME.fullmatch(model) is not None and not is_local_name(model) and not Path(model).exists()


def without_effect(model: str, revision: str | None) -> Iterator[FieldViolation]:
    """Yield a violation for a revision of what has none: a folder of this machine."""
    if revision and Path(model).expanduser().is_dir():
        what = f"is {revision!r}, and --model {model} is a folder of this machine, which has no revisions; leave it out"
        yield FieldViolation("--revision", what)


def checkpoint_directory(model: str, weights: bool = True, revision: str | None = None) -> Path:
    """Return the folder of a checkpoint, for a GGUF file the one that stands for it; a hub name is downloaded.

    `weights`: whether the caller needs them. `revision` is a branch, tag or commit on the hub. Raises InvalidConfig
    when there is no such model.
    """
    if (file := gguf_file(model)) is not None:
        return gguf_folder(file)
    directory = Path(model).expanduser()
    if directory.is_dir():
        return directory
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        patterns = [*_OTHER_FILES, *(_WEIGHTS if weights else ())]
        return Path(snapshot_download(model, revision=revision or None, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        what = f"{model!r} is not a local directory, and the hub did not provide it: {' '.join(str(error).split())}"
        raise InvalidConfig(FieldViolation("--model", what)) from error
