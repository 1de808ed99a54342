"""Vercel's AI SDK as released: texts, tools, objects and steps, by chats and by the Responses API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.suites.clients.double import Double, call
from tests.suites.clients.other_python import need_clients, output_of, program
from tests.suites.clients.served import Served, missing

FOLDER = Path(__file__).with_name("ai_sdk")
KINDS = ("compatible", "openai")
TOWN = {"name": "Lyon", "big": True}


@pytest.fixture(scope="session", autouse=True)
def ai_sdk() -> None:
    """Check for the client before anything is started for it."""
    need_clients("ai-sdk")
    if not (FOLDER / "node_modules" / ".package-lock.json").exists():
        missing("the AI SDK", "make test-clients, which runs npm")


def called(server: Served | Double, name: str, kind: str) -> Any:
    given = {"url": f"{server.http_url}/v1", "model": server.model, "calls": [[name, kind]]}
    command = [str(program("ai-sdk", "node")), str(FOLDER / "calls.js")]
    (found,) = json.loads(output_of(command, json.dumps(given)))
    return found


def is_town(found: dict[str, Any]) -> bool:
    return found.keys() == {"name", "big"} and found["name"] in ("Lyon", "Basel") and isinstance(found["big"], bool)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_is_the_same_whole_and_streamed(served: Served, kind: str) -> None:
    """Demo model: greedy text."""
    whole, pieces, tokens, streamed_tokens = called(served, "text", kind)
    assert whole == "".join(pieces)
    assert pieces, "one at least: a busy server sends several tokens at once"
    assert tokens == streamed_tokens > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_named_tool_is_called_whole_and_streamed(served: Served, kind: str) -> None:
    """Demo model: toolChoice names the tool."""
    for calls in called(served, "tools", kind):
        ((name, arguments),) = calls
        assert (name, is_town(arguments)) == ("findTown", True)


@pytest.mark.parametrize("kind", KINDS)
def test_objects_come_in_every_way(served: Served, kind: str) -> None:
    """Demo model: the package sends the schema."""
    found = called(served, "objects", kind)
    assert [is_town(each) for each in found] == [True] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_tool_is_run_and_its_result_answered(double: Double, kind: str) -> None:
    """Model double: it calls of its own accord, then answers."""
    double.play(call("findTown", **TOWN), "In Lyon.")
    assert called(double, "steps", kind) == ["In Lyon.", ["tool-calls", "stop"]]
    _, second = double.prompts()
    assert "Lyon is big." in second


@pytest.mark.parametrize("kind", KINDS)
def test_a_tool_beside_a_schema_is_run_and_the_answer_has_the_form(double: Double, kind: str) -> None:
    """Model double: it calls of its own accord, then answers in JSON."""
    double.play(call("findTown", **TOWN), json.dumps(TOWN))
    assert called(double, "steps_to_object", kind) == TOWN
    assert len(double.prompts()) == 2
