"""Each kind of wrong request over each API of a real router: a counter, a line, a record by its id, and the id."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from cli.suite.programs import metrics_addresses
from common.contracts.limits import ALIKE_REFUSALS_BURST, ALIKE_REFUSALS_PER_SECOND, MAX_PUBLIC_MESSAGE_BYTES
from quire.api.status import DETAILS_KEY
from quire.decision.v1 import decision_pb2, decision_pb2_grpc
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc
from quire.kserve.v2 import kserve_pb2, kserve_pb2_grpc
from quire.types.v1 import types_pb2
from quire.vllm.v1 import control_pb2, control_pb2_grpc, engine_pb2, engine_pb2_grpc
from quire.vllm.v1 import inference_pb2 as vllm_pb2
from quire.vllm.v1 import inference_pb2_grpc as vllm_pb2_grpc
from tests.support.suite import PATIENCE, greedy
from tests.support.tenants import TenantSuite, tenant_suite
from tests.support.waiting import until
from tests.support.why import quire_why

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECRET = "xyzzy-the-words-of-a-user"
OWN_ID = re.compile(r"quire-[0-9a-f]{32}")
GENERATE = "quire.inference.v1.InferenceService/Generate"
INFER, STREAM = (f"inference.GRPCInferenceService/{name}" for name in ("ModelInfer", "ModelStreamInfer"))


@dataclass(frozen=True)
class Seen:
    """What a client got: its code, the ids under which it may ask, and the reason where the answer has one."""

    code: str
    shown_id: str
    own_id: str
    reason: str = ""
    pushback: str = ""


Ask = Callable[[TenantSuite, str], Awaitable[Seen]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tenants(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TenantSuite]:
    slow = dict.fromkeys(("openai", "responses", "anthropic", "grpc", "kserve", "vllm"), "requests_per_minute = 1")
    options = {"red": "", "blue": ""} | slow
    async with tenant_suite(tmp_path_factory.mktemp("refused"), options) as running:
        yield running


def http(path: str, tenant: str = "red", method: str = "POST", content: bytes | None = None, **body: Any) -> Ask:
    async def ask(tenants: TenantSuite, client_id: str) -> Seen:
        headers = {"authorization": f"Bearer {tenants.keys.get(tenant, SECRET)}", "content-type": "application/json"}
        if client_id:
            headers["x-request-id"] = client_id
        async with httpx.AsyncClient(base_url=tenants.suite.stack.http_url, timeout=PATIENCE) as client:
            given: dict[str, Any] = {"json": body} if content is None else {"content": content}
            answer = await client.request(method, path, headers=headers, **given)
        ids = answer.headers["x-request-id"], answer.headers["x-quire-request-id"]
        return Seen(str(answer.status_code), *ids)

    return ask


def seen_of(code: str, trailers: Any) -> Seen:
    """Return what the trailers of a call say; the details of its status agree with them."""
    found = dict(trailers or ())
    info, request = error_details_pb2.ErrorInfo(), error_details_pb2.RequestInfo()
    for detail in status_pb2.Status.FromString(found[DETAILS_KEY]).details if DETAILS_KEY in found else ():
        for kind in (info, request):
            if detail.Is(kind.DESCRIPTOR):
                detail.Unpack(kind)
    ids = found["x-request-id"], found["x-quire-request-id"]
    if DETAILS_KEY in found:
        assert (request.request_id, request.serving_data) == ids
        assert info.domain == "quire"
    return Seen(code, *ids, info.reason, found.get("grpc-retry-pushback-ms", ""))


def rpc(name: str, stub: Any, message: Any, tenant: str = "red", streams: bool = False) -> Ask:
    async def ask(tenants: TenantSuite, client_id: str) -> Seen:
        metadata = [("authorization", f"Bearer {tenants.keys.get(tenant, SECRET)}")]
        if client_id:
            metadata.append(("x-request-id", client_id))
        given = message() if callable(message) else message
        call = getattr(stub(tenants.suite.channel), name)(given, metadata=metadata, timeout=PATIENCE)
        try:
            if streams:
                async for _ in call:
                    pass
            else:
                await call
        except grpc.aio.AioRpcError as error:
            return seen_of(error.code().name, error.trailing_metadata())
        return seen_of("OK", await call.trailing_metadata())

    return ask


def prompt(text: str = SECRET, **sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt=pb.Prompt(text=text), sampling=types_pb2.SamplingParams(**sampling))


def infer(model: str = "checkpoint", **parameters: int) -> kserve_pb2.ModelInferRequest:
    request = kserve_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(SECRET.encode())
    for name, value in parameters.items():
        request.parameters[name].int64_param = value
    return request


def asked(**fields: Any) -> vllm_pb2.GenerateRequest:
    return vllm_pb2.GenerateRequest(text=SECRET, **fields)


CHAT = [{"role": "user", "content": SECRET}]
VLLM, CONTROL = vllm_pb2_grpc.InferenceStub, control_pb2_grpc.ControlStub
ENGINE = engine_pb2_grpc.VllmEngineStub
INFERENCE, KSERVE = inference_pb2_grpc.InferenceServiceStub, kserve_pb2_grpc.GRPCInferenceServiceStub
LONG = "a b c d " * 40_000
COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/messages"
# name: (api, method, code, reason, how to ask)
KINDS: dict[str, tuple[str, str, str, str, Ask]] = {
    "wrong field, chat": ("openai", COMPLETIONS, "400", "INVALID_FIELD", http(COMPLETIONS, messages=CHAT, top_p=9)),
    "wrong type, chat": ("openai", COMPLETIONS, "400", "INVALID_FIELD", http(COMPLETIONS, messages=SECRET)),
    "no JSON": ("openai", COMPLETIONS, "400", "MALFORMED", http(COMPLETIONS, content=f"[{SECRET}".encode())),
    "half a character": (
        "openai", "/v1/completions", "400", "MALFORMED", http("/v1/completions", content=b'{"prompt": "\\ud800"}')),
    "too long": (
        "openai", "/v1/completions", "400", "CONTEXT_LENGTH_EXCEEDED", http("/v1/completions", prompt=LONG)),
    "other model": ("openai", COMPLETIONS, "404", "MODEL_NOT_FOUND", http(COMPLETIONS, model=SECRET, messages=CHAT)),
    "other model by path": (
        "openai", "/v1/models/{name:path}", "404", "MODEL_NOT_FOUND", http(f"/v1/models/{SECRET}", method="GET")),
    "not offered": (
        "openai", "/v1/completions", "400", "UNSUPPORTED", http("/v1/completions", prompt=SECRET, best_of=3)),
    "no key, embeddings": (
        "openai", "/v1/embeddings", "401", "UNAUTHENTICATED", http("/v1/embeddings", tenant="", input=SECRET)),
    "wrong field, tokenize": ("openai", "/tokenize", "400", "INVALID_FIELD", http("/tokenize", prompt={})),
    "wrong field, responses": (
        "openai", "/v1/responses", "400", "INVALID_FIELD", http("/v1/responses", input=SECRET, temperature=-1)),
    "no response": (
        "openai", "/v1/responses/{response_id}", "404", "NOT_FOUND", http(f"/v1/responses/{SECRET}", method="GET")),
    "no path": ("openai", "unknown", "404", "UNKNOWN_PATH", http(f"/v1/{SECRET}")),
    "no method": ("openai", COMPLETIONS, "405", "METHOD_NOT_ALLOWED", http(COMPLETIONS, method="GET")),
    "rate, responses": (
        "openai", "/v1/responses", "429", "RATE_LIMITED",
        http("/v1/responses", "responses", input="a", max_output_tokens=1)),
    "rate, chat": (
        "openai", COMPLETIONS, "429", "RATE_LIMITED", http(COMPLETIONS, "openai", messages=CHAT, max_tokens=1)),
    "wrong field, messages": (
        "anthropic", MESSAGES, "400", "INVALID_FIELD", http(MESSAGES, messages=CHAT, max_tokens=1, model="checkpoint",
                                                            temperature=-3)),
    "no key, messages": (
        "anthropic", MESSAGES, "401", "UNAUTHENTICATED", http(MESSAGES, tenant="", messages=CHAT, max_tokens=1)),
    "other model, messages": (
        "anthropic", f"{MESSAGES}/count_tokens", "404", "MODEL_NOT_FOUND",
        http(f"{MESSAGES}/count_tokens", messages=CHAT, model=SECRET)),
    "rate, messages": (
        "anthropic", MESSAGES, "429", "RATE_LIMITED",
        http(MESSAGES, "anthropic", messages=CHAT, max_tokens=1, model="checkpoint")),
    "wrong field, Generate": (
        "grpc", GENERATE, "INVALID_ARGUMENT", "INVALID_FIELD",
        rpc("Generate", INFERENCE, prompt(top_p=7), streams=True)),
    "too long, Generate": (
        "grpc", GENERATE, "INVALID_ARGUMENT", "CONTEXT_LENGTH_EXCEEDED",
        rpc("Generate", INFERENCE, prompt(LONG), streams=True)),
    "no key, Generate": (
        "grpc", GENERATE, "UNAUTHENTICATED", "UNAUTHENTICATED", rpc("Generate", INFERENCE, prompt(), "", streams=True)),
    "rate, Generate": (
        "grpc", GENERATE, "RESOURCE_EXHAUSTED", "RATE_LIMITED",
        rpc("Generate", INFERENCE, prompt(max_tokens=1), "grpc", True)),
    "wrong field, Tokenize": (
        "grpc", "quire.inference.v1.InferenceService/Tokenize", "INVALID_ARGUMENT", "INVALID_FIELD",
        rpc("Tokenize", INFERENCE, pb.TokenizeRequest())),
    "wrong field, Embed": (
        "grpc", "quire.inference.v1.InferenceService/Embed", "INVALID_ARGUMENT", "INVALID_FIELD",
        rpc("Embed", INFERENCE, pb.EmbedRequest())),
    "not allowed, GetLoads": (
        "grpc", "quire.inference.v1.InferenceService/GetLoads", "PERMISSION_DENIED", "PERMISSION_DENIED",
        rpc("GetLoads", INFERENCE, pb.GetLoadsRequest())),
    "wrong field, ModelInfer": (
        "kserve", INFER, "INVALID_ARGUMENT", "INVALID_FIELD", rpc("ModelInfer", KSERVE, infer(n=0))),
    "other model, ModelInfer": (
        "kserve", INFER, "NOT_FOUND", "MODEL_NOT_FOUND", rpc("ModelInfer", KSERVE, infer(SECRET))),
    "no key, ModelInfer": (
        "kserve", INFER, "UNAUTHENTICATED", "UNAUTHENTICATED", rpc("ModelInfer", KSERVE, infer(), "")),
    "rate, ModelInfer": (
        "kserve", INFER, "RESOURCE_EXHAUSTED", "RATE_LIMITED",
        rpc("ModelInfer", KSERVE, infer(max_tokens=1), "kserve")),
    "wrong field, vLLM": (
        "vllm", "vllm.Inference/Generate", "INVALID_ARGUMENT", "INVALID_FIELD",
        rpc("Generate", VLLM, asked(decoding=vllm_pb2.DecodingParameters(structural_tag=SECRET)))),
    "other adapter, vLLM": (
        "vllm", "vllm.Inference/Generate", "NOT_FOUND", "MODEL_NOT_FOUND",
        rpc("Generate", VLLM, asked(lora_name=SECRET))),
    "other model, vLLM": (
        "vllm", "vllm.Inference/Generate", "NOT_FOUND", "MODEL_NOT_FOUND", rpc("Generate", VLLM, asked(model=SECRET))),
    "not offered, vLLM": (
        "vllm", "vllm.Control/LoadLora", "UNIMPLEMENTED", "UNSUPPORTED",
        rpc("LoadLora", CONTROL, control_pb2.LoadLoraRequest(lora_name=SECRET))),
    "no key, vLLM": (
        "vllm", "vllm.Control/GetServerInfo", "UNAUTHENTICATED", "UNAUTHENTICATED",
        rpc("GetServerInfo", CONTROL, control_pb2.GetServerInfoRequest(), "")),
    "rate, vLLM": (
        "vllm", "vllm.Inference/Generate", "RESOURCE_EXHAUSTED", "RATE_LIMITED",
        rpc("Generate", VLLM, asked(stopping=vllm_pb2.StoppingCriteria(max_new_tokens=1)), "vllm")),
    "wrong field, engine of vLLM": (
        "vllm", "vllm.grpc.engine.VllmEngine/Generate", "INVALID_ARGUMENT", "INVALID_FIELD",
        rpc("Generate", ENGINE, engine_pb2.GenerateRequest(text=SECRET, data_parallel_rank=3), streams=True)),
}  # fmt: skip


async def counted(tenants: TenantSuite, *labels: str) -> float:
    """Return how many refusals the router has counted under api, method, code and reason."""
    wanted = dict(zip(("api", "method", "code", "reason"), labels, strict=True))
    return await figure(tenants, "quire:refusals_total", wanted)


async def figure(tenants: TenantSuite, name: str, labels: Mapping[str, str]) -> float:
    (address,) = metrics_addresses(tenants.suite.stack.options)
    async with httpx.AsyncClient(timeout=PATIENCE) as client:
        text = (await client.get(f"http://{address}/metrics")).text
    samples = (each for family in text_string_to_metric_families(text) for each in family.samples)
    return sum(each.value for each in samples if each.name == name and labels.items() <= each.labels.items())


async def records(tenants: TenantSuite, request_id: str) -> list[decision_pb2.DecisionRecord]:
    """Return the records of a request, once there is one: a client may have its status before that."""
    return await until(lambda: records_now(tenants, request_id))


async def records_now(tenants: TenantSuite, request_id: str) -> list[decision_pb2.DecisionRecord]:
    wanted = decision_pb2.ListDecisionsRequest(request_id=request_id)
    return list((await tenants.suite.decisions.ListDecisions(wanted, timeout=PATIENCE)).decisions)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_refused_request_is_counted_logged_recorded_and_has_its_id(tenants: TenantSuite, kind: str) -> None:
    *labels, ask = KINDS[kind]
    api, _, code, reason = labels
    for attempt in itertools.count():
        before, lines = await counted(tenants, *labels), len(tenants.suite.lines)
        client_id = f"gateway {kind} {attempt}"
        seen = await ask(tenants, client_id)
        if seen.code == code:
            break  # the other one was the request of this minute
        assert kind.startswith("rate")
    assert seen.shown_id == client_id
    assert OWN_ID.fullmatch(seen.own_id)
    if api in ("grpc", "kserve", "vllm"):
        assert seen.reason == reason
        assert bool(seen.pushback) == (reason == "RATE_LIMITED")
    await until(lambda: counted(tenants, *labels), lambda now: now == before + 1)
    for name in (seen.own_id, client_id):
        (record,) = await records(tenants, name)
        assert (record.kind, record.request_id) == ("rejection", seen.own_id)
        assert SECRET not in str(record)
    said = await until(lambda: [each for each in tenants.suite.lines[lines:] if seen.own_id in each])
    assert len(said) == 1
    assert reason in said[0]
    assert SECRET not in said[0]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("rate")])
async def test_a_tenant_over_its_own_rate_is_no_failure_that_pages(tenants: TenantSuite, kind: str) -> None:
    async def failures() -> tuple[float, ...]:
        reasons = ("RATE_LIMITED", "OVERLOADED", "UNAVAILABLE", "INTERNAL")
        return tuple([await figure(tenants, "quire:request_failure_total", {"reason": each}) for each in reasons])

    before = await failures()
    while (await KINDS[kind][4](tenants, "")).code not in ("429", "RESOURCE_EXHAUSTED"):
        before = await failures()  # that was the request of this minute
    limited, *others = await failures()
    assert (limited, others) == (before[0] + 1, list(before[1:]))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("wrong field, chat", "sampling.top_p: is 9"),
        ("no key, Generate", "Refused at once with UNAUTHENTICATED: it showed no key"),
        ("other model", "Refused at once with MODEL_NOT_FOUND: the model that it names is not served here"),
        ("rate, ModelInfer", "requests_per_minute"),
        ("no path", "404 to openai unknown"),
    ],
)
async def test_quire_why_finds_a_refused_request_by_its_own_id_and_by_its_clients(
    tenants: TenantSuite, kind: str, words: str
) -> None:
    *_, code, _, ask = KINDS[kind]
    for attempt in itertools.count():
        seen = await ask(tenants, f"why-{kind.replace(' ', '-')}-{attempt}")
        if seen.code == code:
            break  # the other one was the request of this minute
        assert kind.startswith("rate")
    for name in (seen.own_id, seen.shown_id):
        status, out, err = await quire_why(tenants.suite, name)
        assert (status, err) == (0, "")
        assert words in " ".join(out.split())


async def test_a_client_finds_its_refused_request_by_the_routers_id_alone(tenants: TenantSuite) -> None:
    """Another client could guess the other name."""
    seen = await KINDS["other model"][4](tenants, "easy-to-guess")
    public = decision_pb2_grpc.DecisionServiceStub(tenants.suite.channel)

    async def found(name: str, tenant: str) -> list[str]:
        asked = decision_pb2.ListDecisionsRequest(request_id=name)
        answer = await public.ListDecisions(asked, metadata=tenants.metadata(tenant), timeout=PATIENCE)
        return [each.chosen for each in answer.decisions]

    assert await found(seen.own_id, "red") == ["MODEL_NOT_FOUND"]
    assert await found(seen.own_id, "blue") == []
    assert await found(seen.shown_id, "red") == []


async def test_an_id_that_the_message_gives_goes_before_the_one_in_metadata(tenants: TenantSuite) -> None:
    request = prompt(top_p=7)
    request.request_id = "chosen-by-me"
    seen = await rpc("Generate", INFERENCE, request, streams=True)(tenants, "of-a-gateway")
    assert (seen.shown_id, seen.own_id) == ("chosen-by-me", "chosen-by-me")
    assert {each.request_id for each in await records(tenants, "of-a-gateway")} == {"chosen-by-me"}


async def test_a_client_cannot_refuse_a_request_in_the_name_of_the_routers_own_ids(tenants: TenantSuite) -> None:
    taken = "quire-" + "0" * 32
    request = prompt()
    request.request_id = taken
    seen = await rpc("Generate", INFERENCE, request, streams=True)(tenants, taken)
    assert (seen.code, seen.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
    assert OWN_ID.fullmatch(seen.own_id)
    assert seen.own_id != taken
    assert [each.request_id for each in await records(tenants, seen.own_id)] == [seen.own_id]


async def test_an_id_in_metadata_is_cut_and_cleaned_as_in_a_header(tenants: TenantSuite) -> None:
    seen = await KINDS["wrong field, Tokenize"][4](tenants, "n" * 500)
    assert seen.shown_id == "n" * 128


async def test_a_call_that_is_served_has_its_ids_in_its_trailers_too(tenants: TenantSuite) -> None:
    seen = await rpc("Generate", INFERENCE, greedy([5, 6, 7], 2), streams=True)(tenants, "served")
    assert (seen.code, seen.shown_id) == ("OK", "served")
    assert OWN_ID.fullmatch(seen.own_id)
    await until(lambda: records_now(tenants, seen.own_id), lambda found: any(each.kind == "outcome" for each in found))


async def test_an_id_in_use_is_refused_beside_the_request_that_has_it(tenants: TenantSuite) -> None:
    request = greedy([5, 6, 7], 4000, "in-use")
    metadata = tenants.metadata("red")
    running = tenants.suite.inference.Generate(request, timeout=PATIENCE, metadata=metadata)
    await running.read()
    seen = await rpc("Generate", INFERENCE, request, streams=True)(tenants, "")
    assert (seen.code, seen.reason) == ("ALREADY_EXISTS", "ALREADY_EXISTS")
    assert OWN_ID.fullmatch(seen.own_id)
    assert "rejection" not in {each.kind for each in await records(tenants, "in-use")}
    running.cancel()


@pytest.mark.parametrize("method", ["/quire.inference.v1.InferenceService/Nothing", f"/{SECRET}/x"])
async def test_a_method_that_there_is_not_is_counted_under_no_name(tenants: TenantSuite, method: str) -> None:
    labels = ("grpc", "unknown", "UNIMPLEMENTED", "UNKNOWN_PATH")
    before = await counted(tenants, *labels)
    call: Any = tenants.suite.channel.unary_unary(method)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call(b"", timeout=PATIENCE)
    seen = seen_of(refused.value.code().name, refused.value.trailing_metadata())
    assert (seen.code, seen.reason) == ("UNIMPLEMENTED", "UNKNOWN_PATH")
    await until(lambda: counted(tenants, *labels), lambda now: now == before + 1)
    assert len(await records(tenants, seen.own_id)) == 1


async def test_a_message_above_the_limit_of_grpc_counts_though_no_handler_sees_it(tenants: TenantSuite) -> None:
    labels = ("grpc", "quire.inference.v1.InferenceService/Tokenize", "RESOURCE_EXHAUSTED", "NOT_RECEIVED")
    before = await counted(tenants, *labels)
    large = pb.TokenizeRequest(prompt=pb.Prompt(text="a" * (MAX_PUBLIC_MESSAGE_BYTES + 1)))
    metadata = (*tenants.metadata("red"), ("x-request-id", "too-large"))
    with pytest.raises(grpc.aio.AioRpcError, match="larger than max"):
        await tenants.suite.inference.Tokenize(large, timeout=PATIENCE, metadata=metadata)
    await until(lambda: counted(tenants, *labels), lambda now: now == before + 1)
    assert [each.chosen for each in await records(tenants, "too-large")] == ["NOT_RECEIVED"]


async def test_a_request_that_a_stream_of_many_refuses_counts_though_the_stream_ends_well(tenants: TenantSuite) -> None:
    labels = ("kserve", STREAM, "NOT_FOUND", "MODEL_NOT_FOUND")
    before = await counted(tenants, *labels)
    ask = rpc("ModelStreamInfer", KSERVE, lambda: iter([infer(SECRET), infer(SECRET)]), streams=True)
    seen = await ask(tenants, "a stream")
    assert seen.code == "OK"
    await until(lambda: counted(tenants, *labels), lambda now: now == before + 2)
    found = await records(tenants, "a stream")
    assert [each.chosen for each in found] == ["MODEL_NOT_FOUND"] * 2
    assert len({each.request_id for each in found}) == 2
    stub = kserve_pb2_grpc.GRPCInferenceServiceStub(tenants.suite.channel)
    answers = stub.ModelStreamInfer(iter([infer(SECRET)]), metadata=tenants.metadata("red"), timeout=PATIENCE)
    (error,) = [each async for each in answers]
    request_id = error.infer_response.parameters["request_id"].string_param
    assert [each.chosen for each in await records(tenants, request_id)] == ["MODEL_NOT_FOUND"]


async def test_what_health_answers_counts(tenants: TenantSuite) -> None:
    labels = ("grpc", "grpc.health.v1.Health/Check", "NOT_FOUND", "NOT_FOUND")
    before, lines = await counted(tenants, *labels), len(tenants.suite.lines)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await health_pb2_grpc.HealthStub(tenants.suite.channel).Check(health_pb2.HealthCheckRequest(service="nobody"))
    await until(lambda: counted(tenants, *labels), lambda now: now == before + 1)
    seen = seen_of(refused.value.code().name, refused.value.trailing_metadata())
    assert await records_now(tenants, seen.own_id) == []
    assert not [line for line in tenants.suite.lines[lines:] if seen.own_id in line]


async def test_what_is_no_http_counts_and_has_a_record(tenants: TenantSuite) -> None:
    labels = ("http", "connection", "400", "MALFORMED")
    before = await counted(tenants, *labels)
    host, _, port = tenants.suite.stack.http_url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"\x16\x03\x01 hello\r\n\r\n")
    async with asyncio.timeout(PATIENCE):
        answer = (await reader.read()).decode()
    writer.close()
    request_id = re.search(r"x-quire-request-id: (\S+)", answer)
    assert request_id is not None
    await until(lambda: counted(tenants, *labels), lambda now: now == before + 1)
    assert [each.chosen for each in await records(tenants, request_id[1])] == ["MALFORMED"]


async def test_a_flood_leaves_the_records_of_others_where_they_are(tenants: TenantSuite) -> None:
    listed = decision_pb2.ListDecisionsRequest(kind="rejection", limit=1000)

    async def alike() -> int:
        found = (await tenants.suite.decisions.ListDecisions(listed, timeout=PATIENCE)).decisions
        return sum(each.chosen == "METHOD_NOT_ALLOWED" and each.tenant == "blue" for each in found)

    labels = ("openai", "/v1/embeddings", "405", "METHOD_NOT_ALLOWED")
    before, began = await counted(tenants, *labels), asyncio.get_running_loop().time()
    ask = http("/v1/embeddings", "blue", method="GET")
    flood = [await ask(tenants, "") for _ in range(3 * ALIKE_REFUSALS_BURST)]
    took = asyncio.get_running_loop().time() - began
    assert await counted(tenants, *labels) == before + len(flood)
    assert await alike() <= ALIKE_REFUSALS_BURST + 1 + took * ALIKE_REFUSALS_PER_SECOND
    assert len(await records(tenants, flood[-1].own_id)) == 1
