"""`quire why`, `quire trace` and `quire adapters` as processes against a running suite."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from common.process.python import module_command
from quire.decision.v1 import decision_pb2
from quire.inference.v1 import inference_pb2 as pb
from tests.support.suite import PATIENCE, Suite
from tests.support.waiting import until


async def quire_why(suite: Suite, *flags: str) -> tuple[int, str, str]:
    """Return the exit status, the output and the errors of the command."""
    return await _command(suite, "why", *flags)


async def quire_trace(suite: Suite, *flags: str) -> tuple[int, str, str]:
    """Return the same of `quire trace`."""
    return await _command(suite, "trace", *flags)


async def quire_adapters(suite: Suite, *flags: str) -> tuple[int, str, str]:
    """Return the same of `quire adapters`."""
    return await _command(suite, "adapters", *flags)


async def _command(suite: Suite, *words: str) -> tuple[int, str, str]:
    where = ["--admin-address", suite.stack.admin_address, "--state-dir", str(suite.stack.options.state_dir)]
    pipe = asyncio.subprocess.PIPE
    command = module_command("cli.main", *words, *where)
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    async with asyncio.timeout(PATIENCE):
        out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


async def head_of(suite: Suite, request_id: str) -> str:
    """Return the first three lines that the command prints about a request."""
    status, out, err = await quire_why(suite, request_id)
    assert (status, err) == (0, "")
    return "\n".join(out.splitlines()[:3])


async def until_blamed(words: str, incident: Callable[[int], Awaitable[str]]) -> str:
    """Return the head of an incident that takes as long, twice as long, ... as it should, until these words are in it.

    On a busy machine anything else may take longer than what a test holds back, and is the cause then.
    """
    head = ""
    for times in (1, 2, 4, 8, 16):
        head = await incident(times)
        if words in head:
            break
    return head


async def outcome_of(suite: Suite, request: pb.GenerateRequest) -> Mapping[str, float]:
    """Return the figures of the router's record of how a request ended; zeros are not among them."""
    (record,) = await _records(suite, request.request_id, "outcome")
    return record.figures


async def until_placed(suite: Suite, request: pb.GenerateRequest) -> str:
    """Wait until the router has chosen a worker for a request; return the worker's id."""
    records = await until(lambda: _records(suite, request.request_id, "routing"), seconds=PATIENCE)
    return records[-1].chosen


async def _records(suite: Suite, request_id: str, kind: str) -> Sequence[decision_pb2.DecisionRecord]:
    wanted = decision_pb2.ListDecisionsRequest(request_id=request_id, kind=kind)
    return (await suite.decisions.ListDecisions(wanted, timeout=PATIENCE)).decisions
