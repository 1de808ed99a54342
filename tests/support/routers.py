"""Several routers that share their ports: connections to each of them, and the end of one."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import grpc

from common.rpc.server import open_channel
from quire.decision.v1 import decision_pb2, decision_pb2_grpc
from tests.support.load import kill
from tests.support.simulated import seeded
from tests.support.suite import PATIENCE, Outcome, Suite, stream
from tests.support.waiting import until

# The mark of a call between routers.
ALONE = (("quire-this-process-alone", "1"),)


def router_of(outcome: Outcome) -> str:
    """Return the id of the router that served a request: its decisions are named after it."""
    assert outcome.admitted is not None
    return outcome.admitted.decision_id.rpartition("-")[0]


async def connections(
    suite: Suite, stack: AsyncExitStack, routers: int, each: int
) -> list[tuple[str, grpc.aio.Channel]]:
    """Connect to the shared port until every router has `each` connections; return so many of each, with its id.

    The kernel gives each new connection to one of the listeners, by a hash of its ports.
    """
    found: dict[str, list[grpc.aio.Channel]] = {}
    async with asyncio.timeout(PATIENCE):
        while len(found) < routers or min(map(len, found.values())) < each:
            channel = await stack.enter_async_context(open_channel(suite.stack.address))
            found.setdefault(router_of(await stream(channel, seeded([1, 2, 3], 1))), []).append(channel)
    return [(owner, channel) for owner, channels in found.items() for channel in channels[:each]]


async def own_id(suite: Suite, name: str) -> str:
    """Return the id of one router, which has served before: its decisions are named after it."""
    async with open_channel(suite.stack.children[name].program.address) as channel:
        stub = decision_pb2_grpc.DecisionServiceStub(channel)
        asked = decision_pb2.ListDecisionsRequest(limit=1)
        (record,) = (await stub.ListDecisions(asked, timeout=PATIENCE, metadata=ALONE)).decisions
        return str(record.decision_id.rpartition("-")[0])


async def killed(suite: Suite, name: str) -> None:
    """Kill a process and wait until it is gone: a connection that reaches it while it dies is reset."""
    pid = suite.stack.children[name].pid
    kill(suite, name)
    await until(lambda: suite.stack.children[name].pid != pid, seconds=PATIENCE)
