"""How a checkpoint makes one vector of a prompt: as sentence-transformers stores it, or as an option asks for it.

modules.json lists the parts of such a model in order: the transformer, in the folder itself, then `Pooling`, whose
folder has a config.json, then `Normalize` where vectors have length 1. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Literal

from common.checkpoint.files import read_list, read_object
from common.contracts.errors import FieldViolation, InvalidConfig
from common.contracts.types import NO_POOLING

PoolingOption = Literal["auto", "none", "last", "mean"]
MODULES: Final = "modules.json"
_NORMALISED: Final = ", normalised"
# Other modes have no part in decoders: "cls" is the first token, which sees nothing but itself.
_MODES: Final = {"lasttoken": "last", "mean": "mean"}
# The flags of older versions, one for each mode.
_FLAGS: Final = {
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
# Files and keys by which sentence-transformers changes a text before it is encoded.
_CHANGES: Final = (
    ("config_sentence_transformers.json", "default_prompt_name", "puts a prompt before every text"),
    ("sentence_bert_config.json", "do_lower_case", "writes texts in small letters"),
)
_PARTS: Final = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])


RANKING_PARTS: Final = ["Transformer", "LogitScore"]
"""The parts of a decoder that ranks by its answer (`ranking.py`): it generates."""


class PoolingMode(StrEnum):
    LAST = "last"
    MEAN = "mean"


@dataclass(frozen=True, slots=True)
class Pooling:
    """The hidden state of the last token, or the mean of all; `normalised` vectors have length 1."""

    mode: PoolingMode
    normalised: bool = True

    def __str__(self) -> str:
        """Return the pooling as a pool's identity has it."""
        return f"{self.mode}{_NORMALISED if self.normalised else ''}"


def name_of(pooling: Pooling | None) -> str:
    """Return the pooling as a pool's identity has it."""
    return NO_POOLING if pooling is None else str(pooling)


def needs_every_token(pooling: str) -> bool:
    """Return whether a pooling, as an identity has it, needs every hidden state, so that no prefix hit can be taken."""
    return pooling.startswith(PoolingMode.MEAN)


def asked_pooling(option: PoolingOption, directory: Path) -> Pooling | None:
    """Return the pooling of a pool; None where it generates. An option in words asks for vectors of length 1.

    Raises InvalidConfig for a stored form that cannot be computed here.
    """
    if option == "auto":
        return stored_pooling(directory)
    return None if option == "none" else Pooling(PoolingMode(option))


def stored_pooling(directory: Path) -> Pooling | None:
    """Return what modules.json of a checkpoint asks for; None where it asks for no vectors. Raises InvalidConfig."""
    path, modules = directory / MODULES, parts_of(directory)
    kinds = [name for name, _ in modules]
    if not path.is_file() or kinds == RANKING_PARTS:
        return None
    if kinds not in _PARTS:
        what = f"{path} has the parts {', '.join(kinds)}; expected {', '.join(_PARTS[0])} and perhaps Normalize"
        raise _bad(f"{what}: give --pooling last or mean to pool without the others, or none to generate")
    _check_texts(directory)
    mode = _stored_mode(directory / modules[1][1] / "config.json")
    return Pooling(mode, normalised="Normalize" in kinds)


def parts_of(directory: Path) -> list[tuple[str, str]]:
    """Return name and folder of each part in modules.json; none without that file. Raises InvalidConfig."""
    path = directory / MODULES
    found = read_list(path) if path.is_file() else []
    return [(str(each.get("type", "")).rpartition(".")[2], str(each.get("path", ""))) for each in found]


def _check_texts(directory: Path) -> None:
    """Raise InvalidConfig for a checkpoint that embeds another text than it is given."""
    for name, key, does in _CHANGES:
        path = directory / name
        if path.is_file() and read_object(path).get(key):
            what = f"{path} {does} ({key}); clients must send texts so themselves"
            raise _bad(f"{what}: give --pooling last or mean, as {MODULES} has it, to embed texts as they come")


def _stored_mode(path: Path) -> PoolingMode:
    config = read_object(path)
    modes = _modes(config)
    if len(modes) != 1 or modes[0] not in _MODES:
        what = f"{path} pools by {' and '.join(modes) or 'nothing'}; expected one of {' and '.join(_MODES)}"
        raise _bad(f"{what}: give --pooling last or mean to pool so instead")
    if config.get("include_prompt") is False:
        raise _bad(f"{path} leaves prompts out of the mean (include_prompt); only all tokens together are pooled")
    return PoolingMode(_MODES[modes[0]])


def _modes(config: Mapping[str, Any]) -> Sequence[str]:
    named = config.get("pooling_mode")
    if named is None:
        return [mode for flag, mode in _FLAGS.items() if config.get(flag)]
    return [named] if isinstance(named, str) else list(map(str, named))


def _bad(what: str) -> InvalidConfig:
    return InvalidConfig(FieldViolation("--model", what))
