"""`quire record FILE`: writes a log of the requests that end from now on, for `quire replay`.

The log has lengths, times and names of blocks; it has no text and no token. The names are made with a key that is
forgotten with the recording. One router is recorded: the one of --admin-address.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TextIO

from rich.console import Console

from cli.client import add_admin_address, admin_channel, path_of, run_command
from cli.replay.trace import Arrival, Measured, header, line_of
from common.contracts.errors import FieldViolation, InvalidConfig
from common.contracts.types import KvGroup
from quire.client import Model
from quire.decision.v1 import decision_pb2, decision_pb2_grpc
from quire.inference.v1 import inference_pb2, inference_pb2_grpc
from router.observe.diagnosis.words import count


def parser() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    flags = argparse.ArgumentParser("quire record", description=__doc__, formatter_class=form)
    flags.add_argument("file", type=path_of, help="log to write; it must not exist")
    flags.add_argument("--seconds", type=float, metavar="N", help="end after so many seconds; unset: at Ctrl-C")
    flags.add_argument("--requests", type=int, metavar="N", help="end after so many sequences")
    add_admin_address(flags)
    return flags


def arrival_of(record: decision_pb2.WatchRequestsResponse) -> Arrival:
    """Return the line of a sequence that ended."""
    measured = None
    if record.HasField("first_token_seconds"):
        measured = Measured(
            record.first_token_seconds, record.last_token_seconds, record.cached_tokens, record.worker_id
        )
    return Arrival(
        record.arrived,
        record.prompt_tokens,
        record.output_tokens,
        tuple(record.blocks),
        record.tenant,
        record.priority,
        measured,
    )


def suite_of(status: inference_pb2.GetStatusResponse, groups: Sequence[KvGroup] = ()) -> dict[str, Any]:
    """Return the sizes of the recorded suite. Where workers differ, a replay gives all of them the least.

    `groups` are those of the pool's layers, if it has any; the blocks of a worker are then pages.
    """
    workers = [each for each in status.workers if each.num_blocks]
    if not workers:
        return {}
    suite = {
        "workers": len(workers),
        "num_blocks": min(each.num_blocks for each in workers),
        "max_num_seqs": min(each.max_num_seqs for each in workers),
    }
    # Workers of one model have one window.
    window = max(each.window for each in workers)
    suite |= {"window": window} if window else {}
    parts = [{"kind": each.kind.value, "span": each.span, "pages": each.pages} for each in groups]
    return suite | ({"groups": parts} if parts else {})


class Log:
    """The file; its header is written with the first request."""

    def __init__(self, file: TextIO, suite: dict[str, Any]) -> None:
        self._file, self.suite = file, suite
        self.requests = self.lost = 0

    def take(self, record: decision_pb2.WatchRequestsResponse) -> None:
        """Write a sequence; one that arrived before the recording is left out."""
        self.lost += record.lost
        if record.arrived < 0:
            return
        if not self.requests:
            self._file.write(header(record.block_size, self.suite) + "\n")
        self._file.write(line_of(arrival_of(record)) + "\n")
        self._file.flush()
        self.requests += 1


async def record(console: Console, args: argparse.Namespace, log: Log) -> None:
    async with admin_channel(args.admin_address, args.state_dir) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        model = Model.from_proto(await stub.GetModel(inference_pb2.GetModelRequest()))
        status = await stub.GetStatus(inference_pb2.GetStatusRequest())
        log.suite = suite_of(status, model.identity.kv_geometry.groups)
        call = decision_pb2_grpc.DecisionServiceStub(channel).WatchRequests(decision_pb2.WatchRequestsRequest())
        await call.initial_metadata()
        until = f"for {args.seconds:g} s" if args.seconds else "until Ctrl-C"
        console.print(f"Recording {until} what ends at {args.admin_address}: {args.file}", highlight=False)
        with suppress(TimeoutError, asyncio.CancelledError):
            async with asyncio.timeout(args.seconds):
                async for one in call:
                    log.take(one)
                    if log.requests == args.requests:
                        break
        call.cancel()


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)

    async def body(console: Console) -> None:
        if (args.seconds is not None and not args.seconds > 0) or (args.requests is not None and args.requests <= 0):
            raise InvalidConfig(FieldViolation("--seconds, --requests", "are to be above 0; leave out what has no end"))
        try:
            file = args.file.open("x", encoding="utf-8")
        except OSError as error:
            what = f"{args.file} cannot be made: {error.strerror}; name a new file in a folder that is there"
            raise InvalidConfig(FieldViolation("FILE", what)) from None
        log = Log(file, {})
        try:
            with file:
                await record(console, args, log)
        finally:
            if not log.requests:
                args.file.unlink()
        if not log.requests:
            console.print("No request ended, so there is no log.")
            return
        lost = f" {log.lost} are missing: this command read too slowly." if log.lost else ""
        console.print(
            f"{count(log.requests, 'sequence')} recorded.{lost} Next: quire replay {args.file}", highlight=False
        )

    return run_command(body)
