"""Options of `quire up` and of the commands that call a router, from flags, environment and a TOML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from common.settings.options import Address, BlockSize, Count, Fraction, RedisUrl, Seconds, Settings
from gpuworker.config import EngineSettings

# Each process gets the others' ports before any of them runs, so 0 cannot mean "a free one" here.
FixedPort = Annotated[int, Field(ge=1, le=65535)]


class ClientSettings(Settings):
    """options of the commands that talk to a router"""

    service: ClassVar[str] = "client"

    address: Address = Field("127.0.0.1:50051", description="HOST:PORT of the router")


class UpSettings(EngineSettings):
    """options of the suite"""

    service: ClassVar[str] = "up"

    model: str = Field(..., description="folder of the checkpoint to serve, or a hub name where there is a network")
    workers: Count = Field(1, description="GPU workers to start")
    manager: Literal["remote", "embedded"] = Field(
        "remote", description="KV manager as a service of its own, or inside each worker (for comparison)"
    )
    block_size: BlockSize = Field(16, description="slots in a block")
    threads: Count | None = Field(
        None, description="threads of each worker's engine on a CPU; unset: all workers share cores - 1"
    )
    host: str = Field("127.0.0.1", description="address to listen on")
    port: FixedPort = Field(50051, description="gRPC port of the router")
    routers: Count = Field(1, description="router processes, which share the router's ports")
    own_port: FixedPort = Field(
        50150,
        description="with several routers: gRPC port of the first one alone, its /metrics 1000 above; others follow",
    )
    http_port: FixedPort = Field(8000, description="HTTP port of the router: OpenAI-compatible API, /metrics, /health")
    manager_port: FixedPort = Field(50052, description="gRPC port of the KV manager")
    worker_port: FixedPort = Field(50053, description="gRPC port of the first worker; the others follow")
    redis_url: RedisUrl | None = Field(
        None, description="Redis to use; unset: one is started", json_schema_extra={"env": "REDIS_URL"}
    )
    state_dir: Path = Field(Path(".quire"), description="folder of files that outlive the processes")
    trace_sample_ratio: Fraction = Field(1.0, description="share of requests that are traced")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe line shown")
    drain_timeout: Seconds = Field(30.0, description="seconds that running requests get after Ctrl-C")
