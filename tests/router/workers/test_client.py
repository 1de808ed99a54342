"""The client's half of the worker stream, against a real gRPC server: events, cancels, breaks, and who may be used."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from common.contracts.errors import (
    AlreadyExists,
    DeadlineExceeded,
    IdentityMismatch,
    InvalidRequest,
    ProtocolViolation,
    Unavailable,
)
from common.contracts.limits import MAX_HANDLE, MAX_SUBMIT_BYTES
from common.contracts.types import FinishReason, MissReason, SamplingParams, TokenLogprobs, Usage
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from quire.types.v1 import types_pb2
from router.placement.worker_model import Capacity, Load
from router.workers import outbox
from router.workers.client import Pacing, WorkerClient
from router.workers.worker_events import Lost, Preempted, Refused, SequenceAdmitted, SequenceFinished, TokensSampled
from tests.support.router.client_harness import QUICK, SUBMISSION, Inbox, Listener, running_client
from tests.support.router.fake_worker import IDENTITY, FakeWorker, prompt_of

# ------------------------------------------------------------ hello


async def test_both_sides_say_who_they_are(client: WorkerClient, worker: FakeWorker, listener: Listener) -> None:
    (hello,) = worker.hellos
    assert (hello.router_id, hello.incarnation, hello.HasField("identity")) == ("router", b"i" * 16, False)
    (facts,) = listener.facts
    assert (facts.worker_id, facts.incarnation, facts.identity) == ("w0", worker.incarnation, IDENTITY)
    assert facts.capacity == Capacity(num_blocks=64, block_size=4, max_num_seqs=8, max_model_len=256)


async def test_a_known_pool_is_reported_and_a_worker_that_differs_refuses_with_both_values(
    worker: FakeWorker, listener: Listener
) -> None:
    worker.identity = replace(IDENTITY, block_size=8)
    async with running_client(worker, listener) as client:
        client.identity = IDENTITY
        await listener.until(lambda: bool(listener.errors))
    error = listener.errors[0]
    assert isinstance(error, IdentityMismatch)
    (mismatch,) = error.mismatches
    assert (mismatch.field, mismatch.ours, mismatch.theirs) == ("block_size", "4", "8")


async def test_a_listener_that_refuses_the_worker_ends_the_stream(worker: FakeWorker, listener: Listener) -> None:
    listener.refuse_with = IdentityMismatch(())
    async with running_client(worker, listener) as client:
        await listener.until(lambda: len(listener.errors) >= 2)
        assert not client.ready
    assert all(isinstance(error, IdentityMismatch) for error in listener.errors[:2])


async def test_a_worker_that_bounds_silence_gets_pulses(worker: FakeWorker, listener: Listener) -> None:
    worker.silence = 0.06
    async with running_client(worker, listener):
        await worker.until(lambda: len(worker.pulses) >= 3)
    assert worker.streams == 1


async def test_a_silent_worker_is_tried_again(worker: FakeWorker, listener: Listener) -> None:
    worker.greets = False
    async with running_client(worker, listener, replace(QUICK, hello=0.2)):
        await worker.until(lambda: worker.streams >= 2)
    assert str(listener.errors[0]) == "no hello within 0.2 s"


# ------------------------------------------------------------ a sequence


async def test_a_submit_carries_everything(client: WorkerClient, worker: FakeWorker) -> None:
    sampling = SamplingParams(
        temperature=0.0,
        top_k=5,
        max_tokens=9,
        stop=("x",),
        stop_token_ids=(3,),
        logit_bias=((4, 1.5),),
        seed=77,
        logprobs=0,
    )
    full = replace(
        SUBMISSION,
        index=2,
        block_hashes=(b"a" * 16, b"b" * 16),  # type: ignore[arg-type]
        sampling=sampling,
        priority=-3,
        timeout=1.5,
        traceparent="tp",
        output_before=2,
        no_cache=True,
        cache_domain=b"d" * 32,
    )
    client.submit_sequence(full, Inbox().put, fork_of=12)
    await worker.until(lambda: bool(worker.submits))
    submit = worker.submits[0]
    assert prompt_of(submit) == [1, 2, 3, 4, 5]
    assert (submit.request_id, submit.index, submit.priority, submit.traceparent) == ("r1", 2, -3, "tp")
    assert (submit.block_hashes, submit.parent_digest) == (b"a" * 16 + b"b" * 16, b"r" * 32)
    assert (submit.timeout_seconds, submit.output_tokens_before, submit.no_cache) == (1.5, 2, True)
    assert (submit.fork_of, list(submit.eos_token_ids), submit.cache_domain) == (12, [7], b"d" * 32)
    sent = submit.sampling
    assert (sent.HasField("temperature"), sent.temperature, sent.top_k, sent.max_tokens) == (True, 0.0, 5, 9)
    assert (sent.seed, dict(sent.logit_bias), list(sent.stop_token_ids)) == (77, {4: 1.5}, [3])
    assert (sent.HasField("logprobs"), sent.logprobs, list(sent.stop)) == (True, 0, [])


async def test_what_is_unset_stays_unset(client: WorkerClient, worker: FakeWorker) -> None:
    client.submit_sequence(SUBMISSION, Inbox().put)
    await worker.until(lambda: bool(worker.submits))
    submit = worker.submits[0]
    assert not submit.HasField("timeout_seconds")
    assert not submit.HasField("fork_of")
    assert not submit.sampling.HasField("logprobs")


async def test_the_events_of_a_step_reach_their_sequences_in_order(client: WorkerClient, worker: FakeWorker) -> None:
    first, second = Inbox(), Inbox()
    one, two = client.submit_sequence(SUBMISSION, first.put), client.submit_sequence(SUBMISSION, second.put)
    await worker.until(lambda: len(worker.submits) == 2)
    worker.step({one: [10, 11], two: [20]}, admitted={one: 4, two: 0}, finished={two: FinishReason.LENGTH})
    assert await first.next() == SequenceAdmitted(4, MissReason.NEVER_SEEN, 0, "", 0.0)
    assert await first.next() == TokensSampled((10, 11))
    assert await second.next() == SequenceAdmitted(0, MissReason.NEVER_SEEN, 0, "", 0.0)
    assert await second.next() == TokensSampled((20,))
    assert await second.next() == SequenceFinished(FinishReason.LENGTH, Usage())
    assert first.empty


async def test_handles_rise(client: WorkerClient) -> None:
    assert [client.submit_sequence(SUBMISSION, Inbox().put) for _ in range(3)] == [1, 2, 3]


async def test_log_probabilities_follow_their_tokens(client: WorkerClient, worker: FakeWorker) -> None:
    plain, asked = Inbox(), Inbox()
    one, two = client.submit_sequence(SUBMISSION, plain.put), client.submit_sequence(SUBMISSION, asked.put)
    await worker.until(lambda: len(worker.submits) == 2)
    entries = [
        types_pb2.TokenLogprobs(token_id=token, logprob=-0.5, top_token_ids=[token, 9], top_logprobs=[-0.5, -1.5])
        for token in (20, 21)
    ]
    worker.step({one: [10], two: [20, 21]}, logprobs=entries, logprob_handles=b"\2\0\0\0\2\0\0\0")
    assert await plain.next() == TokensSampled((10,))
    expected = tuple(TokenLogprobs(token, -0.5, ((token, -0.5), (9, -1.5))) for token in (20, 21))
    assert await asked.next() == TokensSampled((20, 21), expected)


async def test_preemption_and_the_end_with_its_usage(client: WorkerClient, worker: FakeWorker) -> None:
    inbox = Inbox()
    handle = client.submit_sequence(SUBMISSION, inbox.put)
    await worker.until(lambda: bool(worker.submits))
    usage = types_pb2.Usage(prompt_tokens=5, cached_tokens=4, output_tokens=3, recomputed_tokens=6, preemptions=1)
    end = pb.SequenceFinished(
        handle=handle, reason=types_pb2.FinishReason.FINISH_REASON_STOP, usage=usage, stop_token_id=0
    )
    worker.step(preempted=b"\1\0\0\0", ended=[end])
    assert await inbox.next() == Preempted()
    assert await inbox.next() == SequenceFinished(FinishReason.STOP, Usage(5, 4, 3, 6, 1), stop_token_id=0)


async def test_a_refusal_is_the_error_that_the_worker_meant(client: WorkerClient, worker: FakeWorker) -> None:
    inbox = Inbox()
    handle = client.submit_sequence(SUBMISSION, inbox.put)
    await worker.until(lambda: bool(worker.submits))
    worker.refuse(handle, AlreadyExists("handle 1"))
    event = await inbox.next()
    assert isinstance(event, Refused)
    assert isinstance(event.error, AlreadyExists)


async def test_a_refusal_that_is_broken_loses_no_sequence_unheard(
    client: WorkerClient, worker: FakeWorker, listener: Listener
) -> None:
    """The handle was forgotten first: the stream ended, and the request waited for its deadline."""
    inbox = Inbox()
    handle = client.submit_sequence(SUBMISSION, inbox.put)
    await worker.until(lambda: bool(worker.submits))
    worker.say(pb.StreamResponse(refused=pb.Refused(handle=handle, status=bytes(range(16)))))
    event = await inbox.next()
    assert isinstance(event, Lost)
    assert "16 bytes of a refusal" in event.reason
    assert isinstance(listener.errors[0], ProtocolViolation)


async def test_heartbeats_show_the_load(client: WorkerClient, worker: FakeWorker, listener: Listener) -> None:
    worker.heartbeat(running=2, waiting=1, unheld_blocks=50, step_age_seconds=0.25, manager_attached=False)
    await listener.until(lambda: bool(listener.loads))
    assert listener.loads[0] == Load(
        running=2, waiting=1, unheld_blocks=50, step_age_seconds=0.25, manager_attached=False
    )


# ------------------------------------------------------------ giving up


async def test_a_cancel_is_sent_once_with_its_reason_and_silences_the_sequence(
    client: WorkerClient, worker: FakeWorker
) -> None:
    inbox, other = Inbox(), Inbox()
    handle, next_handle = client.submit_sequence(SUBMISSION, inbox.put), client.submit_sequence(SUBMISSION, other.put)
    await worker.until(lambda: len(worker.submits) == 2)
    client.cancel_sequence(handle, FinishReason.STOP)
    client.cancel_sequence(handle, FinishReason.CANCELLED)
    await worker.until(lambda: bool(worker.cancels))
    worker.step({handle: [10], next_handle: [20]}, finished={handle: FinishReason.STOP})
    assert await other.next() == TokensSampled((20,))
    assert inbox.empty
    client.submit_sequence(SUBMISSION, Inbox().put)
    await worker.until(lambda: len(worker.submits) == 3)
    (cancel,) = worker.cancels
    assert (cancel.handle, cancel.reason) == (handle, types_pb2.FinishReason.FINISH_REASON_STOP)


async def test_a_sequence_of_an_earlier_stream_is_cancelled(client: WorkerClient, worker: FakeWorker) -> None:
    worker.step({99: [1]})
    worker.step({99: [2]})
    await worker.until(lambda: bool(worker.cancels))
    client.submit_sequence(SUBMISSION, Inbox().put)
    await worker.until(lambda: bool(worker.submits))
    assert [cancel.handle for cancel in worker.cancels] == [99]


async def test_abandoned_sequences_are_cancelled_and_lost(client: WorkerClient, worker: FakeWorker) -> None:
    inbox = Inbox()
    handle = client.submit_sequence(SUBMISSION, inbox.put)
    await worker.until(lambda: bool(worker.submits))
    client.abandon("hung")
    lost = await inbox.next()
    assert isinstance(lost, Lost)
    assert (lost.reason, lost.breakdown is not None) == (f"{worker.address}: hung", True)
    await worker.until(lambda: bool(worker.cancels))
    assert worker.cancels[0].handle == handle


async def test_a_submission_that_was_not_sent_is_withdrawn(client: WorkerClient, worker: FakeWorker) -> None:
    handle = client.submit_sequence(SUBMISSION, Inbox().put)
    client.cancel_sequence(handle, FinishReason.CANCELLED)
    client.submit_sequence(replace(SUBMISSION, request_id="r2"), Inbox().put)
    await worker.until(lambda: bool(worker.submits))
    assert [submit.request_id for submit in worker.submits] == ["r2"]
    assert worker.cancels == []


async def test_a_submission_that_is_too_large_for_the_stream_is_refused_alone(
    client: WorkerClient, worker: FakeWorker
) -> None:
    huge = replace(SUBMISSION, packed_tokens=bytes(MAX_SUBMIT_BYTES))
    with pytest.raises(InvalidRequest, match=f"expected at most {MAX_SUBMIT_BYTES}"):
        client.submit_sequence(huge, Inbox().put)
    inbox = Inbox()
    handle = client.submit_sequence(SUBMISSION, inbox.put)
    await worker.until(lambda: bool(worker.submits))
    worker.step({handle: [7]})
    assert await inbox.next() == TokensSampled((7,))
    assert worker.streams == 1


async def test_a_handle_that_names_a_sequence_is_not_given_again(client: WorkerClient, worker: FakeWorker) -> None:
    inbox = Inbox()
    assert client.submit_sequence(SUBMISSION, Inbox().put) == 1
    cancelled = client.submit_sequence(SUBMISSION, Inbox().put)
    await worker.until(lambda: len(worker.submits) == 2)
    client.cancel_sequence(cancelled, FinishReason.CANCELLED)
    client._last_handle = MAX_HANDLE
    assert client.submit_sequence(SUBMISSION, inbox.put) == 3
    worker.step(finished={cancelled: FinishReason.CANCELLED})
    worker.step({3: [1]})
    await inbox.next()
    client._last_handle = MAX_HANDLE
    assert client.submit_sequence(SUBMISSION, Inbox().put) == 2


# ------------------------------------------------------------ breaks


async def test_a_broken_stream_loses_its_sequences_and_is_opened_again(
    client: WorkerClient, worker: FakeWorker, listener: Listener
) -> None:
    inbox = Inbox()
    client.submit_sequence(SUBMISSION, inbox.put)
    await worker.until(lambda: bool(worker.submits))
    await worker.kill()
    assert isinstance(await inbox.next(), Lost)
    assert not client.ready
    with pytest.raises(Unavailable, match="not connected"):
        client.submit_sequence(SUBMISSION, inbox.put)
    await worker.restart()
    await listener.until(lambda: len(listener.facts) == 2)
    assert listener.facts[1].incarnation == worker.incarnation
    again = Inbox()
    handle = client.submit_sequence(SUBMISSION, again.put)
    assert handle == 2
    await worker.until(lambda: len(worker.submits) == 2)
    worker.step({handle: [5]})
    assert await again.next() == TokensSampled((5,))


async def test_the_listener_gets_a_break_before_the_sequences_do(
    client: WorkerClient, worker: FakeWorker, listener: Listener
) -> None:
    seen: list[int] = []
    client.submit_sequence(SUBMISSION, lambda event: seen.append(len(listener.errors)))
    worker.fail(Unavailable("the worker is draining"))
    await listener.until(lambda: bool(listener.errors))
    assert seen == [1]
    assert "the worker is draining" in str(listener.errors[0])


async def test_a_worker_that_found_this_router_silent_convicts_no_request(
    client: WorkerClient, worker: FakeWorker, listener: Listener
) -> None:
    inbox = Inbox()
    client.submit_sequence(SUBMISSION, inbox.put)
    await worker.until(lambda: bool(worker.submits))
    worker.fail(DeadlineExceeded("no message of the router came for 10 s"))
    lost = await inbox.next()
    assert isinstance(lost, Lost)
    assert lost.breakdown is None
    await listener.until(lambda: len(listener.facts) == 2)


async def test_a_router_that_stood_still_says_so_however_its_stream_ended(
    worker: FakeWorker, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own gRPC may end the connection when it runs again, because no ping was answered meanwhile."""
    worker.silence, inbox = 600.0, Inbox()
    async with running_client(worker, listener) as client:
        await listener.until(lambda: client.ready)
        client.submit_sequence(SUBMISSION, inbox.put)
        await worker.until(lambda: bool(worker.submits))
        monkeypatch.setattr(outbox, "monotonic", lambda: time.monotonic() + 2 * worker.silence)
        worker.fail(Unavailable("ping timeout"))
        lost = await inbox.next()
        assert isinstance(lost, Lost)
        assert lost.breakdown is None
        await listener.until(lambda: len(listener.facts) == 2)
        worker.fail(Unavailable("and once more, without a pause"))
        await listener.until(lambda: len(listener.facts) == 3)
    assert [hello.stood_still for hello in worker.hellos] == [False, True, False]


async def test_a_router_that_stood_still_hears_first_which_clients_are_gone(
    client: WorkerClient, worker: FakeWorker, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that it took back for a client that is gone would end, though the client goes on elsewhere."""
    gone, stays, told_first = Inbox(), Inbox(), list[bool]()
    handle = client.submit_sequence(SUBMISSION, gone.put)
    client.submit_sequence(SUBMISSION, stays.put)
    await worker.until(lambda: len(worker.submits) == 2)
    sleep = asyncio.sleep

    async def while_clients_leave(seconds: float) -> None:
        if seconds == Pacing().stood_still:
            told_first.append(gone.empty and stays.empty and not listener.errors)
            client.cancel_sequence(handle, FinishReason.CANCELLED)
        await sleep(0.0)

    monkeypatch.setattr(asyncio, "sleep", while_clients_leave)
    worker.fail(DeadlineExceeded("no message of the router came for 10 s"))
    assert isinstance(await stays.next(), Lost)
    monkeypatch.undo()
    assert told_first == [True]
    assert gone.empty


@pytest.mark.parametrize("seq", [2, 0])
async def test_outputs_out_of_sequence_break_the_stream(
    client: WorkerClient, worker: FakeWorker, listener: Listener, seq: int
) -> None:
    worker.say(pb.StreamResponse(outputs=pb.StepOutputs(seq=seq)))
    await listener.until(lambda: bool(listener.errors))
    assert isinstance(listener.errors[0], ProtocolViolation)


async def test_arrays_that_do_not_fit_break_the_stream(
    client: WorkerClient, worker: FakeWorker, listener: Listener
) -> None:
    broken = pb.StepOutputs(seq=1, handles=b"\1\0\0\0", counts=b"\2\0\0\0", token_ids=b"\1\0\0\0")
    worker.say(pb.StreamResponse(outputs=broken))
    await listener.until(lambda: bool(listener.errors))
    assert isinstance(listener.errors[0], ProtocolViolation)


async def test_a_client_that_is_ended_loses_its_sequences(worker: FakeWorker, listener: Listener) -> None:
    inbox = Inbox()
    async with running_client(worker, listener) as client:
        await listener.until(lambda: bool(listener.facts))
        client.submit_sequence(SUBMISSION, inbox.put)
    assert isinstance(await inbox.next(), Lost)


@pytest.mark.parametrize(
    ("event", "suspect"), [("nothing", True), ("two heartbeats", False), ("admitted", True), ("a token", True)]
)
async def test_a_sequence_is_a_suspect_once_the_worker_has_begun_it(
    client: WorkerClient, worker: FakeWorker, listener: Listener, event: str, suspect: bool
) -> None:
    inbox = Inbox()
    handle = client.submit_sequence(SUBMISSION, inbox.put)
    await worker.until(lambda: bool(worker.submits))
    if event == "two heartbeats":
        worker.heartbeat(waiting=1)
        worker.heartbeat(waiting=1)
    elif event != "nothing":
        worker.step({handle: [1]} if event == "a token" else {}, admitted={handle: 0})
    worker.fail(ProtocolViolation("a break"))
    while not isinstance(lost := await inbox.next(), Lost):
        pass
    assert (lost.breakdown is not None) is suspect


@pytest.mark.parametrize("drains", [True, False])
async def test_a_worker_that_drains_makes_nobody_a_suspect_and_one_whose_engine_ended_does(
    client: WorkerClient, worker: FakeWorker, drains: bool
) -> None:
    inbox = Inbox()
    client.submit_sequence(SUBMISSION, inbox.put)
    await worker.until(lambda: bool(worker.submits))
    worker.heartbeat(draining=drains)
    worker.say(None)
    lost = await inbox.next()
    assert isinstance(lost, Lost)
    assert (lost.breakdown is not None) is not drains


def test_a_worker_that_comes_is_connected_within_a_second() -> None:
    assert max(Pacing().reconnect.pause(failures, 0.999) for failures in range(1, 100)) <= 1.0
