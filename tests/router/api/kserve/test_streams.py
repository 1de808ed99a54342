"""Streams of the Open Inference Protocol: deltas, several requests at once, errors beside answers, cancels."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from grpc import aio

from common.contracts.errors import DeadlineExceeded, Overloaded, QuotaViolation, Unavailable
from common.contracts.types import FinishReason
from quire.kserve.v2 import kserve_pb2 as pb
from router.api.kserve import servicer as kserve_servicer
from router.contracts.events import ValidatedRequest
from tests.support.router.fake_frontend import Step, admitted, finished, tokens
from tests.support.router.kserve_harness import ARRIVED, PATIENCE_S, Api, served_api, two_sequences
from tests.support.router.kserve_messages import infer, is_final, outputs_of

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Api]:
    async with served_api() as running:
        yield running


@pytest.fixture
def api(served: Api) -> Api:
    """The service with its script as at first."""
    return served.reset()


async def test_a_stream_has_a_response_a_delta_and_one_final_one(api: Api) -> None:
    wanted = infer(name="a", input_ids=[1], stream=True, return_finish_reason=True, return_num_output_tokens=True)
    responses = await api.stream(wanted)
    assert {response.error_message for response in responses} == {""}
    answers = [response.infer_response for response in responses]
    assert [outputs_of(each)["text_output"] for each in answers] == [["Hello"], [" world"], [""]]
    assert [outputs_of(each)["finish_reason"] for each in answers] == [["None"], ["None"], ["stop"]]
    assert [outputs_of(each)["num_output_tokens"] for each in answers] == [[1], [1], [0]]
    assert [is_final(each) for each in answers] == [False, False, True]
    assert {each.id for each in answers} == {"a"}


async def test_without_stream_a_stream_answers_once(api: Api) -> None:
    (response,) = await api.stream(infer(name="a", text_input="x ", stream=False))
    assert outputs_of(response.infer_response) == {"text_output": ["x Hello world"]}
    assert is_final(response.infer_response)


async def test_deltas_of_several_sequences_keep_their_places(api: Api) -> None:
    api.frontend.script = two_sequences
    wanted = infer(input_ids=[1], stream=True, sampling_parameters={"n": 2}, return_finish_reason=True)
    answers = [outputs_of(each.infer_response) for each in await api.stream(wanted)]
    assert [each["text_output"] for each in answers] == [["", "a"], ["b", ""], ["c", ""], ["", ""]]
    assert [each["finish_reason"] for each in answers][1:] == [["None", "None"], ["None", "length"], ["stop", "length"]]


async def test_an_empty_final_response_when_that_is_enough(api: Api) -> None:
    parameters = {"triton_enable_empty_final_response": True}
    *_, last = await api.stream(infer(input_ids=[1], stream=True, parameters=parameters))
    assert list(last.infer_response.outputs) == []
    assert is_final(last.infer_response)
    *_, last = await api.stream(infer(input_ids=[1], stream=True, parameters=parameters, return_finish_reason=True))
    assert outputs_of(last.infer_response) == {"text_output": [""], "finish_reason": ["stop"]}


async def test_a_whole_answer_has_its_tensors_although_it_is_empty(api: Api) -> None:
    api.frontend.script = lambda request: [admitted(request), finished(0)]
    (only,) = await api.stream(infer(input_ids=[1], parameters={"triton_enable_empty_final_response": True}))
    assert outputs_of(only.infer_response) == {"text_output": [""]}


async def test_each_request_of_a_stream_arrives_at_its_own_time(api: Api) -> None:
    call = api.stub.ModelStreamInfer(timeout=PATIENCE_S)
    for _ in range(2):
        await call.write(infer(input_ids=[1]))
        assert await call.read() is not aio.EOF
        api.clock.advance(2.0)
    await call.done_writing()
    first, second = api.frontend.requests
    assert second.arrived - first.arrived == 2.0
    assert second.deadline == first.deadline


async def test_requests_of_one_stream_are_answered_as_they_go(api: Api) -> None:
    first, second = asyncio.Event(), asyncio.Event()

    def script(request: ValidatedRequest) -> list[Step]:
        if request.prompt == (1,):
            return [admitted(request), tokens("slow"), first, tokens("er"), finished(2)]
        return [admitted(request), tokens("quick"), second, finished(1)]

    api.frontend.script = script
    call = api.stub.ModelStreamInfer(timeout=PATIENCE_S)
    seen = []

    async def see() -> None:
        response = await call.read()
        assert isinstance(response, pb.ModelStreamInferResponse)
        answer = response.infer_response
        seen.append((answer.id, *outputs_of(answer)["text_output"], is_final(answer)))

    await call.write(infer(name="a", input_ids=[1], stream=True))
    await see()
    await call.write(infer(name="b", input_ids=[2], stream=True))
    await see()
    second.set()
    await see()
    await call.done_writing()  # what is under way goes on
    first.set()
    await see()
    await see()
    assert seen == [
        *(("a", "slow", False), ("b", "quick", False), ("b", "", True)),
        *(("a", "er", False), ("a", "", True)),
    ]
    assert await call.read() is aio.EOF
    assert await call.code() is grpc.StatusCode.OK


async def test_an_error_is_reported_under_its_id_and_the_stream_goes_on(api: Api) -> None:
    api.frontend.script = lambda request: (
        [Overloaded(QuotaViolation("router.queue", "8 of 8"), 1.0)]
        if request.prompt == (1,)
        else [admitted(request), tokens("fine"), finished(1)]
    )
    requests = [infer(name="full", input_ids=[1]), infer(name="good", input_ids=[2]), infer(name="gone", model="x")]
    by_id = {each.infer_response.id: each for each in await api.stream(*requests)}
    assert by_id["full"].error_message == "request full: router.queue: 8 of 8; try again in 1.0 s"
    assert by_id["full"].infer_response.parameters["reason"].string_param == "OVERLOADED"
    assert by_id["gone"].error_message.startswith("request gone: model 'x' is not served here")
    assert outputs_of(by_id["good"].infer_response) == {"text_output": ["fine"]}
    assert all(is_final(each.infer_response) for each in by_id.values())


async def test_a_stream_that_fails_late_has_no_other_final_response(api: Api) -> None:
    late: list[Step] = [tokens("He"), finished(1, reason=FinishReason.DEADLINE), DeadlineExceeded("deadline exceeded")]
    api.frontend.script = lambda request: [admitted(request), *late]
    responses = await api.stream(infer(input_ids=[1], stream=True))
    assert [(each.error_message, is_final(each.infer_response)) for each in responses] == [
        ("", False),
        ("deadline exceeded", True),
    ]


async def test_clients_may_ask_for_a_status_in_place_of_the_message(api: Api) -> None:
    api.frontend.script = lambda _: [Unavailable("no worker")]
    with pytest.raises(aio.AioRpcError) as error:
        await api.stream(infer(input_ids=[1]), metadata=[("triton_grpc_error", "true")])
    assert (error.value.code(), error.value.details()) == (grpc.StatusCode.UNAVAILABLE, "no worker")


async def test_a_stream_has_so_many_requests_under_way_and_no_more(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kserve_servicer, "MOST_AT_ONCE", 2)
    go, under_way = asyncio.Event(), list[int]()

    def script(request: ValidatedRequest) -> list[Step]:
        if request.prompt == (2,):
            return [admitted(request), finished(0)]
        under_way.append(len(api.frontend.requests) - api.frontend.ended)
        return [admitted(request), tokens("x"), go, finished(1)]

    api.frontend.script = script
    call = api.stub.ModelStreamInfer(timeout=PATIENCE_S)
    for _ in range(6):
        await call.write(infer(input_ids=[1], stream=True))
    assert [await call.read() is not aio.EOF for _ in range(2)] == [True, True]
    # This goes the same way as the six, after them.
    await api.stream(infer(input_ids=[2]))
    go.set()
    await call.done_writing()
    last = []
    while isinstance(response := await call.read(), pb.ModelStreamInferResponse):
        last.append(is_final(response.infer_response))
    assert sum(last) == 6
    assert (len(under_way), max(under_way)) == (6, 2)


async def test_cancelling_the_stream_closes_every_request_on_it(api: Api) -> None:
    api.frontend.script = lambda request: [admitted(request), tokens("x"), asyncio.Event()]
    call = api.stub.ModelStreamInfer(timeout=PATIENCE_S)
    for number in range(3):
        await call.write(infer(name=str(number), input_ids=[1], stream=True))
        assert await call.read() is not aio.EOF
    call.cancel()
    async with asyncio.timeout(PATIENCE_S):
        while api.frontend.ended < 3:
            api.frontend.closed.clear()
            await api.frontend.closed.wait()


async def test_the_streams_deadline_and_trace_are_those_of_its_requests(api: Api) -> None:
    parent, own = f"00-{'a' * 32}-{'b' * 16}-01", f"00-{'c' * 32}-{'d' * 16}-01"
    requests = [infer(name="1", input_ids=[1]), infer(name="2", input_ids=[2], parameters={"traceparent": own})]
    await api.stream(*requests, metadata=[("traceparent", parent)])
    traces = {request.prompt[0]: request.traceparent for request in api.frontend.requests}
    assert traces == {1: parent, 2: own}
    assert all(request.deadline == pytest.approx(ARRIVED + PATIENCE_S, abs=1) for request in api.frontend.requests)
