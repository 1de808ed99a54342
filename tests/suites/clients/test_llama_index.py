"""LlamaIndex as released, by its class for servers with OpenAI's API: function calling, objects, an agent."""

from __future__ import annotations

from typing import Any

import pytest

from tests.suites.clients.double import Double, call
from tests.suites.clients.other_python import answers_of, need_clients
from tests.suites.clients.served import Served


@pytest.fixture(scope="session", autouse=True)
def llama_index() -> None:
    """Check for the client before anything is started for it."""
    need_clients("llama-index")


def called(server: Served | Double, name: str) -> Any:
    given = {"url": f"{server.http_url}/v1", "model": server.model, "calls": [name]}
    (found,) = answers_of("llama_index_calls.py", given, "llama-index")
    return found


def is_town(found: dict[str, Any]) -> bool:
    return found.keys() == {"name", "big"} and found["name"] in ("Lyon", "Basel") and isinstance(found["big"], bool)


def test_a_chat_is_the_same_whole_and_streamed(served: Served) -> None:
    """Demo model: greedy text."""
    whole, streamed = called(served, "chat")
    assert whole == streamed != ""


def test_a_required_tool_is_called_whole_and_streamed(served: Served) -> None:
    """Demo model: tool_choice is required."""
    for calls in called(served, "tools"):
        ((name, arguments),) = calls
        assert (name, is_town(arguments)) == ("find_town", True)


def test_objects_come_by_a_function_and_by_a_schema(served: Served) -> None:
    """Demo model: tool_choice is required, and response_format has the schema."""
    found = called(served, "structured")
    assert [is_town(each) for each in found] == [True, True]


def test_an_agent_runs_its_tool_and_answers(double: Double) -> None:
    """Model double: it calls of its own accord, then answers."""
    double.play(call("find_town", name="Lyon", big=True), "In Lyon.")
    assert called(double, "agent") == "In Lyon."
    _, second = double.prompts()
    assert "Lyon is big." in second
