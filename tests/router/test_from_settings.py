"""Parts of a router that follow from its settings."""

from __future__ import annotations

import pytest

from common.contracts.limits import MAX_BATCH_REQUESTS
from router.from_settings import batch_requests


@pytest.mark.parametrize(
    ("max_queued", "max_tokens", "context", "wanted"),
    [
        (1024, None, 4096, MAX_BATCH_REQUESTS),
        (100, None, 4096, 25),
        (3, None, 4096, 1),
        (1024, 100_000, 4096, 12),
        (1024, 4096, 4096, 1),
        (40, 1_000_000, 4096, 10),
    ],
)
def test_batches_leave_room_for_those_who_wait(
    max_queued: int, max_tokens: int | None, context: int, wanted: int
) -> None:
    assert batch_requests(max_queued, max_tokens, context) == wanted
