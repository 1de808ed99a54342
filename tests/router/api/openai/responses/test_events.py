"""Parts of an answer become items and typed events, held strictly to the models of the official client."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from openai.types.responses import Response

from router.api.openai.answer import Bill, ThoughtTokens
from router.api.openai.responses.events import QUEUED, ResponseBuilder
from router.api.openai.responses.routes import usage_body
from router.contracts.answer_parts import CallArguments, CallBegun, Part, Thought, Words
from tests.support.router.responses import events_of

Json = dict[str, Any]
BODY: Json = {
    "id": "resp_1", "object": "response", "created_at": 1, "status": "in_progress", "model": "demo", "output": [],
    "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
}  # fmt: skip
USAGE = usage_body(Bill(5, 3, 4, reasoning_tokens=2))
TEXT = ["output_item.added", "content_part.added", "output_text.delta"]
TEXT_END = ["output_text.done", "content_part.done", "output_item.done"]
THINK = ["output_item.added", "content_part.added", "reasoning_text.delta"]
THINK_END = ["reasoning_text.done", "content_part.done", "output_item.done"]
CALL = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]


def builder(streamed: bool = True) -> ResponseBuilder:
    numbers = itertools.count(1)
    return ResponseBuilder({**BODY}, lambda prefix: f"{prefix}{next(numbers)}", lambda: 9, streamed)


def played(*parts: Part, ran_out: bool = False) -> tuple[list[str], Json, list[Json]]:
    """Return the names of the events of an answer, its body at the end, and the events."""
    made = builder()
    events = events_of(made.begin() + made.add(parts) + made.finish(USAGE, ran_out))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    Response.model_validate_json(json.dumps(made.body()), strict=True)
    assert events[-1]["response"] == made.body()
    return [event["type"].removeprefix("response.") for event in events], made.body(), events


def test_a_text() -> None:
    names, body, events = played(Words("Hel"), Words('lo "\n'))
    assert names == ["created", "in_progress", *TEXT, "output_text.delta", *TEXT_END, "completed"]
    (message,) = body["output"]
    assert (message["status"], message["content"][0]["text"]) == ("completed", 'Hello "\n')
    assert [event["delta"] for event in events if "delta" in event] == ["Hel", 'lo "\n']
    assert {event["item_id"] for event in events if "item_id" in event} == {message["id"]}
    assert (body["status"], body["completed_at"], body["usage"]) == ("completed", 9, USAGE)
    assert events[0]["response"]["output"] == []


def test_a_thought_before_a_text() -> None:
    names, body, _ = played(Thought("so"), Words("\n\n"), Words("Yes"))
    assert names == ["created", "in_progress", *THINK, *THINK_END, *TEXT, *TEXT_END, "completed"]
    thought, message = body["output"]
    assert (thought["type"], thought["content"][0]["text"]) == ("reasoning", "so")
    assert message["content"][0]["text"] == "\n\nYes"


def test_calls_with_their_arguments() -> None:
    parts = (CallBegun(0, "add"), CallArguments(0, '{"a":1}'), Words("\n"), CallBegun(1, "sub"), CallArguments(1, "{}"))
    names, body, events = played(*parts)
    assert names == ["created", "in_progress", *CALL, *CALL, "completed"]
    assert [(item["name"], item["arguments"]) for item in body["output"]] == [("add", '{"a":1}'), ("sub", "{}")]
    first, second = (item["call_id"] for item in body["output"])
    assert first != second
    assert [event["output_index"] for event in events if "output_index" in event] == [0] * 4 + [1] * 4


def test_white_space_alone_before_a_call_is_no_message() -> None:
    _, body, _ = played(Thought("so"), Words("\n"), CallBegun(0, "add"), CallArguments(0, "{}"))
    assert [item["type"] for item in body["output"]] == ["reasoning", "function_call"]


@pytest.mark.parametrize("parts", [(), (Words(" \n"),)])
def test_an_answer_always_has_an_item(parts: tuple[Part, ...]) -> None:
    _, body, _ = played(*parts)
    (message,) = body["output"]
    assert message["content"][0]["text"] == "".join(part.text for part in parts if isinstance(part, Words))


@pytest.mark.parametrize("part", [Words("Hel"), Thought("Hm"), CallBegun(0, "add")])
def test_an_answer_that_ran_out_of_tokens_is_incomplete(part: Part) -> None:
    names, body, _ = played(part, ran_out=True)
    assert names[-1] == "incomplete"
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][-1]["status"] == "incomplete"
    assert body.get("completed_at") is None


def test_a_failure_keeps_what_came_before_it() -> None:
    made = builder()
    events = events_of(made.begin() + made.add([Words("Hel")]) + made.fail("server_error", "lost"))
    assert events[-1]["type"] == "response.failed"
    body = events[-1]["response"]
    assert (body["status"], body["error"]) == ("failed", {"code": "server_error", "message": "lost"})
    assert (body["output"][0]["status"], body["output"][0]["content"][0]["text"]) == ("incomplete", "Hel")


def test_a_queued_response_is_created_once() -> None:
    made = builder()
    names = [event["type"] for event in events_of(made.begin(QUEUED) + made.begin())]
    assert names == ["response.created", "response.queued", "response.in_progress"]


def test_a_response_in_progress_shows_its_text_so_far() -> None:
    made = builder(streamed=False)
    assert made.begin() + made.add([Words("Hel")]) == ""
    (message,) = made.body()["output"]
    assert (message["status"], message["content"][0]["text"]) == ("in_progress", "Hel")
    made.cancel()
    assert (made.body()["status"], made.body()["output"][0]["status"]) == ("cancelled", "incomplete")


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        ([(1, [Thought("a")]), (1, []), (1, [Words("b")])], 1),
        ([(1, []), (1, [Thought("a")]), (1, [Words("b")])], 2),
        ([(8, [Thought("abc"), Words("d")])], 6),
        ([(2, [Thought("abc")]), (3, [])], 5),
        ([(2, [Words("abc")]), (3, [])], 0),
    ],
)
def test_tokens_of_thoughts_are_counted(batches: list[tuple[int, list[Part]]], expected: int) -> None:
    counted = ThoughtTokens()
    for tokens, parts in batches:
        counted.take(tokens, parts)
    assert counted.end() == expected
