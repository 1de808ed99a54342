"""The choice of a worker for an adapter: it must know the content, and one that has it in memory is preferred."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.contracts.adapters import AdapterRef
from router.placement.adapters import PRIOR_LOAD_S, AdapterNames, WorkerAdapter, WorkerAdapters
from router.placement.placement_request import PlacementOutcome, PlacementRequest
from router.placement.worker_model import Load, WorkerModel
from tests.support.router.placements import chosen, placement, rejected, router, terms, worker

OLD, NEW = "1" * 64, "2" * 64
SQL = AdapterRef("sql", NEW)


def knowing(
    name: str, in_memory: bool, content: str = NEW, load: Load | None = None, seconds: float = 0.0
) -> WorkerModel:
    found = worker(name, load)
    found.adapters = WorkerAdapters({"sql": WorkerAdapter(content, in_memory=in_memory)}, seconds)
    return found


def wanted(prompt: int = 100) -> PlacementRequest:
    return replace(placement(prompt), adapter=SQL)


def test_a_worker_that_has_it_in_memory_is_preferred_by_the_seconds_of_a_load() -> None:
    cold, warm = knowing("cold", False, seconds=0.03), knowing("warm", True)
    choice = router().route(wanted(), [cold, warm], {})
    assert chosen(choice) == "warm"
    assert terms(choice, "cold")["adapter"] == 0.03
    assert "adapter" not in terms(choice, "warm")


def test_a_queue_that_is_longer_than_a_load_goes_to_a_cold_worker() -> None:
    """40 prompt tokens before it take 40 ms at the worker that has it."""
    busy = Load(unheld_blocks=64, pending_prefill_tokens=40)
    warm = knowing("warm", True, load=busy)
    assert chosen(router().route(wanted(), [knowing("cold", False, seconds=0.03), warm], {})) == "cold"
    assert chosen(router().route(wanted(), [knowing("cold", False, seconds=0.05), warm], {})) == "warm"


def test_until_a_load_was_measured_it_has_a_prior() -> None:
    choice = router().route(wanted(), [knowing("cold", False)], {})
    assert terms(choice, "cold")["adapter"] == PRIOR_LOAD_S
    assert choice.first_token_s > PRIOR_LOAD_S


def test_a_worker_without_the_content_takes_no_request_for_it() -> None:
    other, without = knowing("other", True, content=OLD), worker("without")
    choice = router().route(wanted(), [other, without], {})
    assert (choice.outcome, choice.worker) == (PlacementOutcome.NO_WORKER, None)
    assert rejected(choice) == dict.fromkeys(("other", "without"), "no adapter: it does not know sql with this content")
    assert chosen(router().route(placement(), [other], {})) == "other"


# ------------------------------------------------------------ names


def knows(content: str) -> WorkerAdapters:
    return WorkerAdapters({"sql": WorkerAdapter(content)})


def test_a_name_stands_for_the_content_that_came_last() -> None:
    names, nothing = AdapterNames(), WorkerAdapters({})
    names.note(nothing, knows(OLD))
    assert names.find("sql", [knows(OLD), knows(OLD)]) == AdapterRef("sql", OLD)
    names.note(knows(OLD), knows(NEW))
    assert names.find("sql", [knows(NEW), knows(OLD)]) == AdapterRef("sql", NEW)
    names.note(knows(OLD), knows(OLD))
    assert names.find("sql", [knows(NEW), knows(OLD)]) == AdapterRef("sql", NEW)


def test_where_the_last_content_has_left_another_one_counts() -> None:
    names = AdapterNames()
    names.note(WorkerAdapters({}), knows(NEW))
    assert names.find("sql", [knows(OLD)]) == AdapterRef("sql", OLD)
    assert names.find("sql", [WorkerAdapters({})]) is None


def test_a_name_of_the_base_is_never_an_adapter() -> None:
    names = AdapterNames(("sql", "alias"))
    assert names.note(WorkerAdapters({}), knows(OLD)) == ["sql"]
    assert names.note(knows(OLD), knows(OLD)) == []
    assert names.find("sql", [knows(OLD)]) is None
    assert names.names([knows(OLD)]) == []


@pytest.mark.parametrize("in_memory", [True, False])
def test_seconds_until_it_is_there(in_memory: bool) -> None:
    adapters = WorkerAdapters({"sql": WorkerAdapter(NEW, in_memory=in_memory)}, 0.5)
    assert adapters.seconds_until(SQL) == (0.0 if in_memory else 0.5)
