"""Options of `quire serve`, from flags, environment and a TOML file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from cli.demo_model import CHECKPOINT
from common.checkpoint.hub import without_effect
from common.contracts.errors import FieldViolation
from common.settings.decision_log import DecisionLogSettings
from common.settings.options import (
    BlockSize,
    Count,
    CountOrAuto,
    ExistingFile,
    Fraction,
    Host,
    MetricsAlias,
    MetricsTenants,
    Names,
    RedisUrl,
    RemotePrefillMode,
    Seconds,
    UrlPrefix,
    together,
)
from gpuworker.config import EngineSettings
from router.config import ReasoningParser, ToolCallParser

# Each process gets the others' ports before any of them runs, so `quire serve` itself picks a free one for each 0.
FixedPort = Annotated[int, Field(ge=0, le=65535)]


class UpSettings(EngineSettings, DecisionLogSettings):
    """options of the suite"""

    service: ClassVar[str] = "serve"
    positional: ClassVar[str] = "model"

    model: str = Field(
        str(CHECKPOINT),
        description="folder of the checkpoint to serve, or a hub name where there is a network; unset: the demo model",
        json_schema_extra={"unsaid": ""},
    )
    revision: str | None = Field(None, description="branch, tag or commit of a model on the hub; unset: main")
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
    batch_dir: Path | None = Field(
        None, description="folder of what clients upload to /v1/files, and of their batches; unset: neither is offered"
    )
    force_include_usage: bool = Field(
        False, description="end every stream of a chat or completion with its usage, whatever the client says"
    )
    open_schemas: bool = Field(
        False,
        description="let objects of JSON schemas have properties that the schema does not name, unless it forbids them",
    )
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
        (), description="origin of pages that may call the HTTP API from a browser; repeatable; * is any; unset: none"
    )
    allowed_hosts: Names = Field(
        (), description="name by which callers on this machine may call the HTTP API without keys; repeatable"
    )
    workers: CountOrAuto = Field(
        1, description="GPU workers to start; auto: one for each NUMA node, on its cpus and memory"
    )
    prefill_workers: Count | None = Field(
        None,
        description="of the workers, the first so many compute prompts for the others, which decode (--disaggregation "
        "of each); with --host-memory and --data-port 0; unset: each worker does all",
    )
    remote_prefill: RemotePrefillMode = Field(
        "auto",
        description="whether a prompt is computed at a prefill worker first; auto: where that is predicted to be "
        "faster, delays of running requests included; always: wherever a worker has room for it; off: never",
    )
    manager: Literal["remote", "embedded"] = Field(
        "remote", description="KV manager as a service of its own, or inside each worker (for comparison)"
    )
    block_size: BlockSize = Field(16, description="slots in a block")
    threads: Count | None = Field(
        None,
        description="threads of each worker's engine on a CPU; unset: all workers share the cores, less one from "
        "three cores on",
    )
    host: Host = Field("127.0.0.1", description="address of the ports for clients")
    admin_host: Host = Field(
        "127.0.0.1", description="address of everything else: the router's admin plane, KV manager, workers"
    )
    port: FixedPort = Field(8000, description="HTTP port of the router: OpenAI-compatible API, /health")
    grpc_port: FixedPort = Field(50051, description="gRPC port of the router")
    routers: Count = Field(1, description="router processes, which share the router's ports")
    own_port: FixedPort = Field(
        50150,
        description="with several routers: admin port of the first one only, its /metrics 1000 above; others follow",
    )
    admin_port: FixedPort | None = Field(
        None, description="gRPC port of the router's admin plane: spans, traces, status; unset: 1 below --grpc-port"
    )
    admin_http_port: FixedPort | None = Field(
        None, description="port of the router's /metrics; unset: 1000 above --grpc-port"
    )
    manager_port: FixedPort = Field(50052, description="gRPC port of the KV manager")
    managers: Count = Field(1, description="KV manager processes; one leads, the others stand by and take over")
    shards: Count = Field(
        1, description="parts of the pool, each with --managers processes of its own and its share of the workers"
    )
    standby_port: FixedPort = Field(
        50250, description="with several KV managers: gRPC port of the second one; the others follow"
    )
    worker_port: FixedPort = Field(50053, description="gRPC port of the first worker; the others follow")
    redis_url: RedisUrl | None = Field(
        None, description="Redis to use; unset: one is started", json_schema_extra={"env": "REDIS_URL"}
    )
    redis_ca: Path | None = Field(
        None, description="PEM file: the CA of a rediss:// Redis; unset: those that this machine trusts"
    )
    tenants: Path | None = Field(
        None, description="TOML file of tenants and the hashes of their keys; unset: no keys, each address is a tenant"
    )
    server_key_file: Path | None = Field(
        None, description="file with the key that separates tenants' cached blocks; unset: one is made in --state-dir"
    )
    state_dir: Path = Field(Path(".quire"), description="folder of files that outlive the processes")
    insecure: bool = Field(
        False, description="plain text between the services; unset: TLS, with certificates that are made in state-dir"
    )
    public_tls_cert: Path | None = Field(
        None, description="PEM file: the certificate of --port and --grpc-port; unset: they are plain text"
    )
    public_tls_key: Path | None = Field(None, description="PEM file: the key of that certificate")
    trace_sample_ratio: Fraction = Field(1.0, description="share of requests that are traced")
    slo_ttft: Seconds | None = Field(
        None, description="seconds to the first token that clients were promised; a later one is kept as slow"
    )
    slo_itl: Seconds | None = Field(
        None,
        description="inter-token latency in seconds; above it on over 1 % of its outputs, a request is kept as slow",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe line shown")
    drain_timeout: Seconds = Field(30.0, description="seconds that running requests get after Ctrl-C")

    def problems(self) -> Iterator[FieldViolation]:
        yield from super().problems()
        yield from together(self, "public_tls_cert", "public_tls_key")
        yield from without_effect(self.model, self.revision)
        if self.managers > 1 and self.manager == "embedded":
            what = f"is {self.managers}, and --manager embedded starts none; leave out one of them"
            yield FieldViolation("--managers", what)
        yield from self._shards()
        yield from self._prefill_workers()

    def _prefill_workers(self) -> Iterator[FieldViolation]:
        count = self.prefill_workers
        if count is None:
            return
        what = f"is {count}, and "
        if self.disaggregation != "none":
            yield FieldViolation("--prefill-workers", f"{what}--disaggregation is for all workers; leave out one")
        if self.manager == "embedded":
            yield FieldViolation("--prefill-workers", f"{what}--manager embedded passes no blocks; leave out one")
        if isinstance(self.workers, int) and count >= self.workers:
            yield FieldViolation("--prefill-workers", f"{what}there are {self.workers} workers; at least one decodes")

    def _shards(self) -> Iterator[FieldViolation]:
        if self.shards == 1:
            return
        what = f"is {self.shards}, and "
        if self.manager == "embedded":
            yield FieldViolation("--shards", f"{what}--manager embedded starts no manager; leave out one of them")
        elif isinstance(self.workers, int) and self.shards > self.workers:
            yield FieldViolation("--shards", f"{what}there are {self.workers} workers; expected one for each at least")
