"""The KV manager's options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from common.addresses.host_port import redis_addresses
from common.contracts.errors import FieldViolation
from common.decisions.ring import DEFAULT_RING_BYTES
from common.process.advertise import is_this_host
from common.settings.decision_log import DecisionLogSettings
from common.settings.options import (
    Address,
    BlockSize,
    Bytes,
    Count,
    Fraction,
    LoadFormat,
    Port,
    Seconds,
    TokenizerFolder,
    WorkerId,
    host_of,
    is_loopback,
)
from common.settings.pool_key import PoolSettings
from kvmanager.contracts.ledger_config import DEFAULTS, EvictionName, ManagerConfig, Runway, VictimOrder


class KvManagerSettings(PoolSettings, DecisionLogSettings):
    """options of the KV manager"""

    service: ClassVar[str] = "kvmanager"

    port: Port = Field(50052, description="gRPC port; 0 takes a free one")
    metrics_port: Port | None = Field(None, description="port of /metrics and /health; unset: the gRPC port + 1000")
    group: WorkerId | None = Field(
        None,
        description="name of the group of managers of one pool; whichever holds the lease of the group in Redis leads, "
        "the others stand by; unset: this manager is alone",
    )
    group_lease: Annotated[float, Field(ge=0.3, le=60.0)] = Field(
        3.0, description="seconds after which a standby takes over from a leader that hangs"
    )
    group_address: Address | None = Field(
        None,
        description="HOST:PORT at which the other managers of the group reach this one; unset: host and port, and for "
        "a host of 0.0.0.0 the address on the way to Redis",
    )
    model: Path | None = Field(
        None,
        description="folder of the checkpoint that workers must serve; unset: what the first worker to attach serves",
    )
    tokenizer: TokenizerFolder | None = Field(
        None, description="folder of the tokenizer that workers must use instead of the model's"
    )
    load_format: LoadFormat = Field("auto", description="dummy: workers have random weights; matters only with a model")
    seed: int = Field(0, description="seed of dummy weights")
    block_size: BlockSize = Field(16, description="slots in a block; the same on every service")
    watermark: Fraction = Field(DEFAULTS.watermark, description="share of blocks kept free when a sequence is admitted")
    eviction_policy: EvictionName = Field(
        DEFAULTS.eviction,
        description="which cached blocks leave first; utility: those least likely to be used again soon, as learned; "
        "frequency: those used least often; lru: those released longest ago",
    )
    preemption_policy: VictimOrder = Field(
        DEFAULTS.preemption,
        description="who gives its blocks when they run out, of the lowest priority; work: who loses the least; "
        "arrival: who came last",
    )
    max_preemptions: int = Field(
        DEFAULTS.max_preemptions,
        ge=0,
        description="times after which a request is preempted for higher priorities alone; it is then admitted with "
        "all blocks of its greatest length; 0: there is no bound",
    )
    chunked_grants: bool = Field(
        DEFAULTS.chunked_grants,
        description="a long prompt that waits for blocks begins with half of them, where those that run leave these, "
        "and gets the others as they come free",
    )
    peer_fetch: bool = Field(
        True,
        description="workers with a data port fetch blocks from each other that they lack; off: each computes them",
    )
    replicate: bool = Field(
        DEFAULTS.replicate,
        description="copy prefixes that several workers are asked for into the host memory of others",
    )
    backfill: bool = Field(
        DEFAULTS.backfill,
        description="requests pass one that lacks blocks if they end before it can have them, or leave it enough",
    )
    max_wait: float = Field(
        DEFAULTS.max_wait,
        ge=0.0,
        description="seconds after which a request that waits for blocks gets every eighth admission, whatever its "
        "priority; 0: never",
    )
    manager_patience: Seconds = Field(
        60.0,
        description="seconds for which the work of a worker may stand still although blocks are free. Then one of its "
        "sequences is preempted, or the worker has to attach anew; health says NOT_SERVING before (--stall-timeout)",
    )
    retention_share: Fraction = Field(
        DEFAULTS.retention_share,
        description="share of a worker's blocks that one tenant may retain in the cache by cache_retention; 0: none; "
        "all tenants together may retain half",
    )
    pin_share: Fraction = Field(
        DEFAULTS.pin_share,
        description="share of a worker's blocks that prefixes of one tenant may have which an operator pins; 0: none; "
        "all pins together may have half",
    )
    max_retention: float = Field(
        DEFAULTS.max_retention, ge=0.0, description="seconds that a block may be retained; longer durations are lowered"
    )
    runway: Runway = Field(
        DEFAULTS.runway, description="auto: lease ahead of need; max: reserve each request's whole length up front"
    )
    runway_slots: Count = Field(
        DEFAULTS.runway_slots, description="slots of every running sequence that the lease pool covers"
    )
    max_workers: Count = Field(DEFAULTS.max_workers, description="workers that may be attached at once")
    max_blocks_per_worker: Count = Field(
        DEFAULTS.max_blocks_per_worker,
        description="blocks that one worker may have; a ledger takes about 630 bytes for each, and some 400 for "
        "each of up to four times as many that it evicted",
    )
    max_blocks: Count = Field(
        DEFAULTS.max_blocks, description="blocks that all workers may have together, those in host memory included"
    )
    max_inventory_bytes: Bytes = Field(128 << 20, description="size of the inventory of a worker that attaches")
    max_inventory_messages: Count = Field(4096, description="messages that may carry an inventory")
    attach_timeout: Seconds = Field(
        60.0, description="seconds between two messages of a worker until its inventory is complete"
    )
    prefix_ttl: Seconds = Field(3600.0, description="seconds that an index entry lives without renewal")
    lease_ttl: Seconds = Field(5.0, description="seconds that a discovery lease lives without renewal")
    decision_ring: Count = Field(100_000, description="decision records kept in memory")
    decision_ring_bytes: Bytes = Field(DEFAULT_RING_BYTES, description="memory of the decision records, about")

    def manager_config(self) -> ManagerConfig:
        """Return what the options say of the manager and its ledgers."""
        options = type(self).model_fields
        named = {each.name: getattr(self, each.name) for each in fields(ManagerConfig) if each.name in options}
        return ManagerConfig(
            eviction=self.eviction_policy,
            preemption=self.preemption_policy,
            runway_reach=4 * self.runway_slots,
            **named,
        )

    def problems(self) -> Iterator[FieldViolation]:
        yield from super().problems()
        if self.group is not None and not self.redis_url:
            what = f"is {self.group}, and there is no Redis for its lease; give --redis-url, or leave --group out"
            yield FieldViolation("--group", what)
        if self.group is None and self.group_address is not None:
            yield FieldViolation("--group-address", "has no effect; expected it with a --group")
        if self.group_address is not None and len(self.group_address.split()) != 1:
            yield FieldViolation("--group-address", "has spaces; expected HOST:PORT")
        yield from self._unreachable()

    def _unreachable(self) -> Iterator[FieldViolation]:
        """Refuse a loopback address in a group whose Redis shows that it has other hosts."""
        announced = self.group_address or self.host
        host = host_of(announced) if self.group_address else announced
        if self.group is None or not self.redis_url or not is_loopback(host):
            return
        redis = next((each for each, _ in redis_addresses(self.redis_url) if not is_this_host(each)), None)
        if redis is None:
            return
        what = (
            f"is {announced}, which only this host reaches, and the Redis of group {self.group} is on another host "
            f"({redis}); give --host 0.0.0.0, or --group-address with the HOST:PORT at which the others reach this one"
        )
        yield FieldViolation("--group-address" if self.group_address else "--host", what)
