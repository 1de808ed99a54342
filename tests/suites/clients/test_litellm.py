"""LiteLLM as released: chats, tools, structured output, and its fallback on errors about the context."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.suites.clients.double import Double, call, served_double
from tests.suites.clients.other_python import answers_of, need_clients
from tests.suites.clients.served import Served


@pytest.fixture(scope="session", autouse=True)
def litellm() -> None:
    """Check for the client before anything is started for it."""
    need_clients("litellm")


@pytest.fixture(scope="module")
def small() -> Iterator[Double]:
    """A server whose context is short."""
    with served_double(max_model_len=128) as running:
        yield running


def called(server: Served | Double, name: str, small: Double | None = None) -> Any:
    other = small or server
    given = {"url": f"{server.http_url}/v1", "small": f"{other.http_url}/v1", "model": server.model, "calls": [name]}
    (found,) = answers_of("litellm_calls.py", given, "litellm")
    return found


def is_town(found: dict[str, Any]) -> bool:
    return found.keys() == {"name", "big"} and found["name"] in ("Lyon", "Basel") and isinstance(found["big"], bool)


def test_a_chat_is_the_same_whole_and_streamed(served: Served) -> None:
    """Demo model: greedy text."""
    whole, streamed = called(served, "chat")
    assert whole == streamed
    assert whole[0]


def test_a_named_tool_is_called_whole_and_streamed(served: Served) -> None:
    """Demo model: tool_choice names the tool."""
    for calls in called(served, "tools"):
        ((name, arguments),) = calls
        assert (name, is_town(arguments)) == ("find_town", True)


def test_a_call_and_the_answer_to_its_result(double: Double) -> None:
    """Model double: it calls of its own accord, then answers."""
    double.play(call("find_town", name="Lyon", big=True), "In Lyon.")
    assert called(double, "result") == [[["find_town", {"name": "Lyon", "big": True}]], "In Lyon."]
    _, second = double.prompts()
    assert "Lyon is big." in second


def test_a_schema_is_followed(served: Served) -> None:
    """Demo model: response_format has the schema."""
    assert is_town(called(served, "structured"))


def test_a_response_comes_by_the_responses_api(double: Double) -> None:
    """Model double: it says one sentence."""
    double.play("In Lyon.")
    assert called(double, "responses") == ["completed", "In Lyon."]


def test_a_prompt_beyond_the_context_is_known_as_one(double: Double, small: Double) -> None:
    """Model double: its context is short, and it is never reached."""
    small.play()
    assert called(double, "too_long", small) == ["ContextWindowExceededError", 400]
    assert small.prompts() == []


def test_a_prompt_beyond_the_context_goes_to_the_fallback(double: Double, small: Double) -> None:
    """Model doubles: the context of the first is short, the second answers."""
    small.play()
    double.play("In Lyon.")
    assert called(double, "fallback", small) == "In Lyon."
    assert (len(small.prompts()), len(double.prompts())) == (0, 1)
