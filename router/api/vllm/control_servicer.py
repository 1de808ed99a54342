"""vLLM's own `Control` service: facts of the suite, and ends of requests. All that has no meaning here is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NoReturn

from google.protobuf.message import Message

from common.contracts.errors import Unsupported
from common.version import quire_version
from quire.types.v1 import types_pb2
from quire.vllm.v1 import control_pb2 as pb
from quire.vllm.v1 import control_pb2_grpc as rpc
from router.api.shared.call_context import Calls, Context
from router.api.vllm.facts import PortRouters, StatusSource, Totals, abort_all
from router.api.vllm.inference_codec import SCHEMA_VERSION
from router.contracts.ports import AdapterSource

CONTROL: Final = "vllm.Control"
_EVENTS: Final = "quire.kvmanager.v1.KvManagerService/SubscribeKvEvents"
_WEIGHTS: Final = (
    "workers read their weights at their start; start workers with another checkpoint, and drain the old ones"
)
_ADAPTERS: Final = "adapters are loaded, unloaded and listed by `quire adapters`, or by HTTP at /v1/load_lora_adapter"
_PAUSES: Final = "workers do not pause; drain one by SIGTERM, and others go on with its requests"


def _refusing(method: str, why: str) -> Any:
    """Return a method that refuses every call of a caller who is known."""

    async def refuse(self: ControlServicer, request: Message, context: Context) -> NoReturn:
        self._calls.caller(context)
        raise Unsupported(f"{method} is not offered: {why}")

    return refuse


def _source_of(events: types_pb2.KvEventSource) -> pb.KvEventSource:
    """Return a worker's source as vLLM names it. Each worker is an engine of its own, of rank 0."""
    return pb.KvEventSource(
        transport="zmq",
        endpoint=events.endpoint,
        topic=events.topic,
        replay_endpoint=events.replay_endpoint,
        data_parallel_rank=0,
        encoding="msgpack",
        schema_version=1,
        buffer_steps=events.buffer_steps,
        hwm=events.hwm,
        max_queue_size=events.max_queue_size,
    )


class ControlServicer(rpc.ControlServicer):
    """`events_at` returns HOST:PORT of the admin plane, where events of the caches stand."""

    def __init__(
        self,
        status: StatusSource,
        routers: PortRouters,
        calls: Calls,
        name: str,
        events_at: Callable[[], str],
        adapters: AdapterSource,
    ) -> None:
        self._adapters = adapters
        self._status, self._routers, self._calls = status, routers, calls
        self._name, self._events_at = name, events_at

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.ServerInfo:
        """Return the size of the suite, whose workers are one replica to a client."""
        caller, card = self._calls.caller(context), self._status.model()
        totals, block_size = Totals.of(self._status.status(), card, caller), card.identity.block_size
        one = pb.ParallelismInfo(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            decode_context_parallel_size=1,
            world_size=1,
            data_parallel_size_local=1,
        )
        return pb.ServerInfo(
            engine_version=f"quire {quire_version()}",
            api_version="vllm",
            instance_id=self._name,
            parallelism=one,
            max_model_len=card.max_model_len,
            kv_block_size=block_size,
            total_kv_blocks=totals.blocks,
            max_running_requests=totals.sequences,
            rl_capabilities=pb.RlCapabilities(),
            proto_version=SCHEMA_VERSION,
            effective_attention_block_size=block_size or None,
        )

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.ModelInfo:
        self._calls.caller(context)
        card = self._status.model()
        return pb.ModelInfo(
            model_id=card.name,
            served_model_name=card.name,
            served_model_aliases=card.aliases,
            supports_text_input=bool(card.identity.tokenizer_fingerprint),
            supports_token_ids_input=True,
            supports_lora=bool(self._adapters.adapter_names()),
        )

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """End the caller's requests of these ids, at whichever router they are."""
        await abort_all(self._routers, request.request_ids, self._calls.caller(context))
        return pb.AbortResponse()

    async def GetKvEventSources(
        self, request: pb.GetKvEventSourcesRequest, context: Context
    ) -> pb.GetKvEventSourcesResponse:
        """Return where an admin tenant subscribes to events of the caches; there is no source for others.

        Workers that publish events in vLLM's form come first, in the order of their names. The events of the KV manager
        are those of all workers, in Quire's own form.
        """
        if not self._calls.caller(context).tenant.admin:
            return pb.GetKvEventSourcesResponse()
        workers = sorted(self._status.status().workers, key=lambda each: each.worker_id)
        sources = [_source_of(each.kv_events) for each in workers if each.HasField("kv_events")]
        own = pb.KvEventSource(
            transport="grpc", endpoint=self._events_at(), topic=_EVENTS, encoding="protobuf", schema_version=1
        )
        return pb.GetKvEventSourcesResponse(sources=[*sources, own])

    async def IsPaused(self, request: pb.IsPausedRequest, context: Context) -> pb.IsPausedResponse:
        self._calls.caller(context)
        return pb.IsPausedResponse(paused=False)

    async def IsSleeping(self, request: pb.IsSleepingRequest, context: Context) -> pb.IsSleepingResponse:
        self._calls.caller(context)
        return pb.IsSleepingResponse(sleeping=False)

    Shutdown = _refusing("Shutdown", "a client cannot end the suite; send the router SIGTERM, and it drains")
    LoadLora = _refusing("LoadLora", _ADAPTERS)
    UnloadLora = _refusing("UnloadLora", _ADAPTERS)
    ListLoras = _refusing("ListLoras", _ADAPTERS)
    PauseGeneration = _refusing("PauseGeneration", _PAUSES)
    ResumeGeneration = _refusing("ResumeGeneration", _PAUSES)
    Sleep = _refusing("Sleep", _PAUSES)
    WakeUp = _refusing("WakeUp", _PAUSES)
    InitWeightTransferEngine = _refusing("InitWeightTransferEngine", _WEIGHTS)
    StartWeightUpdate = _refusing("StartWeightUpdate", _WEIGHTS)
    StartDraftWeightUpdate = _refusing("StartDraftWeightUpdate", _WEIGHTS)
    UpdateWeights = _refusing("UpdateWeights", _WEIGHTS)
    FinishWeightUpdate = _refusing("FinishWeightUpdate", _WEIGHTS)
    UpdateWeightVersion = _refusing("UpdateWeightVersion", _WEIGHTS)
    GetWeightVersion = _refusing("GetWeightVersion", _WEIGHTS)
