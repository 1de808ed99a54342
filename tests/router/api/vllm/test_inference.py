"""vLLM's own `Inference` service over a real socket, with a scripted frontend behind it."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf.struct_pb2 import Struct

from common.contracts.adapters import AdapterRef
from common.contracts.errors import DeadlineExceeded
from common.contracts.types import ConstraintKind, FinishReason, TokenLogprobs, Usage
from quire.vllm.v1 import inference_pb2 as pb
from router.contracts.events import Finished, PromptLogprobs, Tokens, ValidatedRequest
from router.contracts.session_ids import session_name
from router.tenants.tenancy import Caller, Tenant
from tests.support.router.fake_frontend import TIMINGS, Step, admitted, finished, tokens
from tests.support.router.vllm_harness import PATIENCE_S, Api, mistakes_in, refused

pytestmark = pytest.mark.asyncio(loop_scope="module")

IDS: dict[str, Any] = {"token_ids": pb.TokenIds(ids=[1, 2, 3])}


async def whole(api: Api, **fields: Any) -> pb.GenerateResponse:
    return await api.inference.Generate(pb.GenerateRequest(**fields), timeout=PATIENCE_S)


async def streamed(api: Api, **fields: Any) -> list[pb.GenerateResponse]:
    call = api.inference.GenerateStream(pb.GenerateRequest(**fields), timeout=PATIENCE_S)
    return [each async for each in call]


async def mistakes(api: Api, **fields: Any) -> dict[str, str]:
    """Return what is wrong with each field of a request, by GenerateStream."""
    found = await mistakes_in(api.inference.GenerateStream(pb.GenerateRequest(**fields), timeout=PATIENCE_S))
    assert not api.frontend.requests
    return found


# ------------------------------------------------------------ answers


async def test_a_whole_answer_in_text(api: Api) -> None:
    assert await whole(api, text="Lyon is") == pb.GenerateResponse(
        prompt_info=pb.PromptInfo(num_prompt_tokens=len(api.served.prompt)),
        outputs=pb.SequenceOutput(
            text="Hello world",
            num_tokens=2,
            finish_info=pb.FinishInfo(num_output_tokens=2, finish_reason=pb.FinishInfo.STOP, num_cached_tokens=0),
        ),
    )
    assert api.served.whole


async def test_a_stream_in_tokens(api: Api) -> None:
    response = pb.ResponseOptions(prompt_token_ids=True, output_text=False, output_token_ids=True)
    assert await streamed(api, **IDS, response=response) == [
        pb.GenerateResponse(prompt_info=pb.PromptInfo(num_prompt_tokens=3, token_ids=[1, 2, 3])),
        pb.GenerateResponse(outputs=pb.SequenceOutput(num_tokens=1, token_ids=[7])),
        pb.GenerateResponse(outputs=pb.SequenceOutput(num_tokens=1, token_ids=[7])),
        pb.GenerateResponse(
            outputs=pb.SequenceOutput(
                finish_info=pb.FinishInfo(num_output_tokens=2, finish_reason=pb.FinishInfo.STOP, num_cached_tokens=0)
            )
        ),
    ]
    assert not api.served.whole


async def test_sequences_carry_their_index_and_ends_their_reason(api: Api) -> None:
    def script(request: ValidatedRequest) -> list[Step]:
        end = Finished(0, FinishReason.STOP, Usage(output_tokens=2, cached_tokens=2), TIMINGS, stop_token_id=9)
        eos = Finished(2, FinishReason.STOP, Usage(), TIMINGS, stop_token_id=5)
        others = [finished(2, index=1, reason=FinishReason.LENGTH), finished(1, index=3, stop="ab")]
        late = finished(1, index=4, reason=FinishReason.CANCELLED)
        return [admitted(request, cached=2), tokens("b", 5, 6, index=1), end, eos, *others, late]

    api.frontend.script = script
    found = await streamed(
        api, **IDS, sampling=pb.RandomSampling(num_sequences=5), stopping=pb.StoppingCriteria(stop_token_ids=[9])
    )
    assert api.served.sampling.n == 5
    assert [each.outputs.index for each in found[1:]] == [1, 0, 2, 1, 3, 4]
    ends = [each.outputs.finish_info for each in found[2:]]
    reasons = pb.FinishInfo
    assert ends == [
        reasons(num_output_tokens=2, finish_reason=reasons.STOP, num_cached_tokens=2, stop_token_id=9),
        reasons(finish_reason=reasons.STOP, num_cached_tokens=0, eos_token_id=5),
        reasons(num_output_tokens=2, finish_reason=reasons.LENGTH, num_cached_tokens=0),
        reasons(num_output_tokens=1, finish_reason=reasons.STOP, num_cached_tokens=0, stop_string="ab"),
        reasons(num_output_tokens=1, finish_reason=reasons.ABORTED, num_cached_tokens=0),
    ]


async def test_log_probabilities_of_prompt_and_output(api: Api) -> None:
    scored = (TokenLogprobs(2, -0.5, ((4, -0.25), (2, -0.5)), 2), TokenLogprobs(3, -2.0, ((4, -0.125), (6, -1.0)), 9))
    output = (TokenLogprobs(5, -0.5, ((6, -0.25), (5, -0.5))), TokenLogprobs(7, -4.0, ((6, -0.25), (5, -0.5))))
    api.frontend.script = lambda request: [
        admitted(request),
        PromptLogprobs(scored[:1]),
        PromptLogprobs(scored[1:]),
        Tokens(0, "ab", (5, 7), output),
        finished(2),
    ]
    asked = pb.ResponseOptions(
        prompt_logprobs=True,
        prompt_candidates=pb.CandidateTokens(top_n=2),
        output_logprobs=True,
        output_candidates=pb.CandidateTokens(top_n=2),
    )
    for found in (await whole(api, **IDS, response=asked), *[await _both(api, asked)]):
        info, outputs = found.prompt_info, found.outputs
        assert (list(info.logprobs), list(info.ranks)) == ([0.0, -0.5, -2.0], [0, 2, 9])
        assert [[(each.id, each.logprob, each.rank) for each in at.tokens] for at in info.candidate_tokens] == [
            [],
            [(4, -0.25, 1)],
            [(4, -0.125, 1), (6, -1.0, 2)],
        ]
        assert (list(outputs.logprobs), list(outputs.ranks)) == ([-0.5, -4.0], [2, 0])
        assert [[(each.id, each.logprob, each.rank) for each in at.tokens] for at in outputs.candidate_tokens] == [
            [(6, -0.25, 1)],
            [(6, -0.25, 1), (5, -0.5, 2)],
        ]
    sampling = api.frontend.requests[0].sampling
    assert (sampling.logprobs, sampling.prompt_logprobs) == (2, 2)


async def _both(api: Api, asked: pb.ResponseOptions) -> pb.GenerateResponse:
    """Return the first two responses of a stream as one: the prompt's log-probabilities come with its facts."""
    first, second, _ = await streamed(api, **IDS, response=asked)
    return pb.GenerateResponse(prompt_info=first.prompt_info, outputs=second.outputs)


async def test_tokens_that_are_asked_for_by_name_have_no_rank(api: Api) -> None:
    entry = TokenLogprobs(5, -0.5, ((6, -0.25), (5, -0.5)))
    api.frontend.script = lambda request: [admitted(request), Tokens(0, "a", (5,), (entry,)), finished(1)]
    candidates = pb.CandidateTokens(token_ids=pb.TokenIds(ids=[6, 5]))
    found = await whole(api, **IDS, response=pb.ResponseOptions(output_logprobs=True, output_candidates=candidates))
    assert api.served.sampling.logprob_token_ids == (6, 5)
    assert list(found.outputs.ranks) == [0]
    assert [(each.id, each.rank) for each in found.outputs.candidate_tokens[0].tokens] == [(6, 0)]


async def test_an_output_that_ends_in_an_error_is_the_status(api: Api) -> None:
    end = finished(1, reason=FinishReason.ERROR, message="the step failed")
    api.frontend.script = lambda request: [admitted(request), tokens("a"), end]
    for call in (api.inference.Generate, api.inference.GenerateStream):
        assert await refused(call(pb.GenerateRequest(text="a"))) == (grpc.StatusCode.INTERNAL, "the step failed")


async def test_a_deadline_that_cut_the_answer_short_is_the_status(api: Api) -> None:
    late: list[Step] = [tokens("He"), finished(1, reason=FinishReason.DEADLINE), DeadlineExceeded("deadline exceeded")]
    api.frontend.script = lambda request: [admitted(request), *late]
    code, _ = await refused(api.inference.Generate(pb.GenerateRequest(**IDS)))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_cancelled_stream_closes_its_events(api: Api) -> None:
    api.frontend.script = lambda request: [admitted(request), asyncio.Event()]
    call = api.inference.GenerateStream(pb.GenerateRequest(**IDS), timeout=PATIENCE_S)
    await asyncio.wait_for(api.frontend.reached.wait(), PATIENCE_S)
    call.cancel()
    await asyncio.wait_for(api.frontend.closed.wait(), PATIENCE_S)


# ------------------------------------------------------------ requests


async def test_every_field_reaches_the_request(api: Api) -> None:
    await streamed(
        api,
        request_id="r-1",
        model="alias",
        text="Lyon is",
        temperature=0.5,
        sampling=pb.RandomSampling(num_sequences=2, top_k=3, top_p=0.5, min_p=0.25, seed=-5),
        decoding=pb.DecodingParameters(
            presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.5, logit_bias={7: 2.0}
        ),
        stopping=pb.StoppingCriteria(
            max_new_tokens=9,
            min_new_tokens=2,
            stop_token_ids=[9],
            stop_strings=["x"],
            include_stop_strings=True,
            ignore_eos=True,
            thinking_token_budget=-1,
        ),
        response=pb.ResponseOptions(skip_special_tokens=False),
        kv=pb.KVCacheParameters(bypass_prefix_cache=True, cache_salt="pepper"),
        truncate_prompt_tokens=2,
        priority=-7,
        session_id="talk 1",
        watermarking=True,
        engine_reasoning_gate=pb.EngineReasoningGate(reasoning_ended=True),
    )
    served = api.served
    sampling = served.sampling
    assert (served.request_id, served.model, len(served.prompt), served.correlation_id) == ("r-1", "alias", 2, "")
    assert served.session == session_name("", "talk 1")
    assert (sampling.temperature, sampling.n, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 2, 3, 0.5, 0.25)
    assert (sampling.seed, sampling.max_tokens, sampling.min_tokens) == (-5, 9, 2)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.5)
    assert (dict(sampling.logit_bias), sampling.stop_token_ids, sampling.stop) == ({7: 2.0}, (9,), ("x",))
    assert (sampling.include_stop, sampling.ignore_eos, served.skip_special_tokens) == (True, True, False)
    # A lower number is served first in vLLM, a higher one here.
    assert (served.priority, served.no_cache, served.salt) == (7, True, "pepper")


async def test_a_session_comes_by_field_or_by_metadata_and_is_bounded(api: Api) -> None:
    call = api.inference.GenerateStream(pb.GenerateRequest(**IDS), metadata=(("x-session-id", "talk"),))
    assert [each async for each in call]
    assert api.served.session == session_name("", "talk")
    api.frontend.requests.clear()
    wrong = await mistakes(api, **IDS, session_id="a" * 257)
    assert wrong == {"session_id": "has 257 characters; expected at most 256"}


async def test_what_is_left_out_is_as_vllm_has_it(api: Api) -> None:
    await streamed(api, **IDS)
    sampling = api.served.sampling
    assert (sampling.temperature, sampling.n, sampling.max_tokens) == (0.0, 1, 4093)
    assert (sampling.logprobs, sampling.prompt_logprobs, sampling.constraint) == (None, None, None)
    assert (api.served.priority, api.served.no_cache, api.served.salt) == (0, False, "")
    assert api.served.skip_special_tokens


async def test_a_salt_joins_the_tenants_domain(api: Api) -> None:
    await streamed(api, **IDS, kv=pb.KVCacheParameters(cache_salt="pepper"))
    assert (api.served.cache_domain, api.served.salt) == (api.callers.now.tenant.cache_domain, "pepper")


@pytest.mark.parametrize(
    ("decoding", "kind", "text"),
    [
        ({"json": '{"type": "string"}'}, ConstraintKind.JSON_SCHEMA, '{"type": "string"}'),
        ({"regex": "a+"}, ConstraintKind.REGEX, "a+"),
        ({"json_object": True}, ConstraintKind.JSON_SCHEMA, '{"type": "object"}'),
        ({"grammar": 'start: "a"'}, ConstraintKind.GRAMMAR, 'start: "a"'),
        (
            {"choice": pb.DecodingParameters.StringChoices(choices=["a", 'b"'])},
            ConstraintKind.GRAMMAR,
            'start: CHOICE\nCHOICE: "a" | "b\\""',
        ),
        ({"allowed_token_ids": [5, 8, 7]}, ConstraintKind.GRAMMAR, "start: <[5,7-8]>*"),
    ],
)
async def test_constraints(api: Api, decoding: dict[str, Any], kind: ConstraintKind, text: str) -> None:
    await streamed(api, **IDS, decoding=pb.DecodingParameters(**decoding))
    constraint = api.served.sampling.constraint
    assert constraint is not None
    assert (constraint.kind, constraint.text) == (kind, text)


async def test_allowed_tokens_let_no_other_token_end_the_output(api: Api) -> None:
    await streamed(api, **IDS, decoding=pb.DecodingParameters(allowed_token_ids=[7, 8]))
    assert dict(api.served.sampling.logit_bias) == {5: -100.0}


async def test_no_constraint_is_no_constraint(api: Api) -> None:
    await streamed(api, **IDS, decoding=pb.DecodingParameters(json_object=False))
    assert api.served.sampling.constraint is None


# ------------------------------------------------------------ refusals


async def test_what_is_not_offered_is_refused_by_name(api: Api) -> None:
    transfer = Struct()
    transfer.update({"do_remote_decode": True})
    found = await mistakes(
        api,
        **IDS,
        media=[pb.MediaItem(url="http://127.0.0.1/a.png")],
        decoding=pb.DecodingParameters(structural_tag="{}", bad_words_token_ids=[pb.TokenIds(ids=[1, 2])]),
        stopping=pb.StoppingCriteria(thinking_token_budget=5),
        kv=pb.KVCacheParameters(kv_transfer_params=transfer, ec_transfer_params=transfer),
        engine_reasoning_gate=pb.EngineReasoningGate(reasoning_ended=False),
    )
    assert sorted(found) == [
        "decoding.bad_words_token_ids",
        "decoding.structural_tag",
        "engine_reasoning_gate.reasoning_ended",
        "kv.ec_transfer_params",
        "kv.kv_transfer_params",
        "media",
        "stopping.thinking_token_budget",
    ]
    assert found["media"] == "is given, and the model takes text alone; leave it out"
    assert found["decoding.bad_words_token_ids"].endswith("forbid single tokens by logit_bias of -100")


async def test_wrong_values_are_named_as_the_client_calls_them(api: Api) -> None:
    found = await mistakes(
        api,
        token_ids=pb.TokenIds(ids=[1, 99_999, 4_000_000_000]),
        request_id="quire-1",
        temperature=-1,
        truncate_prompt_tokens=3_000_000_000,
        priority=300,
        sampling=pb.RandomSampling(num_sequences=99, top_k=3_000_000_000, top_p=2, min_p=2),
        decoding=pb.DecodingParameters(
            presence_penalty=9, repetition_penalty=-1, logit_bias={7: 900, 3_000_000_000: 1}
        ),
        stopping=pb.StoppingCriteria(max_new_tokens=3_000_000_000, stop_token_ids=[99_999], stop_strings=[""]),
        response=pb.ResponseOptions(output_logprobs=True, output_candidates=pb.CandidateTokens(top_n=21)),
        kv=pb.KVCacheParameters(cache_salt="x" * 257),
    )
    assert found["priority"] == "is 300; expected -100, which is served first, to 100"
    assert found["token_ids.ids[2]"] == "is 4000000000; expected a token id of the model's vocabulary"
    assert found["token_ids.ids[1]"] == "is 99999; expected a token id, 0 to 2026"
    assert sorted(found) == [
        "decoding.logit_bias[3000000000]",
        "decoding.logit_bias[7]",
        "decoding.presence_penalty",
        "decoding.repetition_penalty",
        "kv.cache_salt",
        "priority",
        "request_id",
        "response.output_candidates.top_n",
        "sampling.min_p",
        "sampling.num_sequences",
        "sampling.top_k",
        "sampling.top_p",
        "stopping.max_new_tokens",
        "stopping.stop_strings[0]",
        "stopping.stop_token_ids[0]",
        "temperature",
        "token_ids.ids[1]",
        "token_ids.ids[2]",
        "truncate_prompt_tokens",
    ]


@pytest.mark.parametrize(
    ("fields", "name", "what"),
    [
        ({}, "prompt", "is missing; expected a prompt"),
        ({"text": ""}, "text", "is empty"),
        ({**IDS, "decoding": pb.DecodingParameters(regex="(")}, "decoding.regex", "is not closed"),
        (
            {**IDS, "decoding": pb.DecodingParameters(choice=pb.DecodingParameters.StringChoices())},
            "decoding.choice.choices",
            "is empty; expected at least one text",
        ),
        (
            {**IDS, "decoding": pb.DecodingParameters(allowed_token_ids=[1, 5000])},
            "decoding.allowed_token_ids[1]",
            "is 5000; expected a token id, 0 to 2026",
        ),
        (
            {**IDS, "decoding": pb.DecodingParameters(allowed_token_ids=[1] * 3000)},
            "decoding.allowed_token_ids",
            "has 3000 ids; expected at most 2027, each of the vocabulary once",
        ),
        (
            {**IDS, "decoding": pb.DecodingParameters(allowed_token_ids=[1], regex="a")},
            "decoding.allowed_token_ids",
            "cannot be combined with decoding.regex; omit one of them",
        ),
        (
            {**IDS, "decoding": pb.DecodingParameters(logit_bias=dict.fromkeys(range(1025), 1.0))},
            "decoding.logit_bias",
            "has 1025 entries; expected at most 1024",
        ),
        (
            {
                **IDS,
                "response": pb.ResponseOptions(output_logprobs=True, output_candidates=pb.CandidateTokens(all=True)),
            },
            "response.output_candidates.all",
            "is given, and at most 20 tokens come; give top_n",
        ),
        (
            {
                **IDS,
                "response": pb.ResponseOptions(prompt_logprobs=True),
                "sampling": pb.RandomSampling(num_sequences=2),
            },
            "response.prompt_logprobs",
            "is true, and stands in the first response, before any of several sequences; ask for one sequence",
        ),
    ],
)
async def test_a_mistake_alone(api: Api, fields: dict[str, Any], name: str, what: str) -> None:
    ((field, found),) = (await mistakes(api, **fields)).items()
    assert field == name
    assert found.startswith(what)


async def test_a_prompt_beyond_the_context_is_told_in_the_clients_words(api: Api) -> None:
    found = await mistakes(api, token_ids=pb.TokenIds(ids=[1] * 5000))
    assert found["token_ids.ids"].startswith("This model's maximum context length is 4096 tokens.")


async def test_fields_of_a_later_version_are_refused_by_number(api: Api) -> None:
    later = pb.GenerateRequest(**IDS, decoding=pb.DecodingParameters.FromString(b"\xc8\x06\x01"))
    later.MergeFromString(b"\xa8\x06\x01\xb0\x06\x01")
    code, details = await refused(api.inference.GenerateStream(later))
    expected = "expected those of vLLM 0.33.0; leave them out, or use a client of that version"
    within = f"has fields that are not known here, with the numbers 105; {expected}"
    assert (code, details) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        f"request: has fields that are not known here, with the numbers 101, 102; {expected}; decoding: {within}",
    )


@pytest.mark.parametrize("count", [6000, 1_000_000])
async def test_many_unknown_fields_are_counted_and_not_read(api: Api, count: int) -> None:
    later = pb.GenerateRequest(**IDS)
    later.MergeFromString(b"\xa8\x06\x01" * count)
    what = f"request: has {3 * count} bytes of fields that are not known here; expected those of vLLM 0.33.0"
    assert await refused(api.inference.Generate(later)) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        f"{what}; leave them out, or use a client of that version",
    )


async def test_several_sequences_are_streamed_alone(api: Api) -> None:
    request = pb.GenerateRequest(**IDS, sampling=pb.RandomSampling(num_sequences=2))
    what = "sampling.num_sequences: is 2, and Generate answers with one sequence; call GenerateStream"
    assert await refused(api.inference.Generate(request)) == (grpc.StatusCode.INVALID_ARGUMENT, what)
    request.sampling.num_sequences = 99  # which no method takes: one mistake is told once
    assert list(await mistakes_in(api.inference.Generate(request))) == ["sampling.num_sequences"]


async def test_another_model_is_not_found_and_the_served_one_is_named(api: Api) -> None:
    what = "model 'gpt' is not served here; 'demo' is"
    request = pb.GenerateRequest(**IDS, model="gpt")
    assert await refused(api.inference.Generate(request)) == (grpc.StatusCode.NOT_FOUND, what)


@pytest.mark.parametrize(
    ("names", "adapter"),
    [
        ({"lora_name": "sql"}, "sql"),
        ({"model": "demo", "lora_name": "sql"}, "sql"),
        ({"model": "alias", "lora_name": "chat"}, "chat"),
        ({"model": "sql", "lora_name": "sql"}, "sql"),
        ({"model": "chat"}, "chat"),
        ({"model": "demo"}, None),
        ({}, None),
    ],
)
async def test_a_request_names_its_adapter_as_such_or_as_its_model(
    api: Api, names: dict[str, str], adapter: str | None
) -> None:
    await streamed(api, **IDS, **names)
    expected = None if adapter is None else AdapterRef(adapter, adapter[0] * 64)
    assert api.served.adapter == expected


@pytest.mark.parametrize("name", ["gpt", "demo", "alias", "../sql", "sql/", "x" * 100_000])
async def test_an_adapter_that_is_not_served_is_not_found(api: Api, name: str) -> None:
    """The base is no adapter either."""
    what = f"adapter {name[:128]!r} is not served here; 'demo' is"
    request = pb.GenerateRequest(**IDS, lora_name=name)
    assert await refused(api.inference.Generate(request)) == (grpc.StatusCode.NOT_FOUND, what)
    assert not api.frontend.requests


async def test_two_adapters_are_one_too_many(api: Api) -> None:
    what = "is 'sql', and model is 'chat', which is another adapter; leave one of them out"
    assert await mistakes(api, **IDS, model="chat", lora_name="sql") == {"lora_name": what}


async def test_an_adapter_that_the_tenant_may_not_use_is_refused(api: Api) -> None:
    api.callers.now = Caller(Tenant("test", max_priority=100, models=frozenset({"demo", "chat"})))
    await streamed(api, **IDS, lora_name="chat")
    code, details = await refused(api.inference.Generate(pb.GenerateRequest(**IDS, lora_name="sql")))
    assert (code, "may not use model 'sql'" in details) == (grpc.StatusCode.PERMISSION_DENIED, True)


async def test_another_rank_is_refused(api: Api) -> None:
    request = pb.GenerateRequest(**IDS)
    await api.inference.Generate(request, metadata=(("x-data-parallel-rank", "0"),))
    code, details = await refused(api.inference.Generate(request, metadata=(("x-data-parallel-rank", "1"),)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith("x-data-parallel-rank: is '1'; expected 0 or nothing")


async def test_a_whole_answer_that_grows_too_large_is_refused_and_a_stream_of_it_is_not(api: Api) -> None:
    parts = [tokens("x" * (1 << 20)) for _ in range(17)]
    # What comes after the part that is too much is not waited for.
    api.frontend.script = lambda request: [admitted(request), *parts, asyncio.Event()]
    found = await mistakes_in(api.inference.Generate(pb.GenerateRequest(**IDS), timeout=PATIENCE_S))
    assert list(found) == ["stopping.max_new_tokens"]
    api.frontend.script = lambda request: [admitted(request), *parts, finished(17)]
    assert sum(len(each.outputs.text) for each in await streamed(api, **IDS)) == 17 << 20
