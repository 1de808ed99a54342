"""How a decoder ranks: by whether it would answer yes or no, as sentence-transformers stores it.

modules.json lists the transformer, then `LogitScore`, whose folder has a config.json with the two tokens. The chat
template writes the roles `query` and `document`. Qwen3-Reranker has this form. Standard library only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from common.checkpoint.files import read_object
from common.checkpoint.pooling import MODULES, RANKING_PARTS, parts_of
from common.contracts.errors import FieldViolation, InvalidConfig

_KEYS: Final = ("true_token_id", "false_token_id")


class RankTokens(NamedTuple):
    """The tokens of the two answers."""

    yes: int
    no: int


def stored_ranking(directory: Path, vocab_size: int) -> RankTokens | None:
    """Return the tokens by which a checkpoint ranks; None where it does not, or by one token alone.

    A single token has no probability to compare with: its score is a logit, which no answer has. Raises InvalidConfig.
    """
    modules = parts_of(directory)
    if [name for name, _ in modules] != RANKING_PARTS:
        return None
    path = directory / modules[1][1] / "config.json"
    config = read_object(path)
    found = [config.get(key) for key in _KEYS]
    if found[1] is None:
        return None
    for key, value in zip(_KEYS, found, strict=True):
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocab_size:
            what = f"{path} has {key} {value!r}, as {MODULES} wants it; expected a token id, 0 to {vocab_size - 1}"
            raise InvalidConfig(FieldViolation("--model", what))
    yes, no = map(int, (each for each in found if each is not None))
    return RankTokens(yes, no)
