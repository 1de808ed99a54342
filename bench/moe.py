"""Experts, layers that keep states, or layers of two shapes: natively, through transformers, with --peers elsewhere.

    python -m bench.moe --peers DIR --json
    python -m bench.moe --family lfm2

The shape is Mixtral's, made small: 8 experts of which a token takes 2; or Qwen3-MoE's: 4 of 32. Both have 150 million
parameters. No peer runs the others. Those of models that keep states are LFM2-350M's, with 16 layers, Qwen3.5's of 0.2
billion parameters, and LFM2-MoE's of 8 layers with 32 experts. That of Gemma 4 is E2B's of 10 layers, half of which
have no K and V of their own. Steps of both paths take turns on the same random weights: decodes of 1, 8 and 32
sequences after 128 tokens, and a prefill. A ratio is the median time through transformers over that of the native path.
The peers then run workloads beside Quire's services on a checkpoint of the same shape, as in `bench.peers`:
ratio_W4_bf16 is Quire's tokens a second over those of the fastest peer.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from bench import peers
from bench.comparison.peer_models import MIXTURES
from bench.comparison.peer_process import PEERS
from bench.comparison.table import all_figures, print_tables
from bench.lib.checkpoints import checkpoint
from bench.lib.harness import parser, report_columns
from common.contracts.types import KvGeometry
from gpuworker.attention.backends import make_backend
from gpuworker.attention.step_inputs import attention_arrays, attention_metadata, pack_rows, to_device
from gpuworker.memory.kv_cache import KvCache
from gpuworker.models.choose import open_native
from gpuworker.models.hf.loader import ModelSource, load_model
from gpuworker.models.self_test import self_test

_OTHERS: Final[Mapping[str, Mapping[str, object]]] = {
    "lfm2": {
        "model_type": "lfm2",
        "vocab_size": 65536,
        "hidden_size": 1024,
        "intermediate_size": 6656,
        "num_hidden_layers": 16,
        "full_attn_idxs": [1, 4, 7, 10, 12, 14],
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    "qwen3_5": {
        "model_type": "qwen3_5_text",
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 8,
        "full_attention_interval": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 16,
        "tie_word_embeddings": True,
    },
    "lfm2_moe": {
        "model_type": "lfm2_moe",
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "moe_intermediate_size": 448,
        "num_hidden_layers": 8,
        "layer_types": ["conv", "conv", "full_attention", "conv"] * 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    },
    "gemma4": {
        "model_type": "gemma4_text",
        "vocab_size": 32000,
        "vocab_size_per_layer_input": 32000,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 10,
        "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 2,
        "num_kv_shared_layers": 5,
        "use_double_wide_mlp": True,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "final_logit_softcapping": 30.0,
    },
}
# What else a tiny one says.
_TINY: Final[Mapping[str, Mapping[str, object]]] = {
    "lfm2_moe": {"layer_types": ["full_attention", "conv"], "num_dense_layers": 1},
    "gemma4": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 512,
    },
}
TINY: Final = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512}
_FAMILIES: Final = {**MIXTURES, **_OTHERS}
CPU: Final = torch.device("cpu")
_BLOCK_SIZE: Final = 16
_BEFORE: Final = 128  # tokens of a sequence before its decode
_NOTES: Final = {
    "native_ms": "median time of a step on the native path, in ms",
    "transformers_ms": "the same through transformers",
    "ratio": "transformers over native",
}
Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a step computes: rows with so many tokens each, after so many that are cached."""

    name: str
    rows: int
    tokens: int
    before: int


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    tiny = {**TINY, **_TINY.get(options.family, {})} if options.tiny else {}
    shape = {**_FAMILIES[options.family], **tiny}
    if options.peers is not None and options.family in _OTHERS:
        raise SystemExit(f"--peers: no peer runs {options.family}; leave it out, or take another family")
    against = None if options.peers is None else peers.read_arguments(_words(options))
    with checkpoint(options.model, shape) as (folder, load_format):
        source = ModelSource(str(folder), options.dtype, load_format, quantization=options.quantization)
        found = open_native(source, CPU, "native", lambda cache: make_backend("auto", cache))
        assert found is not None  # "native" raises where the model cannot take the path
        hosted = load_model(source, CPU)
        self_test(hosted, lambda cache: make_backend("auto", cache))  # it shows which states layers keep
    columns = {}
    for step in _steps(options.prefill):
        turns = [_step(model, found[1], step) for model in (found[0], hosted)]
        native, transformers = _medians(turns, options.repeats)
        columns[step.name] = {
            "native_ms": 1e3 * native,
            "transformers_ms": 1e3 * transformers,
            "ratio": transformers / native,
        }
    single = {} if against is None else _beside_peers(against)
    report_columns("moe", columns, _NOTES, options.json, single)


def _options() -> argparse.Namespace:
    flags = parser(__doc__)
    flags.add_argument("--family", choices=list(_FAMILIES), default="mixtral", help="the shape of the random one")
    flags.add_argument("--model", help="a checkpoint with experts, in place of the random one")
    flags.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    flags.add_argument("--quantization", choices=("none", "int8", "int4", "w8a8"), default="none")
    flags.add_argument("--threads", type=int, default=torch.get_num_threads())
    flags.add_argument("--prefill", type=int, default=512, help="tokens of the prefill")
    flags.add_argument("--repeats", type=int, default=7)
    flags.add_argument("--tiny", action="store_true", help="a model of 0.4 million parameters, to try the benchmark")
    flags.add_argument("--peers", type=Path, help="folder of other engines, to compare with them too (bench.peers)")
    flags.add_argument("--engines", nargs="+", default=["openvino", "vllm"], choices=list(PEERS), metavar="PEER")
    flags.add_argument("--plan", nargs="+", default=["W4:1", "W1:0.25"], metavar="W:SCALE", help="what all run")
    flags.add_argument("--rounds", type=int, default=3, help="runs of each engine on each workload")
    return flags.parse_args()


def _words(options: argparse.Namespace) -> list[str]:
    """Return the command line of `bench.peers` for the checkpoint of the family."""
    lists = ("--engines", *options.engines, "--plan", *options.plan)
    mode = ("--dtype", options.dtype, "--caching", "off", "--threads", str(options.threads))
    one = ("--peers", str(options.peers), "--model", options.family, "--repeat", str(options.rounds))
    return [*one, *lists, *mode]


def _beside_peers(against: argparse.Namespace) -> dict[str, float]:
    lines = peers.measure(against)
    print_tables(lines, [against.out])
    return all_figures(lines)


def _steps(prefill: int) -> Iterator[Shape]:
    yield from (Shape(f"b{rows}", rows, 1, _BEFORE) for rows in (1, 8, 32))
    yield Shape(f"prefill{prefill}", 1, prefill, 0)


def _step(model: Any, geometry: KvGeometry, shape: Shape) -> Run:
    """Return a call that runs a step of random tokens; its last token of each row has logits."""
    blocks = -(-(shape.before + shape.tokens) // _BLOCK_SIZE)
    attention = make_backend("auto", KvCache(geometry, shape.rows * blocks, _BLOCK_SIZE, CPU))
    table = np.arange(shape.rows * blocks, dtype=np.int32).reshape(shape.rows, blocks)
    start, length = (np.full(shape.rows, each, dtype=np.int32) for each in (shape.before, shape.tokens))
    rows = pack_rows(start, length, table, _BLOCK_SIZE)
    metadata = attention_metadata(rows, to_device(attention_arrays(rows), CPU))
    positions = torch.from_numpy(rows.positions).long()
    draw = torch.Generator().manual_seed(0)
    token_ids = torch.randint(model.vocab_size, (len(positions),), generator=draw)
    keep = torch.arange(shape.tokens - 1, len(positions), shape.tokens)

    places = np.arange(shape.rows, dtype=np.int32)
    if model.states is not None and len(model.states.kept) < shape.rows:
        model.states.reserve(shape.rows)

    def run() -> object:
        attention.begin(metadata)
        if model.states is not None:
            model.states.begin(metadata, places)
        return model.forward(token_ids, positions, keep, attention)

    return run


@torch.inference_mode()
def _medians(runs: list[Run], repeats: int) -> list[float]:
    """Return the median seconds of each call; they take turns, after one warm-up each."""
    seconds: list[list[float]] = [[] for _ in runs]
    for turn in range(repeats + 1):
        for run, found in zip(runs, seconds, strict=True):
            began = time.perf_counter()
            run()
            if turn:
                found.append(time.perf_counter() - began)
    return [statistics.median(found) for found in seconds]


if __name__ == "__main__":
    main()
