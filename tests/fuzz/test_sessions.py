"""What follows a good beginning: reports of a worker that is attached, submissions of a router that has said hello.

A stream of arbitrary messages breaks off at its first one. Here the first ones are right, and the numbers of the others
too.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator

import grpc
from hypothesis import given
from hypothesis import strategies as st

from common.wire.identity_codec import identity_from_proto
from quire.gpuworker.v1 import gpuworker_pb2 as worker_pb
from quire.gpuworker.v1 import gpuworker_pb2_grpc as worker_rpc
from quire.kvmanager.v1 import kvmanager_pb2 as manager_pb
from tests.fuzz.harness import ANY, PATIENCE, Fuzzed, again_and_again, call_both_ways
from tests.fuzz.messages import messages
from tests.fuzz.submissions import requests_of_a_router

QUIET = 0.1
# The same where submissions are served: blocks and steps take a while on a busy machine.
LONG_QUIET = 20.0
SESSION, STREAM = "/quire.kvmanager.v1.KvManagerService/Session", "/quire.gpuworker.v1.GpuWorkerService/Stream"
BLOCKS = 64


async def info_of(address: str) -> worker_pb.WorkerInfo:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = worker_rpc.GpuWorkerServiceStub(channel)
        return (await stub.GetWorker(worker_pb.GetWorkerRequest(), timeout=PATIENCE)).info


def numbered(requests: list[manager_pb.SessionRequest]) -> list[bytes]:
    """Return the messages of one session, with the numbers that the manager expects."""
    for seq, request in enumerate(requests, start=1):
        request.session, request.seq = 1, seq
    return [request.SerializeToString() for request in requests]


def test_reports_of_an_attached_worker_are_taken_or_end_its_session(fuzzed: Fuzzed) -> None:
    options = fuzzed.suite.stack.options
    info = fuzzed.run(info_of(f"{options.host}:{options.worker_ports[0]}"))
    address = f"{options.host}:{options.manager_port}"
    answers: list[list[bytes]] = []

    def beginning() -> list[manager_pb.SessionRequest]:
        attach = manager_pb.Attach(
            worker_id="fuzz",
            incarnation=secrets.token_bytes(16),
            identity=info.identity,
            num_blocks=BLOCKS,
            max_num_seqs=8,
            prefix_caching=True,
        )
        last = manager_pb.Inventory(last=True)
        return [manager_pb.SessionRequest(attach=attach), manager_pb.SessionRequest(inventory=last)]

    async def send(reports: list[manager_pb.Report]) -> None:
        rest = [manager_pb.SessionRequest(report=report) for report in reports]
        async with grpc.aio.insecure_channel(address) as channel:
            answers.append(await call_both_ways(channel, SESSION, numbered([*beginning(), *rest]), QUIET))

    @ANY
    @given(reports=st.lists(messages(manager_pb.Report), min_size=1, max_size=5))
    def send_any(reports: list[manager_pb.Report]) -> None:
        fuzzed.recent.append(f"reports {reports!r}")
        fuzzed.run(send(reports))

    again_and_again(send_any, 0.05)
    assert any(answers), "the beginning was right"
    fuzzed.check()


def test_submissions_of_a_router_are_served_or_refused(fuzzed: Fuzzed) -> None:
    options = fuzzed.suite.stack.options
    address = f"{options.host}:{options.worker_ports[0]}"
    info = fuzzed.run(info_of(address))
    hello = worker_pb.StreamRequest(hello=worker_pb.Hello(router_id="fuzz", incarnation=bytes(16)))
    served = Counter[str]()

    async def send(requests: list[worker_pb.StreamRequest]) -> None:
        contents = [each.SerializeToString() for each in (hello, *requests)]
        async with grpc.aio.insecure_channel(address) as channel:
            answers = await call_both_ways(channel, STREAM, contents, LONG_QUIET, Ends(requests).are_complete)
        served.update(word for answer in answers for word in words_of(worker_pb.StreamResponse.FromString(answer)))

    sound = requests_of_a_router(identity_from_proto(info.identity), info.vocab_size)
    anything = st.lists(messages(worker_pb.Submit), min_size=1, max_size=4)
    submits = anything.map(lambda found: [worker_pb.StreamRequest(submit=each) for each in found])

    @ANY
    @given(requests=st.integers(0, 3).flatmap(lambda chance: sound if chance else submits))
    def send_any(requests: list[worker_pb.StreamRequest]) -> None:
        fuzzed.recent.append(f"submits {requests!r}")
        fuzzed.run(send(requests))

    again_and_again(send_any, 0.05, reached=lambda: bool(served["admitted"] and served["refused"]))
    assert served["admitted"], f"no submission reaches the engine: {served}"
    assert served["refused"], f"no submission is refused: {served}"
    fuzzed.check()


class Ends:
    """The handles of submissions that were not refused and have not ended, and are not cancelled either."""

    def __init__(self, requests: list[worker_pb.StreamRequest]) -> None:
        cancelled = {each.cancel.handle for each in requests if each.HasField("cancel")}
        self._open = {each.submit.handle for each in requests if each.HasField("submit")} - cancelled

    def are_complete(self, answer: bytes) -> bool:
        """Take one answer of the worker; return whether nothing more is to come."""
        message = worker_pb.StreamResponse.FromString(answer)
        self._open -= {message.refused.handle, *(end.handle for end in message.outputs.finished)}
        return not self._open


def words_of(answer: worker_pb.StreamResponse) -> Iterator[str]:
    """Yield a word for each thing that a worker says."""
    yield answer.WhichOneof("message") or "nothing"
    yield from ["admitted"] * len(answer.outputs.admitted)
