"""What the kinds of memory of a model take: bytes of a token with latents, sequences that fit where layers are groups,
hits there, and what attending on latents or states costs.

    python -m bench.memory_kinds --json
    python -m bench.memory_kinds --only minimax_m2 --rounds 0 --older TREE    and what groups cost a pool without them

Bytes are counted on two layers of the attention of a published model, with random weights, as the self-test at start
finds them; they do not depend on the machine. Rates are those of a worker's engine in float32: on a small deepseek_v3,
with latents and, in turns, with K and V of every head; on a small qwen3_next, whose layers keep states, and in turns
by transformers' `generate` of the same weights. Capacity and hits are counted (`bench/lib/kv_groups.py`). The cost of a
report, a grant and a token is that of this tree over an older one, in turns (`bench/lib/one_kind.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from transformers import CONFIG_MAPPING

from bench.lib.checkpoints import HYBRID
from bench.lib.harness import median_interval, parser, progress, report
from bench.lib.kv_groups import HYBRIDS, MODELS, capacity_figures, hit_figures, hybrid_hit_figures
from bench.lib.models import data_plane, plane_worker
from bench.lib.one_kind import one_kind_figures
from bench.lib.state_traces import trace_figures
from bench.lib.workers import BenchWorker, Run, random_prompts
from common.contracts.types import KvGeometry
from gpuworker.attention.backends import make_backend
from gpuworker.memory.byte_plan import bytes_per_block
from gpuworker.models.hf import latents
from gpuworker.models.hf.loader import random_module
from gpuworker.models.hf.model import IMPLEMENTATION, TransformersModel
from gpuworker.models.hf.tiny import tiny_config
from gpuworker.models.self_test import self_test
from gpuworker.plane.assembly import ModelPlane


@dataclass(frozen=True, slots=True)
class Shape:
    """The attention of a published model: `layers` counts those with attention."""

    family: str
    layers: int
    heads: int
    rank: int
    rope: int
    nope: int
    value: int


# From config.json of the named checkpoints on huggingface.co. longcat_flash attends twice in each of its 28 layers.
SHAPES: Final = {
    "deepseek_v3": Shape("deepseek_v3", 61, 128, 512, 64, 128, 128),  # deepseek-ai/DeepSeek-V3
    "deepseek_v2_lite": Shape("deepseek_v2", 27, 16, 512, 64, 128, 128),  # deepseek-ai/DeepSeek-V2-Lite
    "glm4_moe_lite": Shape("glm4_moe_lite", 47, 20, 512, 64, 192, 256),  # zai-org/GLM-4.7-Flash
    "minicpm3": Shape("minicpm3", 62, 40, 256, 32, 64, 64),  # openbmb/MiniCPM3-4B
    "youtu": Shape("youtu", 32, 16, 512, 64, 128, 128),  # tencent/Youtu-LLM-2B
    "longcat_flash": Shape("longcat_flash", 56, 64, 512, 64, 128, 128),  # meituan-longcat/LongCat-Flash-Chat
    "axk1": Shape("axk1", 61, 64, 512, 64, 128, 128),  # skt/A.X-K1
}
# Of the engine whose rates are taken: a sixteenth of DeepSeek-V3's heads, and as many numbers in each.
_SMALL: Final = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "initializer_range": 0.1,
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 4,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 192,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 4096,
}
# Six layers of the gated delta rule and two that attend, with experts, as Qwen3-Next has them.
_BLOCK_SIZE, _ROWS = 16, 8


@dataclass(frozen=True)
class Size:
    """Tokens of each prompt and of each output whose rates are measured."""

    prompt: int = 512
    output: int = 33


def geometry_of(shape: Shape) -> KvGeometry:
    """Return the K/V of a token in bfloat16 as a worker finds it, in all layers of the published model."""
    sizes = {
        "hidden_size": 4 * shape.heads,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "kv_lora_rank": shape.rank,
        "qk_rope_head_dim": shape.rope,
        "qk_nope_head_dim": shape.nope,
        "v_head_dim": shape.value,
    }
    known = CONFIG_MAPPING[shape.family].__dataclass_fields__
    more = {"head_dim": shape.rope, "qk_head_dim": shape.nope + shape.rope, "num_experts_per_tok": 2}
    sizes |= {name: value for name, value in more.items() if name in known}
    config = tiny_config(CONFIG_MAPPING[shape.family](), **sizes)
    module = random_module(config, torch.float32, 0, torch.device("cpu"))
    found = self_test(TransformersModel(module, "bfloat16"), lambda cache: make_backend("auto", cache))
    return replace(found, num_layers=shape.layers)


@contextmanager
def every_head() -> Iterator[None]:
    """Let no model that is loaded meanwhile attend on latents."""
    with patch.object(latents, "_why_not", return_value="the benchmark compares"):
        yield


def byte_figures(name: str, shape: Shape) -> Iterator[tuple[str, float, str]]:
    """Yield name, value and meaning of each figure of one model."""
    kept = bytes_per_block(geometry_of(shape), 1)
    with every_head():
        expanded = bytes_per_block(geometry_of(shape), 1)
    least = (shape.rank + shape.rope) * shape.layers * 2
    yield f"latent_bytes_{name}", kept / least, "bytes a token in bf16 over those of latent and rope key alone"
    yield f"kib_a_token_{name}", kept / 1024, "KiB of a token in bf16, all layers"
    yield f"every_head_{name}", expanded / kept, "K and V of every head over latents"


def _plane(size: Size, shape: Mapping[str, object] = _SMALL, impl: str = "transformers") -> ModelPlane:
    slots = _ROWS * (size.prompt + size.output + 2 * _BLOCK_SIZE)
    options = {"device": "cpu", "dtype": "float32", "kv_blocks": slots // _BLOCK_SIZE, "block_size": _BLOCK_SIZE}
    return data_plane(None, shape, model_impl=impl, max_num_seqs=_ROWS, prefix_caching=False, **options)


def _rates(worker: BenchWorker, size: Size, seed: int) -> tuple[float, float]:
    """Return tokens a second of prefills and of decodes, of all rows together."""
    run: Run = worker.load(random_prompts(_ROWS, size.prompt, seed), size.output)
    first = max(run.first_tokens)
    return run.prompt_tokens / first, (run.tokens - _ROWS) / (run.seconds - first)


def rate_figures(rounds: int, size: Size) -> Iterator[tuple[str, float, str]]:
    """Yield the rates with latents over those with every head: medians of so many rounds, in turns."""
    with every_head():
        theirs = _plane(size)
    ours = _plane(size)
    with plane_worker(ours, _BLOCK_SIZE) as with_latents, plane_worker(theirs, _BLOCK_SIZE) as with_heads:
        pairs = []
        for seed in range(rounds + 1):
            pairs.append((_rates(with_latents, size, seed), _rates(with_heads, size, seed)))
            progress(f"round {seed} of {rounds}")
    for at, name in enumerate(("prefill", "decode")):
        ratios = [one[at] / other[at] for one, other in pairs[1:]]  # the first touches memory for the first time
        median, least, most = median_interval(ratios)
        words = f"{name} tokens/s with latents over every head, median of {rounds}; 95 % {least:.2f} to {most:.2f}"
        yield f"{name}_over_every_head", median, words


@torch.inference_mode()
def _generated(plane: ModelPlane, prompts: Sequence[Sequence[int]], output: int) -> float:
    """Return tokens a second of transformers' `generate` for one batch, prompts and outputs together."""
    model: Any = plane.model
    ids = torch.tensor(prompts)
    model.module.set_attn_implementation("sdpa")
    try:
        began = time.perf_counter()
        model.module.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=output, do_sample=False, pad_token_id=0
        )
        return (ids.numel() + len(prompts) * output) / (time.perf_counter() - began)
    finally:
        model.module.set_attn_implementation(IMPLEMENTATION)


def hybrid_figures(rounds: int, size: Size) -> Iterator[tuple[str, float, str]]:
    """Yield the rates of a model whose layers keep states over those of `generate`: medians of rounds, in turns.

    `hosted` is on transformers' code, `native` in C++.
    """
    hosted, native = _plane(size, HYBRID), _plane(size, HYBRID, "native")
    with plane_worker(hosted, _BLOCK_SIZE) as on_theirs, plane_worker(native, _BLOCK_SIZE) as on_ours:
        workers = {"hosted": on_theirs, "native": on_ours}
        for rows in (1, _ROWS):
            ratios: dict[str, list[float]] = {name: [] for name in workers}
            for seed in range(rounds + 1):
                prompts = random_prompts(rows, size.prompt, seed)
                generated = _generated(hosted, prompts, size.output)
                for name, worker in workers.items():
                    run = worker.load(prompts, size.output)
                    ratios[name].append((run.prompt_tokens + run.tokens) / run.seconds / generated)
                progress(f"hybrid, batch {rows}: round {seed} of {rounds}")
            for name, found in ratios.items():
                median, least, most = median_interval(found[1:])
                words = f"tokens/s of {rows} over transformers' generate, median of {rounds}; "
                yield f"{name}_hybrid_{rows}", median, words + f"95 % {least:.2f} to {most:.2f}"


_TRACES = "traces"
"""Of models whose layers keep states; they take minutes."""


def main() -> None:
    flags = parser(__doc__)
    named = list(dict.fromkeys([*SHAPES, *MODELS, *HYBRIDS, _TRACES]))
    flags.add_argument("--only", choices=named, nargs="+", default=named, help="some models")
    flags.add_argument("--rounds", type=int, default=7, help="rounds of the rates; 0 takes none")
    flags.add_argument("--prompt", type=int, default=Size.prompt, help="tokens of a prompt of the rates")
    flags.add_argument("--output", type=int, default=Size.output, help="tokens of an output of the rates")
    flags.add_argument("--older", type=Path, metavar="TREE", help="a checkout of this project to compare with")
    flags.add_argument("--older-rounds", type=int, default=5, help="rounds of the comparison, of 21 pairs each")
    args = flags.parse_args()
    found = [figure for name in args.only if name in SHAPES for figure in byte_figures(name, SHAPES[name])]
    for name in args.only:
        if name in MODELS:
            found += [*capacity_figures(name), *hit_figures(name)]
        if name in HYBRIDS:
            found += hybrid_hit_figures(name)
    if _TRACES in args.only:
        found += trace_figures()
    if args.older is not None:
        found += one_kind_figures(args.older, args.older_rounds)
    if args.rounds:
        size = Size(args.prompt, args.output)
        found += [*rate_figures(args.rounds, size), *hybrid_figures(args.rounds, size)]
    report(
        "memory_kinds", {name: value for name, value, _ in found}, {name: words for name, _, words in found}, args.json
    )


if __name__ == "__main__":
    main()
