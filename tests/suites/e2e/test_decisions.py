"""`quire decisions` as a process: records of both services, filters, pages, and --follow."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from common.process.python import module_command
from quire.decision.v1 import decision_pb2 as pb
from tests.support.suite import PATIENCE, Suite, greedy
from tests.support.why import quire_why

pytestmark = pytest.mark.asyncio(loop_scope="session")


def command(suite: Suite, *flags: str) -> list[str]:
    where = ["--admin-address", suite.stack.admin_address, "--state-dir", str(suite.stack.options.state_dir)]
    return [*module_command("cli.main", "decisions", *flags, *where)]


async def quire_decisions(suite: Suite, *flags: str) -> list[dict[str, Any]]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command(suite, *flags, "--json"), stdout=pipe, stderr=pipe)
    async with asyncio.timeout(PATIENCE):
        out, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")
    found: list[dict[str, Any]] = json.loads(out)["decisions"]
    return found


@asynccontextmanager
async def following(suite: Suite, *flags: str) -> AsyncIterator[asyncio.StreamReader]:
    """Run the command with --follow beside the test; interrupt it at the end."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command(suite, "--follow", "--json", *flags), stdout=pipe)
    try:
        assert process.stdout is not None
        yield process.stdout
    finally:
        process.kill()
        await process.wait()


async def served(suite: Suite, name: str) -> str:
    """Serve a request, and return the worker that it had."""
    request = greedy(list(range(100, 140)), 2)
    request.request_id = name
    outcome = await suite.generate(request)
    assert outcome.admitted is not None
    return outcome.admitted.worker_id


async def test_filters_of_both_services(suite: Suite) -> None:
    worker = await served(suite, "decided-1")
    await suite.until_all_free(2)
    own = await quire_decisions(suite, "--request", "decided-1")
    kinds = {(each["service"], each["kind"]) for each in own}
    assert kinds == {("router", "admission"), ("router", "routing"), ("manager", "grant"), ("router", "outcome")}
    at_worker, manager, outcomes = await asyncio.gather(
        quire_decisions(suite, "--worker", worker, "--since", "1h"),
        quire_decisions(suite, "--service", "manager", "--limit", "1000"),
        quire_decisions(suite, "--kind", "outcome", "--limit", "1"),
    )
    assert {each["worker"] for each in at_worker} == {worker}
    assert {each["service"] for each in at_worker} == {"router", "manager"}
    assert {each["service"] for each in manager} == {"manager"}
    assert [each["kind"] for each in outcomes] == ["outcome"]


async def test_follow_prints_each_record_once(suite: Suite) -> None:
    # A record of before shows that the command has begun to follow: it begins with the newest of them.
    await served(suite, "decided-2")
    async with following(suite, "--kind", "outcome", "--limit", "1") as lines, asyncio.timeout(PATIENCE):
        first = json.loads(await lines.readline())
        assert first["kind"] == "outcome"
        names = [f"followed-{number}" for number in range(3)]
        for name in names:
            await served(suite, name)
        seen = [json.loads(await lines.readline())["request_id"] for _ in names]
        assert seen == names


async def test_all_pages_have_what_one_page_has(suite: Suite) -> None:
    for number in range(3):
        await served(suite, f"paged-{number}")
    await suite.until_all_free(2)
    whole = await suite.decisions.ListDecisions(pb.ListDecisionsRequest(limit=1000), timeout=PATIENCE)
    asked, seen = pb.ListDecisionsRequest(limit=4), list[str]()
    while True:
        page = await suite.decisions.ListDecisions(asked, timeout=PATIENCE)
        seen = [each.decision_id for each in page.decisions] + seen
        asked.page_token = page.next_page_token
        if not asked.page_token:
            break
    assert seen[-len(whole.decisions) :] == [each.decision_id for each in whole.decisions]
    assert len(set(seen)) == len(seen)


async def test_why_compares_a_span_of_time_with_the_one_before(suite: Suite) -> None:
    await served(suite, "compared")
    status, out, err = await quire_why(suite, "--hit-rate", "--latency", "--since", "1h", "--json")
    assert (status, err) == (0, "")
    hits, times = json.loads(out)["changes"]
    assert (hits["measure"], times["measure"]) == ("hit_rate", "first_token")
    assert min(hits["after"]["requests"], times["after"]["requests"]) >= 1
    # No router has run for two hours here, so the span before is empty, and that is said.
    assert hits["head"].startswith("Nothing to compare: no request that counts ended in the span before")
    assert any(each.startswith("records go back ") for each in hits["missing"])
    status, out, _ = await quire_why(suite, "--hit-rate", "compared")
    assert status == 2


async def test_the_watched_status_has_the_blocks_of_each_worker(suite: Suite) -> None:
    await served(suite, "watched")
    await suite.until_all_free(2)
    where = ["--admin-address", suite.stack.admin_address, "--state-dir", str(suite.stack.options.state_dir)]
    pipe = asyncio.subprocess.PIPE
    command = module_command("cli.main", "status", "--watch", "--json", *where)
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    async with asyncio.timeout(PATIENCE):
        out, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")
    found = json.loads(out)
    pools = {each.worker_id: each for each in await suite.pools()}
    assert {each["worker_id"]: each["in_use"] for each in found["workers"]} == dict.fromkeys(pools, 0)
    assert all(each["cached"] + each["free"] == each["blocks"] for each in found["workers"])
    assert found["troubles"] == []
