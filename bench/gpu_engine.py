"""The engine on a GPU against the time to read its bytes, and against transformers' continuous batching.

Random weights are made on the device, in two common shapes. The whole engine runs: thread, lease agent, the manager's
ledger, step runner and CUDA graphs, without the network. First the benchmark compares a tiny model's tokens with those
of transformers' `generate`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM

from bench.gpu.engine_harness import GREEDY, EngineDriver, decode_rate, random_prompts
from bench.gpu.measure import Figure, checked, copy_bandwidth, parser, report, the_device
from bench.gpu.models import MODELS, TINY, config_of, spec_of
from bench.gpu.peer import PeerFailure, peer_rate
from common.contracts.types import KvGeometry, SamplingParams
from gpuworker.attention.triton_backend import TritonAttention
from gpuworker.memory.byte_plan import bytes_per_block
from gpuworker.memory.devices import dtype_name
from gpuworker.memory.kv_cache import KvCache
from gpuworker.models.llama.gpu_model import LlamaGpuModel
from gpuworker.models.llama.gpu_weights import fused_weights, random_weights
from gpuworker.runner.cuda_graphs import graph_launcher
from gpuworker.runner.model_runner import ModelRunner, RunnerLimits
from gpuworker.runner.thread_executor import thread_executor
from gpuworker.scheduling.outcomes import AgentConfig

BLOCK_SIZE = 16
_CONTEXT, _OUTPUT, _SKIPPED = 1024, 192, 32
_TARGETS = {("llama_8b", 1): 0.80, ("llama_8b", 32): 0.75, ("qwen3_06b", 1): 0.45, ("qwen3_06b", 32): 0.60}
_BATCHES = (1, 8, 32, 128)
_DRAWS = {
    "greedy": GREEDY,
    "temperature": SamplingParams(temperature=0.8, seed=1),
    "top_k": SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=1),
    "top_p": SamplingParams(temperature=0.8, top_p=0.9, seed=1),
    "penalty": SamplingParams(temperature=0.0, repetition_penalty=1.2),
    "log-probabilities": SamplingParams(temperature=0.0, logprobs=3),
}


@dataclass(frozen=True, slots=True)
class Load:
    """`batch` sequences at once, whose contexts have `context` tokens on average while they decode."""

    batch: int
    context: int = _CONTEXT
    output: int = _OUTPUT
    skipped: int = _SKIPPED

    @property
    def prompt(self) -> int:
        return self.context - (self.output + self.skipped) // 2

    @property
    def blocks(self) -> int:
        """Blocks of all sequences at their ends, and some to lease ahead."""
        return self.batch * (-(-(self.prompt + self.output) // BLOCK_SIZE) + 2)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    flags.add_argument("--no-peer", action="store_true", help="leave transformers' continuous batching out")
    args = flags.parse_args()
    device = the_device("gpu_engine")
    check(device)
    copied = copy_bandwidth(device)
    figures = [Figure("copy_gb_s", copied / 1e9, "copy of 1 GiB on the device, bytes read and written")]
    for name in args.models[: 1 if args.quick else None]:
        for figure in measured(name, copied, device, _BATCHES[: 1 if args.quick else None], peer=not args.no_peer):
            print(f"timed  {figure.name}", flush=True)
            figures.append(figure)
    report("gpu_engine", device, figures)


def check(device: torch.device, rows: int = 5, prompt: int = 70, output: int = 40) -> None:
    """Compare the tokens of a tiny model in float32 with `generate`'s: prefills, chunks, graphs."""
    config, spec = config_of(TINY), spec_of(TINY)
    prompts = random_prompts(rows, prompt, spec.vocab_size, seed=1)
    torch.manual_seed(0)
    with device:
        module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    module.generation_config.eos_token_id = None
    tensors = module.state_dict()
    weights = fused_weights(spec, tensors.__getitem__, torch.float32, device)
    model = LlamaGpuModel(config, weights, "float32", prompt + output)
    with torch.inference_mode():
        ids = torch.tensor(prompts, device=device)
        made = module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=output, do_sample=False)
    load = Load(rows, prompt + output // 2, output, 0)
    with engine_on(model, load, budget=64) as engine:
        found = [stream.tokens for stream in engine.run(prompts, output)]
        with _noticing_waits(device):
            for name, sampling in _DRAWS.items():
                streams = engine.run(prompts, output, sampling)
                missing = sum(len(stream.tokens) != output for stream in streams)
                checked(f"steps that wait for the device, {name}", missing, 0)
    differ = (torch.tensor(found) != made[:, prompt:].cpu()).float().mean()
    checked("tokens that differ from generate's", float(differ), 0.0)


@contextmanager
def _noticing_waits(device: torch.device) -> Iterator[None]:
    """Make torch raise where it waits for the device implicitly; the step then fails at that place."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def engine_on(model: LlamaGpuModel, load: Load, budget: int = 8192) -> EngineDriver:
    """Return an engine over a cache that holds the load."""
    spec, max_len = model.spec, load.prompt + load.output
    geometry = KvGeometry(spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.head_dim, model.kv_dtype)
    cache = KvCache(geometry, load.blocks, BLOCK_SIZE, model.device)
    attention = TritonAttention(cache)
    limits = RunnerLimits(load.batch, max_len)
    launcher = graph_launcher(model, cache, attention, load.batch, max_len)
    runner = ModelRunner(model, cache, attention, limits, thread_executor(launcher))
    config = AgentConfig(load.blocks, BLOCK_SIZE, budget, max_num_seqs=load.batch, prefix_caching=False)
    return EngineDriver(runner, config, geometry)


def measured(name: str, copied: float, device: torch.device, batches: tuple[int, ...], peer: bool) -> Iterator[Figure]:
    """Yield tokens a second of one model at each batch, over the limit of its bytes, and over the peer's."""
    spec, config = spec_of(MODELS[name]), config_of(MODELS[name])
    weights = random_weights(spec, torch.bfloat16, device)
    model = LlamaGpuModel(config, weights, dtype_name(torch.bfloat16), 2 * _CONTEXT)
    ours = {}
    for batch in batches:
        load = Load(batch)
        ours[batch] = _rate(model, load)
        limit = batch * copied / step_bytes(model, load)
        what = f"{batch} rows, contexts of {load.context}"
        yield Figure(f"{name}_{batch}_tok_s", ours[batch], f"tokens a second: {what}")
        share = f"over what reading {step_bytes(model, load) / 1e9:.2f} GB a step allows at a copy's speed: {what}"
        yield Figure(f"{name}_{batch}_of_limit", ours[batch] / limit, share, _TARGETS.get((name, batch)))
    del model, weights
    _empty()
    for batch in batches if peer else ():
        yield _over_peer(name, Load(batch), ours[batch], device)
        _empty()


def _rate(model: LlamaGpuModel, load: Load) -> float:
    with engine_on(model, load) as engine:
        for seed in range(2):  # the first run is a warm-up
            prompts = random_prompts(load.batch, load.prompt, model.vocab_size, seed)
            streams = engine.run(prompts, load.output)
    _empty()
    return decode_rate(streams, load.skipped)


def _over_peer(name: str, load: Load, ours: float, device: torch.device) -> Figure:
    """Return Quire's tokens a second over those of transformers' continuous batching, on a model of the same shape."""
    figure, peer = f"{name}_{load.batch}_over_transformers", "transformers' continuous batching"
    prompts = random_prompts(load.batch, load.prompt, spec_of(MODELS[name]).vocab_size, 1)
    try:
        theirs = peer_rate(config_of(MODELS[name]), prompts, load.output, load.skipped, device)
    except PeerFailure as error:
        return Figure(figure, None, f"{peer} failed: {error}")
    return Figure(figure, ours / theirs, f"tokens a second over {peer} ({theirs:.0f})", 1.0)


def step_bytes(model: LlamaGpuModel, load: Load) -> int:
    """Return the bytes that a decode step must read: all weights but a separate embedding, and the K/V of all rows."""
    spec, weights = model.spec, model.weights
    embedding = 0 if spec.tied else weights.embedding.numel() * weights.embedding.itemsize
    geometry = KvGeometry(spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.head_dim, model.kv_dtype)
    return weights.num_bytes - embedding + load.batch * load.context * bytes_per_block(geometry, 1)


def _empty() -> None:
    """Release unused GPU memory; the next cache would otherwise be allocated beside it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
