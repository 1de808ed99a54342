"""`strict: true` closes the objects of a schema in the body, whatever the router leaves open."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.api.openai.request import constraint_of
from router.api.openai.types import ChatRequest

INNER: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "integer"}}}


@pytest.mark.parametrize(("strict", "closed"), [(True, True), (False, False), (None, False)])
def test_strict_closes_every_object(strict: bool | None, closed: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": dict(INNER)}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": strict}}
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "Hi"}], "response_format": form})
    asked = constraint_of(body)
    assert asked is not None
    sent = json.loads(asked.constraint.text)
    found = [sent.get("additionalProperties"), sent["properties"]["a"]["items"].get("additionalProperties")]
    assert found == ([False, False] if closed else [None, None])
