"""Hot prefixes in replays: where fetches are priced, they leave a busy holder; where they are not, they queue there."""

from __future__ import annotations

import random
from dataclasses import replace

from cli.replay.links import LinkRates, Moves
from cli.replay.policies import with_policies
from cli.replay.simulation import Replay, ReplayOptions, replay
from cli.replay.trace import Arrival, Trace
from cli.replay.worker import Timing
from gpuworker.scheduling.step_costs import StepCosts

HOT = tuple(range(64))
"""1,024 tokens, which take 102 ms to compute and 11 ms to fetch."""
RATES = LinkRates(host=16e9, disk=1e9, peer=100e6, setup=0.001, token=1000.0)
COSTS = StepCosts(base=0.005, decode=0.0001, prefill=0.0001)
SUITE = ReplayOptions(
    workers=4, num_blocks=2048, timing=Timing(COSTS), moves=Moves(4096, peers=True, rates=RATES)
)  # fmt: skip


def hot(rate: float, requests: int = 160) -> Trace:
    """Return requests that all begin with one prefix, go on with 1,024 tokens of their own, and come in bursts."""
    draw, at, found = random.Random(7), 0.0, list[Arrival]()
    for number in range(requests):
        at += draw.expovariate(rate) if number % 8 == 0 else 0.0
        found.append(Arrival(at + (5.0 if number else 0.0), 2048, 4, HOT))
    return Trace(tuple(found), 16)


def served(policy: str) -> Replay:
    return replay(hot(rate=1.5), with_policies(SUITE, policy))


def test_bursts_of_a_prefix_spread_over_workers_that_fetch_it_once_each() -> None:
    found = served("cost")
    fetched = [each for each in found.requests if each.peer_tokens]
    by_worker = {each.worker: each.peer_tokens for each in fetched}
    assert len(by_worker) == 3, "all but the one that computed it"
    assert all(tokens == 1024 for tokens in by_worker.values())
    computed = sum(1024 - min(1024, each.cached_tokens) for each in found.requests)
    assert computed <= 2 * 1024, "nobody computes it again, but for the first one and one that did not expect a fetch"


def test_a_prefix_leaves_its_busy_holder_where_a_fetch_is_priced() -> None:
    """The holder computes 800 tokens for 80 ms when the prefix is asked for, which an idle worker could compute."""
    asked = (Arrival(0.0, 1088, 4, HOT), Arrival(5.0, 1888, 4, HOT), Arrival(5.001, 1088, 4, HOT))
    two = replace(SUITE, workers=2)
    found = {name: replay(Trace(asked, 16), with_policies(two, name)).requests for name in ("cost", "unpriced-fetches")}
    for first, busy, _ in found.values():
        assert busy.worker == first.worker
    waits, fetches = found["unpriced-fetches"][-1], found["cost"][-1]
    assert (waits.peer_tokens, waits.cached_tokens) == (0, 1024)
    assert waits.worker == found["unpriced-fetches"][0].worker
    assert fetches.worker != found["cost"][0].worker
    assert fetches.peer_tokens == 1024
    assert (fetches.first_token_s or 0.0) < 0.5 * (waits.first_token_s or 0.0)


def test_a_prefix_of_two_workers_comes_to_the_third_where_it_is_replicated() -> None:
    """Two requests for one prefix run at two workers; the third one has it before a request asks for it there."""
    asked = (Arrival(0.0, 1088, 4, HOT), Arrival(5.0, 1088, 200, HOT), Arrival(6.0, 1088, 200, HOT))
    three = replace(SUITE, workers=3, max_num_seqs=1)
    found = {on: replay(Trace(asked, 16), replace(three, manager=replace(three.manager, replicate=on)))
             for on in (False, True)}  # fmt: skip
    assert {on: each.replicated for on, each in found.items()} == {False: 0, True: 64}
    assert found[True].decisions["prefetch"] == 2, "what was asked for, and what came"
    assert "prefetch" not in found[False].decisions
