"""What a worker costs that fetches what it lacks of a prompt: exact seconds, and who fetches from whom."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.contracts.transfers import FETCH_MARGIN, TransferCosts
from kvmanager.ledger import transfers
from router.placement.fetches import PRIOR, Held, find_held, price_fetch, usual_rates
from router.placement.routing import LeastTime, LeastTimes
from router.placement.worker_model import Load, WorkerModel
from tests.support.router.placements import CAPACITY, STEP, TOKEN, chosen, placement, router, step_of, terms, worker

FETCHES = replace(CAPACITY, fetches_blocks=True)
RATES = Load(unheld_blocks=64, fetch_seconds_per_block=0.002, fetch_setup_seconds=0.003)
"""A block of sixteen tokens is fetched in 2 ms, and computed in 16 ms."""
PROMPT = 100
"""Six full blocks, and four tokens."""


def fetching(name: str, load: Load = RATES) -> WorkerModel:
    return worker(name, load, FETCHES)


def busy(name: str, tokens: int) -> WorkerModel:
    return fetching(name, replace(RATES, running=1, pending_prefill_tokens=tokens))


def held_by(source: WorkerModel, blocks: int = 6, busy_s: float = 0.0) -> Held:
    return Held(source, blocks, busy_s)


# ---------------------------------------------------------------- the price


def test_what_another_worker_has_is_fetched_and_the_rest_is_computed() -> None:
    source, cold = fetching("source"), fetching("cold")
    choice = router().route(placement(PROMPT), [source, cold], {"source": 6}, held=held_by(source))
    found = terms(choice, "cold")
    assert found["fetch"] == pytest.approx(0.003 + 6 * 0.002)
    assert found["prefill"] == pytest.approx(4 * TOKEN + STEP)
    assert list(found) == ["queue_delay", "fetch", "prefill", "decode_pressure"]
    figures = next(dict(each.figures) for each in choice.decision.candidates if each.name == "cold")
    assert figures == {"hit_blocks": 0.0, "fetched_blocks": 6.0}
    assert "fetch" not in terms(choice, "source")
    assert (chosen(choice), choice.fetch, choice.hit_blocks) == ("source", None, 6)


def test_what_a_worker_has_itself_is_not_fetched() -> None:
    source, other = fetching("source"), fetching("other")
    hits = {"source": 6, "other": 2}
    found = terms(router().route(placement(PROMPT), [source, other], hits, held=held_by(source)), "other")
    assert found["fetch"] == pytest.approx(0.003 + 4 * 0.002)
    assert found["prefill"] == pytest.approx(4 * TOKEN + STEP)


def test_the_last_token_is_computed_and_its_block_is_not_fetched() -> None:
    source, cold = fetching("source"), fetching("cold")
    found = terms(router().route(placement(96), [cold], {"source": 6}, held=held_by(source)), "cold")
    assert found["fetch"] == pytest.approx(0.003 + 5 * 0.002)
    assert found["prefill"] == pytest.approx(16 * TOKEN + STEP)


@pytest.mark.parametrize("other", [worker("w"), fetching("w", replace(RATES, fetch_seconds_per_block=0.0144))])
def test_a_worker_that_fetches_nothing_or_slowly_computes(other: WorkerModel) -> None:
    """14.4 ms a block are 0.9 of what computing it takes, and the setup is beside them."""
    found = terms(router().route(placement(PROMPT), [other], {}, held=held_by(fetching("source"))), "w")
    assert "fetch" not in found
    assert found["prefill"] == pytest.approx(PROMPT * TOKEN + STEP)


def test_a_worker_without_a_prefix_cache_neither_fetches_nor_serves() -> None:
    without = replace(FETCHES, prefix_caching=False)
    plain = worker("w", RATES, without)
    assert price_fetch(plain, held_by(fetching("source")), 0, 6, TOKEN, PRIOR) is None


def test_rates_that_are_unknown_are_those_of_others_or_assumed() -> None:
    source, new = fetching("source"), fetching("new", Load(unheld_blocks=64))
    both = router().route(placement(PROMPT), [source, new], {"source": 6}, held=held_by(source))
    assert terms(both, "new")["fetch"] == pytest.approx(0.003 + 6 * 0.002)
    alone = router().route(placement(PROMPT), [new], {}, held=held_by(source))
    assert terms(alone, "new")["fetch"] == pytest.approx(PRIOR.seconds(6))
    assert usual_rates([source, new, busy("b", 0)]) == pytest.approx((0.003, 0.002))


def test_an_older_worker_reports_no_setup() -> None:
    old = fetching("old", Load(unheld_blocks=64, fetch_seconds_per_block=0.002))
    found = terms(router().route(placement(PROMPT), [old], {}, held=held_by(fetching("source"))), "old")
    assert found["fetch"] == pytest.approx(6 * 0.002)


@pytest.mark.parametrize("block", [0.001, 0.0139, 0.0141, 0.5])
@pytest.mark.parametrize("ahead", [0, 1, 40])
def test_router_and_manager_agree_on_what_pays(block: float, ahead: int) -> None:
    costs = TransferCosts(compute=16 * TOKEN, read=0.0, peer=block, peer_setup=0.003)
    load = replace(RATES, fetch_seconds_per_block=block)
    held = held_by(fetching("source"), busy_s=ahead * block)
    priced = price_fetch(fetching("w", load), held, 0, 6, TOKEN, PRIOR)
    assert (priced is not None) is transfers.fetch_pays(costs, 6, from_peer=True, ahead=ahead)
    assert (priced is not None) is (0.003 + (ahead + 6) * block < FETCH_MARGIN * 96 * TOKEN)


def test_a_deadline_that_only_a_fetch_keeps_is_kept() -> None:
    """Computing takes 110 ms, fetching 15 ms and computing the rest 14 ms."""
    source, cold = busy("source", 400), fetching("cold")
    for model in (source, cold):
        model.shown_at = 0.0
        model.heartbeat(replace(model.load, running=1, decode_step_seconds=STEP, steps=1), now=0.0)
    asked = replace(placement(PROMPT), left=0.05)
    found = router().route(asked, [source, cold], {"source": 6}, held=held_by(source))
    assert chosen(found) == "cold"
    assert found.least_s == pytest.approx(0.003 + 6 * 0.002 + 4 * TOKEN + step_of(2))
    assert router().route(asked, [source, cold], {"source": 6}).least_s > 0.05


def test_a_bound_takes_a_fetch_to_need_no_time() -> None:
    slow, cold = worker("slow"), fetching("cold")
    least = LeastTimes()
    least.keep([LeastTime(each, 1.0, TOKEN, STEP) for each in (slow, cold)], (), 2, 0.0)
    found = least.bounds([slow, cold], {"source": 5}, PROMPT, (), lambda _: True, 5)
    assert found.work == [(100 * TOKEN + STEP, "slow"), (20 * TOKEN + STEP, "cold")]
    assert least.bounds([cold], {"cold": 6}, PROMPT, (), lambda _: True, 5).work == [(4 * TOKEN + STEP, "cold")]


# ---------------------------------------------------------------- hot prefixes


@pytest.mark.parametrize(("queue", "wanted"), [(0, "source"), (10, "source"), (30, "cold")])
def test_a_holder_keeps_its_prefix_until_its_queue_is_longer_than_a_fetch(queue: int, wanted: str) -> None:
    """The fetch takes 15 ms, and each token before the request 1 ms."""
    source, cold = fetching("source", replace(RATES, pending_prefill_tokens=queue)), fetching("cold")
    choice = router().route(placement(PROMPT), [source, cold], {"source": 6}, held=held_by(source))
    assert chosen(choice) == wanted
    if wanted == "cold":
        assert choice.fetch is not None
        assert choice.fetch[:2] == (source, 6)
        assert choice.fetch[2:] == pytest.approx((0.015, 0.012))
        # Without fetches the request would have waited at the holder.
        assert chosen(router().route(placement(PROMPT), [source, cold], {"source": 6})) == "source"


def test_fetches_before_it_at_the_source_are_waited_for_and_stop_paying() -> None:
    source, cold = fetching("source"), fetching("cold")
    for busy_s, seconds in ((0.0, 0.015), (0.05, 0.065), (0.0713, 0.0863)):
        found = price_fetch(cold, held_by(source, busy_s=busy_s), 0, 6, TOKEN, PRIOR)
        assert found is not None
        assert found[:2] == (source, 6)
        assert found[2:] == pytest.approx((seconds, 0.012))
    assert price_fetch(cold, held_by(source, busy_s=0.0715), 0, 6, TOKEN, PRIOR) is None


# ---------------------------------------------------------------- sources


def test_the_source_has_the_most_and_of_equals_the_least_to_serve() -> None:
    few, one, other = fetching("few"), fetching("one"), fetching("other")
    sources = {each.worker_id: each for each in (few, one, other)}
    published = {"few": 3, "one": 6, "other": 6, "far": 9}
    assert find_held(sources, published, 1.0) == Held(one, 6, 0.0)
    one.serve_fetch(0.5, 1.0)
    assert find_held(sources, published, 1.0) == Held(other, 6, 0.0)
    other.serve_fetch(0.25, 1.0)
    other.serve_fetch(0.5, 1.0)
    assert find_held(sources, published, 1.125) == Held(one, 6, 0.375)
    assert find_held(sources, published, 2.0) == Held(one, 6, 0.0)
    assert find_held(sources, {"far": 9, "few": 0}, 1.0) is None


def test_a_source_that_stands_still_is_not_asked_and_one_that_drains_is() -> None:
    hung = fetching("hung", replace(RATES, running=1, step_age_seconds=100.0, step_predicted_seconds=0.1))
    drains, few = fetching("drains", replace(RATES, draining=True)), fetching("few")
    assert find_held({"hung": hung, "few": few}, {"hung": 6, "few": 2}, 0.0) == Held(few, 2, 0.0)
    assert find_held({"drains": drains, "few": few}, {"drains": 6, "few": 2}, 0.0) == Held(drains, 6, 0.0)
