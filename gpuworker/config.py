"""The GPU worker's options."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

from pydantic import AfterValidator, Field

from common.checkpoint.hub import without_effect
from common.checkpoint.pooling import PoolingMode, PoolingOption
from common.contracts.adapters import NAME_WORDS, is_adapter_name
from common.contracts.errors import FieldViolation
from common.contracts.limits import MAX_ADAPTER_RANK, ORPHANS_ALONE
from common.cpu_list import cpus_of, in_words
from common.process.topology import allowed_cpus
from common.settings.options import (
    Address,
    Addresses,
    BlockSize,
    Bytes,
    Count,
    CpuLevel,
    Cpus,
    DisaggregationMode,
    DrainMode,
    DType,
    Fraction,
    KvCacheDType,
    LoadFormat,
    ModelImpl,
    Names,
    Port,
    Quantization,
    Seconds,
    ServiceSettings,
    Settings,
    Speculative,
    TokenizerFolder,
    WorkerId,
    host_of,
    is_loopback,
)
from gpuworker.scheduling.step_costs import DEFAULT_COSTS, parse_costs


def _costs(value: str) -> str:
    parse_costs(value)
    return value


_DISK_CACHE_BYTES: Final = 16 << 30
DEFAULT_LORAS: Final = 8


def _adapters(values: tuple[str, ...]) -> tuple[str, ...]:
    """Check that each is NAME=DIR, and that no name is given twice. Raises ValueError."""
    for value in values:
        name, _, folder = value.partition("=")
        if not folder:
            raise ValueError(f"{value!r} is not NAME=DIR, such as sql=/adapters/sql")
        if not is_adapter_name(name):
            raise ValueError(f"{name[:64]!r} cannot name an adapter; expected {NAME_WORDS}")
    names = [value.partition("=")[0] for value in values]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{twice!r} names two adapters; give each a name of its own")
    return values


def _kv_endpoint(value: str) -> str:
    """Check that a value is tcp://HOST:PORT, at an address that can be bound. Raises ValueError."""
    scheme, _, address = value.partition("://")
    host, _, port = address.rpartition(":")
    try:
        if host.startswith("["):
            ipaddress.IPv6Address(host[1:-1] if host.endswith("]") else host)
        elif host not in ("*", "localhost"):
            ipaddress.IPv4Address(host)
        if scheme != "tcp" or not 0 <= int(port) <= 65535:
            raise ValueError
    except ValueError:
        what = f"{value[:64]!r} is not tcp://HOST:PORT, with an IP address (IPv6 in brackets), localhost or * for all"
        raise ValueError(f"{what}, such as tcp://127.0.0.1:5557") from None
    return value


def bound_address(endpoint: str) -> tuple[str, int]:
    """Return the host, without brackets, and the port of tcp://HOST:PORT as `--kv-events` has it."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return {"*": "0.0.0.0", "localhost": "127.0.0.1"}.get(host, host.removeprefix("[").removesuffix("]")), int(port)


KvEndpoint = Annotated[str, AfterValidator(_kv_endpoint)]
StepCostWords = Annotated[str, AfterValidator(_costs)]


class EngineSettings(Settings):
    """options of the engine"""

    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = (("kv_blocks", "kv_memory", "gpu_memory_utilization"),)

    load_format: LoadFormat = Field("auto", description="dummy makes random weights from the configuration only")
    tokenizer: TokenizerFolder | None = Field(
        None, description="folder of a tokenizer to use instead of the checkpoint's; the same on every service"
    )
    dtype: DType = Field("auto", description="type of weights and activations; auto: the checkpoint's own")
    kv_cache_dtype: KvCacheDType = Field(
        "auto",
        description="type of K and V in the cache: float32, bfloat16, float16, int8, fp8; auto: the model's. int8 and "
        "fp8 keep a scale for each slot and head",
    )
    quantization: Quantization = Field(
        "none",
        description="how linear layers hold their weights: int8 and int4 quantise only weights, w8a8 activations too; "
        "auto: the fastest type for the shape of each layer that loses at most 1 % of perplexity, timed at start and "
        "said in the log with the reason; none: as the "
        "checkpoint has them, in integers too. Other than none only on the native path of a CPU",
    )
    deterministic: bool = Field(
        False,
        description="compute the same tokens, to the bit of their logits, whatever else runs, however prompts are cut, "
        "on every worker of the pool; refused where that cannot be kept: it needs the native CPU path",
    )
    model_impl: ModelImpl = Field(
        "auto",
        description="native: Quire's own forward of the Llama family, in C++ on a CPU, in fused kernels on CUDA; "
        "transformers: the forward of the transformers library with Quire's attention; auto: native where the model "
        "and the device allow it, and the log has the reason",
    )
    pooling: PoolingOption = Field(
        "auto",
        description="make a vector of each prompt instead of continuing it: of its last token's hidden state, or of "
        "the mean of all, at length 1; auto: as modules.json of the checkpoint has it, else none; none: generate",
    )
    speculative: Speculative = Field(
        "none",
        description="guess the next tokens and verify several in one step; the tokens stay those of plain decoding. "
        "ngram: as the same last tokens went on before, in prompt and output, or as the request's `prediction` or its "
        "grammar says; "
        "a sequence is guessed for while that is faster. draft: by the model of --draft-model, too. On a CPU: the "
        "native path, or float32",
    )
    draft_model: str | None = Field(
        None,
        description="a smaller model that guesses, with the tokenizer of the model: a folder, a GGUF file or a hub "
        "name; it takes memory and a KV cache of its own. Given, --speculative is draft",
    )
    simulate: StepCostWords | None = Field(
        None,
        description="run no model: a step sleeps for base + decode for each row that samples + prefill for each other "
        "position. Tokens follow from seed and position; no weights are read, no K/V is kept. Without "
        f"a value: {DEFAULT_COSTS}. For tests of load",
        json_schema_extra={"bare": DEFAULT_COSTS},
    )
    lora: Annotated[Names, AfterValidator(_adapters)] = Field(
        (),
        description="NAME=DIR, a LoRA adapter in PEFT's format, and the model name by which requests choose it; "
        "repeatable",
    )
    lora_dir: Path | None = Field(
        None,
        description="folder that is watched: each folder in it is an adapter under its own name, and from anywhere "
        "below it adapters are loaded at run time (`quire adapters`); unset: none are",
    )
    max_loras: Count | None = Field(
        None,
        description="adapters in memory at once; others are read when requests name them, and the least recently used "
        "ones leave; unset: 8, with --lora or --lora-dir",
    )
    max_lora_rank: int = Field(
        16, ge=1, le=MAX_ADAPTER_RANK, description="largest rank of an adapter; memory is reserved for it"
    )
    cuda_graphs: bool = Field(
        True,
        description="CUDA only: capture decode steps of native models at start, some seconds, and run them as graphs",
    )
    tensor_parallel_size: Count = Field(
        1,
        le=16,
        description="processes that run one worker's model together: each has its heads, its part of the "
        "other weights, and its part of every block of K/V. On a CPU, for models with a forward of Quire's own; tokens "
        "come through rank 0. They are on this host, or shared out among hosts by WORLD_SIZE, RANK, MASTER_ADDR and "
        "MASTER_PORT",
        json_schema_extra={"short": "-tp"},
    )
    rank_timeout: Seconds = Field(
        60.0, description="seconds in which the other ranks of a worker must come at its start"
    )
    rank_interface: str | None = Field(
        None,
        min_length=1,
        max_length=15,
        description="network interface, such as eth1, on which ranks of several hosts listen and nothing else does; "
        "unset: loopback",
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    cpu_level: CpuLevel = Field(
        "auto",
        description="vector instructions of the native CPU kernels: scalar, avx2, avx_vnni, avx512, avx512_vnni, "
        "avx512_bf16, amx; on ARM scalar, neon, neon_dotprod; auto: the best that the processor has. Others are for "
        "measurements and tests",
    )
    seed: int = Field(0, description="seed of dummy weights; `quire serve` also gives it to requests that name none")
    kv_blocks: Count | None = Field(
        None, description="size of a worker's KV pool in blocks; in pages where layers are groups"
    )
    kv_memory: Bytes | None = Field(
        None,
        description="size of a worker's KV pool in bytes, such as 4GiB; unset, and without --kv-blocks: on a CPU 1 GiB "
        "or a quarter of the free memory, whichever is less",
    )
    host_memory: Bytes | None = Field(
        None,
        description="memory of the host, such as 8GiB, that keeps blocks which leave the KV pool. They are copied back "
        "in place of being computed, for prefixes of later requests and after preemptions. For models whose layers all "
        "attend to every token; unset: none",
    )
    disk_cache: Path | None = Field(
        None,
        description="folder on a local disk that keeps blocks beyond host memory, and for a worker that restarts. Each "
        "worker has a folder of its own in it. Blocks come back by way of host memory, so it needs --host-memory; "
        "unset: none",
    )
    disk_cache_size: Bytes | None = Field(
        None, description="size of each worker's part of --disk-cache, such as 100GiB; unset: 16 GiB"
    )
    data_port: Port | None = Field(
        None,
        description="port at which other workers fetch cached blocks from this one, and it from theirs; 0 takes a free "
        "one. Blocks come by way of host memory, so it needs --host-memory; unset: none are fetched",
    )
    data_address: Address | None = Field(
        None,
        description="HOST:PORT at which other workers reach --data-port; unset: the host of --advertise and the port",
    )
    carrier: Literal["auto", "nixl"] = Field(
        "auto",
        description="how fetched blocks come: auto: through shared memory on one host, else over the connection to "
        "--data-port; nixl: by NIXL in place of the connection where both workers say so, for networks with RDMA. It "
        "needs quire-llm[nixl], TLS and a private network, and never ran over RDMA yet",
    )
    kv_events: KvEndpoint | None = Field(
        None,
        description="tcp://HOST:PORT at which a worker publishes what its cache stores and removes, over ZeroMQ in "
        "vLLM's form, for routers of others; port 0 takes a free one, several workers take ports one after the other. "
        "It tells token ids to whoever connects, so HOST is on loopback. It needs quire-llm[events]; unset: none",
    )
    kv_events_replay: KvEndpoint | None = Field(
        None, description="tcp://HOST:PORT at which subscribers of --kv-events ask for what they have missed"
    )
    kv_events_topic: str = Field("", max_length=255, description="topic of --kv-events, such as kv@HOST@MODEL")
    kv_events_unprotected: bool = Field(
        False,
        description="let --kv-events and --kv-events-replay be beyond loopback: whoever reaches them reads the prompts "
        "of all tenants as token ids, without any proof of who that is, and without encryption",
    )
    gpu_memory_utilization: float = Field(
        0.90,
        gt=0.0,
        le=1.0,
        description="CUDA only: share of the device's memory for weights, activations and KV pool",
    )
    max_model_len: Count | None = Field(
        None,
        description="longest prompt and output together; unset: the checkpoint's own, or, where its "
        "model runs any, the tokenizer's or 8192",
    )
    max_num_seqs: Count | None = Field(
        None, description="sequences in a step; unset: 256 on a GPU, 64 on a CPU, at most --max-num-batched-tokens"
    )
    max_num_batched_tokens: Count = Field(2048, description="tokens in a step; at least --max-num-seqs")
    long_prefill_cap: Count | None = Field(None, description="tokens of one prompt in a step; unset: no cap of its own")
    orphan_grace: float = Field(
        25.0,
        ge=0.0,
        description="seconds that the sequences of a router that died run on, for clients that resume at another one; "
        f"up to {ORPHANS_ALONE} times as long until any router is connected; 0: they end with their router",
    )
    drain: DrainMode = Field(
        "finish",
        description="what a worker that stops (SIGTERM) does with its sequences: finish: they run to their ends; "
        "migrate: routers move them at once to workers that have room, and the others run on here. Both end with "
        "--drain-timeout",
    )
    trace_step_ratio: Fraction = Field(
        0.0, description="share of engine steps that get a span, with links to the traced requests in the step"
    )
    prefix_caching: bool = Field(True, description="keep blocks of finished requests, and share them")
    disaggregation: DisaggregationMode = Field(
        "none",
        description="prefill: compute prompts for workers that decode, and whole requests only where no other worker "
        "is; decode: serve requests, and fetch what a prefill worker has computed of their prompts; none: serve "
        "requests. prefill and decode need --data-port",
    )

    def num_seqs(self, default: int) -> int:
        """Return the sequences in a step; `default` is that of the device."""
        return self.max_num_seqs or min(default, self.max_num_batched_tokens)

    @property
    def most_loras(self) -> int:
        """Return how many adapters may be in memory at once; 0 where none are served."""
        return (self.max_loras or DEFAULT_LORAS) if self.lora or self.lora_dir is not None else 0

    @property
    def disk_cache_bytes(self) -> int:
        """Return the size of each worker's part of the disk cache; 0 without one."""
        return 0 if self.disk_cache is None else self.disk_cache_size or _DISK_CACHE_BYTES

    @property
    def speculation(self) -> str:
        """What guesses: --speculative, which a draft model implies."""
        return "draft" if self.draft_model is not None and self.speculative == "none" else self.speculative

    def problems(self) -> Iterator[FieldViolation]:
        yield from super().problems()
        yield from self._rank_problems()
        if self.speculative == "draft" and self.draft_model is None:
            what = (
                "is draft, and no model is named that guesses; expected --draft-model with one, or --speculative ngram"
            )
            yield FieldViolation("--speculative", what)
        if self.speculative == "ngram" and self.draft_model is not None:
            what = f"is {self.draft_model}, and --speculative ngram guesses without one; leave out one of them"
            yield FieldViolation("--draft-model", what)
        if self.host_memory is not None and not self.prefix_caching:
            what = "keeps cached blocks, and --no-prefix-caching keeps none; leave out one of them"
            yield FieldViolation("--host-memory", what)
        yield from self._disk_problems()
        yield from self._adapter_problems()
        yield from self._event_problems()
        if self.data_port is not None and self.host_memory is None:
            what = "is for blocks that come by way of host memory, and there is none; add --host-memory 1GiB"
            yield FieldViolation("--data-port", what)
        if self.disaggregation != "none" and self.data_port is None:
            what = f"is {self.disaggregation}, and blocks pass between workers by --data-port"
            yield FieldViolation("--disaggregation", f"{what}; add it, with --host-memory")
        if self.data_address is not None and self.data_port is None:
            yield FieldViolation("--data-address", "is where others reach --data-port, and there is none; add it")
        if self.carrier != "auto" and self.data_port is None:
            what = f"is {self.carrier}, and blocks come from other workers by --data-port alone; add it"
            yield FieldViolation("--carrier", what)
        tokens, sequences = self.max_num_batched_tokens, self.max_num_seqs
        if sequences is not None and tokens < sequences:
            what = f"is {tokens}, and a step has up to {sequences} sequences with a token each"
            yield FieldViolation(
                "--max-num-batched-tokens", f"{what}; expected at least {sequences}, or a lower --max-num-seqs"
            )

    def _rank_problems(self) -> Iterator[FieldViolation]:
        """Refuse what several ranks do not do yet, so that nothing is done by halves."""
        if self.tensor_parallel_size == 1:
            return
        flag, size = "--tensor-parallel-size", self.tensor_parallel_size
        tiers = {"--host-memory": self.host_memory, "--disk-cache": self.disk_cache, "--data-port": self.data_port}
        for tier, given in tiers.items():
            if given is not None:
                what = f"moves whole blocks, and each of {size} ranks has a part of every block; leave one of them out"
                yield FieldViolation(tier, what)
        refused = {
            "--simulate": (self.simulate is not None, "runs no model that could be cut"),
            "--draft-model": (self.draft_model is not None, "is run by one process; use --speculative ngram"),
            "--model-impl transformers": (self.model_impl == "transformers", "is run by one process"),
            "--deterministic": (self.deterministic, "is promised between workers of one rank alone"),
            "--quantization auto": (self.quantization == "auto", "is chosen by times, which differ between ranks"),
            f"--device {self.device}": (self.device.startswith("cuda"), "has ranks on CPUs alone, so far"),
        }
        for what, (given, why) in refused.items():
            if given:
                yield FieldViolation(flag, f"is {size}, and {what} {why}; leave one of them out")

    @property
    def needs_peers(self) -> bool:
        """Whether peers must be able to fetch blocks. Each of several workers is given a free port, needed or not."""
        return bool(self.data_port) or self.disaggregation != "none"

    def _adapter_problems(self) -> Iterator[FieldViolation]:
        if self.max_loras is not None and not self.most_loras:
            yield FieldViolation("--max-loras", "bounds adapters, and there are none; add --lora or --lora-dir")
        if self.lora_dir is not None and not self.lora_dir.expanduser().is_dir():
            yield FieldViolation("--lora-dir", f"is {self.lora_dir}, which is not a folder; make it, or leave it out")

    def _event_problems(self) -> Iterator[FieldViolation]:
        given = {"--kv-events": self.kv_events, "--kv-events-replay": self.kv_events_replay}
        for flag, endpoint in given.items():
            host = host_of((endpoint or "").removeprefix("tcp://"))
            if endpoint is not None and not is_loopback(host) and not self.kv_events_unprotected:
                what = f"is {endpoint}, beyond loopback, and tells prompts as token ids to whoever connects"
                yield FieldViolation(flag, f"{what}; expected 127.0.0.1, or --kv-events-unprotected besides")
        if self.kv_events is not None:
            if not self.prefix_caching:
                what = "tells of cached blocks, and --no-prefix-caching keeps none; leave out one of them"
                yield FieldViolation("--kv-events", what)
            return
        others = {
            "--kv-events-replay": self.kv_events_replay,
            "--kv-events-topic": self.kv_events_topic,
            "--kv-events-unprotected": self.kv_events_unprotected,
        }
        for flag in [flag for flag, value in others.items() if value]:
            yield FieldViolation(flag, "is a part of --kv-events, and there is none; add it")

    def _disk_problems(self) -> Iterator[FieldViolation]:
        if self.disk_cache is None:
            if self.disk_cache_size is not None:
                yield FieldViolation("--disk-cache-size", "is the size of a --disk-cache, and there is none; add it")
            return
        if not self.prefix_caching:
            what = "keeps cached blocks, and --no-prefix-caching keeps none; leave out one of them"
            yield FieldViolation("--disk-cache", what)
        elif self.host_memory is None:
            what = "keeps blocks that come back by way of host memory, and there is none; add --host-memory 1GiB"
            yield FieldViolation("--disk-cache", what)


class GpuWorkerSettings(EngineSettings, ServiceSettings):
    """options of the GPU worker"""

    service: ClassVar[str] = "gpuworker"

    port: Port = Field(50053, description="gRPC port; 0 takes a free one")
    metrics_port: Port | None = Field(None, description="port of /metrics and /health; unset: the gRPC port + 1000")
    advertise: Address | None = Field(
        None,
        description="HOST:PORT at which routers reach this worker; unset: host and port, and for a host of 0.0.0.0 the "
        "address on the way to the manager",
    )
    worker_id: WorkerId | None = Field(None, description="name of this worker; unset: host name and port")
    manager: Annotated[Addresses, Field(min_length=1)] = Field(
        ("127.0.0.1:50052",),
        description="HOST:PORT of the KV manager, or of each manager of a group, with commas or behind one name",
    )
    manager_patience: Seconds = Field(
        60.0, description="seconds for which a worker that has lost its KV manager is ready; the same on routers"
    )
    model: str = Field(..., description="folder of the checkpoint, or a hub name where there is a network")
    revision: str | None = Field(None, description="branch, tag or commit of a model on the hub; unset: main")
    block_size: BlockSize = Field(16, description="slots in a block; the same on every service")
    threads: Count | None = Field(
        None,
        description="threads of the engine on a CPU, of each rank; unset: one for each core, less one from three cores "
        "on, shared out among ranks",
    )
    cpus: Cpus | None = Field(
        None,
        description="cpus that the worker runs on, such as 0-7,16-23; its memory then comes from their NUMA node; "
        "unset: all that the process may use",
    )

    def problems(self) -> Iterator[FieldViolation]:
        yield from super().problems()
        if self.simulate is not None and self.most_loras:
            flag = "--lora" if self.lora else "--lora-dir"
            yield FieldViolation(flag, "adapts a model, and --simulate runs none; leave out one of them")
        if self.simulate is not None and self.pooling in tuple(PoolingMode):
            yield FieldViolation("--pooling", f"is {self.pooling}, and --simulate runs no model; leave out one of them")
        if self.speculation != "none" and self.simulate is not None:
            what = f"is {self.speculation}, and --simulate has nothing to verify guesses with; leave out one of them"
            yield FieldViolation("--speculative", what)
        yield from self._cpu_problems()
        yield from self.beyond_loopback("--manager", map(host_of, self.manager))
        yield from without_effect(self.model, self.revision)

    def _cpu_problems(self) -> Iterator[FieldViolation]:
        if self.cpus is None:
            return
        wanted, allowed = cpus_of(self.cpus), allowed_cpus()
        if missing := wanted - allowed:
            what = f"is {self.cpus}, and this process may not use cpu {in_words(missing)}"
            yield FieldViolation("--cpus", f"{what}; choose among {in_words(allowed)} (`lscpu` shows nodes)")
        if self.threads is not None and self.threads > len(wanted):
            what = f"is {self.threads}, and --cpus has {len(wanted)}: threads that share a cpu stall each other"
            yield FieldViolation("--threads", f"{what}; give at most {len(wanted)}, or more cpus")
