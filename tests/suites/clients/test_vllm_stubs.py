"""vLLM's services at a whole suite, by stubs of Quire's own code: answers are those of Quire's own API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from quire.inference.v1 import inference_pb2 as own
from quire.types.v1 import types_pb2
from quire.vllm.v1 import control_pb2, control_pb2_grpc, engine_pb2, engine_pb2_grpc, inference_pb2_grpc
from quire.vllm.v1 import inference_pb2 as pb
from tests.suites.clients.served import Served
from tests.support.suite import PATIENCE, Outcome

PROMPT = [5, 6, 7, 8]
NEW = 12
STOPPING = pb.StoppingCriteria(max_new_tokens=NEW, ignore_eos=True)


@pytest_asyncio.fixture
async def channel(served: Served) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(served.address) as opened:
        yield opened


@pytest.fixture(scope="module")
def expected(served: Served) -> Outcome:
    """Quire's own answer to the prompt, greedy, with log-probabilities of prompt and output."""
    sampling = types_pb2.SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=2, prompt_logprobs=2)
    prompt = own.Prompt(token_ids=own.TokenIds(ids=PROMPT))
    return served.run(lambda suite: suite.generate(own.GenerateRequest(prompt=prompt, sampling=sampling)))


async def test_tokens_and_text_are_those_of_quires_own_api(channel: grpc.aio.Channel, expected: Outcome) -> None:
    stub = inference_pb2_grpc.InferenceStub(channel)
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=PROMPT), stopping=STOPPING, response=pb.ResponseOptions(output_token_ids=True)
    )
    whole = await stub.Generate(request, timeout=PATIENCE)
    assert (whole.prompt_info.num_prompt_tokens, whole.outputs.text) == (len(PROMPT), expected.text)
    assert list(whole.outputs.token_ids) == expected.tokens
    assert whole.outputs.finish_info.finish_reason == pb.FinishInfo.LENGTH
    parts = [each async for each in stub.GenerateStream(request, timeout=PATIENCE)]
    assert [each.HasField("prompt_info") for each in parts] == [True, *[False] * (len(parts) - 1)]
    assert "".join(each.outputs.text for each in parts) == expected.text
    assert [token for each in parts for token in each.outputs.token_ids] == expected.tokens
    assert parts[-1].outputs.finish_info.num_output_tokens == NEW


async def test_log_probabilities_are_those_of_quires_own_api(channel: grpc.aio.Channel, expected: Outcome) -> None:
    response = pb.ResponseOptions(
        prompt_logprobs=True,
        prompt_candidates=pb.CandidateTokens(top_n=2),
        output_logprobs=True,
        output_candidates=pb.CandidateTokens(top_n=2),
    )
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), stopping=STOPPING, response=response)
    found = await inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=PATIENCE)
    info, outputs = found.prompt_info, found.outputs
    assert list(info.logprobs) == [0.0, *[each.logprob for each in expected.prompt_logprobs]]
    assert list(info.ranks) == [0, *[each.rank for each in expected.prompt_logprobs]]
    assert list(outputs.logprobs) == [each.logprob for each in expected.logprobs]
    # The greedy token is the likeliest one; the other candidate is the second.
    assert list(outputs.ranks) == [1] * NEW
    seconds = [each.top_token_ids[1] for each in expected.logprobs]
    assert [[(each.id, each.rank) for each in at.tokens] for at in outputs.candidate_tokens] == [
        [(token, 2)] for token in seconds
    ]


async def test_a_gateways_engine_puts_out_the_same(channel: grpc.aio.Channel, expected: Outcome) -> None:
    stub = engine_pb2_grpc.VllmEngineStub(channel)
    params = engine_pb2.SamplingParams(
        temperature=0, max_tokens=NEW, ignore_eos=True, skip_special_tokens=True, logprobs=2, prompt_logprobs=2
    )
    request = engine_pb2.GenerateRequest(
        tokenized=engine_pb2.TokenizedInput(input_ids=PROMPT), sampling_params=params, stream=True
    )
    parts = [each async for each in stub.Generate(request, timeout=PATIENCE)]
    chunks, end = [each.chunk for each in parts[:-1]], parts[-1].complete
    assert [token for each in chunks for token in each.token_ids] == expected.tokens
    assert (end.finish_reason, end.prompt_tokens, end.completion_tokens) == ("length", len(PROMPT), NEW)
    logprobs = [value for each in chunks for value in each.output_logprobs.token_logprobs]
    assert logprobs == [each.logprob for each in expected.logprobs]
    scored = [each.value for each in chunks[0].input_logprobs.token_logprobs[1:]]
    assert scored == [each.logprob for each in expected.prompt_logprobs]
    request.stream = False
    (whole,) = [each.complete async for each in stub.Generate(request, timeout=PATIENCE)]
    assert list(whole.output_ids) == expected.tokens
    assert whole.input_logprobs.token_ids == PROMPT


async def test_a_text_is_made_tokens_of_here_and_its_second_question_finds_it_cached(
    channel: grpc.aio.Channel, served: Served
) -> None:
    stub = inference_pb2_grpc.InferenceStub(channel)
    text = "Anna walked to the attic. " * 12
    prompt = own.Prompt(text=text)
    tokens = await served_tokens(served, prompt)
    request = pb.GenerateRequest(
        text=text,
        stopping=STOPPING,
        response=pb.ResponseOptions(prompt_token_ids=True),
        kv=pb.KVCacheParameters(cache_salt="test of vLLM's services"),
        session_id="one talk",
    )
    cached = []
    for _ in range(2):
        found = await stub.Generate(request, timeout=PATIENCE)
        assert list(found.prompt_info.token_ids) == tokens
        cached.append(found.outputs.finish_info.num_cached_tokens)
    assert cached[0] == 0
    assert cached[1] > 0


async def served_tokens(served: Served, prompt: own.Prompt) -> list[int]:
    asked = own.TokenizeRequest(prompt=prompt)
    found = await asyncio.to_thread(served.run, lambda suite: suite.inference.Tokenize(asked, timeout=PATIENCE))
    return list(found.token_ids)


async def test_a_cancelled_stream_and_an_aborted_one_give_every_block_back(
    channel: grpc.aio.Channel, served: Served
) -> None:
    generation, control = inference_pb2_grpc.InferenceStub(channel), control_pb2_grpc.ControlStub(channel)
    stopping = pb.StoppingCriteria(max_new_tokens=3000, ignore_eos=True)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), stopping=stopping)
    left = generation.GenerateStream(request, timeout=PATIENCE)
    await left.read()
    left.cancel()
    request.request_id = "aborted"
    aborted = generation.GenerateStream(request, timeout=PATIENCE)
    await aborted.read()
    await control.Abort(control_pb2.AbortRequest(request_ids=[request.request_id]), timeout=PATIENCE)
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await rest_of(aborted)
    assert ended.value.code() is grpc.StatusCode.CANCELLED
    await asyncio.to_thread(served.until_all_free)


async def rest_of(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_facts_are_those_of_the_suite(channel: grpc.aio.Channel, served: Served) -> None:
    control, engine = control_pb2_grpc.ControlStub(channel), engine_pb2_grpc.VllmEngineStub(channel)
    info = await control.GetServerInfo(control_pb2.GetServerInfoRequest(), timeout=PATIENCE)
    assert (info.max_model_len, info.kv_block_size, info.total_kv_blocks) == (4096, 16, 1024)
    assert info.max_running_requests > 0
    model = await control.GetModelInfo(control_pb2.GetModelInfoRequest(), timeout=PATIENCE)
    assert model.served_model_name == served.model
    loads = await engine.GetLoads(engine_pb2.GetLoadsRequest(), timeout=PATIENCE)
    assert loads.loads[0].max_total_num_tokens == 1024 * 16
    health = await engine.HealthCheck(engine_pb2.HealthCheckRequest(), timeout=PATIENCE)
    assert health.healthy
