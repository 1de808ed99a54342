"""Which records `quire why --slowest` and the like look at: of a live router, and of a log on disk."""

from __future__ import annotations

import io
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
from rich.console import Console

from cli.commands.why import chosen_ids, document_of, parser, show
from cli.views.why import WhyTable
from cli.why.gather import Gatherer
from cli.why.source import LogSource, Source
from common.contracts.errors import NotFound
from common.contracts.types import Decision, DecisionKind
from common.decisions.log_files import Bounds, member_of
from common.decisions.log_folder import LogFolder
from common.decisions.log_reader import LogReader
from common.decisions.ring import DecisionRing
from common.rpc.server import RpcServer, open_channel
from common.wire.decision_json import line_of
from quire.decision.v1 import decision_pb2_grpc as rpc
from router.api.grpc.decision_servicer import DecisionServicer, RecordSources
from router.api.grpc.manager_calls import ManagerCalls
from router.observe.diagnosis.outcome import Outcome, figures_of, texts_of
from router.observe.siblings import Siblings
from router.observe.trace_store import TraceStore

MINUTE = 60 * 10**9
COUNT = 2_500


def ended(name: str, time_ns: int, first_token_s: float, preemptions: int = 0) -> Decision:
    outcome = Outcome(ended="length", before=(("prefill", first_token_s),), preemptions=preemptions)
    return Decision(
        f"end-{name}", DecisionKind.OUTCOME, time_ns, "length", name, (), texts_of(outcome), figures=figures_of(outcome)
    )


def records(now_ns: int) -> list[Decision]:
    """Return the slowest request of all, the slowest of the last two hours, and many quick ones after both."""
    slow = [ended("slowest", now_ns - 300 * MINUTE, 9.0), ended("slow", now_ns - 60 * MINUTE, 5.0, preemptions=1)]
    return slow + [ended(f"r{number}", now_ns - 50 * MINUTE + number, 0.1) for number in range(COUNT)]


async def live(stack: AsyncExitStack, made: Sequence[Decision]) -> grpc.aio.Channel:
    server, ring = RpcServer([]), DecisionRing(10_000, began_ns=1)
    for each in made:
        ring.record(each)
    servicer = DecisionServicer(
        RecordSources(ring, TraceStore(8)), Siblings(), ManagerCalls(["127.0.0.1:1"], open_channel)
    )
    rpc.add_DecisionServiceServicer_to_server(servicer, server.server)
    port = await server.start("127.0.0.1", 0)
    stack.push_async_callback(server.stop, 0.0)
    return await stack.enter_async_context(open_channel(f"127.0.0.1:{port}"))


def on_disk(root: Path, made: Sequence[Decision]) -> LogSource:
    times = [each.time_ns for each in made]
    folder = LogFolder.claimed(root, "router", Bounds(1 << 24, 10**18), max(times))
    timed = [(each.time_ns, line_of(1, each)) for each in made]
    folder.append(member_of(timed), min(times), max(times), max(times))
    folder.close()
    return LogSource(LogReader([root]))


@pytest.fixture(params=["live", "disk"])
async def source(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Source | grpc.aio.Channel]:
    made = records(time.time_ns())
    async with AsyncExitStack() as stack:
        yield on_disk(tmp_path, made) if request.param == "disk" else await live(stack, made)


async def chosen(
    source: Source | grpc.aio.Channel, *words: str, most: int = 10_000
) -> tuple[list[str], tuple[str, ...]]:
    return await chosen_ids(Gatherer(source, most=most), parser().parse_args(words))


async def test_since_looks_at_all_records_of_its_time(source: Source | grpc.aio.Channel) -> None:
    assert await chosen(source, "--slowest", "1", "--since", "2h") == (["slow"], ())
    assert await chosen(source, "--preempted", "--since", "2h") == (["slow"], ())
    ids, missing = await chosen(source, "--slowest", "2", "--since", "36500d")
    assert ids == ["slowest", "slow"]
    assert not any("looked at" in each for each in missing)


async def test_without_since_the_newest_records_alone_are_looked_at_which_is_said(
    source: Source | grpc.aio.Channel,
) -> None:
    ids, (missing,) = await chosen(source, "--slowest", "1")
    assert ids == [f"r{COUNT - 1}"]
    assert missing.startswith("ends of requests from before ")
    assert missing.endswith(": the newest 1,000 alone were looked at; --since TIME looks at all within a time")
    with pytest.raises(NotFound, match=r"no request of that kind ended here .* the newest 1,000 alone were looked at"):
        await chosen(source, "--preempted")


async def test_the_records_of_since_are_bounded_which_is_said(source: Source | grpc.aio.Channel) -> None:
    _, (missing,) = await chosen(source, "--slowest", "--since", "2h", most=1_500)
    assert missing.endswith(": the newest 1,500 alone were looked at; name a shorter --since")
    assert (await chosen(source, "--slowest", "1", "--since", "2h", most=COUNT + 1)) == (["slow"], ())


async def test_the_last_request_is_the_last_whatever_there_is_before_it(source: Source | grpc.aio.Channel) -> None:
    assert await chosen(source, "--last") == ([f"r{COUNT - 1}"], ())
    assert await chosen(source, "r7") == (["r7"], ())


async def test_refusals_are_looked_at_and_cut_by_themselves(tmp_path: Path) -> None:
    now_ns = time.time_ns()
    made = [
        Decision(f"d{number}", DecisionKind.REJECTION, now_ns - MINUTE + number, "router.queue", f"r{number}")
        for number in range(1_001)
    ]
    ids, (missing,) = await chosen(on_disk(tmp_path, made), "--rejected")
    assert (len(ids), ids[-1]) == (1_000, "r1")
    assert missing.startswith("refusals from before ")


def test_what_is_missing_stands_below_the_requests() -> None:
    console = Console(file=io.StringIO(), width=80)
    show(console, WhyTable([], 0), ["ends of requests from before 12:00"])
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines()[-1] == "missing: ends of requests from before 12:00"
    assert document_of([], ["ends"], "/page/runbook") == {"requests": [], "missing": ["ends"]}
