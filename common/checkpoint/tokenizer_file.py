"""The tokenizer.json of a checkpoint: its own, or one that transformers makes of a checkpoint's older files.

Routers and KV managers run without transformers, whose import takes seconds: a process of its own converts, once, and
the result is kept in the user's cache (XDG_CACHE_HOME) for every later start.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from common.checkpoint.files import refuse_pointers
from common.checkpoint.tokenizer_checks import refuse_hostile
from common.contracts.errors import FieldViolation, InvalidConfig

log = logging.getLogger(__name__)

# Files that a tokenizer can be made of, the first of them for the message.
_SOURCES: Final = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt")
# Files that say how: they change the result too.
_SETTINGS: Final = (
    *("merges.txt", "config.json"),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
)
# Tokenizers need no torch, whose import takes most of the time of a conversion.
_PROGRAM: Final = (
    "import sys; sys.modules['torch'] = None; from transformers import AutoTokenizer as A; "
    "A.from_pretrained(sys.argv[1]).backend_tokenizer.save(sys.argv[2])"
)
_SECONDS: Final = 300.0
_SENTENCEPIECE: Final = b"\n"  # the tag of the first piece; a file of tiktoken begins with a letter


def tokenizer_json(directory: Path) -> Path | None:
    """Return the tokenizer.json to use; None for a checkpoint without any tokenizer.

    Raises InvalidConfig when that file is broken or hostile, and when there are older files alone and they cannot be
    converted here.
    """
    own = directory / "tokenizer.json"
    if own.is_file():
        refuse_hostile(own)
        return own
    sources = [directory / name for name in _SOURCES if (directory / name).is_file()]
    if not sources:
        return None
    refuse_pointers(sources)
    kept = _cache() / _digest(directory) / own.name
    if not kept.is_file():
        _refuse_without(sources[0], *_needed(sources[0]))
        _convert(directory, sources[0], kept)
        log.info("converted %s to a tokenizer.json, kept in %s", sources[0].name, kept.parent)
    return kept


def _needed(source: Path) -> tuple[str, ...]:
    """Return the packages with which transformers converts a file."""
    if source.suffix != ".model":
        return ("transformers",)
    with source.open("rb") as file:
        first = file.read(1)
    return ("transformers", "sentencepiece" if first == _SENTENCEPIECE else "tiktoken")


def _refuse_without(source: Path, *packages: str) -> None:
    if missing := [name for name in packages if find_spec(name) is None]:
        raise _unconverted(source, f"needs {' and '.join(missing)}: pip install {' '.join(missing)}")


def _convert(directory: Path, source: Path, kept: Path) -> None:
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        made = Path(folder) / kept.name
        command = [sys.executable, "-c", _PROGRAM, str(directory.resolve()), str(made)]
        env = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        try:
            # In a folder of its own: a file named like a module, in that of the caller, would be imported.
            done = subprocess.run(
                command, capture_output=True, text=True, env=env, cwd=folder, timeout=_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise _unconverted(source, f"took more than {_SECONDS:g} s") from None
        if done.returncode or not made.is_file():
            last = (done.stderr.strip().splitlines() or ["no reason was given"])[-1]
            raise _unconverted(source, f"failed: {last[:300]}")
        made.replace(kept)


def _unconverted(source: Path, why: str) -> InvalidConfig:
    what = (
        f"{source.parent} has {source.name} and no tokenizer.json, and its conversion {why}. Or convert elsewhere, by"
        " transformers' AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
    )
    return InvalidConfig(FieldViolation("--model", what))


def _digest(directory: Path) -> str:
    """Return 32 hexadecimal digits for what decides the result of a conversion."""
    digest = hashlib.sha256(_version("transformers").encode())
    for name in (*_SOURCES, *_SETTINGS):
        path = directory / name
        if path.is_file():
            content = path.read_bytes()
            digest.update(f"{name} {len(content)} ".encode() + content)
    return digest.hexdigest()[:32]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _cache() -> Path:
    """Return the folder of converted tokenizers; one of this process alone where the user's cache cannot be written."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire" / "tokenizers"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return _own_folder()
    return folder if os.access(folder, os.W_OK) else _own_folder()


@functools.cache
def _own_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="quire-tokenizers-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
