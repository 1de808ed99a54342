"""The command `llm` as released: schemas and tools, by chats and by the Responses API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.suites.clients.double import Double, call
from tests.suites.clients.other_python import need_clients, output_of, program
from tests.suites.clients.served import Served

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Lyon", "Basel"]}, "big": {"type": "boolean"}},
    "required": ["name", "big"],
}
TOOL = """
def find_town(name: str) -> str:
    "Finds a town."
    return name + " is big."
"""
QUESTION = "Where does Anna live?"
KINDS = ("chat", "responses")


@pytest.fixture(scope="session", autouse=True)
def llm() -> None:
    """Check for the client before anything is started for it."""
    need_clients("llm")


def said(server: Served | Double, folder: Path, kind: str, *words: str) -> str:
    """Return what the command prints; its configuration has the model once for each API."""
    more = {"supports_schema": True, "supports_tools": True, "api_base": f"{server.http_url}/v1"}
    models: list[dict[str, Any]] = [
        {"model_id": "chat", "model_name": server.model, **more},
        {"model_id": "responses", "model_name": server.model, "responses": True, **more},
    ]
    # Every JSON text is YAML too.
    (folder / "extra-openai-models.yaml").write_text(json.dumps(models))
    command = [str(program("llm", "llm")), "-m", kind, *words, QUESTION]
    return output_of(command, more={"LLM_USER_PATH": str(folder)}).strip()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream", [(), ("--no-stream",)])
def test_a_schema_is_followed(served: Served, tmp_path: Path, kind: str, stream: tuple[str, ...]) -> None:
    """Demo model: the command sends the schema."""
    options = ("--schema", json.dumps(SCHEMA), "-o", "max_tokens", "400", *stream)
    found = json.loads(said(served, tmp_path, kind, *options))
    assert found.keys() == {"name", "big"}
    assert found["name"] in ("Lyon", "Basel")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream", [(), ("--no-stream",)])
def test_a_tool_is_run_and_its_result_answered(
    double: Double, tmp_path: Path, kind: str, stream: tuple[str, ...]
) -> None:
    """Model double: it calls of its own accord, then answers."""
    double.play(call("find_town", name="Lyon"), "In Lyon.")
    assert said(double, tmp_path, kind, "--functions", TOOL, *stream) == "In Lyon."
    _, second = double.prompts()
    assert "Lyon is big." in second


@pytest.mark.parametrize("kind", KINDS)
def test_a_tool_beside_a_schema_is_run_and_the_answer_has_the_form(double: Double, tmp_path: Path, kind: str) -> None:
    """Model double: it calls of its own accord, then answers in JSON."""
    double.play(call("find_town", name="Lyon"), '{"name": "Lyon", "big": true}')
    options = ("--functions", TOOL, "--schema", json.dumps(SCHEMA))
    assert json.loads(said(double, tmp_path, kind, *options)) == {"name": "Lyon", "big": True}
    assert len(double.prompts()) == 2
