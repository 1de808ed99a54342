"""The router's options."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from common.contracts.errors import FieldViolation
from common.contracts.limits import CALLS_PER_CONNECTION
from common.contracts.turns import DEFAULT_MAX_WAIT
from common.decisions.ring import DEFAULT_RING_BYTES
from common.process.metrics import metrics_port
from common.settings.decision_log import DecisionLogSettings
from common.settings.options import (
    Addresses,
    BlockSize,
    Bytes,
    Count,
    ExistingFile,
    Host,
    LoadFormat,
    MetricsAlias,
    MetricsTenants,
    Names,
    Networks,
    Port,
    RemotePrefillMode,
    Seconds,
    TokenizerFolder,
    UrlPrefix,
    host_of,
    one_of,
    together,
)
from common.settings.pool_key import PoolSettings
from router.answers.dialects.names import REASONING_DIALECTS, TOOL_DIALECTS
from router.observe.tail_rules import Objective

ToolCallParser = Annotated[str, AfterValidator(one_of("auto", "none", *TOOL_DIALECTS))]
ReasoningParser = Annotated[str, AfterValidator(one_of("auto", "none", *REASONING_DIALECTS))]
ResponseStoreKind = Annotated[str, AfterValidator(one_of("auto", "memory", "none"))]


class RouterSettings(PoolSettings, DecisionLogSettings):
    """options of the router"""

    service: ClassVar[str] = "router"

    model: Path = Field(..., description="folder of the checkpoint, for its tokenizer and chat template")
    tokenizer: TokenizerFolder | None = Field(
        None, description="folder of a tokenizer, and of its chat template, to use instead; the same on every service"
    )
    chat_template: ExistingFile | None = Field(
        None, description="file with a chat template in Jinja; unset: the tokenizer's own"
    )
    chat_control_tokens: bool = Field(
        False, description="text of a chat that spells a special token becomes that token, such as <|im_end|>"
    )
    refuse_media: bool = Field(
        False, description="refuse images, files, audio and video in a chat; unset: a text stands in for each"
    )
    tool_call_parser: ToolCallParser = Field(
        "auto",
        description="how the model calls tools; auto: as its chat template has it; none: tools are refused",
    )
    reasoning_parser: ReasoningParser = Field(
        "auto", description="how the model writes its thoughts; auto: as its chat template has it; none: as text"
    )
    model_name: Names = Field(
        (), description="what clients call the model; repeatable: further names are aliases; unset: its folder's name"
    )
    seed: int | None = Field(
        None,
        ge=-(1 << 63),
        lt=1 << 63,
        description="seed of requests that name none: equal ones get equal tokens; unset: random",
    )
    load_format: LoadFormat = Field(
        "auto", description="dummy: weights are random, and the first worker names the model"
    )
    block_size: BlockSize = Field(16, description="slots in a block; the same on every service")
    port: Port = Field(8000, description="HTTP port: OpenAI-compatible API, /health; 0 takes a free one")
    grpc_port: Port = Field(50051, description="gRPC port for clients; 0 takes a free one")
    admin_host: Host = Field(
        "127.0.0.1", description="address of the admin plane: spans, decisions and traces of all, status, metrics"
    )
    admin_port: Port | None = Field(None, description="gRPC port of the admin plane; unset: 1 below --grpc-port")
    admin_http_port: Port | None = Field(
        None, description="port of /metrics and /health on the admin plane; unset: 1000 above --grpc-port or --own-port"
    )
    own_port: Port | None = Field(
        None,
        description="let other routers of this host share --port and the gRPC ports (SO_REUSEPORT); this one "
        "alone also has its admin plane here; 0 takes a free one",
    )
    sibling: Addresses = Field((), description="HOST:PORT of the own port of a router that shares the ports; repeat it")
    sibling_timeout: Seconds = Field(
        1.0, description="seconds after which a router that shares the ports is left out of an answer about all of them"
    )
    public_tls_cert: Path | None = Field(
        None, description="PEM file: the certificate of --port and --grpc-port; unset: they are plain text"
    )
    public_tls_key: Path | None = Field(None, description="PEM file: the key of that certificate")
    root_path: UrlPrefix = Field(
        "", description="prefix of the paths of the HTTP API, which a proxy in front passes on or cuts off"
    )
    tokenizer_info: bool = Field(
        False, description="/tokenizer_info on the HTTP port: tokenizer_config.json, with the chat template in use"
    )
    public_metrics: bool = Field(
        False,
        description="/metrics on the HTTP port, for gateways and autoscalers: figures of requests by vLLM's names",
    )
    metrics_alias: MetricsAlias = Field(
        "none", description="further names of figures in /metrics of the admin plane, beside quire: ones; vllm: vLLM's"
    )
    metrics_tenants: MetricsTenants = Field(
        0, description="tenants that metrics of requests name, those that come first; others are `other`; 0: none is"
    )
    cors_origins: Names = Field(
        (),
        description="origin of pages that may call the HTTP API from a browser (https://chat.example); repeatable; "
        "* is any; unset: none",
    )
    allowed_hosts: Names = Field(
        (),
        description="name by which callers on this machine may call the HTTP API without keys, as a proxy in front "
        "passes it on; repeatable; always: addresses, localhost, names without a domain or of a private one",
    )
    http_connections: Count = Field(
        4096, description="HTTP connections at once, and never more than half of the files that the process may open"
    )
    http_connections_per_peer: Count = Field(
        1024, description="HTTP connections of one address at once; a proxy in front of the router is one address"
    )
    grpc_calls_per_connection: Count = Field(
        CALLS_PER_CONNECTION,
        description="calls at once on one connection to --grpc-port; further ones wait at the client. Each costs "
        "memory before a key is checked",
    )
    worker: Addresses = Field((), description="HOST:PORT of a GPU worker; repeatable; default: those in Redis")
    worker_network: Networks = Field(
        (),
        description="network (10.0.0.0/8), host or domain (.workers.example) of workers that Redis may name; "
        "repeatable; default: loopback, and with a pool key private networks",
    )
    manager: Annotated[Addresses, Field(min_length=1)] = Field(
        ("127.0.0.1:50052",),
        description="HOST:PORT of the KV manager, or of each manager of a group, with commas or behind one "
        "name; the admin plane passes calls on to the one that leads",
    )
    tenants: Path | None = Field(
        None, description="TOML file of tenants and the hashes of their keys; unset: no keys, each address is a tenant"
    )
    server_key_file: Path | None = Field(
        None, description="file with the key that separates tenants' cached blocks; equal on all routers of a pool"
    )
    response_store: ResponseStoreKind = Field(
        "auto",
        description="where responses of /v1/responses are kept; auto: in Redis, in memory where there is none; "
        "memory: of this router; none: nowhere",
    )
    response_ttl: Seconds = Field(86_400.0, description="seconds for which a response is kept")
    batch_dir: Path | None = Field(
        None,
        description="folder of what clients upload to /v1/files, and of their batches; routers may share it; "
        "unset: neither is offered",
    )
    force_include_usage: bool = Field(
        False, description="end every stream of a chat or completion with its usage, whatever the client says"
    )
    open_schemas: bool = Field(
        False,
        description="let objects of JSON schemas have properties that the schema does not name, unless it forbids them",
    )
    max_queued_requests: Count = Field(1024, description="requests that may wait for a worker, in each router process")
    max_wait: float = Field(
        DEFAULT_MAX_WAIT,
        ge=0.0,
        description="seconds after which a request that waits for a worker gets every eighth free slot, whatever its "
        "priority; 0: never; give KV managers the same",
    )
    max_tokens_in_flight: Count | None = Field(
        None,
        description="prompt and output tokens of all requests inside a router process; unset: the queue is the bound",
    )
    manager_patience: Seconds = Field(
        60.0,
        description="seconds for which a worker without its KV manager gets requests. Then its silent sequences go to "
        "another worker or end, and a router without another worker is not ready",
    )
    remote_prefill: RemotePrefillMode = Field(
        "auto",
        description="whether a prompt is computed at a prefill worker first (--disaggregation of workers); auto: where "
        "that is predicted to be faster, delays of running requests included; always: wherever such a worker has room; "
        "off: never",
    )
    index_timeout: Seconds = Field(
        0.02, description="seconds that a lookup in the prefix index may take; a later answer costs hits, not a request"
    )
    lease_ttl: Seconds = Field(5.0, description="seconds that a worker found in Redis counts without renewal")
    decision_ring: Count = Field(100_000, description="decision records kept in memory")
    decision_ring_bytes: Bytes = Field(DEFAULT_RING_BYTES, description="memory of the decision records, about")
    span_ring: Count = Field(20_000, description="spans kept by the built-in receiver")
    span_ring_bytes: Bytes = Field(DEFAULT_RING_BYTES, description="memory of the spans, about")
    slo_ttft: Seconds | None = Field(
        None, description="seconds to the first token that clients were promised; a later one is kept as slow"
    )
    slo_itl: Seconds | None = Field(
        None,
        description="inter-token latency in seconds; above it on over 1 % of its outputs, a request is kept as slow",
    )
    debug_loop_turns: bool = Field(
        False, description="measure the turns of the event loop for `quire debug dump`; costs up to 4 % of a core"
    )
    routing_seed: int = Field(0, description="seed of the tie-break between equal workers")

    @property
    def objective(self) -> Objective:
        """What makes a request slow."""
        return Objective.of(self.slo_ttft, self.slo_itl)

    @property
    def used_admin_port(self) -> int:
        """The gRPC port of the admin plane; 0 is a free one."""
        return max(0, self.grpc_port - 1) if self.admin_port is None else self.admin_port

    @property
    def used_admin_http_port(self) -> int:
        """The HTTP port of the admin plane, which belongs to one process also where several share ports."""
        return metrics_port(self.admin_http_port, self.grpc_port if self.own_port is None else self.own_port)

    def internal_host(self) -> tuple[str, str]:
        """Return the address of the admin plane. Clients reach --host, in plain text unless it has a certificate."""
        return "--admin-host", self.admin_host

    def problems(self) -> Iterator[FieldViolation]:
        yield from super().problems()
        yield from together(self, "public_tls_cert", "public_tls_key")
        yield from self.beyond_loopback("--worker", map(host_of, self.worker))
        yield from self.beyond_loopback("--sibling", map(host_of, self.sibling))
        yield from self.beyond_loopback("--manager", map(host_of, self.manager))
