"""instructor as released: every mode that it has for OpenAI's client."""

from __future__ import annotations

from typing import Any

import pytest

from tests.suites.clients.double import Double, call
from tests.suites.clients.other_python import answers_of, need_clients
from tests.suites.clients.served import Served

TOWN = {"name": "Lyon", "big": True}
# Modes whose request names its tool or has a schema, which the demo model must follow.
FORCED = (
    *("TOOLS", "TOOLS_STRICT", "FUNCTIONS", "JSON_SCHEMA", "JSON_O1"),
    *("RESPONSES_TOOLS", "RESPONSES_TOOLS_WITH_INBUILT_TOOLS"),
)
# What a model that chooses well says in the other modes.
SAID = {"JSON": '{"name": "Lyon", "big": true}', "MD_JSON": 'It is\n```json\n{"name": "Lyon", "big": true}\n```'}


@pytest.fixture(scope="session", autouse=True)
def instructor() -> None:
    """Check for the client before anything is started for it."""
    need_clients("instructor")


def called(server: Served | Double, *calls: tuple[str, ...]) -> Any:
    given = {"url": f"{server.http_url}/v1", "model": server.model, "calls": calls}
    return answers_of("instructor_calls.py", given, "instructor")


def is_town(found: dict[str, Any]) -> bool:
    return found.keys() == {"name", "big"} and found["name"] in ("Lyon", "Basel") and isinstance(found["big"], bool)


def test_modes_that_force_a_tool_or_a_schema_give_an_object(served: Served) -> None:
    """Demo model: the mode names its tool, or sends a schema."""
    found = called(served, *(("town", mode) for mode in FORCED))
    assert {mode: is_town(each) for mode, each in zip(FORCED, found, strict=True)} == dict.fromkeys(FORCED, True)
    served.until_all_free()


def test_modes_that_ask_in_words_give_an_object(double: Double) -> None:
    """Model double: it writes the JSON that the prompt asks for."""
    double.play(*SAID.values())
    assert called(double, *(("town", mode) for mode in SAID)) == [TOWN] * len(SAID)
    assert all("json_schema" in prompt for prompt in double.prompts())


def test_parallel_tools_give_an_object_a_call(double: Double) -> None:
    """Model double: it calls two tools in one answer, with tool_choice auto."""
    double.play("\n".join((call("Town", **TOWN), call("River", length=7))))
    assert called(double, ("parallel",)) == [[TOWN, {"length": 7}]]
    assert len(double.prompts()) == 1


def test_every_mode_of_the_package_is_tested(served: Served) -> None:
    """No model: the package is asked for its modes."""
    (modes,) = called(served, ("modes",))
    assert {*modes} == {*FORCED, *SAID, "PARALLEL_TOOLS"}


def test_streamed_objects_grow(served: Served) -> None:
    """Demo model: the mode names its tool, or sends a schema."""
    for states in called(served, ("partial", "TOOLS"), ("partial", "JSON_SCHEMA")):
        assert len(states) > 1
        assert is_town(states[-1])


def test_a_refused_object_is_asked_for_again(double: Double) -> None:
    """Model double: its second call heeds the complaint about the first."""
    double.play(call("Big", name="Lyon", big=False), call("Big", **TOWN))
    assert called(double, ("asked_again",)) == [TOWN]
    _, second = double.prompts()
    assert "the town must be big" in second
