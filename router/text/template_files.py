"""The files that hold the chat templates of a checkpoint; which one counts is as in transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from common.errors import FieldViolation, InvalidConfig
from router.text.checkpoint import read_json

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
    of_tokenizer = _named(tokenizer_config.get("chat_template"))
    of_processor = _named(read_json(directory / "chat_template.json").get("chat_template"))
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


def _of_files(directory: Path) -> dict[str, str]:
    files = {_DEFAULT: directory / "chat_template.jinja", _TOOL_USE: directory / TOOL_USE}
    return {name: read_template(file) for name, file in files.items() if file.is_file()}


def _named(templates: str | Mapping[str, str] | list[dict[str, str]] | None) -> dict[str, str]:
    """Return templates by name; checkpoints have one text, or a list of named ones."""
    if isinstance(templates, list):
        return {each["name"]: each["template"] for each in templates}
    if isinstance(templates, Mapping):
        return dict(templates)
    return {} if templates is None else {_DEFAULT: templates}
