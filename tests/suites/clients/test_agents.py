"""Agent frameworks as released get calls and objects that fit, from a weak model: it is forced by name or by schema."""

from __future__ import annotations

from typing import Any

import pytest

from tests.suites.clients.other_python import answers_of, need_clients
from tests.suites.clients.served import Served


@pytest.fixture(scope="session", autouse=True)
def clients() -> None:
    """Check for the clients before a suite is started for them."""
    need_clients()


def called(served: Served, name: str) -> Any:
    return answers_of("agent_calls.py", {"call": name, "url": f"{served.http_url}/v1", "model": served.model})


def is_town(found: dict[str, Any]) -> bool:
    return found.keys() == {"name", "big"} and found["name"] in ("Lyon", "Basel") and isinstance(found["big"], bool)


def test_langchain_gets_the_calls_of_bound_tools_whole_and_streamed(served: Served) -> None:
    """Demo model: tool_choice names the tool."""
    whole, streamed = called(served, "langchain_tools")
    for calls in (whole, streamed):
        ((name, arguments),) = calls
        assert (name, is_town(arguments)) == ("find_town", True)


def test_langchain_gets_objects_both_ways(served: Served) -> None:
    """Demo model: tool_choice names the function, and response_format has the schema."""
    found = called(served, "langchain_structured")
    assert (len(found), all(map(is_town, found))) == (2, True)


def test_pydantic_ai_gets_its_default_output(served: Served) -> None:
    """Demo model: tool_choice is required."""
    assert is_town(called(served, "pydantic_ai_output"))
