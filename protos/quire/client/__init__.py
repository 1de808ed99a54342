"""Quire's Python client: `Client` for threads, `AsyncClient` for asyncio. Needs grpcio and protobuf, no service.

    from quire.client import Client

    with Client("127.0.0.1:50051") as client:
        print(client.generate("Once upon a time", max_tokens=32).text)
        for chunk in client.stream([{"role": "user", "content": "Hello!"}], temperature=0):
            print(chunk.text, end="", flush=True)

Every error is a `QuireError` (the tree is in quire/api/errors.py) with the details that the server sent. A stream whose
router dies goes on by itself at another address, or at the same one: `Client(["10.0.0.1:50051", "10.0.0.2:50051"])`.
Where no router can go on with it, it raises `Interrupted`, which carries the output so far.
"""

from quire.api.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    EngineFailure,
    FieldViolation,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    Overloaded,
    QuireError,
    QuotaViolation,
    RateLimited,
    Unavailable,
    Unsupported,
)
from quire.api.types import FinishReason, MissReason, PoolIdentity, TokenLogprobs, Usage
from quire.client.aio import AsyncClient, AsyncStream
from quire.client.chat import ChatOptions, Message, ToolCall
from quire.client.errors import Interrupted, InterruptedByDeadline
from quire.client.request import Options, Prompt, ThoughtBudget
from quire.client.results import Chunk, Completion, Embeddings, Manager, Model, Output, Status, Timings, Worker
from quire.client.retry import Retry
from quire.client.sync import Client, Stream

__all__ = [
    "AlreadyExists",
    "AsyncClient",
    "AsyncStream",
    "Cancelled",
    "ChatOptions",
    "Chunk",
    "Client",
    "Completion",
    "DeadlineExceeded",
    "Embeddings",
    "EngineFailure",
    "FieldViolation",
    "FinishReason",
    "Interrupted",
    "InterruptedByDeadline",
    "InvalidRequest",
    "Manager",
    "Message",
    "MissReason",
    "Model",
    "ModelNotFound",
    "NotFound",
    "Options",
    "Output",
    "Overloaded",
    "PoolIdentity",
    "Prompt",
    "QuireError",
    "QuotaViolation",
    "RateLimited",
    "Retry",
    "Status",
    "Stream",
    "ThoughtBudget",
    "Timings",
    "TokenLogprobs",
    "ToolCall",
    "Unavailable",
    "Unsupported",
    "Usage",
    "Worker",
]
