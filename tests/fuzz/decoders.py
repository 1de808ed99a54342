"""Every function that makes our types of what others sent, and the only errors that it may raise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.message import DecodeError, Message
from google.rpc import status_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from common.contracts.errors import QuireError
from common.contracts.index_format import discovered_from_value, owner_from_fields, unpack_entries
from common.contracts.types import KvGeometry, PoolIdentity, SequenceId
from common.telemetry.context import span_context_of
from common.wire import lease_codec
from common.wire.inventory_codec import InventoryAssembler
from gpuworker.server.codec import engine_request
from gpuworker.server.submit_check import SubmitLimits
from quire.api.status import error_from_status
from quire.gpuworker.v1 import gpuworker_pb2
from quire.kserve.v2 import kserve_pb2
from quire.kvmanager.v1 import kvmanager_pb2
from quire.vllm.v1 import engine_pb2, inference_pb2
from router.api.kserve.request import read
from router.api.vllm import engine_codec, inference_codec
from router.contracts.ports import ModelCard
from router.observe.trace_codec import from_otlp
from router.workers import codec as workers_codec

_IDENTITY: Final = PoolIdentity("model", "tokenizer", 4, KvGeometry(1, 1, 1, 1, "float32"))
_CARD: Final = ModelCard("model", _IDENTITY, 2048, 1000, (5,), has_chat_template=True)
_LIMITS: Final = SubmitLimits(2048, 1000, _IDENTITY)


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder of messages, or of bytes where there is no message class."""

    decode: Callable[[Any], object]
    message: type[Message] | None = None

    def take(self, content: bytes) -> None:
        """Decode bytes that are a message. Any error but one of our own tree leaves this method."""
        try:
            given = content if self.message is None else self.message.FromString(content)
        except DecodeError:
            return
        with suppress(QuireError):
            self.decode(given)


def _submit(message: gpuworker_pb2.Submit) -> object:
    _LIMITS.check(message)
    return engine_request(message, SequenceId(1), None, _LIMITS, message.traceparent)


def _discovered(content: bytes) -> object:
    """Read an entry without a signature; its reader says what is wrong with a ValueError."""
    with suppress(ValueError):
        return discovered_from_value(b"- " + content, "w0", None, 0.0)
    return None


def _owner(content: bytes) -> object:
    names = (b"worker_id", b"incarnation", b"address", b"generation")
    return owner_from_fields(dict(zip(names, content.split(b"\n"), strict=False)))


DECODERS: Final[Mapping[str, Decoder]] = {
    "attach": Decoder(lambda message: lease_codec.attach_from_proto(message, 1), kvmanager_pb2.Attach),
    "report": Decoder(lease_codec.report_from_proto, kvmanager_pb2.Report),
    "inventory": Decoder(lambda message: InventoryAssembler().add(message), kvmanager_pb2.Inventory),
    "grant_batch": Decoder(lease_codec.batch_from_proto, kvmanager_pb2.GrantBatch),
    "attach_ok": Decoder(lease_codec.attach_ok_from_proto, kvmanager_pb2.AttachOk),
    "attach_rejected": Decoder(lease_codec.rejected_from_proto, kvmanager_pb2.AttachRejected),
    "submit": Decoder(_submit, gpuworker_pb2.Submit),
    "worker_info": Decoder(workers_codec.facts_from_proto, gpuworker_pb2.WorkerInfo),
    "load": Decoder(workers_codec.load_from_proto, gpuworker_pb2.Load),
    "refused": Decoder(workers_codec.refusal_from_proto, gpuworker_pb2.Refused),
    "step_outputs": Decoder(lambda message: list(workers_codec.events_of(message)), gpuworker_pb2.StepOutputs),
    "kserve": Decoder(lambda message: read(message, streaming=True), kserve_pb2.ModelInferRequest),
    "vllm": Decoder(
        lambda message: inference_codec.read(message, _CARD, streaming=True), inference_pb2.GenerateRequest
    ),
    "vllm_engine": Decoder(engine_codec.read, engine_pb2.GenerateRequest),
    "otlp": Decoder(
        lambda message: [kept.message() for kept in from_otlp(message)], trace_service_pb2.ExportTraceServiceRequest
    ),
    "status": Decoder(error_from_status, status_pb2.Status),
    "discovered": Decoder(_discovered),
    "slot_owner": Decoder(_owner),
    "slot_entries": Decoder(unpack_entries),
    "traceparent": Decoder(lambda content: span_context_of(content.decode("utf-8", "replace"))),
}
