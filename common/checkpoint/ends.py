"""Which tokens end a generation: those that generation_config.json, config.json and the tokenizer name, together.

People fine-tune a base model and change one of the three alone, so none of them can be trusted to name all ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from common.checkpoint.completed import completed
from common.checkpoint.files import read_config, read_generation, read_object
from common.checkpoint.tokenizer_checks import read_tokens

_ID_DIGITS: Final = 10
Ends = dict[int, list[str]]
# Names of the tokenizer's tokens that end a text, a turn or a message.
_END_TOKENS: Final = ("eos_token", "eot_token", "eom_token")
# Objects of tokenizer_config.json that hold further named tokens.
_MORE_TOKENS: Final = ("extra_special_tokens", "model_specific_special_tokens")


def named_ends(directory: Path, tokenizer: Path | None = None) -> Ends:
    """Return the ids that end a generation, and who says so; `tokenizer` is the folder of another tokenizer.

    Raises InvalidConfig for a file that is not JSON.
    """
    found: Ends = {}
    for name, config in (
        ("generation_config.json", read_generation(directory)),
        ("config.json", completed(read_config(directory) if (directory / "config.json").is_file() else {})),
    ):
        for each in _ids(config):
            found.setdefault(each, []).append(name)
    for name, token in _of_tokenizer(tokenizer or directory):
        found.setdefault(token, []).append(f"the tokenizer's {name}")
    return found


def _ids(config: Mapping[str, Any]) -> list[int]:
    given = config.get("eos_token_id")
    if given is None:
        given = (config.get("text_config") or {}).get("eos_token_id")
    listed = given if isinstance(given, list) else [given]
    return list(dict.fromkeys(each for each in listed if isinstance(each, int) and each >= 0))


def _of_tokenizer(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield the named tokens that end something, with their ids."""
    config = _read(folder / "tokenizer_config.json")
    named = dict(_read(folder / "special_tokens_map.json"))
    for more in (config, *(config.get(key) for key in _MORE_TOKENS)):
        named |= more if isinstance(more, dict) else {}
    texts = {name: text for name in _END_TOKENS if (text := _text(named.get(name)))}
    if not texts:
        return
    ids = _added(folder, config)
    if not all(text in ids for text in texts.values()):
        ids = _vocabulary(folder) | ids
    yield from ((name, ids[text]) for name, text in texts.items() if text in ids)


def _text(token: Any) -> str:
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else ""


def _added(folder: Path, config: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids of added tokens that small files have."""
    decoder = config.get("added_tokens_decoder") or {}
    listed = decoder.items() if isinstance(decoder, dict) else ()
    found = {_text(token): int(key) for key, token in listed if key.isdecimal() and len(key) < _ID_DIGITS}
    return {**_ids_of(_read(folder / "added_tokens.json")), **found}


def _vocabulary(folder: Path) -> dict[str, int]:
    """Return the ids of all tokens; the file may have megabytes."""
    path = folder / "tokenizer.json"
    return dict(read_tokens(path)) if path.is_file() else _ids_of(_read(folder / "vocab.json"))


def _ids_of(tokens: Mapping[str, Any]) -> dict[str, int]:
    return {text: number for text, number in tokens.items() if type(number) is int and number >= 0}


def _read(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}
