"""Keys on every API of a running router: who is refused and how, who sees what, limits, and keys that are revoked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from grpc import aio
from grpc_reflection.v1alpha import reflection_pb2

from common.contracts import errors
from quire.api.status import error_from_rpc
from quire.decision.v1 import decision_pb2, decision_pb2_grpc
from quire.inference.v1 import inference_pb2 as pb
from quire.kserve.v2 import kserve_pb2, kserve_pb2_grpc
from quire.vllm.v1 import control_pb2, control_pb2_grpc, engine_common_pb2, engine_pb2, engine_pb2_grpc
from quire.vllm.v1 import inference_pb2 as vllm_pb2
from quire.vllm.v1 import inference_pb2_grpc as vllm_pb2_grpc
from tests.support.lost_status import refusal_of
from tests.support.spans import called
from tests.support.suite import PATIENCE, greedy
from tests.support.tenants import TenantSuite, random_prompts, tenant_suite, write_tenants
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

OPTIONS = {
    "red": "",
    "blue": "streams = 1",
    "short": "sequences = 2",
    "elsewhere": 'models = ["other"]',
    "leaving": "",
    "boss": "admin = true",
}
(PROMPT,) = random_prompts(1, 32, seed=0)
# Tokens of a stream that a test ends: many seconds of them.
LONG = 4000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tenants(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TenantSuite]:
    async with tenant_suite(tmp_path_factory.mktemp("tenants"), OPTIONS) as running:
        yield running


def http(tenants: TenantSuite, tenant: str = "") -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {tenants.keys[tenant]}"} if tenant else {}
    return httpx.AsyncClient(base_url=tenants.suite.stack.http_url, headers=headers, timeout=PATIENCE)


async def refusal(call: Any) -> errors.QuireError:
    """Return the error of a call that is refused."""
    with pytest.raises(aio.AioRpcError) as refused:
        await call
    return error_from_rpc(refused.value)


async def first_of(call: Any) -> Any:
    return await call.read()


async def rest_of(call: Any) -> None:
    """Read a stream to its end."""
    while await call.read() is not aio.EOF:
        pass


async def test_without_a_key_no_method_that_works_for_clients_answers(tenants: TenantSuite) -> None:
    stub, request = tenants.suite.inference, greedy(PROMPT, 1)
    kserve = kserve_pb2_grpc.GRPCInferenceServiceStub(tenants.suite.channel)
    decisions = decision_pb2_grpc.DecisionServiceStub(tenants.suite.channel)
    generation = vllm_pb2_grpc.InferenceStub(tenants.suite.channel)
    control = control_pb2_grpc.ControlStub(tenants.suite.channel)
    engine = engine_pb2_grpc.VllmEngineStub(tenants.suite.channel)
    calls = [
        first_of(stub.Generate(request)),
        stub.GenerateUnary(pb.GenerateUnaryRequest(request=request)),
        stub.Tokenize(pb.TokenizeRequest(prompt=request.prompt)),
        stub.Detokenize(pb.DetokenizeRequest(token_ids=[5])),
        stub.GetModel(pb.GetModelRequest()),
        stub.GetStatus(pb.GetStatusRequest()),
        stub.GetLoads(pb.GetLoadsRequest()),
        stub.Abort(pb.AbortRequest(request_id="r")),
        first_of(stub.GetTokenizer(pb.GetTokenizerRequest())),
        decisions.ListDecisions(decision_pb2.ListDecisionsRequest(request_id="r")),
        decisions.GetTrace(decision_pb2.GetTraceRequest(request_id="r")),
        decisions.Explain(decision_pb2.ExplainRequest(request=request)),
        first_of(decisions.WatchDecisions(decision_pb2.WatchDecisionsRequest())),
        kserve.ModelInfer(kserve_pb2.ModelInferRequest(model_name="checkpoint")),
        kserve.ModelMetadata(kserve_pb2.ModelMetadataRequest(name="checkpoint")),
        kserve.ModelConfig(kserve_pb2.ModelConfigRequest(name="checkpoint")),
        generation.Generate(vllm_pb2.GenerateRequest(text="a")),
        first_of(generation.GenerateStream(vllm_pb2.GenerateRequest(text="a"))),
        *[
            getattr(control, each.name)(getattr(control_pb2, each.input_type.name)())
            for each in control_pb2.DESCRIPTOR.services_by_name["Control"].methods
        ],
        first_of(engine.Generate(engine_pb2.GenerateRequest(text="a"))),
        engine.Embed(engine_pb2.EmbedRequest()),
        engine.Abort(engine_pb2.AbortRequest()),
        engine.GetModelInfo(engine_pb2.GetModelInfoRequest()),
        engine.GetServerInfo(engine_pb2.GetServerInfoRequest()),
        engine.GetLoads(engine_pb2.GetLoadsRequest()),
        first_of(engine.GetTokenizer(engine_common_pb2.GetTokenizerRequest())),
        engine.FlushCache(engine_common_pb2.FlushCacheRequest()),
        engine.StartProfile(engine_common_pb2.StartProfileRequest()),
        engine.StopProfile(engine_common_pb2.StopProfileRequest()),
        first_of(engine.SubscribeKvEvents(engine_common_pb2.SubscribeKvEventsRequest())),
    ]
    inferred = kserve_pb2.ModelInferRequest(model_name="checkpoint")
    streamed = await refusal_of(lambda: first_of(kserve.ModelStreamInfer(iter([inferred]))))
    found = [*[await refusal(call) for call in calls], error_from_rpc(streamed)]
    assert {type(each) for each in found} == {errors.Unauthenticated}
    assert {str(each).partition(";")[0] for each in found} == {"no key"}


async def test_http_answers_401_before_it_reads_a_body_and_probes_need_no_key(tenants: TenantSuite) -> None:
    async with http(tenants) as client:
        for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("POST", "/tokenize"), ("GET", "/x")):
            answer = await client.request(method, path, content=b"{" * 1000)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert {(await client.get(path)).status_code for path in ("/health", "/ping", "/version")} == {200}


async def test_a_key_opens_every_face(tenants: TenantSuite) -> None:
    assert len((await tenants.ask("red", greedy(PROMPT, 3))).tokens) == 3
    async with http(tenants, "red") as client:
        answer = await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 3, "ignore_eos": True})
        assert answer.status_code == 200
        assert (await client.get("/v1/models")).status_code == 200
    kserve = kserve_pb2_grpc.GRPCInferenceServiceStub(tenants.suite.channel)
    request = kserve_pb2.ModelMetadataRequest(name="checkpoint")
    assert (await kserve.ModelMetadata(request, metadata=tenants.metadata("red"))).name == "checkpoint"


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_needs_a_key(tenants: TenantSuite, version: str) -> None:
    ask = tenants.suite.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    assert isinstance(error_from_rpc(await refusal_of(lambda: first_of(ask(iter([asked]))))), errors.Unauthenticated)
    listed = await first_of(ask(iter([asked]), metadata=tenants.metadata("red")))
    assert "quire.inference.v1.InferenceService" in {each.name for each in listed.list_services_response.service}


async def test_a_gateway_ends_requests_of_its_own_tenant_alone(tenants: TenantSuite) -> None:
    """Two tenants use one id; the abort of a third one ends neither, and that of each ends its own."""
    generation = vllm_pb2_grpc.InferenceStub(tenants.suite.channel)
    control = control_pb2_grpc.ControlStub(tenants.suite.channel)
    engine = engine_pb2_grpc.VllmEngineStub(tenants.suite.channel)
    stopping = vllm_pb2.StoppingCriteria(max_new_tokens=LONG, ignore_eos=True)
    request = vllm_pb2.GenerateRequest(request_id="one-id", token_ids=vllm_pb2.TokenIds(ids=PROMPT), stopping=stopping)
    running = {
        each: generation.GenerateStream(request, timeout=PATIENCE, metadata=tenants.metadata(each))
        for each in ("red", "blue")
    }
    for call in running.values():
        await first_of(call)
    for tenant, owner in (("short", ""), ("red", "red"), ("blue", "blue")):
        if tenant == "blue":
            await engine.Abort(engine_pb2.AbortRequest(request_ids=["one-id"]), metadata=tenants.metadata(tenant))
        else:
            await control.Abort(control_pb2.AbortRequest(request_ids=["one-id"]), metadata=tenants.metadata(tenant))
        if owner:
            with pytest.raises(aio.AioRpcError) as ended:
                await rest_of(running.pop(owner))
            assert ended.value.code() is grpc.StatusCode.CANCELLED
        assert not any(call.done() for call in running.values())


async def test_a_salt_of_a_gateway_joins_its_tenants_domain(tenants: TenantSuite) -> None:
    """Two tenants with one salt share nothing; one tenant's two salts share nothing; no prefix cache, no hit."""
    (prompt,) = random_prompts(1, 64, seed=9)
    generation = vllm_pb2_grpc.InferenceStub(tenants.suite.channel)

    async def cached(tenant: str, salt: str, bypass: bool = False) -> int:
        request = vllm_pb2.GenerateRequest(
            token_ids=vllm_pb2.TokenIds(ids=prompt),
            stopping=vllm_pb2.StoppingCriteria(max_new_tokens=1),
            kv=vllm_pb2.KVCacheParameters(cache_salt=salt, bypass_prefix_cache=bypass),
        )
        answer = await generation.Generate(request, timeout=PATIENCE, metadata=tenants.metadata(tenant))
        return answer.outputs.finish_info.num_cached_tokens

    assert await cached("red", "pepper") == 0
    assert await cached("red", "pepper") > 0
    assert await cached("blue", "pepper") == 0
    assert await cached("red", "salt") == 0
    assert await cached("red", "pepper", bypass=True) == 0


async def test_health_needs_no_key(tenants: TenantSuite) -> None:
    kserve = kserve_pb2_grpc.GRPCInferenceServiceStub(tenants.suite.channel)
    assert (await kserve.ServerLive(kserve_pb2.ServerLiveRequest())).live
    assert (await kserve.ServerReady(kserve_pb2.ServerReadyRequest())).ready
    assert (await kserve.ModelReady(kserve_pb2.ModelReadyRequest(name="checkpoint"))).ready
    engine = engine_pb2_grpc.VllmEngineStub(tenants.suite.channel)
    assert (await engine.HealthCheck(engine_pb2.HealthCheckRequest())).healthy


async def seen(tenants: TenantSuite, tenant: str, request_id: str, tokens: int) -> None:
    """Let a tenant ask for so many tokens under this id; wait for its trace, and check that it is of this request."""
    request = greedy(PROMPT, tokens)
    request.request_id = request_id
    assert len((await tenants.ask(tenant, request)).tokens) == tokens
    public, metadata = decision_pb2_grpc.DecisionServiceStub(tenants.suite.channel), tenants.metadata(tenant)
    names: list[str] = []
    async with asyncio.timeout(PATIENCE):
        while "inference" not in names:
            with suppress(aio.AioRpcError):
                answer = await public.GetTrace(decision_pb2.GetTraceRequest(request_id=request_id), metadata=metadata)
                names = [called(span) for span in answer.spans]
            await asyncio.sleep(0.02)
    (root,) = [span for span in answer.spans if called(span) == "inference"]
    assert (root.attributes["quire.tenant"], root.attributes["quire.max_tokens"]) == (tenant, str(tokens))


async def test_a_tenant_sees_its_own_requests_alone_and_an_admin_those_of_all(tenants: TenantSuite) -> None:
    """Two tenants may use one id; a third one learns nothing from it."""
    for tenant, tokens in (("red", 2), ("blue", 3)):
        await seen(tenants, tenant, "same", tokens)
    await seen(tenants, "red", "mine", 2)
    public = decision_pb2_grpc.DecisionServiceStub(tenants.suite.channel)

    async def listed(who: str, **filters: str) -> set[str]:
        request = decision_pb2.ListDecisionsRequest(**filters)  # type: ignore[arg-type]
        answer = await public.ListDecisions(request, metadata=tenants.metadata(who))
        return {record.tenant for record in answer.decisions}

    assert [await listed(each, request_id="same") for each in ("red", "blue", "short")] == [{"red"}, {"blue"}, set()]
    assert await listed("blue", request_id="same", tenant="red") == {"blue"}
    assert await listed("boss", request_id="same") == {"red", "blue"}
    assert {"red", "blue"} <= await listed("boss")
    assert await listed("boss", tenant="red") == {"red"}
    for named in (decision_pb2.GetTraceRequest(request_id="mine"), decision_pb2.GetTraceRequest(request_id="same")):
        assert isinstance(await refusal(public.GetTrace(named, metadata=tenants.metadata("short"))), errors.NotFound)
    mine = await public.GetTrace(decision_pb2.GetTraceRequest(request_id="mine"), metadata=tenants.metadata("boss"))
    by_trace = decision_pb2.GetTraceRequest(trace_id=mine.trace_id)
    assert (await public.GetTrace(by_trace, metadata=tenants.metadata("boss"))).spans
    assert isinstance(await refusal(public.GetTrace(by_trace, metadata=tenants.metadata("red"))), errors.InvalidRequest)


async def test_a_dry_run_is_of_the_caller_and_an_operator_names_the_tenant(tenants: TenantSuite) -> None:
    (prompt,) = random_prompts(1, 96, seed=7)
    await tenants.ask("red", greedy(prompt, 2))
    public = decision_pb2_grpc.DecisionServiceStub(tenants.suite.channel)

    def asked(tenant: str = "") -> decision_pb2.ExplainRequest:
        return decision_pb2.ExplainRequest(request=greedy(prompt, 2), tenant=tenant)

    async def cached(call: Any) -> int:
        return int((await call).cached_tokens)

    red, blue, boss = (tenants.metadata(tenant) for tenant in ("red", "blue", "boss"))
    assert await cached(public.Explain(asked(), metadata=red)) == 80
    # The name of another tenant counts for nothing: each has cache domains of its own.
    assert await cached(public.Explain(asked("red"), metadata=blue)) == 0
    assert await cached(public.Explain(asked("red"), metadata=boss)) == 80
    assert await cached(tenants.suite.decisions.Explain(asked("red"))) == 80
    assert await cached(tenants.suite.decisions.Explain(asked("blue"))) == 0
    wrong = await refusal(tenants.suite.decisions.Explain(asked()))
    assert isinstance(wrong, errors.InvalidRequest)
    assert "name the tenant that would send it: blue, boss, " in str(wrong)
    short = decision_pb2.ExplainRequest(request=greedy(prompt, 2))
    short.request.sampling.n = 3
    refused = await public.Explain(short, metadata=tenants.metadata("short"))
    assert (refused.outcome, refused.reason.partition(":")[0]) == ("refused", "tenant short.sequences")


async def test_decisions_are_watched_by_admin_tenants_alone(tenants: TenantSuite) -> None:
    public = decision_pb2_grpc.DecisionServiceStub(tenants.suite.channel)
    request = decision_pb2.WatchDecisionsRequest(kind="outcome")
    denied = await refusal(first_of(public.WatchDecisions(request, metadata=tenants.metadata("red"))))
    assert isinstance(denied, errors.PermissionDenied)
    watch = public.WatchDecisions(request, metadata=tenants.metadata("boss"), timeout=PATIENCE)
    assert (await first_of(watch)).position.source
    await tenants.ask("red", greedy(PROMPT, 1))
    (found,) = (await first_of(watch)).decisions
    assert (found.tenant, found.kind) == ("red", "outcome")
    watch.cancel()


async def test_where_workers_listen_is_for_admin_tenants(tenants: TenantSuite) -> None:
    status = tenants.suite.inference.GetStatus
    addresses = {
        tenant: [
            each.address for each in (await status(pb.GetStatusRequest(), metadata=tenants.metadata(tenant))).workers
        ]
        for tenant in ("red", "boss")
    }
    assert addresses["red"] == [""]
    assert addresses["boss"][0].startswith("127.0.0.1:")


async def test_how_much_others_send_is_for_admin_tenants(tenants: TenantSuite) -> None:
    """Start, length and end of a request of one tenant would be seen by another that asks for the status meanwhile."""
    status = tenants.suite.inference.GetStatus
    metadata = tenants.metadata("blue")
    call = tenants.suite.inference.Generate(greedy(PROMPT, 2000), timeout=PATIENCE, metadata=metadata)
    try:
        await call.read()
        of_admin, request = tenants.metadata("boss"), pb.GetStatusRequest()
        await until(lambda: status(request, metadata=of_admin), lambda found: found.running_requests)
        seen = await status(request, metadata=tenants.metadata("red"))
    finally:
        call.cancel()
    (worker,) = seen.workers
    assert (worker.state, worker.num_blocks > 0, worker.max_num_seqs > 0) == ("connected", True, True)
    assert (seen.queued_requests, seen.running_requests) == (0, 0)
    assert (worker.running_sequences, worker.waiting_sequences, worker.unheld_blocks) == (0, 0, 0)
    assert (worker.prefill_tokens_per_second, worker.decode_step_seconds) == (0.0, 0.0)
    await tenants.suite.until_all_free(1)


async def test_a_tenant_of_another_model_is_denied(tenants: TenantSuite) -> None:
    call = tenants.suite.inference.Generate(greedy(PROMPT, 1), metadata=tenants.metadata("elsewhere"))
    assert isinstance(await refusal(first_of(call)), errors.PermissionDenied)
    async with http(tenants, "elsewhere") as client:
        assert (await client.get("/v1/models")).status_code == 403


async def test_a_domain_that_nobody_opened_is_denied(tenants: TenantSuite) -> None:
    request = greedy(PROMPT, 1)
    request.cache.shared_domain = "open"
    call = tenants.suite.inference.Generate(request, metadata=tenants.metadata("red"))
    assert isinstance(await refusal(first_of(call)), errors.PermissionDenied)


async def test_more_than_a_limit_is_refused_with_a_time_to_try_again(tenants: TenantSuite) -> None:
    call = tenants.suite.inference.Generate(greedy(PROMPT, LONG), metadata=tenants.metadata("blue"))
    await call.read()
    refused = await refusal(
        first_of(tenants.suite.inference.Generate(greedy(PROMPT, 1), metadata=tenants.metadata("blue")))
    )
    assert isinstance(refused, errors.Overloaded)
    assert refused.violation.subject == "tenant blue.streams"
    async with http(tenants, "blue") as client:
        answer = await client.post("/v1/completions", json={"prompt": PROMPT})
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert float(answer.headers["retry-after"]) >= 1
    call.cancel()
    await tenants.suite.until_all_free(1)


async def test_each_prompt_of_a_list_counts_as_its_sequences(tenants: TenantSuite) -> None:
    async with http(tenants, "short") as client:
        body = {"prompt": random_prompts(3, 16, seed=1), "max_tokens": 2}
        assert (await client.post("/v1/completions", json=body)).status_code == 429
        assert (await client.post("/v1/completions", json={"prompt": PROMPT, "n": 3})).status_code == 429
        answer = await client.post("/v1/completions", json={"prompt": PROMPT, "n": 2, "max_tokens": 2})
        assert answer.status_code == 200


async def test_a_revoked_key_ends_open_streams_and_those_of_others_go_on(tenants: TenantSuite) -> None:
    stub = tenants.suite.inference
    revoked, other = (
        stub.Generate(greedy(PROMPT, LONG), metadata=tenants.metadata(name), timeout=PATIENCE)
        for name in ("leaving", "red")
    )
    # The third stream is not read: its place at the worker is free all the same.
    unread = stub.Generate(greedy(PROMPT, LONG), metadata=tenants.metadata("leaving"), timeout=PATIENCE)
    for call in (revoked, other, unread):
        await call.read()
    left = {name: key for name, key in tenants.keys.items() if name != "leaving"}
    write_tenants(tenants.file, left, OPTIONS)

    async def drained() -> None:
        while await revoked.read() is not aio.EOF:
            pass

    error = await refusal(asyncio.wait_for(drained(), PATIENCE))
    assert isinstance(error, errors.Unauthenticated)
    assert "revoked" in str(error)
    assert isinstance(await refusal(first_of(stub.Generate(greedy(PROMPT, 1), metadata=tenants.metadata("leaving")))),
                      errors.Unauthenticated)  # fmt: skip
    event = await other.read()
    assert event is not aio.EOF
    other.cancel()
    await tenants.suite.until_all_free(1)
