"""The benchmark of required calls, small: every call that ended parses and fits its schema."""

from __future__ import annotations

import json

import jsonschema
import pytest

from bench.lib.tool_schemas import ToolMaker
from bench.tools import NOTES, fault_of
from tests.support.bench_process import run_benchmark


def test_required_calls_of_random_tools_fit_their_schemas() -> None:
    figures, _ = run_benchmark("tools", "--calls", "8", "--rounds", "1", "--at-once", "4", "--tokens", "400")
    assert figures.keys() == NOTES.keys()
    assert figures["parsed_and_valid"] == 1.0
    assert figures["ended_share"] >= 0.75
    assert figures["throughput_ratio"] > 0


def test_random_tools_are_valid_and_repeat_with_their_seed() -> None:
    made = [ToolMaker(seed, free=0.5).tool() for seed in range(300)]
    assert made == [ToolMaker(seed, free=0.5).tool() for seed in range(300)]
    for tool in made:
        jsonschema.Draft202012Validator.check_schema(tool["function"]["parameters"])
    assert any('{"type": "string"}' in json.dumps(tool) for tool in made)
    assert not any('{"type": "string"}' in json.dumps(ToolMaker(seed).tool()) for seed in range(300))


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}, ""),
        ({"content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": "1"}'}}]}, "integer"),
        ({"content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": '}}]}, "Expecting"),
        ({"content": "Hi", "tool_calls": []}, "expected one call"),
    ],
)
def test_a_call_that_does_not_fit_is_a_fault(message: dict[str, object], words: str) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    fault = fault_of({"function": {"name": "f", "parameters": parameters}}, message)
    assert words in fault
    assert bool(fault) == bool(words)
