"""What tests of the Responses API share: events that are held strictly to the models of the official client."""

from __future__ import annotations

import json
from typing import Any

import httpx
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from common.contracts.types import FinishReason
from router.api.openai.responses import schema
from router.contracts.events import ValidatedRequest
from tests.support.router.fake_frontend import Step, admitted, finished, tokens

Json = dict[str, Any]
_EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def says(*texts: str, reason: FinishReason = FinishReason.STOP, cached: int = 0) -> Any:
    """Return a script of one output in these pieces."""

    def script(request: ValidatedRequest) -> list[Step]:
        return [admitted(request, cached), *map(tokens, texts), finished(len(texts), reason=reason, cached=cached)]

    return script


def events_of(lines: str) -> list[Json]:
    """Return the events of lines, after checking their form."""
    *events, last = lines.split("\n\n")
    assert last == ""
    return [_event(event) for event in events]


def _event(lines: str) -> Json:
    name, data = lines.split("\n")
    text = data.removeprefix("data: ")
    read: Json = json.loads(text)
    assert name == f"event: {read['type']}"
    _EVENTS.validate_json(text, strict=True)
    return read


def body_of(answer: httpx.Response) -> Json:
    """Return the response of a whole answer, after checking its form."""
    assert answer.status_code == 200, answer.text
    for model in (Response, schema.ResponseBody):
        model.model_validate_json(answer.content, strict=True)
    return answer.json()  # type: ignore[no-any-return]
