"""A request from admission to its last token, with worker doubles at the other end of real sockets."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from common.errors import (
    AlreadyExists,
    DeadlineExceeded,
    EngineFailure,
    FieldViolation,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from common.hashing import chain, chain_root, key_of
from common.types import DecisionKind, FinishReason, MissReason
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from quire.types.v1 import types_pb2
from router.core.admission import AdmissionLimits
from router.core.events import AdmittedEvent, FinishedEvent, GenerateEvent, TokensEvent
from tests.router.frontend_bench import CLOCK, Bench, FixedIndex, frontend_over, in_background, request
from tests.router.worker_double import IDENTITY, WorkerDouble, prompt_of


def tokens_of(events: list[GenerateEvent], index: int = 0) -> list[int]:
    parts = [event.token_ids for event in events if isinstance(event, TokensEvent) and event.index == index]
    return [token for part in parts for token in part]


def text_of(events: list[GenerateEvent], index: int = 0) -> str:
    return "".join(event.text for event in events if isinstance(event, TokensEvent) and event.index == index)


def ends_of(events: list[GenerateEvent]) -> dict[int, FinishedEvent]:
    return {event.index: event for event in events if isinstance(event, FinishedEvent)}


def nothing_left(bench: Bench) -> bool:
    books = bench.admission
    outstanding = sum(model.outstanding for model in bench.pool.models())
    return (books.queued, books.running, books.tokens_in_flight, outstanding) == (0, 0, 0, 0)


# ------------------------------------------------------------ the plain way


async def test_a_request_is_admitted_streamed_and_finished() -> None:
    async with frontend_over(WorkerDouble(automatic=True)) as bench:
        events = await bench.events(request(request_id="r1", seed=5))
        admitted, *middle, finished = events
        assert isinstance(admitted, AdmittedEvent)
        assert (admitted.request_id, admitted.worker_id, admitted.prompt_tokens, admitted.seed) == ("r1", "w0", 10, 5)
        assert (admitted.cached_tokens, admitted.miss_reason) == (0, MissReason.NEVER_SEEN)
        assert [event.token_ids for event in middle if isinstance(event, TokensEvent)] == [(100,), (101,), (102,), ()]
        assert text_of(events) == "<100><101><102>."
        assert isinstance(finished, FinishedEvent)
        assert finished.reason is FinishReason.LENGTH
        assert (finished.usage.prompt_tokens, finished.usage.output_tokens) == (10, 3)
        assert nothing_left(bench)


async def test_times_are_in_order() -> None:
    async with frontend_over(WorkerDouble(automatic=True)) as bench:
        (end,) = ends_of(await bench.events(request())).values()
        times = end.timings
        assert 0 < times.queue_seconds <= times.time_to_first_token <= times.total_seconds
        assert times.time_per_output_token * 2 <= times.total_seconds


async def test_the_worker_gets_the_hash_chain_of_the_prompt() -> None:
    worker = WorkerDouble(automatic=True)
    async with frontend_over(worker) as bench:
        await bench.events(request(prompt=10, cache_domain="tenant", salt="s"))
        root = chain_root(IDENTITY.model_fingerprint, IDENTITY.tokenizer_fingerprint, 4, "tenant", [("salt", "s")])
        links = chain(root, list(range(1, 11)), 4)
        (submit,) = worker.submits
        assert submit.chain == b"".join(map(key_of, links))
        assert submit.chain_tail == links[-1]
        assert bench.index.asked == [tuple(map(key_of, links))]


async def test_a_prompt_below_a_block_goes_on_from_the_root() -> None:
    worker = WorkerDouble(automatic=True)
    async with frontend_over(worker) as bench:
        await bench.events(request(prompt=3))
        root = chain_root(IDENTITY.model_fingerprint, IDENTITY.tokenizer_fingerprint, 4)
        assert (worker.submits[0].chain, worker.submits[0].chain_tail) == (b"", root)
        assert bench.index.asked == []


async def test_a_request_without_cache_is_neither_looked_up_nor_hashed() -> None:
    worker = WorkerDouble(automatic=True)
    async with frontend_over(worker) as bench:
        await bench.events(request(prompt=10, no_cache=True))
        assert (worker.submits[0].no_cache, worker.submits[0].chain) == (True, b"")
        assert bench.index.asked == []


async def test_several_sequences_share_one_prompt_at_one_worker() -> None:
    first, second = WorkerDouble("w0", automatic=True), WorkerDouble("w1", automatic=True)
    async with frontend_over(first, second) as bench:
        events = await bench.events(request(n=3))
        assert sum(isinstance(event, AdmittedEvent) for event in events) == 1
        assert {index: tokens_of(events, index) for index in range(3)} == {index: [100, 101, 102] for index in range(3)}
        assert sorted(ends_of(events)) == [0, 1, 2]
        submits = [*first.submits, *second.submits]
        assert not (first.submits and second.submits)
        assert [submit.index for submit in submits] == [0, 1, 2]
        assert [submit.fork_of if submit.HasField("fork_of") else None for submit in submits] == [
            None,
            submits[0].handle,
            submits[0].handle,
        ]
        assert nothing_left(bench)


async def test_the_index_leads_to_the_worker_that_has_the_prefix() -> None:
    workers = [WorkerDouble(f"w{number}", automatic=True) for number in range(4)]
    async with frontend_over(*workers, index=FixedIndex({"w2": 5})) as bench:
        events = await bench.events(request(prompt=40))
        assert isinstance(events[0], AdmittedEvent)
        assert events[0].worker_id == "w2"
        (decision,) = bench.decisions.find(kind="routing")
        assert decision.decision_id == events[0].decision_id
        assert {each.name: dict(each.terms)["hit_blocks"] for each in decision.candidates} == {
            "w0": 0,
            "w1": 0,
            "w2": 5,
            "w3": 0,
        }


async def test_without_an_index_siblings_follow_each_other() -> None:
    workers = [WorkerDouble(f"w{number}", automatic=True) for number in range(4)]
    async with frontend_over(*workers) as bench:
        for _ in range(8):
            await bench.events(request(prompt=200, max_tokens=1))
        assert sorted(len(worker.submits) for worker in workers) == [0, 0, 0, 8]


# ------------------------------------------------------------ stops


async def test_a_stop_string_ends_the_output_and_cancels_at_the_worker() -> None:
    worker = WorkerDouble()
    async with frontend_over(worker) as bench, in_background(bench, request(stop=("<11>",))) as task:
        await worker.until(lambda: bool(worker.submits))
        worker.step({1: [10, 11, 12]}, granted={1: 0})
        events = await task
        assert (tokens_of(events), text_of(events)) == ([10, 11], "<10>")
        end = ends_of(events)[0]
        assert (end.reason, end.stop_string, end.usage.output_tokens) == (FinishReason.STOP, "<11>", 2)
        await worker.until(lambda: bool(worker.cancels))
        assert worker.cancels[0].reason == types_pb2.FinishReason.FINISH_REASON_STOP
        assert nothing_left(bench)


async def test_one_sequence_stops_and_its_sibling_goes_on() -> None:
    worker = WorkerDouble()
    async with frontend_over(worker) as bench, in_background(bench, request(n=2, stop=("<11>",))) as task:
        await worker.until(lambda: len(worker.submits) == 2)
        worker.step({1: [11], 2: [20]}, granted={1: 0, 2: 0})
        worker.step({2: [21]}, finished={2: FinishReason.LENGTH})
        events = await task
        assert tokens_of(events, 1) == [20, 21]
        assert {index: end.reason for index, end in ends_of(events).items()} == {
            0: FinishReason.STOP,
            1: FinishReason.LENGTH,
        }


@pytest.mark.parametrize(("include", "text"), [(False, "<10>."), (True, "<10><7>.")])
async def test_a_stop_token_is_told_but_not_written(include: bool, text: str) -> None:
    worker = WorkerDouble()
    wanted = request(stop_token_ids=(7,), include_stop=include)
    async with frontend_over(worker) as bench, in_background(bench, wanted) as task:
        await worker.until(lambda: bool(worker.submits))
        worker.step({1: [10]}, granted={1: 0})
        worker.step({1: [7]}, finished={1: FinishReason.STOP})
        events = await task
        assert (tokens_of(events), text_of(events)) == ([10, 7], text)
        assert ends_of(events)[0].reason is FinishReason.STOP


@pytest.mark.parametrize(("ignore_eos", "text"), [(False, "."), (True, "<9>.")])
async def test_an_end_of_sequence_is_written_only_where_it_is_ignored(ignore_eos: bool, text: str) -> None:
    worker = WorkerDouble()
    wanted = request(max_tokens=1, ignore_eos=ignore_eos)
    async with frontend_over(worker, eos=(9,)) as bench, in_background(bench, wanted) as task:
        await worker.until(lambda: bool(worker.submits))
        assert list(worker.submits[0].eos_token_ids) == [9]
        worker.step({1: [9]}, granted={1: 0}, finished={1: FinishReason.STOP})
        assert text_of(await task) == text


# ------------------------------------------------------------ cancels and deadlines


async def test_closing_the_events_cancels_at_the_worker() -> None:
    worker = WorkerDouble()
    async with frontend_over(worker) as bench:
        async with in_background(bench, request(n=2)):
            await worker.until(lambda: len(worker.submits) == 2)
        await worker.until(lambda: len(worker.cancels) == 2)
        assert {cancel.reason for cancel in worker.cancels} == {types_pb2.FinishReason.FINISH_REASON_CANCELLED}
        assert nothing_left(bench)


async def test_a_client_that_leaves_the_queue_leaves_nothing_behind() -> None:
    worker = WorkerDouble(max_num_seqs=1)
    async with frontend_over(worker) as bench, in_background(bench, request(n=2)):
        await worker.until(lambda: len(worker.submits) == 2)
        async with in_background(bench, request()):
            await asyncio.sleep(0)
        assert (bench.admission.queued, bench.admission.running) == (0, 1)


async def test_the_deadline_reaches_the_worker_and_ends_the_stream() -> None:
    worker = WorkerDouble()
    wanted = request(deadline=CLOCK.monotonic() + 0.3)
    async with frontend_over(worker) as bench, in_background(bench, wanted) as task:
        await worker.until(lambda: bool(worker.submits))
        assert 0 < worker.submits[0].timeout_seconds <= 0.3
        worker.step({1: [10]}, granted={1: 0})
        events = await task
        end = ends_of(events)[0]
        assert (end.reason, end.usage.output_tokens) == (FinishReason.DEADLINE, 1)
        await worker.until(lambda: bool(worker.cancels))
        assert worker.cancels[0].reason == types_pb2.FinishReason.FINISH_REASON_DEADLINE
        assert nothing_left(bench)


async def test_a_deadline_before_any_block_is_an_error() -> None:
    worker = WorkerDouble()
    async with frontend_over(worker) as bench:
        with pytest.raises(DeadlineExceeded, match="before the request got blocks"):
            await bench.events(request(deadline=CLOCK.monotonic() + 0.1))
        await worker.until(lambda: bool(worker.cancels))


async def test_a_deadline_that_cannot_be_met_is_refused_with_the_prediction() -> None:
    worker = WorkerDouble()
    async with frontend_over(worker) as bench:
        worker.heartbeat(prefill_seconds_per_token=1.0, decode_step_seconds=0.01)
        await bench.until(lambda: bench.pool.models()[0].rates.prefill_token.value is not None)
        with pytest.raises(DeadlineExceeded, match=r"predicted in 10\.0"):
            await bench.events(request(prompt=10, deadline=CLOCK.monotonic() + 5.0))
        assert worker.submits == []
        assert nothing_left(bench)


# ------------------------------------------------------------ refusals


async def test_a_full_queue_refuses_and_the_decision_is_recorded() -> None:
    worker = WorkerDouble(max_num_seqs=1)
    async with (
        frontend_over(worker, limits=AdmissionLimits(max_queued=1)) as bench,
        in_background(bench, request(n=2)),
    ):
        await worker.until(lambda: len(worker.submits) == 2)
        async with in_background(bench, request()):
            await bench.until(lambda: bench.admission.queued == 1)
            with pytest.raises(Overloaded, match=r"router\.queue: 1 requests wait; at most 1"):
                await bench.events(request(request_id="late"))
    (decision,) = bench.decisions.find("late")
    assert (decision.kind, decision.chosen, dict(decision.figures)["queued"]) == (
        DecisionKind.REJECTION,
        "router.queue",
        1.0,
    )


async def test_who_waits_gets_the_place_that_becomes_free() -> None:
    worker = WorkerDouble(max_num_seqs=1)
    async with frontend_over(worker) as bench, in_background(bench, request(n=2)) as first:
        await worker.until(lambda: len(worker.submits) == 2)
        async with in_background(bench, request(request_id="low")) as low:
            await bench.until(lambda: bench.admission.queued == 1)
            async with in_background(bench, request(request_id="high", priority=1)):
                await bench.until(lambda: bench.admission.queued == 2)
                worker.step({1: [1]}, granted={1: 0, 2: 0}, finished={1: FinishReason.LENGTH})
                await worker.until(lambda: len(worker.submits) == 3)
                assert worker.submits[2].request_id == "high"
                assert not low.done()
                assert not first.done()


async def test_an_id_in_use_is_refused() -> None:
    worker = WorkerDouble()
    async with frontend_over(worker) as bench, in_background(bench, request(request_id="r1")):
        await worker.until(lambda: bool(worker.submits))
        with pytest.raises(AlreadyExists, match="request r1 is running"):
            await bench.events(request(request_id="r1"))


async def test_a_request_larger_than_any_pool_is_refused_with_the_numbers_and_the_next_one_served() -> None:
    async with frontend_over(WorkerDouble(num_blocks=4, automatic=True)) as bench:
        with pytest.raises(InvalidRequest, match="5 blocks of 4") as refused:
            await bench.events(request(prompt=10, max_tokens=8))
        assert isinstance(refused.value.violations[0], FieldViolation)
        assert len(await bench.events(request(prompt=10, max_tokens=2))) == 5
        assert nothing_left(bench)


async def test_what_a_worker_refuses_is_the_clients_error() -> None:
    worker = WorkerDouble()
    async with frontend_over(worker) as bench, in_background(bench, request()) as task:
        await worker.until(lambda: bool(worker.submits))
        worker.refuse(1, InvalidRequest(FieldViolation("prompt_token_ids", "too long")))
        with pytest.raises(InvalidRequest, match="too long"):
            await task
        assert nothing_left(bench)


async def test_a_draining_router_refuses() -> None:
    async with frontend_over(WorkerDouble(automatic=True)) as bench:
        bench.frontend.draining = True
        with pytest.raises(Unavailable, match="draining"):
            await bench.events(request())


async def test_without_any_worker_a_request_is_refused_after_some_patience() -> None:
    async with frontend_over(patience=0.05) as bench:
        with pytest.raises(Unavailable, match=r"no worker for 0\.05 s: none is known"):
            await bench.events(request())
        assert nothing_left(bench)


async def test_a_worker_that_comes_in_time_is_waited_for() -> None:
    worker = WorkerDouble(automatic=True)
    async with frontend_over() as bench, in_background(bench, request()) as task:
        await worker.start()
        bench.pool.add(worker.address)
        assert tokens_of(await task) == [100, 101, 102]
        await worker.kill()


# ------------------------------------------------------------ lost workers


async def test_a_sequence_whose_worker_dies_goes_on_at_another_without_losing_or_repeating_a_token() -> None:
    dying, other = WorkerDouble("w0"), WorkerDouble("w1", automatic=True)
    async with frontend_over(dying) as bench, in_background(bench, request(max_tokens=6, logprobs=None)) as task:
        await dying.until(lambda: bool(dying.submits))
        dying.step({1: [100, 101]}, granted={1: 4})
        await other.start()
        bench.pool.add(other.address)
        await bench.connected(2)
        await dying.kill()
        events = await task
        assert tokens_of(events) == [100, 101, 102, 103, 104, 105]
        assert text_of(events) == "<100><101><102><103><104><105>."
        (submit,) = other.submits
        assert prompt_of(submit) == [*range(1, 11), 100, 101]
        assert (submit.output_tokens_before, submit.sampling.max_tokens) == (2, 6)
        assert len(submit.chain) == 16 * 3
        end = ends_of(events)[0]
        assert (end.usage.prompt_tokens, end.usage.cached_tokens, end.usage.output_tokens) == (10, 4, 6)
        assert end.usage.recomputed_tokens == 12
        assert sum(isinstance(event, AdmittedEvent) for event in events) == 1
        (move,) = bench.decisions.find(kind="migration")
        assert move.chosen == "w1"
        assert nothing_left(bench)
        await other.kill()


async def test_the_only_worker_is_waited_for_and_used_again() -> None:
    worker = WorkerDouble()
    async with frontend_over(worker) as bench, in_background(bench, request(n=2)) as task:
        await worker.until(lambda: len(worker.submits) == 2)
        worker.step({1: [100], 2: [100]}, granted={1: 0, 2: 0})
        worker.automatic = True
        await worker.restart()
        events = await task
        assert [tokens_of(events, index) for index in (0, 1)] == [[100, 101, 102]] * 2
        assert nothing_left(bench)


async def test_blocks_granted_again_after_a_preemption_are_no_move() -> None:
    worker = WorkerDouble()
    async with frontend_over(worker) as bench, in_background(bench, request()) as task:
        await worker.until(lambda: bool(worker.submits))
        worker.step({1: [100]}, granted={1: 4})
        worker.step(preempted=b"\1\0\0\0")
        usage = types_pb2.Usage(recomputed_tokens=7, preemptions=1)
        reason = types_pb2.FinishReason.FINISH_REASON_LENGTH
        worker.step(granted={1: 8}, ended=[pb.SequenceFinished(handle=1, reason=reason, usage=usage)])
        end = ends_of(await task)[0]
        assert (end.usage.cached_tokens, end.usage.recomputed_tokens, end.usage.preemptions) == (4, 7, 1)


async def test_a_failed_step_moves_the_sequence() -> None:
    failing, other = WorkerDouble("w0"), WorkerDouble("w1")
    async with frontend_over(failing, other) as bench, in_background(bench, request(max_tokens=2)) as task:
        taken: list[WorkerDouble] = []
        for token, reason in ((100, FinishReason.ERROR), (101, FinishReason.LENGTH)):
            await bench.until(lambda: len(failing.submits) + len(other.submits) > len(taken))
            taker = next(each for each in (failing, other) if len(each.submits) > taken.count(each))
            taken.append(taker)
            handle = taker.submits[-1].handle
            taker.step({handle: [token]}, granted={handle: 0}, finished={handle: reason})
        assert tokens_of(await task) == [100, 101]


async def test_a_worker_that_is_removed_loses_its_sequences_to_another() -> None:
    leaving, staying = WorkerDouble("w0"), WorkerDouble("w1", automatic=True)
    async with frontend_over(leaving) as bench, in_background(bench, request()) as task:
        await leaving.until(lambda: bool(leaving.submits))
        await staying.start()
        bench.pool.add(staying.address)
        await bench.connected(2)
        bench.pool.remove(leaving.address)
        assert tokens_of(await task) == [100, 101, 102]
        assert [model.worker_id for model in bench.pool.models()] == ["w1"]
        await staying.kill()


async def test_all_workers_may_be_replaced_by_another_kind() -> None:
    worker = WorkerDouble(automatic=True)
    async with frontend_over(worker) as bench:
        await bench.events(request())
        await worker.kill()
        await bench.connected(0)
        worker.identity = replace(IDENTITY, model_fingerprint="n" * 32)
        await worker.restart()
        await bench.connected(1)
        await bench.events(request(prompt=4))
        root = chain_root("n" * 32, IDENTITY.tokenizer_fingerprint, 4)
        assert worker.submits[-1].chain_tail == chain(root, [1, 2, 3, 4], 4)[0]


async def test_a_request_that_fails_everywhere_is_given_up() -> None:
    worker = WorkerDouble()
    async with frontend_over(worker) as bench, in_background(bench, request()) as task:
        for attempt in range(1, 5):
            await worker.until(lambda attempt=attempt: len(worker.submits) == attempt)  # type: ignore[misc]
            worker.step(finished={worker.submits[-1].handle: FinishReason.ERROR})
        with pytest.raises(EngineFailure, match="lost 4 workers"):
            await task
        assert nothing_left(bench)


async def test_a_hung_worker_loses_its_sequences_to_another() -> None:
    hung, other = WorkerDouble("w0"), WorkerDouble("w1", automatic=True)
    async with frontend_over(hung) as bench, in_background(bench, request()) as task:
        await hung.until(lambda: bool(hung.submits))
        hung.step({1: [100]}, granted={1: 0})
        hung.heartbeat(step_age_seconds=6.0, step_predicted_seconds=0.01)
        await other.start()
        bench.pool.add(other.address)
        await bench.connected(2)
        await bench.until(lambda: bench.pool.models()[0].load.step_age_seconds > 0)
        bench.pool.check()
        assert tokens_of(await task) == [100, 101, 102]
        await hung.until(lambda: bool(hung.cancels))
        await other.kill()


async def test_a_hung_worker_keeps_its_sequences_while_there_is_no_other() -> None:
    worker = WorkerDouble()
    async with frontend_over(worker) as bench, in_background(bench, request(max_tokens=1)) as task:
        await worker.until(lambda: bool(worker.submits))
        worker.heartbeat(step_age_seconds=6.0, step_predicted_seconds=0.01)
        await bench.until(lambda: bench.pool.models()[0].load.step_age_seconds > 0)
        bench.pool.check()
        worker.step({1: [100]}, granted={1: 0}, finished={1: FinishReason.LENGTH})
        assert tokens_of(await task) == [100]


# ------------------------------------------------------------ traces and metrics


async def test_a_request_makes_a_span_with_queue_route_and_stream_in_it() -> None:
    async with frontend_over(WorkerDouble(automatic=True)) as bench:
        events = await bench.events(request(request_id="r1"))
        spans = {span.name: span for span in bench.spans.get_finished_spans()}
        assert set(spans) == {"request", "queue", "lookup", "route", "stream"}
        whole = spans["request"]
        assert whole.attributes is not None
        assert whole.attributes["quire.request_id"] == "r1"
        parents = {name: span.parent.span_id for name, span in spans.items() if span.parent is not None}
        within = whole.context.span_id
        assert parents == {
            "queue": within,
            "lookup": spans["queue"].context.span_id,
            "route": within,
            "stream": within,
        }
        assert isinstance(events[0], AdmittedEvent)
        assert f"{whole.context.trace_id:032x}" == events[0].trace_id
        assert [event.name for event in spans["route"].events] == ["decision"]
        assert [event.name for event in spans["stream"].events] == ["first token", "finished"]


async def test_the_trace_goes_on_from_the_clients_and_into_the_workers() -> None:
    worker = WorkerDouble(automatic=True)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with frontend_over(worker) as bench:
        await bench.events(request(traceparent=parent))
        whole = next(span for span in bench.spans.get_finished_spans() if span.name == "request")
        assert whole.parent is not None
        assert whole.parent.span_id == 0xB7AD6B7169203331
        expected = f"00-0af7651916cd43dd8448eb211c80319c-{whole.context.span_id:016x}-01"
        assert worker.submits[0].traceparent == expected


async def test_an_unsampled_request_costs_no_span() -> None:
    worker = WorkerDouble(automatic=True)
    async with frontend_over(worker) as bench:
        await bench.events(request(traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"))
        assert bench.spans.get_finished_spans() == ()
        assert worker.submits[0].traceparent == ""


async def test_a_cancelled_request_ends_its_span_as_an_error() -> None:
    worker = WorkerDouble()
    async with frontend_over(worker) as bench:
        async with in_background(bench, request()):
            await worker.until(lambda: bool(worker.submits))
        whole = next(span for span in bench.spans.get_finished_spans() if span.name == "request")
        assert (whole.status.is_ok, whole.status.description) == (False, "the client went away")


async def test_metrics_count_what_the_client_saw() -> None:
    worker = WorkerDouble(automatic=True)
    async with frontend_over(worker) as bench:
        await bench.events(request(prompt=10, n=2))
        value = bench.registry.get_sample_value
        assert value("quire:prompt_tokens_total") == 10
        assert value("quire:generation_tokens_total") == 6
        assert value("quire:request_success_total", {"finished_reason": "length"}) == 2
        assert value("quire:time_to_first_token_seconds_count") == 2
        assert value("quire:inter_token_latency_seconds_count") == 4
        assert (value("quire:num_requests_running"), value("quire:num_requests_waiting")) == (0, 0)
