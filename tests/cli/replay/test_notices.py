"""Routers of a replay that tell each other of their load, over a stream that loses, doubles and reorders notices."""

from __future__ import annotations

import pytest

from bench.scale import arrivals
from cli.replay.figures import figures_of
from cli.replay.notices import Sharing
from cli.replay.simulation import ReplayOptions, replay

ROUTERS, WORKERS, REQUESTS = 4, 8, 250
POOR = Sharing(lost=0.2, doubled=0.2, late=0.2)


def p99(routers: int, sharing: Sharing | None) -> float:
    options = ReplayOptions(workers=WORKERS, routers=routers, sharing=sharing)
    return figures_of(replay(arrivals(WORKERS, REQUESTS, 50.0), options))["ttft_p99_s"]


def test_routers_that_tell_each_other_of_their_load_are_nearly_as_good_as_one() -> None:
    alone, apart = p99(1, None), p99(ROUTERS, None)
    assert apart > 1.3 * alone
    for sharing in (Sharing(), POOR):
        assert p99(ROUTERS, sharing) < 1.2 * alone


@pytest.mark.parametrize("sharing", [Sharing(), POOR])
def test_equal_replays_decide_equally(sharing: Sharing) -> None:
    options = ReplayOptions(workers=2, routers=2, sharing=sharing)
    assert replay(arrivals(2, 40, 50.0), options).digest == replay(arrivals(2, 40, 50.0), options).digest
