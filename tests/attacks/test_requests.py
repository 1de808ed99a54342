"""One request with very long fields, from an anonymous client, against a real router: it costs its sender an error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import pytest_asyncio
from google.protobuf.message import Message

from common.contracts.types import FinishReason
from common.rpc.server import open_channel
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc as rpc
from quire.kserve.v2 import kserve_pb2_grpc as kserve
from quire.types.v1.types_pb2 import SamplingParams as Sampling
from quire.vllm.v1 import control_pb2 as vllm_control
from quire.vllm.v1 import control_pb2_grpc as vllm_control_rpc
from quire.vllm.v1 import engine_pb2, engine_pb2_grpc
from quire.vllm.v1 import inference_pb2 as vllm
from quire.vllm.v1 import inference_pb2_grpc as vllm_rpc
from tests.router.test_process import DEMO, address_in, router
from tests.support.processor import slowness
from tests.support.router.fake_worker import PATIENCE_S, FakeWorker, running
from tests.support.router.kserve_messages import infer

pytestmark = pytest.mark.asyncio(loop_scope="module")

Call = Callable[[rpc.InferenceServiceStub, int], grpc.aio.Call]
# Just below the limit that the router had, and below the one that it has.
BUDGETS = (15_900_000, 4_100_000)
# Before lengths were bounded, such requests took up to 28 s of CPU and 5.6 GB. Half a million empty messages of a chat
# fit into the public limit, and take 71 MiB when they are parsed.
MOST_CPU_S, MOST_GROWTH_MIB = 2.0, 96.0
INNOCENTS, GUESSES = 6, 40


@dataclass
class Victim:
    """A router's process, a channel to it, and its one worker."""

    process: psutil.Process
    channel: grpc.aio.Channel
    worker: FakeWorker

    @property
    def stub(self) -> rpc.InferenceServiceStub:
        return rpc.InferenceServiceStub(self.channel)

    def cpu(self) -> float:
        """Return the seconds of CPU that the router has used."""
        times = self.process.cpu_times()
        return times.user + times.system

    def peak_mib(self) -> float:
        """Return the most memory that the router has held at once since `reset_peak`."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024

    def reset_peak(self) -> None:
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")


@asynccontextmanager
async def victim_of(worker: FakeWorker) -> AsyncIterator[Victim]:
    async with running(worker), router("--worker", worker.address) as process:
        address = await address_in(process.stdout, "READY ")
        beats = asyncio.create_task(beat(worker))
        try:
            async with open_channel(address) as channel:
                yield Victim(psutil.Process(process.pid), channel, worker)
        finally:
            beats.cancel()


async def beat(worker: FakeWorker) -> None:
    """Show the router that the worker is alive, until this task is cancelled."""
    while True:
        worker.heartbeat()
        await asyncio.sleep(0.5)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def victim() -> AsyncIterator[Victim]:
    worker = FakeWorker(identity=DEMO, num_blocks=4096, max_num_seqs=32, max_model_len=2048)
    async with victim_of(worker) as started:
        yield started


def ids(count: int, token_id: int = 5) -> pb.Prompt:
    return pb.Prompt(token_ids=pb.TokenIds(ids=[token_id] * count))


def generate(**fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(**({"prompt": ids(8)} | fields))  # type: ignore[arg-type]


async def refusal(call: grpc.aio.Call) -> tuple[grpc.StatusCode, str]:
    """Return status and words of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ended(call)
    return caught.value.code(), caught.value.details() or ""


async def ended(call: grpc.aio.Call) -> None:
    """Wait for the end of a call; raises AioRpcError when it failed."""
    if isinstance(call, grpc.aio.UnaryStreamCall):
        async for _ in call:
            pass
    else:
        await call  # type: ignore[misc]


def stop_ids(stub: rpc.InferenceServiceStub, budget: int) -> grpc.aio.Call:
    sampling = Sampling(stop_token_ids=[5] * (budget - 2000), max_tokens=8)
    return stub.Generate(generate(prompt=ids(1500), sampling=sampling), timeout=PATIENCE_S)


def stop_strings(stub: rpc.InferenceServiceStub, budget: int) -> grpc.aio.Call:
    sampling = Sampling(stop=["ab" * (budget // 40)] * 16, n=3, max_tokens=8)
    return stub.Generate(generate(sampling=sampling), timeout=PATIENCE_S)


def biases(stub: rpc.InferenceServiceStub, budget: int) -> grpc.aio.Call:
    sampling = Sampling(logit_bias=dict.fromkeys(range(budget // 16), 1.0))
    return stub.Generate(generate(sampling=sampling), timeout=PATIENCE_S)


def known_ids(stub: rpc.InferenceServiceStub, budget: int) -> grpc.aio.Call:
    return stub.Generate(generate(prompt=ids(budget - 1000)), timeout=PATIENCE_S)


def unknown_ids(stub: rpc.InferenceServiceStub, budget: int) -> grpc.aio.Call:
    return stub.Generate(generate(prompt=ids(budget // 4, 1_500_000)), timeout=PATIENCE_S)


def wrong_messages(stub: rpc.InferenceServiceStub, budget: int) -> grpc.aio.Call:
    chat = pb.Chat(messages=[pb.ChatMessage(role="<", content="a")] * (budget // 8))
    return stub.Tokenize(pb.TokenizeRequest(prompt=pb.Prompt(chat=chat)), timeout=PATIENCE_S)


def dense_text(stub: rpc.InferenceServiceStub, budget: int) -> grpc.aio.Call:
    return stub.Tokenize(pb.TokenizeRequest(prompt=pb.Prompt(text="\x00~" * (budget // 2 - 10))), timeout=PATIENCE_S)


def decoded_ids(stub: rpc.InferenceServiceStub, budget: int) -> grpc.aio.Call:
    return stub.Detokenize(pb.DetokenizeRequest(token_ids=[5] * (budget - 1000)), timeout=PATIENCE_S)


def decoded_unknown_ids(stub: rpc.InferenceServiceStub, budget: int) -> grpc.aio.Call:
    return stub.Detokenize(pb.DetokenizeRequest(token_ids=range(1 << 21, (1 << 21) + budget // 5)), timeout=PATIENCE_S)


def dense(budget: int, entry: str = "[]") -> str:
    """Return JSON that takes seconds to parse, and a gigabyte."""
    return f"[{','.join([entry] * ((budget - 1000) // (len(entry) + 1)))}]"


def tokenized(stub: rpc.InferenceServiceStub, **fields: object) -> grpc.aio.Call:
    chat = pb.Chat(**{"messages": [pb.ChatMessage(role="user", content="a")], **fields})  # type: ignore[arg-type]
    return stub.Tokenize(pb.TokenizeRequest(prompt=pb.Prompt(chat=chat)), timeout=PATIENCE_S)


def dense_tools(stub: rpc.InferenceServiceStub, budget: int) -> grpc.aio.Call:
    return tokenized(stub, tools_json=dense(budget))


def dense_documents(stub: rpc.InferenceServiceStub, budget: int) -> grpc.aio.Call:
    return tokenized(stub, documents_json=dense(budget, "{}"))


def dense_variables(stub: rpc.InferenceServiceStub, budget: int) -> grpc.aio.Call:
    return tokenized(stub, template_kwargs_json=f'{{"a": {dense(budget)}}}')


def dense_arguments(stub: rpc.InferenceServiceStub, budget: int) -> grpc.aio.Call:
    """The arguments of many calls, each of which alone may be parsed."""
    called = [pb.ToolCall(id="c", name="f", arguments_json=dense(8_000)) for _ in range(100)]
    asked = pb.ChatMessage(role="user", content="a")
    turn = asked, pb.ChatMessage(role="assistant", tool_calls=called)
    return tokenized(stub, messages=[*turn * (budget // 800_000), asked])


def quoted_arguments(stub: rpc.InferenceServiceStub, budget: int) -> grpc.aio.Call:
    called = pb.ToolCall(id="c", name="f", arguments_json=json.dumps(dense(budget)))
    asked = pb.ChatMessage(role="user", content="a")
    return tokenized(stub, messages=[asked, pb.ChatMessage(role="assistant", tool_calls=[called]), asked])


ATTACKS = (
    *(dense_tools, dense_documents, dense_variables, dense_arguments, quoted_arguments),
    *(stop_ids, stop_strings, biases, known_ids, unknown_ids, wrong_messages, dense_text, decoded_ids),
    decoded_unknown_ids,
)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
async def test_a_request_with_very_long_fields_is_refused_at_little_cost(
    victim: Victim, attack: Call, budget: int
) -> None:
    # What a first request costs (imports, tables) is not part of the attack.
    await refusal(victim.stub.Generate(pb.GenerateRequest(), timeout=PATIENCE_S))
    victim.reset_peak()
    cpu, memory = victim.cpu(), victim.peak_mib()
    code, words = await refusal(attack(victim.stub, budget))
    spent, grown = victim.cpu() - cpu, victim.peak_mib() - memory
    print(f"{attack.__name__} {budget}: {code.name}, {spent:.2f} s of CPU, +{grown:.0f} MiB: {words[:100]}")  # noqa: T201
    assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED), words
    assert spent < MOST_CPU_S * slowness()
    assert grown < MOST_GROWTH_MIB
    assert victim.worker.submits == []


@pytest.mark.parametrize("entry", ["[]", "{}", '{"a":1}', '""', "[[[[[[[[]]]]]]]]"])
async def test_json_in_a_tensor_is_refused_at_little_cost(victim: Victim, entry: str) -> None:
    """KServe's sampling parameters are a text of JSON, and no body of HTTP bounds it."""
    stub = kserve.GRPCInferenceServiceStub(victim.channel)
    request = infer("checkpoint", input_ids=[5] * 8, sampling_parameters=f'{{"stop": {dense(BUDGETS[1], entry)}}}')
    await refusal(victim.stub.Generate(pb.GenerateRequest(), timeout=PATIENCE_S))
    victim.reset_peak()
    cpu, memory = victim.cpu(), victim.peak_mib()
    code, words = await refusal(stub.ModelInfer(request, timeout=PATIENCE_S))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "sampling_parameters" in words
    assert victim.cpu() - cpu < MOST_CPU_S * slowness()
    assert victim.peak_mib() - memory < MOST_GROWTH_MIB


SIZE = BUDGETS[1] - 10_000
FEW, FEW_MORE = vllm.TokenIds(ids=[5]), vllm.TokenIds(ids=[5] * 4)
ENOUGH = vllm.DecodingParameters


def inference(**fields: object) -> tuple[str, Message]:
    return "Inference", vllm.GenerateRequest(**({"token_ids": FEW} | fields))  # type: ignore[arg-type]


def unknown(**fields: object) -> tuple[str, Message]:
    """A request with a million fields of a later version."""
    service, request = inference(**fields)
    request.MergeFromString(b"\xa8\x06\x01" * (SIZE // 3))
    return service, request


def engine(**fields: object) -> tuple[str, Message]:
    given = {"tokenized": engine_pb2.TokenizedInput(input_ids=[5])} | fields
    return "VllmEngine", engine_pb2.GenerateRequest(**given)  # type: ignore[arg-type]


GATEWAYS: dict[str, Callable[[], tuple[str, Message]]] = {
    "unknown fields": unknown,
    "allowed tokens": lambda: inference(decoding=ENOUGH(allowed_token_ids=[5] * SIZE)),
    "bad words": lambda: inference(decoding=ENOUGH(bad_words_token_ids=[FEW_MORE] * (SIZE // 8))),
    "biases": lambda: inference(decoding=ENOUGH(logit_bias=dict.fromkeys(range(SIZE // 16), 1.0))),
    "choices": lambda: inference(decoding=ENOUGH(choice=ENOUGH.StringChoices(choices=["a"] * (SIZE // 3)))),
    "media": lambda: inference(media=[vllm.MediaItem(uuid="abcd")] * (SIZE // 8)),
    "prompt": lambda: inference(token_ids=vllm.TokenIds(ids=[5] * SIZE)),
    "huge ids": lambda: inference(token_ids=vllm.TokenIds(ids=[4_000_000_000] * (SIZE // 5))),
    "stop tokens": lambda: inference(stopping=vllm.StoppingCriteria(stop_token_ids=[5] * SIZE)),
    "prompt of an engine": lambda: engine(tokenized=engine_pb2.TokenizedInput(input_ids=[5] * SIZE)),
    "biases of an engine": lambda: engine(
        sampling_params=engine_pb2.SamplingParams(logit_bias=dict.fromkeys(range(SIZE // 16), 1.0))
    ),
    "media of an engine": lambda: engine(extra_mm_inputs=[engine_pb2.MultimodalInputs()] * (SIZE // 8)),
    "aborted ids": lambda: ("Control", vllm_control.AbortRequest(request_ids=[""] * (SIZE // 2))),
}


@pytest.mark.parametrize("kind", GATEWAYS)
async def test_what_a_gateway_may_send_is_refused_at_little_cost(victim: Victim, kind: str) -> None:
    service, request = GATEWAYS[kind]()
    methods: dict[str, Callable[[Any], grpc.aio.Call]] = {
        "Inference": vllm_rpc.InferenceStub(victim.channel).GenerateStream,
        "VllmEngine": engine_pb2_grpc.VllmEngineStub(victim.channel).Generate,
        "Control": vllm_control_rpc.ControlStub(victim.channel).Abort,
    }
    await refusal(victim.stub.Generate(pb.GenerateRequest(), timeout=PATIENCE_S))
    victim.reset_peak()
    cpu, memory = victim.cpu(), victim.peak_mib()
    code, words = await refusal(methods[service](request))
    spent, grown = victim.cpu() - cpu, victim.peak_mib() - memory
    print(f"{kind}: {code.name}, {spent:.2f} s of CPU, +{grown:.0f} MiB: {words[:100]}")  # noqa: T201
    assert code is grpc.StatusCode.INVALID_ARGUMENT, words
    assert spent < MOST_CPU_S * slowness()
    assert grown < MOST_GROWTH_MIB
    assert victim.worker.submits == []


async def test_a_request_that_fills_the_public_limit_breaks_no_stream_of_others() -> None:
    worker = FakeWorker(identity=DEMO, num_blocks=4096, max_num_seqs=32, max_model_len=2048)
    async with victim_of(worker) as victim:
        request = generate(sampling=Sampling(max_tokens=2, ignore_eos=True))
        calls = [victim.stub.Generate(request, timeout=PATIENCE_S) for _ in range(INNOCENTS)]
        streams = [asyncio.create_task(tokens_of(call)) for call in calls]
        await worker.until(lambda: len(worker.submits) == INNOCENTS)
        handles = [submit.handle for submit in worker.submits]
        worker.step({handle: [7] for handle in handles}, admitted=dict.fromkeys(handles, 0))
        for budget in (*BUDGETS, 16_770_000, 4_190_000):
            code, words = await refusal(stop_ids(victim.stub, budget))
            assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED), words
        worker.step({handle: [8] for handle in handles}, finished=dict.fromkeys(handles, FinishReason.LENGTH))
        assert await asyncio.gather(*streams) == [[7, 8]] * INNOCENTS
        assert (worker.streams, len(worker.submits)) == (1, INNOCENTS)


async def tokens_of(call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]) -> list[int]:
    return [token for event in [event async for event in call] for token in event.tokens.token_ids]


# ------------------------------------------------------------ ids


async def test_ids_that_are_guessed_from_ones_own_refuse_nobody() -> None:
    worker = FakeWorker(identity=DEMO, num_blocks=4096, max_num_seqs=64, max_model_len=2048)
    async with victim_of(worker) as victim:
        request = generate(sampling=Sampling(max_tokens=1, ignore_eos=True))
        held = [await settled(victim.stub.Generate(request, timeout=PATIENCE_S), worker)]
        stem, number = own_id(worker.submits[0].request_id)
        # Ids of decisions came from the same counter as those of requests, two for each request.
        for guess in range(number + 2 * GUESSES, number + 3 * GUESSES):
            request.request_id = f"{stem}{guess}"
            held.append(await settled(victim.stub.Generate(request, timeout=PATIENCE_S), worker))
        request.request_id, worker.automatic = "", True
        codes = [await code_of(victim.stub.Generate(request, timeout=PATIENCE_S)) for _ in range(INNOCENTS)]
        assert codes == [grpc.StatusCode.OK] * INNOCENTS
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)


def own_id(request_id: str) -> tuple[str, int]:
    """Return the part of an id that a client expects in others too, and the number that follows."""
    stem = request_id.rstrip("0123456789")
    return stem, int(request_id[len(stem) :] or 0)


async def settled(call: grpc.aio.Call, worker: FakeWorker) -> asyncio.Task[grpc.StatusCode]:
    """Wait until a request is refused, or runs at the worker; return its end."""
    submits = len(worker.submits)
    end = asyncio.create_task(code_of(call))
    runs = asyncio.create_task(worker.until(lambda: len(worker.submits) > submits))
    await asyncio.wait({end, runs}, return_when=asyncio.FIRST_COMPLETED)
    runs.cancel()
    return end


async def code_of(call: grpc.aio.Call) -> grpc.StatusCode:
    """Return the status of a call; its events are read, because the status comes after them."""
    with suppress(grpc.aio.AioRpcError):
        await ended(call)
    return await call.code()


async def test_a_client_cannot_choose_an_id_of_the_routers_own_form(victim: Victim) -> None:
    code, words = await refusal(
        victim.stub.Generate(generate(request_id="quire-" + "0" * 32), timeout=PATIENCE_S),
    )
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "begins with quire-" in words
