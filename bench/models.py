"""The model of the CPU benchmarks: Llama-shaped, random weights from a fixed seed, made on the spot."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import torch

from common.types import KvGeometry
from gpuworker.attention import make_backend
from gpuworker.core.batch_plan import StepRunner
from gpuworker.core.outcomes import AgentConfig
from gpuworker.kv_cache import KvCache
from gpuworker.model_runner import ModelRunner, RunnerLimits
from gpuworker.models.hosted import HostedModel
from gpuworker.models.loader import ModelSource, load_model
from gpuworker.models.self_test import self_test

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
MAX_MODEL_LEN = 2048


@functools.cache
def model() -> tuple[HostedModel, KvGeometry]:
    """Return the model and the geometry of its cache."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE))
        source = ModelSource(folder, load_format="dummy", dtype="float32")
        hosted = load_model(source, torch.device("cpu"))
    return hosted, self_test(hosted, lambda cache: make_backend("auto", cache))


def cpu_runner(config: AgentConfig) -> tuple[StepRunner, KvGeometry]:
    """Return a runner of its own cache over the shared model."""
    hosted, geometry = model()
    cache = KvCache(geometry, config.num_blocks, config.block_size, torch.device("cpu"))
    limits = RunnerLimits(config.max_num_seqs, MAX_MODEL_LEN)
    return ModelRunner(hosted, cache, make_backend("auto", cache), limits), geometry
