"""Quire's Python client: `Client` for threads, `AsyncClient` for asyncio. Needs grpcio and protobuf, no service.

    from quire.client import Client

    with Client("127.0.0.1:50051") as client:
        print(client.generate("Once upon a time", max_tokens=32).text)
        for chunk in client.stream([{"role": "user", "content": "Hello!"}], temperature=0):
            print(chunk.text, end="", flush=True)

Every error is one of Quire's tree (common/errors.py), with the details that the server sent; a stream that broke after
it had begun raises `Interrupted`, which carries what had come.
"""

from common.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    EngineFailure,
    FieldViolation,
    InvalidRequest,
    NotFound,
    Overloaded,
    QuireError,
    QuotaViolation,
    Unavailable,
    Unsupported,
)
from common.types import FinishReason, MissReason, PoolIdentity, TokenLogprobs, Usage
from quire.client.aio import AsyncClient, AsyncStream
from quire.client.errors import Interrupted, InterruptedByDeadline
from quire.client.request import Message, Options, Prompt
from quire.client.results import Chunk, Completion, Model, Output, Status, Timings, Worker
from quire.client.retry import Retry
from quire.client.sync import Client, Stream

__all__ = [
    "AlreadyExists",
    "AsyncClient",
    "AsyncStream",
    "Cancelled",
    "Chunk",
    "Client",
    "Completion",
    "DeadlineExceeded",
    "EngineFailure",
    "FieldViolation",
    "FinishReason",
    "Interrupted",
    "InterruptedByDeadline",
    "InvalidRequest",
    "Message",
    "MissReason",
    "Model",
    "NotFound",
    "Options",
    "Output",
    "Overloaded",
    "PoolIdentity",
    "Prompt",
    "QuireError",
    "QuotaViolation",
    "Retry",
    "Status",
    "Stream",
    "Timings",
    "TokenLogprobs",
    "Unavailable",
    "Unsupported",
    "Usage",
    "Worker",
]
