"""The folder that stands for a GGUF file: its configuration and tokenizer in Hugging Face format, and a link to it.

The folder lies in the user's cache, so that it is made once for all processes and starts. Its name follows from path,
size and time of the file. Everything that serves a folder then serves the file; `WEIGHTS` says where the tensors are.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

from common.checkpoint.bounded_json import shown
from common.checkpoint.files import read_object
from common.checkpoint.gguf.config import PlainTensor, configuration, plain_tensors
from common.checkpoint.gguf.header import TYPES, Header, Tensor, read_header, refused
from common.checkpoint.gguf.tokenizer import chat_template, generation_config, tokenizer_files

WEIGHTS: Final = "gguf_tensors.json"
LINK: Final = "model.gguf"
# Part of a folder's name: raised when a file would give another folder than before.
_FORMAT: Final = 2
_ENTRY: Final = 6  # values of a tensor in the index
_MOST_CHARACTERS: Final = 200  # of an error of Python


def gguf_folder(file: Path) -> Path:
    """Return the folder of a GGUF file; it is made where it is not there. Raises InvalidConfig for a bad file."""
    whole = file.resolve()
    facts = whole.stat()
    key = f"{_FORMAT}:{whole}:{facts.st_size}:{facts.st_mtime_ns}"
    name = f"{whole.stem[:64]}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    try:
        return _in(_cache(), whole, name)
    except OSError:  # the cache cannot be written
        return _in(_temporary(), whole, name)


def read_places(directory: Path) -> dict[str, PlainTensor]:
    """Return the tensors that the index of such a folder names. Raises InvalidConfig for an index that is broken.

    A folder with an index may come from anywhere: nothing in it is taken as written by this module.
    """
    path, file = directory / WEIGHTS, (directory / LINK).resolve()
    try:
        size = file.stat().st_size
    except OSError as error:
        raise refused(path, f"the GGUF file {file} cannot be read: {error.strerror}") from None
    found = {}
    for name, entry in read_object(path).items():
        if not _is_place(entry, size):
            raise refused(path, f"tensor {shown(name)} is not in {file} as the index says; name the GGUF file instead")
        kind, shape, offset, nbytes, heads, above = entry
        found[name] = PlainTensor(name, Tensor(kind, tuple(shape), offset, nbytes), heads, above)
    return found


def _is_place(entry: Any, size: int) -> bool:
    """Return whether an entry of the index is what `_files` writes, within a file of this size."""
    if not isinstance(entry, list) or len(entry) != _ENTRY:
        return False
    kind, shape, *numbers = entry
    if not isinstance(shape, list) or not all(type(each) is int and each >= 0 for each in (*shape, *numbers)):
        return False
    form = next((each for each in TYPES.values() if each.name == kind), None)
    offset, nbytes, *_ = numbers
    return form is not None and form.bytes_of(shape) == nbytes and offset + nbytes <= size


def _in(base: Path, file: Path, name: str) -> Path:
    """Return the folder of a file in a folder of such folders."""
    if not (base / name / WEIGHTS).is_file():
        base.mkdir(parents=True, exist_ok=True)
        _make(read_header(file), base, name)
    return base / name


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "quire" / "gguf"


@functools.cache
def _temporary() -> Path:
    """Return a folder that lasts as long as this process."""
    base = Path(tempfile.mkdtemp(prefix="quire-gguf-"))
    atexit.register(shutil.rmtree, base, ignore_errors=True)
    return base


def _make(header: Header, base: Path, name: str) -> None:
    """Write the folder beside its place, then move it there: another process sees all of it or nothing."""
    try:
        files = _files(header)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        why = str(error)[:_MOST_CHARACTERS]
        raise header.refuse(f"its metadata do not make a model ({why}); download or convert it again") from None
    made = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=base))
    try:
        for file, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
            (made / file).write_text(text, encoding="utf-8")
        (made / LINK).symlink_to(header.path)
        made.chmod(0o755)
        _move(made, base / name)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _move(made: Path, place: Path) -> None:
    try:
        made.rename(place)
    except OSError:
        if not (place / WEIGHTS).is_file():  # else another process was faster
            raise


def _files(header: Header) -> dict[str, Any]:
    """Return the content of each file by name: text, or what is written as JSON."""
    files: dict[str, Any] = {
        "config.json": configuration(header),
        "generation_config.json": generation_config(header),
        **tokenizer_files(header),
        WEIGHTS: {each.name: [*_place(each.stored), each.heads, each.above] for each in plain_tensors(header)},
    }
    template = chat_template(header)
    return files if template is None else files | {"chat_template.jinja": template}


def _place(stored: Tensor) -> tuple[Any, ...]:
    return stored.type, stored.shape, stored.offset, stored.nbytes
