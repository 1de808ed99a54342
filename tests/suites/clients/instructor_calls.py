"""Calls a server by instructor, and prints what each call got; reads {"url", "model", "calls": [...]} in JSON."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterable
from typing import Any, Literal

import instructor
import openai
from pydantic import BaseModel, field_validator

QUESTION: Any = [{"role": "user", "content": "Where does Anna live?"}]
MORE: Any = {"extra_body": {"seed": 4}, "temperature": 1, "max_tokens": 400, "max_retries": 0}


class Town(BaseModel):
    """A town."""

    name: Literal["Lyon", "Basel"]
    big: bool


class River(BaseModel):
    """A river."""

    length: int


class Big(BaseModel):
    """A town that is big."""

    name: Literal["Lyon", "Basel"]
    big: bool

    @field_validator("big")
    @classmethod
    def is_big(cls, given: bool) -> bool:
        if not given:
            raise ValueError("the town must be big")
        return given


class Calls:
    """All calls, with the client and the model's name."""

    def __init__(self, url: str, model: str) -> None:
        self._client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        self._model = model

    def modes(self) -> list[str]:
        """Return the modes that the package has for OpenAI's client."""
        return [mode.name for mode in instructor.Mode if self._takes(mode)]

    def town(self, mode: str) -> Any:
        """Return an object in a mode."""
        create = self._patched(mode).chat.completions.create
        return create(model=self._model, messages=QUESTION, response_model=Town, **MORE).model_dump()

    def parallel(self) -> Any:
        """Return objects of several kinds, one for each call."""
        create = self._patched("PARALLEL_TOOLS").chat.completions.create
        kinds: Any = Iterable[Town | River]
        return [
            each.model_dump() for each in create(model=self._model, messages=QUESTION, response_model=kinds, **MORE)
        ]

    def partial(self, mode: str) -> Any:
        """Return the states of an object while its stream comes."""
        create = self._patched(mode).chat.completions.create_partial
        return [each.model_dump() for each in create(model=self._model, messages=QUESTION, response_model=Town, **MORE)]

    def asked_again(self) -> Any:
        """Return an object whose first form was refused by its own validator."""
        create = self._patched("TOOLS").chat.completions.create
        more = MORE | {"max_retries": 2}
        return create(model=self._model, messages=QUESTION, response_model=Big, **more).model_dump()

    def _takes(self, mode: instructor.Mode) -> bool:
        try:
            self._patched(mode.name)
        except Exception:  # noqa: BLE001 - the package has several errors for a mode of another provider
            return False
        return True

    def _patched(self, mode: str) -> Any:
        return instructor.from_openai(self._client, mode=instructor.Mode[mode])


def main() -> None:
    warnings.simplefilter("ignore", DeprecationWarning)
    given = json.load(sys.stdin)
    calls = Calls(given["url"], given["model"])
    json.dump([getattr(calls, name)(*rest) for name, *rest in given["calls"]], sys.stdout)


main()
