"""Where the commands read decision records: a router's admin plane, or the decision logs in folders (`--log DIR`)."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, TypeAlias

import grpc

from cli.client import admin_channel, path_of
from cli.why.runbook import INSTALLED, runbook_at
from common.contracts.errors import NotFound, Unavailable
from common.decisions.log_reader import LogReader
from quire.api.status import error_from_rpc
from quire.decision.v1 import decision_pb2 as pb
from quire.decision.v1 import decision_pb2_grpc as rpc

_ROUTER, _MANAGER = "router", "kvmanager"


class LogSource:
    """Answers from folders as a router's admin plane does: an instance stands for its stub."""

    bound: Final = "--decision-log-size, --decision-log-age"
    runbook: Final = INSTALLED

    def __init__(self, reader: LogReader) -> None:
        self._reader = reader

    async def ListDecisions(
        self, request: pb.ListDecisionsRequest, timeout: float | None = None
    ) -> pb.ListDecisionsResponse:
        """Raises Unavailable for records of a KV manager where there are none."""
        if request.kept:  # the log has all records of kept requests too
            return pb.ListDecisionsResponse()
        service = _MANAGER if request.from_manager else _ROUTER
        if request.from_manager and service not in self._reader.services:
            raise Unavailable("no log of one is in the folders; name its --decision-log too, by another --log DIR")
        return self._reader.page(service, request)

    async def GetTrace(self, request: pb.GetTraceRequest, timeout: float | None = None) -> pb.GetTraceResponse:
        """Raises NotFound: spans are kept in memory alone."""
        raise NotFound("a decision log has no spans")

    def missing(self) -> tuple[str, ...]:
        """Return in words of what records are missing, as far as the folders were read."""
        dropped = self._reader.dropped
        lost = (f"the log: {dropped:,} were dropped, because its disk was slow or full",) if dropped else ()
        return (*self._reader.faults, *lost)


class LiveSource:
    """Answers of a router's admin plane."""

    bound: Final = "--decision-ring"

    def __init__(self, channel: grpc.aio.Channel, runbook: str = INSTALLED) -> None:
        stub, self.runbook = rpc.DecisionServiceStub(channel), runbook
        self.ListDecisions, self.GetTrace = stub.ListDecisions, stub.GetTrace

    def missing(self) -> tuple[str, ...]:
        return ()


Source: TypeAlias = LogSource | LiveSource


def source_of(source: Source | grpc.aio.Channel) -> Source:
    return LiveSource(source) if isinstance(source, grpc.aio.Channel) else source


def words_of(error: grpc.aio.AioRpcError | Unavailable) -> str:
    """Return why a service could not be asked, in a line."""
    whole = error if isinstance(error, Unavailable) else error_from_rpc(error)
    return str(whole).partition("\n")[0]


def add_log(flags: argparse.ArgumentParser) -> None:
    text = "read the --decision-log folder DIR instead of asking running services; repeatable"
    flags.add_argument("--log", type=path_of, action="append", metavar="DIR", help=text)


@asynccontextmanager
async def opened(args: argparse.Namespace) -> AsyncIterator[Source]:
    """Open what the flags name: the folders of --log, else the admin plane. Raises InvalidConfig."""
    if args.log:
        yield LogSource(LogReader(args.log))
        return
    async with admin_channel(args.admin_address, args.state_dir) as channel:
        yield LiveSource(channel, await runbook_at(channel, args.admin_address))
