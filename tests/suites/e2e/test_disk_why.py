"""What `quire why`, usage and GetPool say of blocks that came from disk, and of those that did not."""

from __future__ import annotations

import re
from pathlib import Path

from tests.suites.e2e.test_disk_cache import BLOCKS, fill, kill_and_await, suite_with_disk
from tests.suites.e2e.test_host_tier import TALKS, TOKENS
from tests.support.suite import Outcome, Suite, cached_tokens, greedy
from tests.support.why import quire_why


async def ask(suite: Suite, talk: int, request_id: str) -> tuple[Outcome, str]:
    """Let a talk be computed again; return what came, and what `quire why` says of it."""
    request = greedy(TALKS[talk], TOKENS)
    request.request_id = request_id
    outcome = await suite.generate(request)
    status, out, err = await quire_why(suite, request_id)
    assert (status, err) == (0, "")
    return outcome, " ".join(out.split())


async def test_why_says_what_came_from_disk_and_what_computing_it_would_take(tmp_path: Path) -> None:
    """Nine blocks of a talk come back behind a kill. Of another talk's the first is rotten, so nine are computed."""
    async with suite_with_disk(tmp_path) as suite:
        await fill(suite, tmp_path)
        await kill_and_await(suite)
        outcome, told = await ask(suite, 0, "back-again")
        assert outcome.finished is not None
        usage = outcome.finished.usage
        assert (usage.cached_tokens, usage.host_cached_tokens, usage.disk_cached_tokens) == (36, 0, 36)
        assert usage.peer_cached_tokens == 0
        came = r"36 of 37 prompt tokens were cached; 9 blocks came from disk in (under )?[\d.]+ m?s; "
        assert re.search(f"{came}worker-0 loaded 9 blocks from host memory in (under )?[\\d.]+ m?s instead", told), told
        assert "waiting for a fetch" in told
        assert "waits while 9 blocks come from disk" in told
        assert re.search(r"fetched: 9 of 9 blocks came from disk in \d+ ms", told), told
        (pool,) = await suite.pools()
        assert (pool.fetches, pool.disk_loads, pool.disk_lost, pool.fetching) == (1, 9, 0, 0)
        assert pool.disk_held == BLOCKS * len(TALKS)
        (images,) = (tmp_path / "disk").glob("*/images")
        images.write_bytes(bytes(images.stat().st_size))
        outcome, told = await ask(suite, 1, "rotten")
        assert cached_tokens(outcome) == 0
        lost = "0 of 37 prompt tokens were cached: 9 of 9 blocks did not come from disk (9 failed their checksum)"
        assert f"{lost} and were computed." in told, told
        assert "/page/runbook#fetch-failed" in told
