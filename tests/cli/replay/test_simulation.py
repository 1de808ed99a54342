"""Replays: exact times of a lone request, equal runs, hits, pressure on blocks, and what other choices change."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from cli.replay.figures import figures_of
from cli.replay.policies import LeastLoaded, RoundRobin
from cli.replay.simulation import Replay, ReplayOptions, replay
from cli.replay.trace import Arrival, Trace
from cli.replay.worker import Timing
from common.contracts.types import Decision
from gpuworker.scheduling.step_costs import StepCosts
from router.observe.diagnosis.calibration import predicted_s
from router.placement.routing import Choice, Router

COSTS = StepCosts(base=0.01, decode=0.001, prefill=0.0001)
ONE = ReplayOptions(workers=1, num_blocks=64, timing=Timing(COSTS, message=0.0, index=0.0))
GOLDEN = Path(__file__).parent.parent / "golden" / "replay_decisions.txt"


def crowd(requests: int, rate: float, seed: int = 0) -> Trace:
    """Return requests of which every fourth shares a prefix of 64 tokens."""
    rng, at, arrivals = random.Random(seed), 0.0, []
    for number in range(requests):
        at += rng.expovariate(rate)
        blocks = (1, 2, 3, 4) if number % 4 == 0 else ()
        arrivals.append(Arrival(at, rng.choice((80, 160)), rng.choice((16, 48)), blocks))
    return Trace(tuple(arrivals), 16)


def test_a_lone_request_takes_the_steps_that_its_costs_say() -> None:
    (found,) = replay(Trace((Arrival(0.0, 101, 11),), 16), ONE).requests
    assert found.first_token_s == pytest.approx(COSTS.base + COSTS.decode + 100 * COSTS.prefill)
    assert found.token_s == pytest.approx(COSTS.base + COSTS.decode)
    assert (found.tokens, found.cached_tokens, found.refused) == (11, 0, "")


def test_messages_take_their_time() -> None:
    near, far = (
        replay(Trace((Arrival(0.0, 101, 11),), 16), replace(ONE, timing=replace(ONE.timing, message=message)))
        for message in (0.0, 0.02)
    )
    # To the worker, to the manager and back, and to the router.
    assert far.requests[0].first_token_s == pytest.approx((near.requests[0].first_token_s or 0) + 4 * 0.02)


def test_a_prompt_that_was_computed_is_a_hit_and_so_is_a_recorded_output() -> None:
    first = Arrival(0.0, 64, 32, (1, 2, 3, 4, 5, 6))
    again, further = Arrival(5.0, 64, 8, (1, 2, 3, 4)), Arrival(10.0, 112, 8, (1, 2, 3, 4, 5, 6))
    other = Arrival(15.0, 64, 8, (1, 2, 9, 4))
    found = replay(Trace((first, again, further, other), 16), ONE)
    # The last token of a prompt is always computed. The last token of an output never is.
    assert [each.cached_tokens for each in found.requests] == [0, 48, 80, 32]


def test_without_the_cache_nothing_is_a_hit() -> None:
    trace = Trace((Arrival(0.0, 64, 4, (1, 2, 3, 4)), Arrival(5.0, 64, 4, (1, 2, 3, 4))), 16)
    found = replay(trace, replace(ONE, prefix_caching=False))
    assert [each.cached_tokens for each in found.requests] == [0, 0]


def test_where_every_layer_has_a_window_a_small_pool_holds_long_requests_and_their_last_blocks_are_hits() -> None:
    """A window of 64 covers four blocks of 16."""
    first, again = Arrival(0.0, 1024, 8, tuple(range(64))), Arrival(5.0, 1100, 8, tuple(range(64)))
    options = replace(ONE, num_blocks=16)
    assert [each.refused for each in replay(Trace((first, again), 16), options).requests] == ["InvalidRequest"] * 2
    found = replay(Trace((first, again), 16), replace(options, window=64)).requests
    assert [(each.tokens, each.cached_tokens) for each in found] == [(8, 0), (8, 1024)]


def test_routers_find_the_last_blocks_of_a_conversation_where_every_layer_has_a_window() -> None:
    """Each of two conversations goes on at the worker that has its window, though its first blocks are gone."""
    turns = [
        Arrival(5.0 * turn + talk, 320 * (turn + 1), 8, tuple(range(1000 * talk, 1000 * talk + 20 * (turn + 1))))
        for turn in range(4)
        for talk in range(2)
    ]
    found = replay(Trace(tuple(turns), 16), replace(ONE, workers=2, num_blocks=32, window=64)).requests
    assert [each.cached_tokens for each in found] == [0, 0, 320, 320, 640, 640, 960, 960]
    assert [each.worker for each in found[2:]] == [found[0].worker, found[1].worker] * 3


def test_what_no_pool_holds_and_what_the_queue_has_no_place_for_is_refused() -> None:
    huge, small = Arrival(0.0, 2000, 8), Arrival(1.0, 16, 4)
    found = replay(Trace((huge, small), 16), ONE)
    assert [each.refused for each in found.requests] == ["InvalidRequest", ""]
    flood = Trace(tuple(Arrival(0.0, 512, 8) for _ in range(60)), 16)
    found = replay(flood, replace(ONE, max_num_seqs=1, max_queued=5))
    refused = [each.refused for each in found.requests]
    assert {*refused} == {"", "Overloaded"}
    assert all(each.finished_at is not None for each in found.requests if not each.refused)


def test_too_few_blocks_preempt_and_everything_ends() -> None:
    found = replay(crowd(120, 60.0), replace(ONE, num_blocks=24))
    assert figures_of(found)["preemptions"] > 0
    assert all(each.tokens == each.arrival.output_tokens for each in found.requests)
    assert found.decisions["preemption"] > 0


def test_equal_replays_decide_equally_and_another_seed_does_not() -> None:
    trace, options = crowd(150, 100.0), replace(ONE, workers=4, num_blocks=128)
    runs = [replay(trace, options) for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0].digest != replay(trace, replace(options, seed=1)).digest


def test_other_routers_change_where_requests_go() -> None:
    groups = [tuple(range(100 * group, 100 * group + 32)) for group in range(5)]
    trace = Trace(tuple(Arrival(number * 0.1, 520, 4, groups[number % 5]) for number in range(60)), 16)
    options = replace(ONE, workers=4, num_blocks=128)
    cost, turns, least = (
        replay(trace, replace(options, router=router)) for router in (options.router, RoundRobin, LeastLoaded)
    )
    assert [each.worker for each in turns.requests[:8]] == [f"worker-{number % 4}" for number in range(8)]
    assert hits(cost) > 0.8 > hits(turns)
    assert least.digest not in (cost.digest, turns.digest)


def test_several_routers_share_the_workers() -> None:
    trace, options = crowd(80, 200.0), replace(ONE, workers=4, num_blocks=128)
    one, three = replay(trace, options), replay(trace, replace(options, routers=3))
    assert all(each.tokens == each.arrival.output_tokens for each in three.requests)
    assert one.digest != three.digest
    assert {each.worker for each in three.requests} == {f"worker-{number}" for number in range(4)}


def test_a_request_without_output_ends_with_its_prompt() -> None:
    (found,) = replay(Trace((Arrival(0.0, 40, 0),), 16), ONE).requests
    assert (found.tokens, found.first_token_s, found.refused) == (0, None, "")
    assert found.finished_at is not None


@pytest.mark.parametrize(
    ("rate", "changed"),
    [
        (5.0, {}),
        (30.0, {}),
        (60.0, {}),
        (60.0, {"max_num_batched_tokens": 256}),
        (60.0, {"max_num_seqs": 8}),
        (40.0, {"num_blocks": 300}),
        (60.0, {"num_blocks": 300}),
    ],
    ids=str,
)
def test_the_first_token_comes_about_when_it_was_predicted(rate: float, changed: dict[str, Any]) -> None:
    """At two workers that are quiet, busy, full, or short of blocks. Virtual time: the same on any machine."""
    routes = dict[str, Decision]()

    class Remembers(Router):
        def route(self, *args: Any, **named: Any) -> Choice:
            choice = super().route(*args, **named)
            if choice.worker is not None:
                routes[choice.decision.request_id] = choice.decision
            return choice

    options = ReplayOptions(workers=2, router=Remembers, **changed)
    found = replay(mixed(300, rate), options)
    pairs = [
        (predicted_s(chosen), each.first_token_at - chosen.time_ns / 1e9)
        for number, each in enumerate(found.requests)
        if (chosen := routes.get(f"r{number}")) is not None and each.first_token_at is not None and number >= 60
    ]
    assert len(pairs) > 200
    predicted, actual = (median(values) for values in zip(*pairs, strict=True))
    assert 0.7 <= predicted / actual <= 1.4


def mixed(requests: int, rate: float) -> Trace:
    rng, at, arrivals = random.Random(0), 0.0, []
    for _ in range(requests):
        at += rng.expovariate(rate)
        arrivals.append(Arrival(at, rng.choice((64, 128, 512)), rng.choice((32, 128)), ()))
    return Trace(tuple(arrivals), 16)


def hits(found: Replay) -> float:
    return figures_of(found)["hit_share"]


def test_what_a_request_computed_before_its_preemption_is_no_hit() -> None:
    """Every fourth request shares 64 tokens; the others share nothing."""
    found = replay(crowd(60, 80.0, seed=3), replace(ONE, workers=2, num_blocks=28))
    assert any(each.preemptions and number % 4 for number, each in enumerate(found.requests))
    assert {each.cached_tokens for number, each in enumerate(found.requests) if number % 4} == {0}
    assert max(each.cached_tokens for each in found.requests) == 64


def golden_lines() -> list[str]:
    """Return where each request of a small crowd went, what it hit, and what it was preempted by."""
    found = replay(crowd(60, 80.0, seed=3), replace(ONE, workers=2, num_blocks=28))
    lines = [
        f"{number} {each.worker} cached {each.cached_tokens} preempted {each.preemptions} "
        f"first {1000 * (each.first_token_s or 0):.3f} ms"
        for number, each in enumerate(found.requests)
    ]
    return [*lines, *(f"{kind} {count}" for kind, count in found.decisions.items())]


def test_decisions_are_those_of_the_golden_log() -> None:
    """A policy that changes shows as a diff: `python -m tests.cli.replay.test_simulation` writes the file anew."""
    assert golden_lines() == GOLDEN.read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    GOLDEN.write_text("".join(f"{line}\n" for line in golden_lines()), encoding="utf-8")
