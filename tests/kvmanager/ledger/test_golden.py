"""The golden trace: recorded reports give the recorded grants, decisions and events, to the last id."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.contracts.types import DecisionKind
from tests.support.kvmanager.recording import FILE, jsonable, record, replay, report_of


@pytest.fixture(scope="module")
def scenario() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(FILE.read_text())
    return loaded


def test_todays_ledger_answers_as_recorded(scenario: dict[str, Any]) -> None:
    expected = [{key: step[key] for key in step if key != "report"} for step in scenario["steps"]]
    for number, (now, then) in enumerate(zip(replay(scenario), expected, strict=True)):
        assert json.loads(json.dumps(now)) == then, f"step {number} differs"


def test_the_recording_contains_each_kind_of_decision_that_a_manager_makes(scenario: dict[str, Any]) -> None:
    kinds = {decision["kind"] for step in scenario["steps"] for decision in step.get("decisions", ())}
    refused_or_waits = {DecisionKind.REJECTION, DecisionKind.SHORTFALL}
    assert kinds == {DecisionKind.GRANT, DecisionKind.EVICTION, DecisionKind.PREEMPTION, *refused_or_waits}


def test_recording_again_gives_the_same_file(scenario: dict[str, Any]) -> None:
    assert json.loads(json.dumps(record())) == scenario


def test_reports_survive_the_file(scenario: dict[str, Any]) -> None:
    for step in scenario["steps"]:
        assert json.loads(json.dumps(jsonable(report_of(step["report"])))) == step["report"]
