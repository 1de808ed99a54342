"""The files that hold the chat templates of a checkpoint; which one counts is as in transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from common.checkpoint.bounded_json import shown
from common.contracts.errors import FieldViolation, InvalidConfig
from router.answers.text.checkpoint import read_json

# A file of this name in a folder of more templates is that for chats with tools.
TOOL_USE: Final = "additional_chat_templates/tool_use.jinja"
_DEFAULT, _TOOL_USE = "default", "tool_use"


@dataclass(frozen=True, slots=True)
class TemplateSources:
    """The template of a checkpoint, and the one for chats with tools where it has one of its own for them."""

    default: str
    tool_use: str | None = None


def template_sources(directory: Path, tokenizer_config: Mapping[str, Any]) -> TemplateSources | None:
    """Return the templates of files of their own, of the tokenizer, or of the processor's older file."""
    of_tokenizer = _named(directory / "tokenizer_config.json", tokenizer_config)
    older = directory / "chat_template.json"
    of_processor = _named(older, read_json(older))
    named = _of_files(directory)
    if _DEFAULT not in named:
        named = (of_tokenizer or of_processor) | named
    tool_use = named.get(_TOOL_USE)
    default = named.get(_DEFAULT, tool_use)
    if default is None:
        return None
    return TemplateSources(default, tool_use if tool_use != default else None)


def read_template(file: Path) -> str:
    """Return the text of a template. Raises InvalidConfig for a file that is none."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidConfig(FieldViolation("--chat-template", f"{file} is no text in UTF-8: {error}")) from None
    except OSError as error:
        raise InvalidConfig(FieldViolation("--chat-template", f"{file} cannot be read: {error.strerror}")) from None


def _of_files(directory: Path) -> dict[str, str]:
    files = {_DEFAULT: directory / "chat_template.jinja", _TOOL_USE: directory / TOOL_USE}
    return {name: read_template(file) for name, file in files.items() if file.is_file()}


def _named(file: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates of a file by name; checkpoints have one text, or a list of named ones."""
    given = config.get("chat_template")
    if given is None:
        return {}
    pairs = [(_DEFAULT, given)]
    if isinstance(given, dict):
        pairs = [*given.items()]
    elif isinstance(given, list) and all(isinstance(each, dict) for each in given):
        pairs = [(each.get("name"), each.get("template")) for each in given]
    if not all(isinstance(each, str) for pair in pairs for each in pair):
        what = f"{file}: chat_template is {shown(given)}; expected a text, or a list of objects of name and template"
        raise InvalidConfig(FieldViolation("--model", what))
    return dict(pairs)
