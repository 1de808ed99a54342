"""Reads the prompts that a command line gives: a text, a file, standard input, token ids, or a chat as JSON."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from common.errors import FieldViolation, InvalidRequest
from quire.client import Message

# Keys of a body of /v1/chat/completions that count here.
_OF_BODY: Final = ("tools", "max_tokens", "n")


def text_of(flag: str, word: str) -> str:
    """Return a flag's text: its own, that of a file (@FILE), or standard input (-)."""
    try:
        return sys.stdin.read() if word == "-" else Path(word[1:]).read_text() if word.startswith("@") else word
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise InvalidRequest(FieldViolation(flag, f"{word.lstrip('@')} cannot be read: {why}")) from None


def token_ids_of(text: str) -> list[int]:
    """Return the numbers in a text. Raises InvalidRequest."""
    words = [word for word in re.split(r"[\s,\[\]]+", text) if word]
    wrong = next((word for word in words if not re.fullmatch(r"\d{1,9}", word)), None)
    if wrong is not None or not words:
        what = f"has {wrong[:40]!r}" if wrong is not None else "is empty"
        raise InvalidRequest(FieldViolation("--token-ids", f"{what}; expected numbers such as 12 7 530"))
    return [int(word) for word in words]


def chat_of(text: str) -> tuple[list[Message], dict[str, Any]]:
    """Return the messages in a text, and the options that stand beside them. Raises InvalidRequest."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(FieldViolation("--chat", f"is no JSON: {error}")) from None
    options = {name: found[name] for name in _OF_BODY if name in found} if isinstance(found, Mapping) else {}
    messages = found.get("messages") if isinstance(found, Mapping) else found
    if not isinstance(messages, list) or not messages:
        what = 'has no messages; expected [{"role": "user", "content": "..."}], or an object with "messages"'
        raise InvalidRequest(FieldViolation("--chat", what))
    return messages, options
