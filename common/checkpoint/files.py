"""The files of a checkpoint, as strangers' disks have them: JSON that is broken, Git LFS pointers, downloads cut short.

Standard library only: these checks run before a service starts, and before torch is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from common.checkpoint.bounded_json import MOST_BYTES, parse, shown
from common.checkpoint.safetensors_header import CutShort, read_header
from common.checkpoint.sizes import config_problems, generation_problems
from common.contracts.errors import FieldViolation, InvalidConfig

INDEX: Final = "model.safetensors.index.json"
WHOLE: Final = "model.safetensors"
_POINTER: Final = b"version https://git-lfs.github.com/spec/"
_POINTER_BYTES: Final = 1024  # more than any pointer has
# Weights in formats that are not read; those before the last one are pickles.
_OTHER_WEIGHTS: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx")
_MOST_NAMED: Final = 3
_MOST_CHARACTERS: Final = 255  # of the name of a file


def read_config(directory: Path) -> dict[str, Any]:
    """Return config.json of a checkpoint. Raises InvalidConfig when there is none, or its numbers cannot be."""
    path = directory / "config.json"
    if not path.is_file():
        what = f"no config.json in {directory}; expected a checkpoint in Hugging Face format"
        raise InvalidConfig(FieldViolation("--model", what))
    config = read_object(path)
    _refuse(path, config_problems(config))
    return config


def read_generation(directory: Path) -> dict[str, Any]:
    """Return generation_config.json of a checkpoint; {} without one. Raises InvalidConfig where it is broken."""
    path = directory / "generation_config.json"
    if not path.is_file():
        return {}
    config = read_object(path)
    _refuse(path, generation_problems(config))
    return config


def _refuse(path: Path, problems: Iterable[str]) -> None:
    if violations := [FieldViolation("--model", f"{path}: {each}; correct it") for each in problems]:
        raise InvalidConfig(*violations)


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises InvalidConfig for a file that holds anything else."""
    content = _read_json(path)
    if not isinstance(content, dict):
        raise _bad(f"{path} holds a {type(content).__name__}; expected a JSON object: download the file again")
    return content


def read_list(path: Path) -> list[dict[str, Any]]:
    """Return the list of objects in a JSON file. Raises InvalidConfig for a file that holds anything else."""
    content = _read_json(path)
    if not isinstance(content, list) or not all(isinstance(each, dict) for each in content):
        raise _bad(f"{path} holds something else than a list of JSON objects: download the file again")
    return content


def _read_json(path: Path) -> Any:
    refuse_pointers([path])
    try:
        if (size := path.stat().st_size) > MOST_BYTES:
            raise ValueError(f"it has {size} bytes; expected at most {MOST_BYTES}")
        return parse(path.read_bytes())
    except OSError as error:
        raise _bad(f"{path} cannot be read: {error.strerror}; make it readable for this user") from None
    except UnicodeDecodeError:
        raise _bad(f"{path} is not text in UTF-8; expected JSON: download the file again") from None
    except ValueError as error:
        raise _bad(f"{path} is not valid JSON: {error}; correct it, or download the file again") from None


def refuse_pointers(paths: Iterable[Path]) -> None:
    """Raise InvalidConfig when one of the files is a Git LFS pointer."""
    if found := [path for path in paths if is_pointer(path)]:
        raise InvalidConfig(_pointers(found))


def is_pointer(path: Path) -> bool:
    """Return whether a file is what git leaves in place of a large one when Git LFS is not installed."""
    try:
        if path.stat().st_size > _POINTER_BYTES:
            return False
        with path.open("rb") as file:
            return file.read(len(_POINTER)) == _POINTER
    except OSError:
        return False


def weight_problems(directory: Path) -> list[FieldViolation]:
    """Return why the weights of a checkpoint cannot be read, by the names, sizes and headers of its files.

    A folder with a GGUF file is none of this module's business.
    """
    if any(directory.glob("*.gguf")):
        return []
    try:
        found = weight_files(directory).paths
    except InvalidConfig as error:
        return list(error.violations)
    if pointers := [path for path in found if is_pointer(path)]:
        return [_pointers(pointers)]
    return list(_cut_short(found))


def weight_bytes(directory: Path) -> int:
    """Return the bytes on disk of the weights that are read; 0 where there are none, or some are missing."""
    try:
        paths = weight_files(directory).paths
    except InvalidConfig:
        paths = sorted(directory.glob("*.gguf"))
    return sum(path.stat().st_size for path in paths)


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The safetensors files of a checkpoint that are read, in the order of their names.

    `places` has the file of each tensor, by the index; empty without one. `unread` says which files of the folder are
    not read and why, "" where that needs no word.
    """

    paths: Sequence[Path]
    places: Mapping[str, Path] = field(default_factory=dict)
    unread: str = ""


def weight_files(directory: Path) -> WeightFiles:
    """Return which files hold the weights: model.safetensors alone where it is there, as for transformers.

    Else those of the index, or all. An index that names model.safetensors among others is right about all of them.
    Raises InvalidConfig when one is missing.
    """
    index, whole = directory / INDEX, directory / WHOLE
    if whole.is_file():
        return _beside_whole(directory)
    if index.is_file():
        places = {tensor: directory / name for tensor, name in _weight_map(index).items()}
        paths = sorted(set(places.values()))
        if missing := [str(path.relative_to(directory)) for path in paths if not _is_file(path)]:
            raise _bad(f"{index} names {_listed(missing)}, which are not there; finish the download")
        return WeightFiles(paths, places)
    found = sorted(directory.glob("*.safetensors"))
    if not found:
        raise _bad(_no_weights(directory))
    return WeightFiles(found)


def _beside_whole(directory: Path) -> WeightFiles:
    """Return the files of a folder that has model.safetensors."""
    index, whole = directory / INDEX, directory / WHOLE
    if not index.is_file():
        return WeightFiles([whole])
    try:
        places = {tensor: directory / name for tensor, name in _weight_map(index).items()}
    except InvalidConfig:
        return WeightFiles([whole], unread=f"{INDEX} cannot be read, and {WHOLE} needs none")
    paths = sorted(set(places.values()))
    if whole in paths and all(map(_is_file, paths)):
        return WeightFiles(paths, places)
    others = _listed([str(path.relative_to(directory)) for path in paths if path != whole])
    unread = f"the weights are those of {WHOLE}; {INDEX} names {others} instead, and is not followed"
    return WeightFiles([whole], unread=unread)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # the name is too long for any file, or its folder may not be read
        return False


def _weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor. Raises InvalidConfig for an index without them."""
    names = read_object(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise _bad(f'{index} has no "weight_map" of names of tensors and files; download the file again')
    if outside := sorted({name for name in names.values() if Path(name).is_absolute() or ".." in Path(name).parts}):
        raise _bad(f"{index} names {_listed(outside)}; expected files in {index.parent}")
    return names


def _no_weights(directory: Path) -> str:
    others = sorted(path.name for pattern in _OTHER_WEIGHTS for path in directory.glob(pattern))
    if not others:
        return (
            f"no weights in {directory}; expected *.safetensors: finish the download"
            " (--load-format dummy runs on random weights)"
        )
    convert = "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(DIR)"
    return f"no *.safetensors in {directory}, and {_listed(others)} is not read; convert by transformers' {convert}"


def _cut_short(paths: Iterable[Path]) -> Iterator[FieldViolation]:
    """Yield a violation for each safetensors file that is shorter than its header says, or that has a bad header."""
    for path in paths:
        size = path.stat().st_size
        try:
            expected = max((each.end for each in read_header(path).values()), default=0)
        except CutShort as error:
            expected = error.expected
        except ValueError as error:
            yield FieldViolation("--model", f"{path} is not a safetensors file: {error}; download the file again")
            continue
        if size < expected:
            what = f"{path} has {size} bytes, and its header promises {expected}; finish the download"
            yield FieldViolation("--model", what)


def _pointers(paths: list[Path]) -> FieldViolation:
    verb = "is a Git LFS pointer" if len(paths) == 1 else "are Git LFS pointers"
    names, folder = _listed([path.name for path in paths]), paths[0].parent
    what = f"{names} in {folder} {verb} of a few lines, not the file itself; run `git lfs pull` in {folder}"
    return FieldViolation("--model", what)


def _listed(names: list[str]) -> str:
    first = ", ".join(name if len(name) <= _MOST_CHARACTERS else shown(name) for name in names[:_MOST_NAMED])
    return first if len(names) <= _MOST_NAMED else f"{first} and {len(names) - _MOST_NAMED} more"


def _bad(what: str) -> InvalidConfig:
    return InvalidConfig(FieldViolation("--model", what))
