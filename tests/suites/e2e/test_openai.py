"""The official OpenAI client on a real suite: structured output, log-probabilities, stops, seeds, disconnects."""

from __future__ import annotations

import asyncio
import json
import math
import re
import secrets
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import grpc
import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel, Field

from cli.demo_model.prompts import questions, system_text
from quire.decision.v1 import decision_pb2
from quire.inference.v1 import inference_pb2 as pb
from quire.types.v1 import types_pb2 as types
from tests.suites.e2e.conftest import WORKERS
from tests.support.reference import tokenizer
from tests.support.spans import called
from tests.support.suite import PATIENCE, Suite, chat

pytestmark = pytest.mark.asyncio(loop_scope="session")

MODEL = "checkpoint"
MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": system_text()},
    {"role": "user", "content": questions(1)[0].text},
]


class Place(BaseModel):
    """What an answer is to be."""

    kind: Literal["town", "river"]
    number: Annotated[int, Field(ge=0, le=99)]
    open: bool


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def client(suite: Suite) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{suite.stack.http_url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as made:
        yield made


async def test_both_apis_say_the_same(suite: Suite, client: openai.AsyncOpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    whole = await client.chat.completions.create(**fields)
    stream = await client.chat.completions.create(**fields, stream=True)
    parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    over_grpc = await suite.generate(chat(questions(1)[0].text, system_text(), max_tokens=24))
    assert whole.choices[0].message.content == "".join(parts) == over_grpc.text


async def test_a_pool_that_generates_embeds_nothing_and_says_what_to_start(
    suite: Suite, client: openai.AsyncOpenAI
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await suite.inference.Embed(pb.EmbedRequest(inputs=[pb.Prompt(text="a")]), timeout=PATIENCE)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    with pytest.raises(openai.BadRequestError, match="quire serve MODEL --pooling last, or mean"):
        await client.embeddings.create(model=MODEL, input="a")
    with pytest.raises(openai.BadRequestError, match="quire serve MODEL --pooling last, or mean"):
        await client.post("/rerank", cast_to=object, body={"query": "a", "documents": ["b"]})
    await suite.until_all_free(WORKERS)


async def test_an_answer_fits_the_model_that_parses_it(client: openai.AsyncOpenAI) -> None:
    """Demo model: response_format has the schema."""
    answer = await client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Place, temperature=1, seed=4, n=3, max_tokens=200
    )
    assert len(answer.choices) == 3
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Place)


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({"guided_regex": "[A-Z]{2}-[0-9]{4}"}, "[A-Z]{2}-[0-9]{4}"),
        ({"structured_outputs": {"choice": ["yes, gladly", "no"]}}, "yes, gladly|no"),
        ({"guided_choice": [f"word {each}" for each in range(2000)]}, "word [0-9]+"),
        ({"guided_grammar": 'start: "a" middle "z"\nmiddle: /[0-9]{3}/'}, "a[0-9]{3}z"),
        ({"ebnf": 'root ::= "a" middle "z"\nmiddle ::= [0-9] [0-9] [0-9]'}, "a[0-9]{3}z"),
    ],
)
@pytest.mark.parametrize("longer", [{}, {"ignore_eos": True, "min_tokens": 30}])
async def test_output_matches_as_a_whole_and_ends_there(
    suite: Suite, client: openai.AsyncOpenAI, fields: dict[str, Any], fits: str, longer: dict[str, Any]
) -> None:
    stream = await client.completions.create(
        model=MODEL, prompt="Say it:", temperature=1, seed=9, max_tokens=60, stream=True, extra_body=fields | longer
    )
    chunks = [chunk async for chunk in stream]
    assert re.fullmatch(fits, "".join(chunk.choices[0].text for chunk in chunks))
    assert chunks[-1].choices[0].finish_reason == "stop"
    await suite.until_all_free(WORKERS)


async def test_allowed_tokens_alone_are_sampled(client: openai.AsyncOpenAI) -> None:
    allowed = [40, 50, 60]
    extra = {"allowed_token_ids": allowed, "return_token_ids": True}
    answer = await client.completions.create(
        model=MODEL, prompt="Say it:", temperature=1, seed=1, max_tokens=40, logprobs=3, extra_body=extra
    )
    (choice,) = answer.choices
    tokens = choice.model_dump()["token_ids"]
    assert (len(tokens), choice.finish_reason) == (40, "length")
    assert set(tokens) <= set(allowed)


async def test_a_schema_written_by_hand_is_followed(client: openai.AsyncOpenAI) -> None:
    """Demo model: response_format has the schema."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    answer = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, max_tokens=100,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}},
    )  # fmt: skip
    assert isinstance(json.loads(answer.choices[0].message.content or "")["a"], bool)


async def test_the_trace_names_the_kind_of_the_constraint_and_not_its_text(suite: Suite) -> None:
    request = chat("Say a number.")
    request.regex = "secret[0-9]"
    outcome = await suite.generate(request)
    assert re.fullmatch("secret[0-9]", outcome.text)
    assert outcome.admitted is not None
    stub = suite.decisions
    query = decision_pb2.GetTraceRequest(trace_id=outcome.admitted.trace_id)
    async with asyncio.timeout(PATIENCE):
        while True:
            spans = (await stub.GetTrace(query, timeout=PATIENCE)).spans
            if {"inference", "decode"} <= {called(span) for span in spans}:
                break
            await asyncio.sleep(0.05)
    assert [span.attributes["quire.constraint"] for span in spans if called(span) == "inference"] == ["regex"]
    assert "secret" not in str(spans)
    assert not [line for line in suite.lines if "secret" in line]


MANY: dict[str, Any] = {"properties": {f"property{each}": {"type": "integer"} for each in range(1000)}}


@pytest.mark.parametrize("schema", [{"not": {}}, {"type": "object", **MANY}], ids=["keyword", "size"])
async def test_a_constraint_that_cannot_be_followed_costs_no_block_and_no_worker(
    suite: Suite, client: openai.AsyncOpenAI, schema: dict[str, Any]
) -> None:
    decided = decision_pb2.ListDecisionsRequest(kind="routing")
    before = len((await suite.decisions.ListDecisions(decided, timeout=PATIENCE)).decisions)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model=MODEL, prompt="a", extra_body={"guided_json": schema})
    assert caught.value.param == "guided_json"
    assert len((await suite.decisions.ListDecisions(decided, timeout=PATIENCE)).decisions) == before
    await suite.until_all_free(WORKERS)


async def test_requests_of_one_correlation_id_run_together_and_the_trace_is_that_of_the_header(
    suite: Suite, client: openai.AsyncOpenAI
) -> None:
    asked = [
        client.completions.with_raw_response.create(
            model=MODEL, prompt="a", max_tokens=32, extra_headers={"x-request-id": "of a proxy"}
        )
        for _ in range(4)
    ]
    answers = await asyncio.gather(*asked)
    traces = {answer.headers["x-quire-request-id"]: answer.headers["x-trace-id"] for answer in answers}
    assert len(traces) == 4
    for request_id, trace_id in traces.items():
        found = await suite.decisions.GetTrace(decision_pb2.GetTraceRequest(request_id=request_id), timeout=PATIENCE)
        assert found.trace_id == trace_id
    named = await suite.decisions.GetTrace(decision_pb2.GetTraceRequest(request_id="of a proxy"), timeout=PATIENCE)
    assert named.trace_id in traces.values()


async def test_logprobs_are_those_of_grpc_and_spell_the_text(suite: Suite, client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, max_tokens=4, logprobs=True, top_logprobs=3
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    assert len(content) == 4
    spelt = b"".join(bytes(token.bytes or ()) for token in content).decode()
    assert spelt.strip() == (choice.message.content or "").strip()
    for token in content:
        assert token.top_logprobs[0].logprob == token.logprob <= 0  # greedy takes the likeliest
        assert sum(math.exp(each.logprob) for each in token.top_logprobs) <= 1.0 + 1e-5
    request = chat(questions(1)[0].text, system_text(), max_tokens=4)
    request.sampling.logprobs = 3
    unary = await suite.inference.GenerateUnary(pb.GenerateUnaryRequest(request=request), timeout=PATIENCE)
    assert [token.logprob for token in content] == pytest.approx(
        [each.logprob for each in unary.outputs[0].logprobs], abs=1e-4
    )


async def test_a_stop_text_ends_the_answer_before_it(client: openai.AsyncOpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 32}
    free = (await client.chat.completions.create(**fields)).choices[0].message.content or ""
    word = free.split()[2]
    (stopped,) = (await client.chat.completions.create(**fields, stop=[word])).choices
    assert (stopped.message.content, stopped.finish_reason) == (free[: free.index(word)], "stop")
    assert stopped.model_dump()["stop_reason"] == word


async def test_a_seed_makes_an_answer_repeatable(client: openai.AsyncOpenAI) -> None:
    async def said(seed: int) -> str:
        answer = await client.completions.create(
            model=MODEL, prompt="Once", temperature=1.5, seed=seed, max_tokens=24, extra_body={"ignore_eos": True}
        )
        return answer.choices[0].text

    assert await said(1) == await said(1) != await said(2)


async def test_the_second_question_about_a_text_finds_it_cached(client: openai.AsyncOpenAI) -> None:
    """The router may rightly send the second one to a worker without it, whose steps look faster: so texts follow."""
    cached = [0, 0]
    async with asyncio.timeout(PATIENCE):
        while not cached[1]:
            text = f"Read this twice, {secrets.token_hex(4)}. " + system_text()
            cached = [await cached_of(client, text, question.text) for question in questions(2)]
    shared = len(tokenizer()(text)["input_ids"])
    assert cached[0] < 32 < shared - 32 <= cached[1]


async def cached_of(client: openai.AsyncOpenAI, text: str, question: str) -> int:
    """Ask a question about a text; return how many tokens of the prompt were cached."""
    messages: Any = [{"role": "system", "content": text}, {"role": "user", "content": question}]
    answer = await client.chat.completions.create(model=MODEL, max_tokens=4, messages=messages)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


async def test_a_client_that_hangs_up_in_mid_stream_frees_the_blocks(suite: Suite, client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(
        model=MODEL, prompt="Once", max_tokens=3000, n=2, stream=True, extra_body={"ignore_eos": True}
    )
    await anext(stream)
    await stream.close()
    with pytest.raises(openai.APITimeoutError):
        await client.completions.create(
            model=MODEL, prompt="Once", max_tokens=3900, n=8, timeout=0.3, extra_body={"ignore_eos": True}
        )
    await suite.until_all_free(WORKERS)


async def test_the_tokens_of_a_prompt_are_those_that_are_charged(client: openai.AsyncOpenAI, suite: Suite) -> None:
    counted: Any = await client.post(
        f"{suite.stack.http_url}/tokenize", cast_to=object, body={"model": MODEL, "messages": MESSAGES}
    )
    answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == counted["count"]
    assert answer.choices[0].finish_reason == "length"
    sampling = types.SamplingParams(temperature=0, max_tokens=1)
    ids = pb.GenerateRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=counted["tokens"])), sampling=sampling)
    unary = await suite.inference.GenerateUnary(pb.GenerateUnaryRequest(request=ids), timeout=PATIENCE)
    assert unary.admitted.prompt_tokens == counted["count"]


async def test_bad_words_do_not_come_and_the_rest_is_as_likely_as_it_was(client: openai.AsyncOpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
    free = (await client.chat.completions.create(**fields)).choices[0].message.content or ""
    word = re.findall(r"[A-Za-z]+", free)[1]
    held = await client.chat.completions.create(**fields, extra_body={"bad_words": [word, "Zebra crossing"]})
    text = held.choices[0].message.content or ""
    assert word not in re.findall(r"[A-Za-z]+", text)
    assert text.split()[0] == free.split()[0]
