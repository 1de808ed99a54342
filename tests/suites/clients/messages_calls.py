"""Calls of the official `anthropic` client: run by .clients/light/bin/python, with {"url", "model"} in JSON on stdin.

The script prints one JSON object with what each call got; test_messages.py checks it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import anthropic

PATIENCE_S = 120.0
ASKED: dict[str, Any] = {"max_tokens": 24, "messages": [{"role": "user", "content": "Where does Anna live?"}]}
# The client has no argument for the temperature any more.
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}, **ASKED}
TOWN: dict[str, Any] = {
    "name": "find_town",
    "description": "Finds a town.",
    "input_schema": {
        "type": "object",
        "properties": {"name": {"enum": ["Lyon", "Basel"]}, "big": {"type": "boolean"}},
        "required": ["name", "big"],
        "additionalProperties": False,
    },
    "cache_control": {"type": "ephemeral"},
}
FORCED: dict[str, Any] = {
    "tools": [TOWN],
    "tool_choice": {"type": "tool", "name": "find_town"},
    "max_tokens": 400,
    "messages": ASKED["messages"],
    "extra_body": {"seed": 4},
}


class Calls:
    """All calls, with the client and the model's name."""

    def __init__(self, url: str, model: str) -> None:
        self._model = model
        self._client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S)

    def text(self) -> dict[str, Any]:
        raw = self._client.messages.with_raw_response.create(model=self._model, **GREEDY)
        message = raw.parse()
        return {"request_id": message._request_id, **message.to_dict()}

    def stream(self) -> dict[str, Any]:
        with self._client.messages.stream(model=self._model, **GREEDY) as stream:
            pieces = list(stream.text_stream)
            message = stream.get_final_message()
        return {"pieces": pieces, **message.to_dict()}

    def events(self) -> list[str]:
        return [event.type for event in self._client.messages.create(model=self._model, stream=True, **GREEDY)]

    def stop_sequence(self) -> Any:
        given = self._client.messages.create(model=self._model, **GREEDY)
        words = given.content[0].text.split()
        return self._client.messages.create(model=self._model, stop_sequences=[words[1]], **GREEDY).to_dict() | {
            "sequence": words[1]
        }

    def tools(self) -> list[dict[str, Any]]:
        """Return a whole and a streamed call of a tool, and the answer to the result of the first."""
        whole = self._client.messages.create(model=self._model, **FORCED)
        with self._client.messages.stream(model=self._model, **FORCED) as stream:
            streamed = stream.get_final_message()
        (call,) = whole.content
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "Lyon is big."}
        turns: Any = [
            *ASKED["messages"],
            {"role": "assistant", "content": whole.content},
            {"role": "user", "content": [result]},
        ]
        last = self._client.messages.create(model=self._model, tools=[TOWN], max_tokens=8, messages=turns)
        return [each.to_dict() for each in (whole, streamed, last)]

    def structured(self) -> Any:
        """Return a text that a schema constrains."""
        form: Any = {"format": {"type": "json_schema", "schema": TOWN["input_schema"]}}
        message = self._client.messages.create(
            model=self._model, output_config=form, max_tokens=400, messages=ASKED["messages"], extra_body={"seed": 4}
        )
        return message.content[0].text

    def count(self) -> Any:
        counted = self._client.messages.count_tokens(model=self._model, messages=ASKED["messages"])
        return counted.input_tokens

    def errors(self) -> list[list[Any]]:
        block: Any = [{"role": "user", "content": [{"type": "redacted_thinking", "data": "x"}]}]
        long: Any = [{"role": "user", "content": "Anna lives here. " * 5000}]
        create = self._client.messages.create
        return [
            _error(lambda: create(model="claude-9", **ASKED)),
            _error(lambda: create(model=self._model, max_tokens=8, messages=block)),
            _error(lambda: create(model=self._model, max_tokens=8, messages=long)),
        ]


def _error(call: Callable[[], Any]) -> list[Any]:
    """Return the class of the error that a call raises, its type and its message."""
    try:
        return ["none", call().to_dict(), ""]
    except anthropic.APIStatusError as error:
        return [type(error).__name__, error.type, error.api_message]


def main() -> None:
    given = json.load(sys.stdin)
    calls = Calls(given["url"], given["model"])
    json.dump({name: getattr(calls, name)() for name in given["calls"]}, sys.stdout)


if __name__ == "__main__":
    main()
