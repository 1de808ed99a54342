"""When a prompt is computed at another worker first: exact seconds of both ways, and who takes whole requests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.placement.fetches import PRIOR
from router.placement.remote_prefill import (
    LEAST_PATIENCE_S,
    SETUP_S,
    Elsewhere,
    Mode,
    compare_ways,
    for_prompts,
    full_blocks,
    is_worth_it,
    prompt_alone,
    serving,
)
from router.placement.worker_model import Disaggregation, Load, WorkerModel
from tests.support.router.placements import CAPACITY, TOKEN, placement, router, worker

DECODE = replace(CAPACITY, disaggregation=Disaggregation.DECODE, fetches_blocks=True)
PREFILL = replace(CAPACITY, disaggregation=Disaggregation.PREFILL, fetches_blocks=True)
PROMPT = 100
"""Six full blocks of sixteen tokens, and four tokens."""


def compared(
    p: WorkerModel, d: WorkerModel, prompt: int = PROMPT, hits: dict[str, int] | None = None, held: int = 0
) -> Elsewhere | None:
    request, chooser, hits = placement(prompt), router(), hits or {}
    alone = prompt_alone(request, full_blocks(prompt, 16), 16)
    prefill = chooser.price_workers(alone, [p], hits)
    decode = chooser.price_workers(request, [d], hits, later=True)
    return compare_ways(request, prefill, decode, held)


def ways(p: WorkerModel, d: WorkerModel, prompt: int = PROMPT, hits: dict[str, int] | None = None) -> Elsewhere:
    found = compared(p, d, prompt, hits)
    assert found is not None
    return found


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 0), (16, 0), (17, 1), (32, 1), (33, 2), (100, 6)])
def test_the_last_token_is_computed_where_it_is_sampled(tokens: int, blocks: int) -> None:
    assert full_blocks(tokens, 16) == blocks


def test_an_idle_worker_computes_its_prompts_itself() -> None:
    found = ways(worker("p", capacity=PREFILL), worker("d", capacity=DECODE))
    assert found.blocks == 6
    assert found.here_s == pytest.approx(100 * TOKEN)
    assert found.computed_s == pytest.approx(96 * TOKEN + 0.01)  # and the step
    assert found.there_s == pytest.approx(found.computed_s + SETUP_S + PRIOR.seconds(6) + 4 * TOKEN)
    assert not is_worth_it(found, "auto", None)


def test_sequences_that_run_there_count_the_seconds_that_a_prompt_delays_them() -> None:
    busy = Load(running=2, unheld_blocks=40, decode_step_seconds=0.01, prefill_seconds_per_token=TOKEN)
    found = ways(worker("p", capacity=PREFILL), worker("d", busy, DECODE))
    queue = found.decode.queue_delay
    assert found.here_s == pytest.approx(queue + 3 * 100 * TOKEN)
    rest = queue + 3 * 4 * TOKEN
    assert found.there_s == pytest.approx(96 * TOKEN + 0.01 + SETUP_S + PRIOR.seconds(6) + rest)
    assert is_worth_it(found, "auto", None)


def test_a_worker_that_computes_only_ends_of_prompts_does_not_look_slow() -> None:
    ends = Load(steps=9, unheld_blocks=40, decode_step_seconds=0.01, prefill_seconds_per_token=20 * TOKEN)
    d = worker("d", capacity=DECODE)
    for _ in range(200):
        d.heartbeat(replace(ends, steps=ends.steps + 1), now=0.0)
        ends = d.load
    assert router().price_workers(placement(PROMPT), [d], {})[0].token_s > 5 * TOKEN
    assert ways(worker("p", capacity=PREFILL), d).here_s == pytest.approx(100 * TOKEN)


def test_a_fetch_costs_what_the_worker_has_learnt() -> None:
    busy = Load(running=2, unheld_blocks=40, fetch_seconds_per_block=0.5, fetch_setup_seconds=0.25)
    found = ways(worker("p", capacity=PREFILL), worker("d", busy, DECODE))
    assert found.there_s == pytest.approx(
        found.computed_s + SETUP_S + 0.25 + 6 * 0.5 + found.decode.queue_delay + 3 * 4 * TOKEN
    )
    assert not is_worth_it(found, "auto", None)


def test_a_queue_of_prompts_is_passed_by_where_another_worker_has_none() -> None:
    queue = Load(running=1, unheld_blocks=40, pending_prefill_tokens=300)
    idle, full = worker("p", capacity=PREFILL), worker("p", queue, PREFILL)
    decode = Load(running=1, unheld_blocks=40)
    assert is_worth_it(ways(idle, worker("d", decode, DECODE)), "auto", None)
    assert not is_worth_it(ways(full, worker("d", decode, DECODE)), "auto", None)


def test_what_some_worker_holds_is_fetched_and_not_computed_elsewhere() -> None:
    p, d = worker("p", capacity=PREFILL), worker("d", capacity=DECODE)
    assert compared(p, d, held=6) is None
    assert compared(p, d, hits={"d": 6}) is None
    found = compared(p, d, held=4)
    assert found is not None
    assert found.here_s == pytest.approx(36 * TOKEN + PRIOR.seconds(4))
    assert found.computed_s == pytest.approx(32 * TOKEN + 0.01 + PRIOR.seconds(4))


def test_a_worker_that_fetches_no_blocks_computes_its_prompts() -> None:
    assert compared(worker("p", capacity=PREFILL), worker("d", capacity=replace(DECODE, fetches_blocks=False))) is None


def test_a_prompt_without_a_full_block_is_sent_nowhere() -> None:
    assert compared(worker("p", capacity=PREFILL), worker("d", capacity=DECODE), prompt=16) is None


@pytest.mark.parametrize(
    ("mode", "left", "worth"),
    [("always", None, True), ("always", 1.0, True), ("always", 0.05, False), ("off", None, False)],
)
def test_an_operator_decides_and_a_deadline_forbids(mode: Mode, left: float | None, worth: bool) -> None:
    found = ways(worker("p", capacity=PREFILL), worker("d", capacity=DECODE))
    assert is_worth_it(found, mode, left) is worth


def test_a_prompt_is_waited_for_some_times_as_long_as_predicted() -> None:
    p, d = worker("p", capacity=PREFILL), worker("d", capacity=DECODE)
    assert ways(p, d).patience_s == LEAST_PATIENCE_S
    large = replace(PREFILL, max_model_len=1 << 20, num_blocks=1 << 20)
    long = ways(worker("p", capacity=large), worker("d", capacity=replace(large, disaggregation=Disaggregation.DECODE)),
                prompt=4001)  # fmt: skip
    assert long.patience_s == pytest.approx(4 * (4000 * TOKEN + 0.01))


def test_whole_requests_go_to_workers_that_decode_while_one_is_there_to_stay() -> None:
    p, d, n = worker("p", capacity=PREFILL), worker("d", capacity=DECODE), worker("n")
    mixed = [d, n]
    assert serving(mixed) is mixed
    assert (serving([p, d, n]), for_prompts([p, d, n])) == ([d, n], [p])
    alone = [p]
    assert serving(alone) is alone
    assert for_prompts(alone) == []
    leaving = worker("d", Load(draining=True), DECODE)
    both = [p, leaving]
    assert serving(both) is both
    assert for_prompts(both) == []


def test_a_worker_that_passes_no_blocks_computes_no_prompts_for_others() -> None:
    p = worker("p", capacity=replace(PREFILL, fetches_blocks=False))
    d = worker("d", capacity=DECODE)
    assert (serving([p, d]), for_prompts([p, d])) == ([d], [])


def test_a_prompt_that_is_computed_elsewhere_costs_its_rest_alone() -> None:
    whole, rest = placement(PROMPT), replace(placement(PROMPT), computed_elsewhere=96)
    fetching, other = worker("d", capacity=DECODE), worker("n")
    (cost,) = router().price_workers(rest, [fetching], {})
    assert cost.prefill == pytest.approx(4 * TOKEN + 0.01)
    (cost,) = router().price_workers(rest, [other], {})
    assert cost.prefill == pytest.approx(router().price_workers(whole, [other], {})[0].prefill)
