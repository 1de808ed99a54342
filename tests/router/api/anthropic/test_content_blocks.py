"""Parts of an answer as blocks of a message, and as the events and the body that clients read."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest

from router.api.anthropic.answer import Stop, WholeMessage, closing_events, opening_event, step_events, stop_of
from router.api.anthropic.content_blocks import BlockBegun, BlockEnded, BlockText, ContentBlocks, Step
from router.api.openai.answer import Piece
from router.contracts.answer_parts import CallArguments, CallBegun, Part, Thought, Words

SIGNATURE = base64.b64encode(hashlib.sha256(b"Hm. Yes.").digest()).decode()
THOUGHT_WORDS_AND_CALLS: list[Part] = [
    *(Thought("Hm."), Thought(" Yes."), Words("\n"), Words("Let me"), Words(" see."), Words("\n")),
    *(CallBegun(0, "add"), CallArguments(0, '{"a"'), CallArguments(0, ": 1}"), CallBegun(1, "now")),
    *(CallArguments(1, "{}"), Words(" \n")),
]


def steps_of(parts: Sequence[Part], shows_thoughts: bool = True) -> list[Step]:
    numbers = count()
    blocks = ContentBlocks(lambda: f"toolu_{next(numbers)}", shows_thoughts)
    return [*blocks.take(parts), *blocks.finish()]


def whole(parts: Sequence[Part]) -> dict[str, Any]:
    message = WholeMessage(lambda size: None)
    message.add(steps_of(parts))
    return dict(json.loads(b"".join(message.parts({"id": "msg_1"}, Stop("end_turn"), {}))))


def events_of(lines: str) -> list[dict[str, Any]]:
    """Return the data of events, each of which must have the name that its data has."""
    found = []
    for event in lines.split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_each_kind_of_part_has_blocks_of_its_own() -> None:
    assert steps_of(THOUGHT_WORDS_AND_CALLS) == [
        BlockBegun(0, "thinking"),
        BlockText(0, "thinking", "Hm."),
        BlockText(0, "thinking", " Yes."),
        BlockEnded(0, "thinking", SIGNATURE),
        BlockBegun(1, "text"),
        BlockText(1, "text", "\nLet me"),
        BlockText(1, "text", " see."),
        BlockText(1, "text", "\n"),
        BlockEnded(1, "text"),
        BlockBegun(2, "tool_use", "toolu_0", "add"),
        BlockText(2, "tool_use", '{"a"'),
        BlockText(2, "tool_use", ": 1}"),
        BlockEnded(2, "tool_use"),
        BlockBegun(3, "tool_use", "toolu_1", "now"),
        BlockText(3, "tool_use", "{}"),
        BlockEnded(3, "tool_use"),
    ]


def test_white_space_alone_is_no_block() -> None:
    assert steps_of([Words(" "), Words("\n")]) == []
    assert steps_of([Words("\n"), CallBegun(0, "f")])[0] == BlockBegun(0, "tool_use", "toolu_0", "f")


def test_a_thought_that_is_not_shown_keeps_its_signature() -> None:
    assert steps_of([Thought("Hm."), Thought(" Yes.")], shows_thoughts=False) == [
        BlockBegun(0, "thinking"),
        BlockEnded(0, "thinking", SIGNATURE),
    ]


def test_a_whole_message() -> None:
    assert whole(THOUGHT_WORDS_AND_CALLS)["content"] == [
        {"type": "thinking", "thinking": "Hm. Yes.", "signature": SIGNATURE},
        {"type": "text", "text": "\nLet me see.\n", "citations": None},
        {"type": "tool_use", "id": "toolu_0", "name": "add", "input": {"a": 1}},
        {"type": "tool_use", "id": "toolu_1", "name": "now", "input": {}},
    ]


@pytest.mark.parametrize("arguments", ['{"a": [1, ', "", "[1]"])
def test_a_call_that_broke_off_has_an_empty_input(arguments: str) -> None:
    (block,) = whole([CallBegun(0, "add"), CallArguments(0, arguments)])["content"]
    assert block["input"] == {}


def test_the_bytes_of_an_answer_count_while_it_grows() -> None:
    sizes: list[int] = []
    WholeMessage(sizes.append).add(steps_of([Words("é"), Words("abc")]))
    assert sizes == [2, 3]


def test_events_of_a_stream() -> None:
    lines = opening_event({"id": "msg_1"}, {"input_tokens": 3}) + step_events(steps_of([Words('"a"\n')]))
    lines += closing_events(Stop("stop_sequence", "b"), {"output_tokens": 1})
    message: dict[str, Any] = {
        "id": "msg_1",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 3},
    }
    block = {"type": "text", "text": "", "citations": None}
    assert events_of(lines) == [
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": block},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": '"a"\n'}},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "stop_sequence", "stop_sequence": "b"},
            "usage": {"output_tokens": 1},
        },
        {"type": "message_stop"},
    ]


def test_events_of_thoughts_and_calls() -> None:
    found = events_of(step_events(steps_of([Thought("Hm. Yes."), CallBegun(0, "add"), CallArguments(0, "{}")])))
    assert [(each["type"], each.get("delta") or each.get("content_block")) for each in found] == [
        ("content_block_start", {"type": "thinking", "thinking": "", "signature": ""}),
        ("content_block_delta", {"type": "thinking_delta", "thinking": "Hm. Yes."}),
        ("content_block_delta", {"type": "signature_delta", "signature": SIGNATURE}),
        ("content_block_stop", None),
        ("content_block_start", {"type": "tool_use", "id": "toolu_0", "name": "add", "input": {}}),
        ("content_block_delta", {"type": "input_json_delta", "partial_json": "{}"}),
        ("content_block_stop", None),
    ]


@pytest.mark.parametrize(
    ("piece", "lowered", "expected"),
    [
        (Piece(0, finish_reason="stop"), False, Stop("end_turn")),
        (Piece(0, finish_reason="stop", stop_reason=2), False, Stop("end_turn")),
        (Piece(0, finish_reason="stop", stop_reason="END"), False, Stop("stop_sequence", "END")),
        (Piece(0, finish_reason="tool_calls"), False, Stop("tool_use")),
        (Piece(0, finish_reason="length"), False, Stop("max_tokens")),
        (Piece(0, finish_reason="length"), True, Stop("model_context_window_exceeded")),
    ],
)
def test_why_an_answer_ended(piece: Piece, lowered: bool, expected: Stop) -> None:
    assert stop_of(piece, lowered) == expected
