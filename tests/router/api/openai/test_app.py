"""The OpenAI-compatible API: the official client against a real server, with a scripted frontend behind it."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from common.contracts.errors import (
    AlreadyExists,
    DeadlineExceeded,
    Draining,
    InvalidConfig,
    NoWorker,
    Overloaded,
    QueueExpired,
    QuireError,
    QuotaViolation,
    Unavailable,
)
from common.contracts.types import FinishReason, TokenLogprobs
from router.api.http.http_server import serve_http
from router.api.openai.service import Service
from router.contracts.refusals import DROPPED_REASON_HEADER as DROPPED
from tests.support.router.fake_frontend import admitted, finished, tokens
from tests.support.router.fake_worker import PATIENCE_S
from tests.support.router.http_harness import DEADLINE_S, FACTS, HI, Api

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_completion(api: Api) -> None:
    answer = await api.client.completions.create(model="demo", prompt="Lyon is", seed=5, temperature=0.5, stop=["x"])
    assert answer.object == "text_completion"
    (choice,) = answer.choices
    assert (choice.index, choice.text, choice.finish_reason) == (0, "Hello world", "stop")
    (request,) = api.frontend.requests
    assert request.prompt == tuple(await api.encode("Lyon is"))
    assert (request.sampling.seed, request.sampling.temperature, request.sampling.stop) == (5, 0.5, ("x",))
    assert (request.sampling.max_tokens, request.arrived) == (16, api.clock.now)
    assert answer.id == f"cmpl-{request.request_id}"


async def test_a_request_arrives_with_its_body_and_not_when_it_was_read(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    came, begin_with = api.clock.now, Service.begin_with

    def slowly(self: Service, *given: Any) -> None:
        api.clock.advance(2.0)
        begin_with(self, *given)

    monkeypatch.setattr(Service, "begin_with", slowly)
    await api.client.chat.completions.create(model="demo", messages=HI)
    assert (api.frontend.requests[0].arrived, api.clock.now) == (came, came + 2.0)


async def test_usage_counts_prompt_output_and_cached_tokens(api: Api) -> None:
    api.frontend.script = lambda request: [admitted(request, cached=8), tokens("a"), finished(4, cached=3)]
    usage = (await api.client.completions.create(model="demo", prompt=[5, 6, 7, 8])).usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (4, 4, 8)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 3, "what the end says, not the admission"


async def test_chat_is_rendered_with_the_checkpoints_template(api: Api) -> None:
    answer = await api.client.chat.completions.create(model="demo", messages=HI, max_completion_tokens=4)
    assert answer.object == "chat.completion"
    assert (answer.choices[0].message.role, answer.choices[0].message.content) == ("assistant", "Hello world")
    (request,) = api.frontend.requests
    rendered = api.text.decode(request.prompt, skip_special_tokens=False)
    assert rendered == "<|bos|><|user|> Hi<|end|><|assistant|>"
    assert request.sampling.max_tokens == 4


async def test_chat_content_in_parts_is_joined(api: Api) -> None:
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}]
    await api.client.chat.completions.create(model="demo", messages=parts)
    await api.client.chat.completions.create(model="demo", messages=HI)
    assert api.frontend.requests[0].prompt == api.frontend.requests[1].prompt


async def test_streamed_completion(api: Api) -> None:
    stream = await api.client.completions.create(
        model="demo", prompt="a", stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert [[choice.text for choice in chunk.choices] for chunk in chunks] == [["Hello"], [" world"], [""], []]
    assert chunks[2].choices[0].finish_reason == "stop"
    assert [chunk.usage is None for chunk in chunks] == [True, True, True, False]
    assert {chunk.id for chunk in chunks} == {f"cmpl-{api.frontend.requests[0].request_id}"}


async def test_streamed_chat(api: Api) -> None:
    stream = await api.client.chat.completions.create(model="demo", messages=HI, stream=True)
    choices = [chunk.choices[0] async for chunk in stream]
    assert [(choice.delta.role, choice.delta.content, choice.finish_reason) for choice in choices] == [
        ("assistant", "", None),
        (None, "Hello", None),
        (None, " world", None),
        (None, None, "stop"),
    ]


async def test_text_is_streamed_as_it_comes(api: Api) -> None:
    go_on = asyncio.Event()
    api.frontend.script = lambda request: [admitted(request), tokens("Hello"), go_on, tokens("!"), finished(2)]
    stream = await api.client.completions.create(model="demo", prompt="a", stream=True)
    first = await anext(stream)
    assert (first.choices[0].text, go_on.is_set()) == ("Hello", False)
    go_on.set()
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "!"


async def test_several_prompts_and_sequences_keep_their_order(api: Api) -> None:
    api.frontend.script = lambda request: [
        admitted(request),
        tokens(f"{len(request.prompt)}b", index=1),
        tokens(f"{len(request.prompt)}a", index=0),
        finished(1, index=0),
        finished(1, index=1),
    ]
    answer = await api.client.completions.create(model="demo", prompt=[[5], [5, 6]], n=2)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "1a"), (1, "1b"), (2, "2a"), (3, "2b")]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 4)


async def test_when_one_of_several_prompts_fails_the_others_end(api: Api) -> None:
    never = asyncio.Event()
    api.frontend.script = lambda request: [
        admitted(request), never if len(request.prompt) == 1 else Unavailable("lost", 0.5)
    ]  # fmt: skip
    with pytest.raises(openai.InternalServerError, match="lost"):
        await api.client.completions.create(model="demo", prompt=[[5], [5, 6]])
    assert api.frontend.closed.is_set()


async def test_what_stopped_the_output_is_reported(api: Api) -> None:
    api.frontend.script = lambda request: [admitted(request), tokens("a"), finished(1, stop="END")]
    answer = await api.client.completions.create(model="demo", prompt="a")
    assert answer.choices[0].model_dump()["stop_reason"] == "END"


async def test_logprobs_of_a_completion(api: Api) -> None:
    a, b = (await api.encode("a"))[0], (await api.encode("b"))[0]
    given = TokenLogprobs(a, -0.5, ((a, -0.5), (b, -1.5)))
    api.frontend.script = lambda request: [admitted(request), tokens("a", a, logprobs=(given,)), finished(1)]
    logprobs = (await api.client.completions.create(model="demo", prompt="x", logprobs=2)).choices[0].logprobs
    assert logprobs is not None
    assert (logprobs.tokens, logprobs.token_logprobs, logprobs.text_offset) == (["a"], [-0.5], [0])
    assert logprobs.top_logprobs == [{"a": -0.5, "b": -1.5}]
    assert api.frontend.requests[0].sampling.logprobs == 2


async def test_logprobs_of_a_chat(api: Api) -> None:
    a, b = (await api.encode("a"))[0], (await api.encode("b"))[0]
    given = TokenLogprobs(a, -0.5, ((a, -0.5), (b, -1.5)))
    api.frontend.script = lambda request: [admitted(request), tokens("a", a, logprobs=(given,)), finished(1)]
    answer = await api.client.chat.completions.create(model="demo", messages=HI, logprobs=True, top_logprobs=2)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    (token,) = answer.choices[0].logprobs.content
    assert (token.token, token.logprob, token.bytes) == ("a", -0.5, [97])
    assert [(top.token, top.logprob) for top in token.top_logprobs] == [("a", -0.5), ("b", -1.5)]


async def test_the_sampled_token_is_among_the_likeliest_also_where_it_is_not_one_of_them(api: Api) -> None:
    a, b = (await api.encode("a"))[0], (await api.encode("b"))[0]
    entry = TokenLogprobs(b, -3.0, ((a, -0.5),))
    api.frontend.script = lambda request: [admitted(request), tokens("b", logprobs=(entry,)), finished(1)]
    (choice,) = (await api.client.completions.create(model="demo", prompt="x", logprobs=1)).choices
    assert choice.logprobs is not None
    assert choice.logprobs.top_logprobs == [{"a": -0.5, "b": -3.0}]
    api.frontend.script = lambda request: [
        admitted(request), tokens("b", logprobs=(TokenLogprobs(b, -3.0, ()),)), finished(1)
    ]  # fmt: skip
    (choice,) = (await api.client.completions.create(model="demo", prompt="x", logprobs=0)).choices
    assert choice.logprobs is not None
    assert choice.logprobs.top_logprobs == [{"b": -3.0}]


async def test_tokens_may_be_named_by_their_ids(api: Api) -> None:
    a, b = (await api.encode("a"))[0], (await api.encode("b"))[0]
    entry = TokenLogprobs(b, -3.0, ((a, -0.5),))
    api.frontend.script = lambda request: [admitted(request), tokens("b", logprobs=(entry,)), finished(1)]
    extra = {"return_tokens_as_token_ids": True}
    (choice,) = (await api.client.completions.create(model="demo", prompt="x", logprobs=1, extra_body=extra)).choices
    assert choice.logprobs is not None
    assert (choice.logprobs.tokens, choice.logprobs.top_logprobs) == (
        [f"token_id:{b}"], [{f"token_id:{a}": -0.5, f"token_id:{b}": -3.0}],
    )  # fmt: skip
    answer = await api.client.chat.completions.create(
        model="demo", messages=HI, logprobs=True, top_logprobs=1, extra_body=extra
    )
    assert answer.choices[0].logprobs is not None
    [token] = answer.choices[0].logprobs.content or []
    assert (token.token, token.bytes, token.top_logprobs[0].token) == (f"token_id:{b}", [98], f"token_id:{a}")


@pytest.mark.parametrize(("token", "named"), [(FACTS.eos_token_ids[0], None), (9, 9)])
async def test_only_a_stop_token_of_the_request_is_named_as_the_reason(api: Api, token: int, named: int | None) -> None:
    end = replace(finished(1), stop_token_id=token)
    api.frontend.script = lambda request: [admitted(request), tokens("b"), end]
    whole = await api.client.completions.create(model="demo", prompt="x", extra_body={"stop_token_ids": [9]})
    stream = await api.client.completions.create(model="demo", prompt="x", stream=True)
    last = [chunk.choices[0] async for chunk in stream][-1]
    assert [each.model_dump()["stop_reason"] for each in (whole.choices[0], last)] == [named, named]


async def test_fields_that_vllm_added_arrive(api: Api) -> None:
    extra = {
        "top_k": 3, "min_p": 0.5, "repetition_penalty": 1.5, "min_tokens": 1, "stop_token_ids": [9], "ignore_eos": True,
        "include_stop_str_in_output": True, "priority": 4, "cache_salt": "s", "return_token_ids": True,
    }  # fmt: skip
    answer = await api.client.completions.create(model="demo", prompt="a", logit_bias={"5": -1}, extra_body=extra)
    (request,) = api.frontend.requests
    sampling = request.sampling
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty, sampling.min_tokens) == (3, 0.5, 1.5, 1)
    assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.include_stop) == ((9,), True, True)
    assert (sampling.logit_bias, request.priority, request.salt) == (((5, -1.0),), 4, "s")
    assert answer.choices[0].model_dump()["token_ids"] == [7, 7]


async def test_models_lists_what_is_served(api: Api) -> None:
    models = await api.client.models.list()
    assert [model.id for model in models.data] == ["demo", "alias"]
    assert [model.model_dump()["root"] for model in models.data] == ["demo", "demo"]
    assert (await api.client.models.retrieve("alias")).id == "alias"
    assert (await api.client.completions.create(model="alias", prompt="a")).model == "demo"
    assert (await api.client.models.retrieve("demo")).model_dump()["max_model_len"] == FACTS.max_model_len


async def test_another_model_is_not_found(api: Api) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await api.client.completions.create(model="gpt-9", prompt="a")
    assert caught.value.body == {
        "message": "model 'gpt-9' is not served here; 'demo' is",
        "type": "invalid_request_error",
        "param": None,
        "code": "model_not_found",
    }


async def test_every_wrong_field_is_named_as_the_client_knows_it(api: Api) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await api.client.completions.create(model="demo", prompt=[1, 99999], top_p=2, n=70, stop="")
    assert caught.value.param == "top_p"
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["message"] == (
        "top_p: is 2; expected more than 0, at most 1 (1 keeps all tokens); n: is 70; expected 1 to 64; "
        "stop[0]: is empty; expected at least one character; prompt[1]: is 99999; expected a token id, 0 to "
        f"{FACTS.vocab_size - 1}"
    )


async def test_a_field_of_the_wrong_type_is_named(api: Api) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await api.client.completions.create(model="demo", prompt="a", temperature="warm")  # type: ignore[call-overload]
    assert (caught.value.param, caught.value.code) == ("temperature", "invalid_argument")


async def test_what_is_no_json_is_refused(api: Api) -> None:
    answer = await api.http.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"extra_body": {"chat_template": "{{ messages }}"}}, "chat_template: not offered; leave it out"),
        ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, r"messages\[0\].content: 'smell'"),
    ],
)
async def test_what_is_not_offered_is_refused_by_name(api: Api, fields: dict[str, Any], what: str) -> None:
    with pytest.raises(openai.BadRequestError, match=what) as caught:
        await api.client.chat.completions.create(**({"model": "demo", "messages": HI} | fields))
    assert caught.value.code == "unsupported"


async def test_unknown_fields_and_harmless_values_are_ignored(api: Api) -> None:
    extra = {"user": "me", "metadata": {}, "store": True, "service_tier": "auto", "echo": False, "best_of": 1}
    await api.client.completions.create(model="demo", prompt="a", extra_body=extra)
    assert len(api.frontend.requests) == 1


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "headers"),
    [
        (
            Overloaded(QuotaViolation("router.queue", "1024 of 1024"), 1.5),
            429, "rate_limit_error", "rate_limit_exceeded",
            {"retry-after": "2", "retry-after-ms": "1500", DROPPED: "rejected-saturated"},
        ),
        (
            Unavailable("no worker", 0.25),
            503, "server_error", "unavailable", {"retry-after": "1", "retry-after-ms": "250", DROPPED: None},
        ),
        (NoWorker("none"), 503, "server_error", "unavailable", {"retry-after": "1", DROPPED: "rejected-no-endpoints"}),
        (Draining("it stops"), 503, "server_error", "unavailable", {DROPPED: "rejected-shutting-down"}),
        (QueueExpired("too late"), 504, "server_error", "deadline_exceeded", {DROPPED: "rejected-ttl-expired"}),
        (
            DeadlineExceeded("cut short"), 504, "server_error", "deadline_exceeded",
            {"x-should-retry": "false", DROPPED: None},
        ),
        (AlreadyExists("in use"), 409, "invalid_request_error", "already_exists", {"x-should-retry": "false"}),
        (QuireError("broken"), 500, "server_error", "internal", {"x-should-retry": "false"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_has_its_status_and_says_when_to_try_again(
    api: Api, error: QuireError, status: int, kind: str, code: str, headers: dict[str, str | None], stream: bool
) -> None:
    api.frontend.script = lambda request: [error]
    answer = await api.http.post("/v1/completions", json={"prompt": "a", "stream": stream})
    assert answer.status_code == status
    assert answer.json()["error"] == {
        "message": str(error), "type": kind, "param": None, "code": code
    }  # fmt: skip
    assert {name: answer.headers.get(name) for name in headers} == headers


async def test_a_request_that_breaks_is_an_error_and_no_short_answer(api: Api) -> None:
    broken = finished(1, reason=FinishReason.ERROR, message="a step failed")
    api.frontend.script = lambda request: [admitted(request), tokens("a"), broken]
    with pytest.raises(openai.InternalServerError, match="a step failed"):
        await api.client.completions.create(model="demo", prompt="a")


async def test_an_error_in_mid_stream_reaches_the_client(api: Api) -> None:
    api.frontend.script = lambda request: [admitted(request), tokens("a"), Unavailable("the worker is gone")]
    stream = await api.client.completions.create(model="demo", prompt="a", stream=True)
    assert (await anext(stream)).choices[0].text == "a"
    with pytest.raises(openai.APIError, match="the worker is gone"):
        await anext(stream)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("begun", [False, True], ids=["queued", "begun"])
async def test_a_client_that_goes_away_ends_its_request(api: Api, stream: bool, begun: bool) -> None:
    never = asyncio.Event()
    api.frontend.script = lambda request: [admitted(request), tokens("a"), never] if begun else [never]
    asked = asyncio.create_task(api.http.post("/v1/completions", json={"prompt": "a", "stream": stream}))
    await asyncio.wait_for(api.frontend.reached.wait(), DEADLINE_S)
    assert not api.frontend.closed.is_set()
    asked.cancel()
    await asyncio.wait_for(api.frontend.closed.wait(), DEADLINE_S)


async def test_closing_a_stream_ends_its_request(api: Api) -> None:
    never = asyncio.Event()
    api.frontend.script = lambda request: [admitted(request), tokens("a"), never]
    stream = await api.client.completions.create(model="demo", prompt="a", stream=True)
    await anext(stream)
    await stream.close()
    await asyncio.wait_for(api.frontend.closed.wait(), DEADLINE_S)


async def test_health_distinguishes_ready_from_not_ready(api: Api) -> None:
    assert (await api.http.get("/health")).status_code == 200
    api.is_ready = False
    answer = await api.http.get("/health")
    why = {"status": "not ready", "reason": "no worker takes requests: none is known"}
    assert (answer.status_code, answer.json()) == (503, why)


@pytest.mark.parametrize("path", ["/health", "/ping", "/version", "/v1/models"])
async def test_head_has_the_status_of_get_and_no_body(path: str, api: Api) -> None:
    for ready in (True, False):
        api.is_ready = ready
        head, whole = await api.http.head(path), await api.http.get(path)
        assert (head.status_code, head.headers["content-length"]) == (whole.status_code, str(len(whole.content)))
        assert head.content == b""


async def test_metrics_are_not_for_clients(api: Api) -> None:
    assert (await api.http.get("/metrics")).status_code == 404


async def test_an_unknown_path_says_what_is_here(api: Api) -> None:
    answer = await api.http.get("/v2/completions")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].startswith("no such path; /v1/chat/completions")


async def test_stopping_cancels_what_outlives_the_grace() -> None:
    api, never = Api(), asyncio.Event()
    api.frontend.script = lambda request: [never]
    server = await serve_http(api.app, "127.0.0.1", 0, grace_s=1.0)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=PATIENCE_S) as http:
        asked = asyncio.create_task(http.post("/v1/completions", json={"prompt": "a"}))
        await asyncio.wait_for(api.frontend.reached.wait(), DEADLINE_S)
        await asyncio.wait_for(server.stop(), DEADLINE_S)
        assert api.frontend.closed.is_set()
        await asyncio.gather(asked, return_exceptions=True)
    await api.aclose()


async def test_a_port_in_use_is_a_configuration_error(api: Api) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidConfig, match=f"--port: cannot listen on 127.0.0.1:{port}"):
            await serve_http(api.app, "127.0.0.1", port)
