"""What the router counts for the sequences of one request, against what a real ledger lets them share."""

from __future__ import annotations

import pytest

from common.contracts.clock import ManualClock
from router.placement.fair_queue import Flow
from router.placement.placement_request import PlacementRequest
from router.placement.worker_model import Capacity, Load, WorkerModel
from router.requests.dispatcher import Reserver
from tests.support.kvmanager.ledgers import admit, lived, make_ledger, prompt, reserve

SIZE = 4


def pending(capacity: Capacity, tokens: int, hits: int) -> int:
    """Return the prompt tokens that the router counts for three sequences of one prompt."""
    model = WorkerModel("w0", capacity, Load(), heartbeat_at=0.0)
    request = PlacementRequest("r0", tokens, tokens + 8, 8, sequences=3)
    Reserver(ManualClock(0.0), lambda: None).reserve(model, request, hits, Flow(""))
    return model.pending_prefill_tokens


def test_forks_compute_their_last_token_where_a_layer_has_no_window() -> None:
    assert pending(Capacity(100, SIZE, 8, 1000), 102, 5) == 102 - 20 + 2


@pytest.mark.parametrize(("tokens", "hits"), [(16, 0), (17, 0), (60, 0), (60, 1), (60, 2), (60, 6), (60, 14), (15, 3)])
@pytest.mark.parametrize("window", [4, 8, 11])
def test_with_windows_each_fork_computes_what_it_does_not_share(tokens: int, hits: int, window: int) -> None:
    ledger, words = make_ledger(60, SIZE, window=window), prompt(tokens)
    if hits:
        # Another request computed these blocks; all of them are still there.
        lived(ledger, 1, words[: hits * SIZE])
    forks = (reserve(n, words, tokens + 8, SIZE, fork_of=None if n == 2 else 2) for n in (2, 3, 4))
    parent, *others = admit(ledger, *forks)
    assert parent.n_shared == hits
    # Where a fork shares all other blocks, the last one counts as copied: a token is left.
    most = (tokens - 1) // SIZE
    computed = [1 if each.n_shared == most else tokens - each.n_shared * SIZE for each in others]
    assert pending(Capacity(60, SIZE, 8, 1000, window), tokens, hits) == tokens - hits * SIZE + sum(computed)
