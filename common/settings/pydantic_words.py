"""Pydantic's errors in the words of all other errors: the value that was given, and what was expected."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any


def mistake(problem: Mapping[str, Any]) -> str:
    """Return the words of one of pydantic's `ErrorDetails`; a long value is cut."""
    if problem["type"] == "missing":
        return "is missing"
    if problem["type"] == "extra_forbidden":
        return "is not known; expected nothing of this name"
    return f"is {reprlib.repr(problem['input'])}; {expectation(problem)}"


def expectation(problem: Mapping[str, Any]) -> str:
    """Return what was expected, without pydantic's own phrases."""
    if problem["type"] == "too_short":
        return "expected at least one"
    if problem["type"] == "model_type":
        return "expected an object"
    words = str(problem["msg"]).removeprefix("Value error, ").replace("Input should be", "expected")
    return words.partition(", unable to ")[0]
