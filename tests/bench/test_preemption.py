"""`bench.preemption`: the least work is computed again, and nobody is preempted more often than the bound."""

from __future__ import annotations

from random import Random

from bench.preemption import ORDERS, WORKLOADS, Run, Server, figures_of
from kvmanager.contracts.ledger_config import DEFAULTS


def served(order: str, requests: int) -> Run:
    blocks, made = WORKLOADS["at_once"]
    return Server(blocks // 3, *ORDERS[order]).serve(made(Random(1), requests))


def test_the_least_work_is_computed_again_and_everybody_ends() -> None:
    runs = {order: served(order, 60) for order in ("work", "arrival")}
    assert {len(run.ends) for run in runs.values()} == {60}
    assert all(run.preempted for run in runs.values())
    assert runs["work"].computed < runs["arrival"].computed
    assert max(runs["work"].preempted.values()) <= DEFAULTS.max_preemptions


def test_the_figures_are_exact_for_a_seed() -> None:
    found = figures_of("documents", "work", seeds=1, count=20)
    assert found == figures_of("documents", "work", seeds=1, count=20)
    assert found["most_documents_work"] <= DEFAULTS.max_preemptions
