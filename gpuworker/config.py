"""The GPU worker's options."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from common.settings.options import (
    Address,
    BlockSize,
    Bytes,
    Count,
    DType,
    KvCacheDType,
    LoadFormat,
    ModelImpl,
    Port,
    Quantization,
    ServiceSettings,
    Settings,
)
from gpuworker.core.step_costs import DEFAULT_COSTS, parse_costs


def _costs(value: str) -> str:
    parse_costs(value)
    return value


StepCostWords = Annotated[str, AfterValidator(_costs)]


class EngineSettings(Settings):
    """options of the engine"""

    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = (("kv_blocks", "kv_memory", "gpu_memory_utilization"),)

    load_format: LoadFormat = Field("auto", description="dummy makes random weights from the configuration alone")
    dtype: DType = Field("auto", description="type of weights and activations; auto: the checkpoint's own")
    kv_cache_dtype: KvCacheDType = Field(
        "auto",
        description="type of K and V in the cache: float32, bfloat16, float16, int8, fp8; auto: the model's. int8 and "
        "fp8 keep a scale for each slot and head",
    )
    quantization: Quantization = Field(
        "none",
        description="how linear layers hold their weights: int8 and int4 quantise weights alone, w8a8 activations too; "
        "auto: int8, w8a8 or neither by the shape of each layer, timed at start and said in the log; none: as the "
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
    simulate: StepCostWords | None = Field(
        None,
        description="run no model: a step sleeps for base + decode for each row that samples + prefill for each other "
        "position. Tokens follow from seed and position; no weights are read, no K/V is kept. Without "
        f"a value: {DEFAULT_COSTS}. For tests of load",
        json_schema_extra={"bare": DEFAULT_COSTS},
    )
    cuda_graphs: bool = Field(
        True,
        description="CUDA only: capture decode steps of native models at start, some seconds, and run them as graphs",
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    seed: int = Field(0, description="seed of dummy weights")
    kv_blocks: Count | None = Field(None, description="size of a worker's KV pool in blocks")
    kv_memory: Bytes | None = Field(
        None,
        description="size of a worker's KV pool in bytes, such as 4GiB; unset, and without --kv-blocks: on a CPU 1 GiB "
        "or a quarter of the free memory, whichever is less",
    )
    gpu_memory_utilization: float = Field(
        0.90,
        gt=0.0,
        le=1.0,
        description="CUDA only: share of the device's memory for weights, activations and KV pool",
    )
    max_model_len: Count | None = Field(
        None, description="longest prompt and output together; unset: the checkpoint's own"
    )
    max_num_seqs: Count | None = Field(None, description="sequences in a step; unset: 256 on a GPU, 64 on a CPU")
    max_num_batched_tokens: Count = Field(2048, description="tokens in a step")
    long_prefill_cap: Count | None = Field(None, description="tokens of one prompt in a step; unset: no cap of its own")
    prefix_caching: bool = Field(True, description="keep blocks of finished requests, and share them")


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
    worker_id: str | None = Field(None, description="name of this worker; unset: host name and port")
    manager: Address = Field("127.0.0.1:50052", description="HOST:PORT of the KV manager")
    model: str = Field(..., description="folder of the checkpoint, or a hub name where there is a network")
    block_size: BlockSize = Field(16, description="slots in a block; the same on every service")
    threads: Count | None = Field(None, description="threads of the engine on a CPU; unset: cores - 1")
