"""The benchmark of KV events runs through: what a block costs, and one round of both engines."""

from __future__ import annotations

import pytest

from bench import kv_events


def test_a_block_has_a_cost_in_either_thread() -> None:
    figures = {name: value for name, value, _ in kv_events.block_costs(blocks=256)}
    assert figures.keys() == {"engine_us", "thread_us"}
    assert min(figures.values()) > 0


@pytest.mark.parametrize("control", [False, True])
def test_a_round_tells_every_block_unless_neither_engine_tells(monkeypatch: pytest.MonkeyPatch, control: bool) -> None:
    monkeypatch.setattr(kv_events, "LOADS", {"prefill": (2, 33, 1)})
    figures = {name: value for name, value, _ in kv_events.compare(1, control)}
    assert figures["prefill_speed"] > 0
    # Two rounds, the first of which warms up, of two prompts of two full blocks each.
    assert figures["changes"] == (1 if control else 1 + 8)
