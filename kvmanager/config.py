"""The KV manager's options."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from common.settings.options import BlockSize, Count, Fraction, LoadFormat, Port, Seconds, ServiceSettings
from kvmanager.core.config import Runway


class KvManagerSettings(ServiceSettings):
    """options of the KV manager"""

    service: ClassVar[str] = "kvmanager"

    port: Port = Field(50052, description="gRPC port; 0 takes a free one")
    metrics_port: Port | None = Field(None, description="port of /metrics and /health; unset: the gRPC port + 1000")
    model: Path | None = Field(
        None,
        description="folder of the checkpoint that workers must serve; unset: what the first worker to attach serves",
    )
    load_format: LoadFormat = Field("auto", description="dummy: workers have random weights; matters only with a model")
    seed: int = Field(0, description="seed of dummy weights")
    block_size: BlockSize = Field(16, description="slots in a block; the same on every service")
    watermark: Fraction = Field(0.01, description="share of blocks kept free when a sequence is admitted")
    runway: Runway = Field(
        "auto", description="auto: lease ahead of need; max: reserve each request's whole length up front"
    )
    runway_slots: Count = Field(32, description="slots of every running sequence that the lease pool covers")
    prefix_ttl: Seconds = Field(3600.0, description="seconds that an index entry lives without renewal")
    lease_ttl: Seconds = Field(5.0, description="seconds that a discovery lease lives without renewal")
    decision_ring: Count = Field(100_000, description="decision records kept in memory")
