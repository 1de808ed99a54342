"""The router's options."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from common.settings.options import Addresses, BlockSize, Count, LoadFormat, Port, Seconds, ServiceSettings


class RouterSettings(ServiceSettings):
    """options of the router"""

    service: ClassVar[str] = "router"

    model: Path = Field(..., description="folder of the checkpoint, for its tokenizer and chat template")
    model_name: str | None = Field(None, description="what clients call the model; unset: the name of its folder")
    load_format: LoadFormat = Field(
        "auto", description="dummy: weights are random, and the first worker names the model"
    )
    block_size: BlockSize = Field(16, description="slots in a block; the same on every service")
    port: Port = Field(50051, description="gRPC port; 0 takes a free one")
    own_port: Port | None = Field(
        None,
        description="let other routers of this host share --port and --http-port (SO_REUSEPORT); this one alone also "
        "listens here (gRPC) and 1000 above (/metrics, /health); 0 takes free ones",
    )
    sibling: Addresses = Field((), description="HOST:PORT of the own port of a router that shares the ports; repeat it")
    http_port: Port = Field(
        8000, description="port of /metrics, /health and the OpenAI-compatible API; 0 takes a free one"
    )
    worker: Addresses = Field((), description="HOST:PORT of a GPU worker; repeatable; default: those in Redis")
    max_queued_requests: Count = Field(1024, description="requests that may wait for a worker, in each router process")
    max_tokens_in_flight: Count | None = Field(
        None,
        description="prompt and output tokens of all requests inside a router process; unset: the queue is the bound",
    )
    lease_ttl: Seconds = Field(5.0, description="seconds that a worker found in Redis counts without renewal")
    decision_ring: Count = Field(100_000, description="decision records kept in memory")
    span_ring: Count = Field(20_000, description="spans kept by the built-in receiver")
    routing_seed: int = Field(0, description="seed of the tie-break between equal workers")
