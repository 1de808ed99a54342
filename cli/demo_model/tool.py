"""A tool for demonstrations: it finds what a text says about the person of a question."""

from __future__ import annotations

import re
from typing import Any, Final

CHOICE: Final[dict[str, Any]] = {"type": "function", "function": {"name": "look_up"}}
_NAME: Final = re.compile(r"(?<=\s)[A-Z]\w+(?: [A-Z]\w+)*")


def person_in(question: str) -> str:
    """Return the person whom a question names; "" where it names nobody."""
    found = _NAME.search(question)
    return found.group() if found else ""


def tool(person: str) -> dict[str, Any]:
    """Return the tool in OpenAI's form. The demo model has learnt no JSON, so it may name this person alone."""
    parameters = {
        "type": "object",
        "properties": {"person": {"enum": [person]}},
        "required": ["person"],
        "additionalProperties": False,
    }
    description = "Finds what is known about a person."
    return {"type": "function", "function": {"name": "look_up", "description": description, "parameters": parameters}}


def look_up(person: str, text: str) -> str:
    """Return the sentences of a text that name a person."""
    return " ".join(sentence for sentence in re.split(r"(?<=\.) ", text) if person in sentence)
