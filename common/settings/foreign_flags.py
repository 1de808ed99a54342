"""The flags of other engines: Quire's option of the same meaning, or why there is none.

The names are those of vLLM, SGLang, text-generation-inference and llama.cpp's server, as of 2026. A flag that Quire
spells in the same way is not here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

# Quire's option -> the flags of others that mean it.
_OPTIONS: Final[Mapping[str, str]] = {
    "model": "-m --model-path --model-id -hf -hfr --hf-repo",
    "model_name": "--served-model-name -a --alias",
    "max_model_len": "-c --ctx-size --context-length --max-seq-len --max-input-tokens --max-input-length",
    "max_num_seqs": "-np --parallel --max-running-requests --max-batch-size --max-num-sequences --max-seqs --num-slots",
    "max_num_batched_tokens": "-b --batch-size -ub --ubatch-size --max-prefill-tokens --max-batch-prefill-tokens "
    "--chunked-prefill-size --max-num-tokens",
    "max_queued_requests": "--max-concurrent-requests --max-queue-size",
    "long_prefill_cap": "--long-prefill-token-threshold",
    "gpu_memory_utilization": "--mem-fraction-static --cuda-memory-fraction --gpu-mem-util --gpu-memory-fraction "
    "--kv-cache-free-gpu-memory-fraction",
    "kv_memory": "--kv-cache-memory-bytes --kv-cache-memory --max-batch-total-tokens --max-kv-size -cram --cache-ram",
    "kv_blocks": "--num-gpu-blocks-override --num-gpu-blocks",
    "kv_cache_dtype": "-ctk --cache-type-k -ctv --cache-type-v --kv-cache-type",
    "block_size": "--page-size --tokens-per-block",
    "quantization": "-q --quantize",
    "threads": "-t -tb --threads-batch --cpu-threads",
    "device": "-ngl --gpu-layers --n-gpu-layers -dev",
    "seed": "-s --random-seed",
    "workers": "-dp --data-parallel-size --dp-size --dp",
    "deterministic": "--enable-deterministic-inference",
    "port": "--http-port",
    "host": "--hostname",
    "admin_http_port": "--prometheus-port --metrics-port",
    "cors_origins": "--allowed-origins --cors-allow-origin",
    "public_tls_cert": "--ssl-certfile --ssl-cert-file",
    "public_tls_key": "--ssl-keyfile --ssl-key-file",
    "tenants": "--api-key --api-key-file",
    "trace_endpoint": "--otlp-traces-endpoint --otlp-endpoint",
    "log_level": "-v --verbose --verbosity --uvicorn-log-level --disable-log-requests --log-requests",
    "log_format": "--json-output",
    "load_format": "--skip-load-weights",
    "no_prefix_caching": "--disable-radix-cache --no-enable-prefix-caching --no-cache-prompt",
    "no_cuda_graphs": "--enforce-eager --disable-cuda-graph",
    "redis_url": "--redis",
    "draft_model": "-md --model-draft --speculative-model --speculative-draft-model-path",
    "speculative": "--speculative-algorithm --spec-type",
}
_ONE_DEVICE: Final = "a model runs on one device; --workers N starts N replicas of it"
# Why there is no such option -> the flags of others.
_ABSENT: Final[Mapping[str, str]] = {
    _ONE_DEVICE: "-tp --tensor-parallel-size --tp-size --tp --num-shard --sharded -pp --pipeline-parallel-size "
    "--pp-size -ts --tensor-split -sm --split-mode -mg --main-gpu --nnodes --node-rank "
    "--distributed-executor-backend --enable-expert-parallel --ep-size",
    "prefixes are always shared; --no-prefix-caching turns that off": "--enable-prefix-caching --cache-prompt",
    "prompts are always cut into chunks; --max-num-batched-tokens bounds a step": "--enable-chunked-prefill",
    "requests always join the running batch": "-cb --cont-batching --waiting-served-ratio --schedule-policy",
    "a preempted sequence is computed again, and nothing is moved to the host": "--swap-space --cpu-offload-gb",
    "--draft-model names a draft model, and --speculative what guesses": "--speculative-config --speculate",
    "drafts are as many as pay": "--num-speculative-tokens --draft-max --speculative-num-steps",
    "Quire serves no adapters": "--enable-lora --lora-modules --lora-adapters --lora-paths --lora --max-loras",
    "Quire takes text alone": "--limit-mm-per-prompt --mm-processor-kwargs --mmproj",
    "calls of tools are always read; --tool-call-parser none turns that off": "--enable-auto-tool-choice",
    "Quire has its own parsers alone; --tool-call-parser chooses one": "--tool-parser-plugin",
    "thoughts are always read; --reasoning-parser none turns that off": "--enable-reasoning --reasoning-format",
    "code of a checkpoint is never run": "--trust-remote-code",
    "the attention fits device and model; --model-impl chooses the forward": "--attention-backend -fa --flash-attn",
    "llguidance checks every grammar": "--guided-decoding-backend --grammar-backend --structured-outputs-config",
    "weights are mapped from their files": "--mlock --no-mmap --mmap",
    "HF_HOME names the folder of downloads": "--download-dir --huggingface-hub-cache --model-dir",
    "config.json of the checkpoint has it": "--rope-scaling --rope-freq-base --rope-freq-scale --hf-overrides",
    "chat templates are always rendered": "--jinja",
    "/metrics is always there, on the admin plane": "--metrics --enable-metrics",
    "each request has it as a field": "-n --n-predict --predict --temp --temperature --top-p --top-k --min-p "
    "--repeat-penalty --max-tokens --stop",
}
_WHY: Final = {flag: why for why, flags in _ABSENT.items() for flag in flags.split()}
OURS: Final[Mapping[str, str]] = {flag: key for key, flags in _OPTIONS.items() for flag in flags.split()}
FOREIGN: Final = frozenset(OURS) | frozenset(_WHY)


def advice(flag: str, keys: Collection[str]) -> str | None:
    """Return what to do in place of a flag, for a program with the options `keys`; None for an unknown flag."""
    if flag in OURS:
        same = "--" + OURS[flag].replace("_", "-")
        here = OURS[flag].removeprefix("no_") in keys
        return f"is no flag here; {same} is the same" if here else f"is no flag here; `quire serve` has {same}"
    return f"is not there: {_WHY[flag]}" if flag in _WHY else None
