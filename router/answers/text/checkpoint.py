"""Facts of a checkpoint besides its tokenizer: context, vocabulary, end-of-sequence tokens, sampling defaults.

Numbers may also lie in the `text_config` of a multi-modal checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.checkpoint.completed import completed, text_part
from common.checkpoint.context import CONTEXT_KEYS, context_of
from common.checkpoint.ends import named_ends
from common.checkpoint.files import read_config, read_generation, read_object
from common.checkpoint.fingerprint import tokenizer_fingerprint
from common.checkpoint.ranking import RankTokens, stored_ranking
from common.contracts.errors import FieldViolation, InvalidConfig

_HIDDEN_KEYS = ("hidden_size", "n_embd", "d_model")
_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Facts from config.json, generation_config.json and tokenizer_config.json.

    `max_model_len` is in tokens, prompt and output together. `sampling_defaults` has those of temperature, top_p,
    top_k, min_p and repetition_penalty that the checkpoint recommends; `max_new_tokens` is None where it has no advice.
    `ends` has the tokens that end an answer, and why each does.
    """

    directory: Path
    max_model_len: int
    vocab_size: int
    ends: Mapping[int, Sequence[str]]
    sampling_defaults: Mapping[str, float]
    max_new_tokens: int | None
    tokenizer_fingerprint: str
    hidden_size: int = 0
    """Numbers of a token's hidden state; 0 where config.json names none."""
    ranks: RankTokens | None = None
    """The answers by which it ranks."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer."""
        return tuple(self.ends)


def read_checkpoint(directory: Path, tokenizer: Path | None = None) -> Checkpoint:
    """Read a folder in Hugging Face format; `tokenizer` is the folder of another tokenizer.

    Raises InvalidConfig when config.json is missing or lacks a number.
    """
    path = directory / "config.json"
    if not directory.is_dir():
        what = f"{directory} is not a folder on this machine; expected that of a checkpoint (hub names: workers and up)"
        raise InvalidConfig(FieldViolation("--model", what))
    if not path.is_file():
        what = f"no config.json in {directory}; expected the folder of a checkpoint in Hugging Face format"
        raise InvalidConfig(FieldViolation("--model", what))
    config = completed(read_config(directory))
    generation = read_generation(directory)
    ends = named_ends(directory, tokenizer)
    vocab_size = _number(config, ("vocab_size",), path)
    return Checkpoint(
        directory=directory,
        max_model_len=context_of(text_part(config)) or _number(config, CONTEXT_KEYS, path),
        vocab_size=vocab_size,
        ends=ends,
        sampling_defaults=_sampling_defaults(generation),
        max_new_tokens=generation.get("max_new_tokens"),
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer or directory),
        hidden_size=_found(config, _HIDDEN_KEYS) or 0,
        ranks=stored_ranking(directory, vocab_size),
    )


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one when there is no such file. Raises InvalidConfig for bad JSON."""
    return read_object(path) if path.is_file() else {}


def _look(config: Mapping[str, Any], key: str) -> Any:
    value = config.get(key)
    return value if value is not None else (config.get("text_config") or {}).get(key)


def _number(config: Mapping[str, Any], keys: tuple[str, ...], path: Path) -> int:
    found = _found(config, keys)
    if found is None:
        raise InvalidConfig(FieldViolation("--model", f"{path} has no number under {' or '.join(keys)}"))
    return found


def _found(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    return next((value for key in keys if isinstance(value := _look(config, key), int)), None)


def _sampling_defaults(generation: Mapping[str, Any]) -> dict[str, float]:
    """Keep the numbers. Checkpoints mean "no top_k" by null, 0 or -1; the result has 0."""
    found = {key: generation[key] for key in _SAMPLING_KEYS if isinstance(generation.get(key), int | float)}
    if found.get("top_k", 0) < 0:
        found["top_k"] = 0
    return found
