"""The service by which SMG's gateway calls an engine, over a real socket, with a scripted frontend behind it."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from typing import Any

import grpc
import pytest

from common.contracts.types import ConstraintKind, FinishReason, TokenLogprobs, Usage
from quire.vllm.v1 import engine_common_pb2 as common
from quire.vllm.v1 import engine_pb2 as pb
from router.contracts.events import Finished, PromptLogprobs, Tokens, ValidatedRequest
from tests.support.router.fake_frontend import TIMINGS, Step, admitted, embedded, finished, tokens
from tests.support.router.kserve_harness import DEMO
from tests.support.router.vllm_harness import KEYED, PATIENCE_S, Api, mistakes_in, refused

pytestmark = pytest.mark.asyncio(loop_scope="module")

IDS: dict[str, Any] = {"tokenized": pb.TokenizedInput(input_ids=[1, 2, 3])}


async def answers(api: Api, **fields: Any) -> list[pb.GenerateResponse]:
    return [each async for each in api.engine.Generate(pb.GenerateRequest(**fields), timeout=PATIENCE_S)]


async def mistakes(api: Api, **fields: Any) -> dict[str, str]:
    return await mistakes_in(api.engine.Generate(pb.GenerateRequest(**fields), timeout=PATIENCE_S))


# ------------------------------------------------------------ answers


async def test_a_whole_answer_is_one_message_a_sequence(api: Api) -> None:
    assert await answers(api, **IDS) == [
        pb.GenerateResponse(
            complete=pb.GenerateComplete(
                output_ids=[7, 7], finish_reason="stop", prompt_tokens=3, completion_tokens=2, cached_tokens=0
            )
        )
    ]
    assert api.served.whole


async def test_a_stream_has_chunks_and_ends_without_output(api: Api) -> None:
    def script(request: ValidatedRequest) -> list[Step]:
        end = Finished(1, FinishReason.STOP, Usage(output_tokens=3, cached_tokens=2), TIMINGS, stop_token_id=9)
        eos = Finished(0, FinishReason.STOP, Usage(), TIMINGS, stop_token_id=5)
        held = Tokens(1, "text that was held back", ())
        return [admitted(request, cached=2), tokens("b", 5, 6, index=1), tokens("c", 9, index=1), held, end, eos]

    api.frontend.script = script
    found = await answers(
        api, **IDS, stream=True, sampling_params=pb.SamplingParams(n=2, stop_token_ids=[9], max_tokens=4)
    )
    common_fields: dict[str, Any] = {"prompt_tokens": 3, "cached_tokens": 2, "index": 1}
    assert found == [
        pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=[5, 6], completion_tokens=2, **common_fields)),
        pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=[9], completion_tokens=1, **common_fields)),
        pb.GenerateResponse(
            complete=pb.GenerateComplete(finish_reason="stop", completion_tokens=3, matched_token_id=9, **common_fields)
        ),
        pb.GenerateResponse(complete=pb.GenerateComplete(finish_reason="stop", prompt_tokens=3)),
    ]
    assert not api.served.whole


@pytest.mark.parametrize(
    ("reason", "word"),
    [(FinishReason.LENGTH, "length"), (FinishReason.CANCELLED, "abort"), (FinishReason.DEADLINE, "abort")],
)
async def test_reasons(api: Api, reason: FinishReason, word: str) -> None:
    api.frontend.script = lambda request: [admitted(request), tokens("a"), finished(1, reason=reason, stop="ab")]
    (found,) = await answers(api, **IDS)
    assert (found.complete.finish_reason, found.complete.matched_stop_str) == (word, "ab")


async def test_an_output_that_ends_in_an_error_is_the_status(api: Api) -> None:
    end = finished(1, reason=FinishReason.ERROR, message="the step failed")
    api.frontend.script = lambda request: [admitted(request), tokens("a"), end]
    assert await refused(api.engine.Generate(pb.GenerateRequest(**IDS))) == (
        grpc.StatusCode.INTERNAL,
        "the step failed",
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_of_prompt_and_output(api: Api, stream: bool) -> None:
    scored = (TokenLogprobs(2, -0.5, ((4, -0.25),), 2), TokenLogprobs(3, -2.0, ((4, -0.125),), 9))
    output = (TokenLogprobs(5, -0.5, ((6, -0.25),)),)
    api.frontend.script = lambda request: [
        admitted(request),
        PromptLogprobs(scored),
        Tokens(0, "a", (5,), output),
        finished(1),
    ]
    found = await answers(api, **IDS, stream=stream, sampling_params=pb.SamplingParams(logprobs=1, prompt_logprobs=1))
    first = found[0].chunk if stream else found[0].complete
    assert first.output_logprobs == pb.OutputLogProbs(
        token_logprobs=[-0.5], token_ids=[5], top_logprobs=[pb.TopLogProbs(values=[-0.25], token_ids=[6])]
    )
    assert first.input_logprobs == pb.InputLogProbs(
        token_logprobs=[
            pb.InputTokenLogProb(),
            pb.InputTokenLogProb(value=-0.5),
            pb.InputTokenLogProb(value=-2.0),
        ],
        token_ids=[1, 2, 3],
        top_logprobs=[
            pb.TopLogProbs(),
            pb.TopLogProbs(values=[-0.25], token_ids=[4]),
            pb.TopLogProbs(values=[-0.125], token_ids=[4]),
        ],
    )
    assert (api.served.sampling.logprobs, api.served.sampling.prompt_logprobs) == (1, 1)


async def test_log_probabilities_of_the_prompt_come_once_with_the_first_sequence(api: Api) -> None:
    scored = PromptLogprobs((TokenLogprobs(2, -0.5), TokenLogprobs(3, -2.0)))
    early, first, second = tokens("a", index=1), tokens("b"), tokens("c")
    api.frontend.script = lambda request: [admitted(request), scored, early, first, second, finished(2)]
    params = pb.SamplingParams(n=2, prompt_logprobs=0)
    found = await answers(api, **IDS, stream=True, sampling_params=params)
    assert [each.chunk.HasField("input_logprobs") for each in found[:-1]] == [False, True, False]
    assert [each.value for each in found[1].chunk.input_logprobs.token_logprobs] == [0.0, -0.5, -2.0]
    assert not found[1].chunk.input_logprobs.top_logprobs
    assert not found[-1].complete.HasField("input_logprobs")


async def test_a_cancelled_stream_closes_its_events(api: Api) -> None:
    api.frontend.script = lambda request: [admitted(request), asyncio.Event()]
    call = api.engine.Generate(pb.GenerateRequest(**IDS, stream=True), timeout=PATIENCE_S)
    await asyncio.wait_for(api.frontend.reached.wait(), PATIENCE_S)
    call.cancel()
    await asyncio.wait_for(api.frontend.closed.wait(), PATIENCE_S)


# ------------------------------------------------------------ requests


async def test_every_field_reaches_the_request(api: Api) -> None:
    await answers(
        api,
        request_id="r-1",
        text="Lyon is",
        data_parallel_rank=0,
        sampling_params=pb.SamplingParams(
            temperature=0.5,
            top_p=0.5,
            top_k=3,
            min_p=0.25,
            frequency_penalty=-0.5,
            presence_penalty=0.5,
            repetition_penalty=1.5,
            max_tokens=9,
            min_tokens=2,
            stop=["x"],
            stop_token_ids=[9],
            skip_special_tokens=True,
            spaces_between_special_tokens=True,
            ignore_eos=True,
            n=2,
            logprobs=0,
            seed=-5,
            include_stop_str_in_output=True,
            logit_bias={7: 2.0},
            truncate_prompt_tokens=2,
            grammar_from_first_token=True,
        ),
    )
    served, sampling = api.served, api.served.sampling
    assert (served.request_id, len(served.prompt), served.skip_special_tokens) == ("r-1", 2, True)
    assert (sampling.temperature, sampling.n, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 2, 3, 0.5, 0.25)
    assert (sampling.seed, sampling.max_tokens, sampling.min_tokens, sampling.logprobs) == (-5, 9, 2, 0)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.5)
    assert (dict(sampling.logit_bias), sampling.stop_token_ids, sampling.stop) == ({7: 2.0}, (9,), ("x",))
    assert (sampling.include_stop, sampling.ignore_eos) == (True, True)


async def test_what_is_left_out_is_as_the_gateway_has_it(api: Api) -> None:
    await answers(api, **IDS)
    sampling = api.served.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty) == (1.0, 1.0, 0, 1.0)
    assert (sampling.n, sampling.max_tokens, sampling.min_tokens, sampling.logprobs) == (1, 4093, 0, None)
    assert not api.served.skip_special_tokens


@pytest.mark.parametrize(
    ("params", "kind", "text"),
    [
        ({"json_schema": '{"type": "string"}'}, ConstraintKind.JSON_SCHEMA, '{"type": "string"}'),
        ({"json_object": True}, ConstraintKind.JSON_SCHEMA, '{"type": "object"}'),
        ({"regex": "a+"}, ConstraintKind.REGEX, "a+"),
        ({"grammar": 'start: "a"'}, ConstraintKind.GRAMMAR, 'start: "a"'),
        ({"choice": pb.ChoiceConstraint(choices=["a"])}, ConstraintKind.GRAMMAR, 'start: CHOICE\nCHOICE: "a"'),
    ],
)
async def test_constraints(api: Api, params: dict[str, Any], kind: ConstraintKind, text: str) -> None:
    await answers(api, **IDS, sampling_params=pb.SamplingParams(**params))
    constraint = api.served.sampling.constraint
    assert constraint is not None
    assert (constraint.kind, constraint.text) == (kind, text)


async def test_what_is_not_offered_is_refused_by_name(api: Api) -> None:
    found = await mistakes(
        api,
        **IDS,
        # Fields of a refused message are not read.
        mm_inputs=pb.MultimodalInputs.FromString(b"\xc8\x06\x01"),
        extra_mm_inputs=[pb.MultimodalInputs()],
        media_refs=pb.MediaRefs(),
        kv_transfer_params=pb.KvTransferParams(),
        kv_transfer_params_json="{}",
        data_parallel_rank=1,
        sampling_params=pb.SamplingParams(structural_tag="{}"),
    )
    assert sorted(found) == [
        "data_parallel_rank",
        "extra_mm_inputs",
        "kv_transfer_params",
        "kv_transfer_params_json",
        "media_refs",
        "mm_inputs",
        "sampling_params.structural_tag",
    ]
    assert found["mm_inputs"] == "is given, and the model takes text alone; send no media"
    assert found["data_parallel_rank"].startswith("is 1; expected 0 or nothing")


async def test_wrong_values_are_named_as_the_client_calls_them(api: Api) -> None:
    found = await mistakes(
        api,
        tokenized=pb.TokenizedInput(input_ids=[1, 99_999, 4_000_000_000]),
        sampling_params=pb.SamplingParams(
            temperature=-1,
            top_k=3_000_000_000,
            n=99,
            max_tokens=0,
            logprobs=-1,
            stop=[""],
            choice=pb.ChoiceConstraint(),
            truncate_prompt_tokens=-3,
        ),
    )
    assert sorted(found) == [
        "sampling_params.choice.choices",
        "sampling_params.logprobs",
        "sampling_params.max_tokens",
        "sampling_params.n",
        "sampling_params.stop[0]",
        "sampling_params.temperature",
        "sampling_params.top_k",
        "sampling_params.truncate_prompt_tokens",
        "tokenized.input_ids[1]",
        "tokenized.input_ids[2]",
    ]
    assert found["sampling_params.logprobs"] == "is -1; expected 0 to 20"


async def test_fields_of_a_later_version_are_refused_by_number(api: Api) -> None:
    later = pb.SamplingParams.FromString(b"\xc8\x06\x01")
    assert await mistakes(api, **IDS, sampling_params=later) == {
        "sampling_params": "has fields that are not known here, with the numbers 105; "
        "expected those of smg-grpc-proto 0.4.28; leave them out, or use a client of that version"
    }


async def test_a_request_without_a_prompt(api: Api) -> None:
    assert await mistakes(api) == {"input": "is missing; expected a prompt"}


# ------------------------------------------------------------ the other methods


async def test_a_vector(api: Api) -> None:
    api.frontend.script = lambda request: [admitted(request), embedded(0.5, 0.25)]
    found = await api.engine.Embed(pb.EmbedRequest(request_id="e-1", **IDS))
    assert found == pb.EmbedResponse(embedding=[0.5, 0.25], prompt_tokens=3, embedding_dim=2)
    assert (api.served.embeds, api.served.request_id, api.served.prompt) == (True, "e-1", (1, 2, 3))


async def test_a_wrong_prompt_of_a_vector_is_named(api: Api) -> None:
    wrong = pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=[99_999]))
    assert list(await mistakes_in(api.engine.Embed(wrong))) == ["tokenized.input_ids[0]"]
    huge = pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=[4_000_000_000]))
    assert list(await mistakes_in(api.engine.Embed(huge))) == ["tokenized.input_ids[0]"]


async def test_health_is_readiness_and_says_why_not(api: Api) -> None:
    assert await api.engine.HealthCheck(pb.HealthCheckRequest()) == pb.HealthCheckResponse(
        healthy=True, message="ready"
    )
    api.why_not_ready = "the router is draining"
    found = await api.engine.HealthCheck(pb.HealthCheckRequest())
    assert (found.healthy, found.message) == (False, "the router is draining")


async def test_facts_of_the_model(api: Api) -> None:
    assert await api.engine.GetModelInfo(pb.GetModelInfoRequest()) == pb.GetModelInfoResponse(
        model_path="demo",
        is_generation=True,
        max_context_length=4096,
        vocab_size=2027,
        served_model_name="demo",
        eos_token_ids=[5],
        max_req_input_len=4096,
    )


async def test_facts_of_the_server_are_those_of_all_workers_that_serve(api: Api) -> None:
    api.clock.now += 7.5
    assert await api.engine.GetServerInfo(pb.GetServerInfoRequest()) == pb.GetServerInfoResponse(
        active_requests=7,
        uptime_seconds=7.5,
        server_type="vllm-grpc",
        data_parallel_size=1,
        kv_cache_dtype="float32",
        block_size=16,
        max_num_seqs=16,
        constrained_decoding_start="first_token",
    )


async def test_the_load_is_that_of_one_rank(api: Api) -> None:
    found = await api.engine.GetLoads(pb.GetLoadsRequest())
    assert found.dp_rank_count == 1
    assert list(found.loads) == [
        pb.SchedulerLoad(
            num_running_reqs=4,
            num_waiting_reqs=3,
            num_total_reqs=7,
            num_used_tokens=80,
            max_total_num_tokens=320,
            token_usage=0.25,
            max_running_requests=16,
        )
    ]


async def test_a_tenant_with_a_key_does_not_see_what_others_do(api: Api) -> None:
    api.callers.now = KEYED
    assert (await api.engine.GetServerInfo(pb.GetServerInfoRequest())).active_requests == 0
    found = await api.engine.GetLoads(pb.GetLoadsRequest())
    assert list(found.loads) == [pb.SchedulerLoad(max_total_num_tokens=320, max_running_requests=16)]


async def test_the_tokenizer_comes_as_an_archive_of_its_files(api: Api) -> None:
    chunks = [each async for each in api.engine.GetTokenizer(common.GetTokenizerRequest())]
    whole = b"".join(each.data for each in chunks)
    assert [each.sha256 for each in chunks] == [*[""] * (len(chunks) - 1), hashlib.sha256(whole).hexdigest()]
    assert all(len(each.data) < 1 << 20 for each in chunks)
    archive = zipfile.ZipFile(io.BytesIO(whole))
    assert archive.testzip() is None
    assert {each.date_time for each in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    assert sorted(archive.namelist()) == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    for name in archive.namelist():
        assert archive.read(name) == (DEMO / name).read_bytes()
    again = [each async for each in api.engine.GetTokenizer(common.GetTokenizerRequest())]
    assert again == chunks


@pytest.mark.parametrize(
    ("method", "request_type"),
    [
        ("FlushCache", common.FlushCacheRequest),
        ("StartProfile", common.StartProfileRequest),
        ("StopProfile", common.StopProfileRequest),
        ("SubscribeKvEvents", common.SubscribeKvEventsRequest),
    ],
)
async def test_what_has_no_meaning_here_is_refused_by_name(api: Api, method: str, request_type: Any) -> None:
    code, details = await refused(getattr(api.engine, method)(request_type()))
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert details.startswith(f"{method} is not offered: ")
