"""The official `anthropic` client, as released, against a whole suite on the demo model.

The model is too weak to choose tools: calls are forced by name.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.suites.clients.other_python import answers_of, need_clients
from tests.suites.clients.served import Served

QUESTION = [{"role": "user", "content": "Where does Anna live?"}]


@pytest.fixture(scope="session", autouse=True)
def clients() -> None:
    """Check for the clients before a suite is started for them."""
    need_clients()


@pytest.fixture(scope="module")
def got(served: Served) -> dict[str, Any]:
    """What each call of the script got, all made in one process."""
    calls = ["text", "stream", "events", "stop_sequence", "tools", "structured", "count", "errors"]
    found = answers_of("messages_calls.py", {"url": served.http_url, "model": served.model, "calls": calls})
    return dict(found)


def is_town(found: dict[str, Any]) -> bool:
    return found.keys() == {"name", "big"} and found["name"] in ("Lyon", "Basel") and isinstance(found["big"], bool)


def test_an_answer_is_that_of_the_openai_compatible_api(got: dict[str, Any], served: Served) -> None:
    body = {"messages": QUESTION, "max_tokens": 24, "temperature": 0}
    chat = httpx.post(f"{served.http_url}/v1/chat/completions", json=body, timeout=120).json()
    answer = got["text"]
    assert [block["text"] for block in answer["content"]] == [chat["choices"][0]["message"]["content"]]
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", served.model)
    assert answer["stop_reason"] in ("end_turn", "max_tokens")
    assert answer["usage"]["output_tokens"] == chat["usage"]["completion_tokens"]
    assert answer["id"] == f"msg_{answer['request_id']}"


def test_a_stream_has_the_same_text_piece_by_piece(got: dict[str, Any]) -> None:
    whole, streamed = got["text"], got["stream"]
    assert streamed["content"] == whole["content"]
    assert "".join(streamed["pieces"]) == whole["content"][0]["text"]
    assert streamed["stop_reason"] == whole["stop_reason"]
    assert streamed["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_events_come_in_order(got: dict[str, Any]) -> None:
    kinds = got["events"]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_a_stop_sequence_is_named(got: dict[str, Any]) -> None:
    answer = got["stop_sequence"]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", answer["sequence"])


def test_a_forced_tool_is_called_whole_and_streamed_and_its_result_answered(got: dict[str, Any]) -> None:
    """Demo model: tool_choice names the tool."""
    *called, last = got["tools"]
    for answer in called:
        (call,) = answer["content"]
        assert (call["type"], call["name"], answer["stop_reason"]) == ("tool_use", "find_town", "tool_use")
        assert is_town(call["input"])
    assert last["stop_reason"] in ("end_turn", "max_tokens", "tool_use")


def test_a_schema_holds(got: dict[str, Any]) -> None:
    """Demo model: output_config has the schema."""
    assert is_town(json.loads(got["structured"]))


def test_tokens_are_counted_as_they_are_billed(got: dict[str, Any]) -> None:
    usage = got["text"]["usage"]
    assert got["count"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_errors_are_those_that_the_client_knows(got: dict[str, Any], served: Served) -> None:
    model, block, long = got["errors"]
    assert model == ["NotFoundError", "not_found_error", f"model 'claude-9' is not served here; {served.model!r} is"]
    assert block[:2] == ["BadRequestError", "invalid_request_error"]
    assert block[2].startswith("messages[0].content[0].type: 'redacted_thinking' is not offered")
    assert long[:2] == ["BadRequestError", "invalid_request_error"]
    assert long[2].startswith("prompt is too long: ")
