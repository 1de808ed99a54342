"""A plain configuration means what transformers makes of it, and runs in plain torch as transformers runs it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from gpuworker.models.hf.loader import context_limit
from gpuworker.models.hf.model import TransformersModel
from gpuworker.models.hf.tiny import thresholds
from gpuworker.models.llama.plain_config import PlainConfig, plain_config
from gpuworker.models.llama.reference import TorchReference, reference_part
from gpuworker.models.llama.spec import llama_spec, rope_table, why_not_llama

SIZES = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": 5e5,
    "initializer_range": 0.3,  # of random weights: large enough that every part shows in the logits
}
# What checkpoints on the hub say, in older names and in newer ones.
LLAMA = SIZES | {"model_type": "llama", "torch_dtype": "bfloat16", "rope_scaling": None, "rope_interleaved": False}
MISTRAL = SIZES | {"model_type": "mistral", "sliding_window": None, "dtype": "float16"}
QWEN2 = SIZES | {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 32, "max_window_layers": 2}
QWEN3 = (
    {name: value for name, value in SIZES.items() if name != "rope_theta"}
    | {"model_type": "qwen3", "head_dim": 24, "attention_bias": False, "layer_types": ["full_attention"] * 3}
    | {"rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "tie_word_embeddings": True}
)
PLAIN = {
    "llama": LLAMA,
    "llama with biases": LLAMA | {"attention_bias": True, "mlp_bias": True},
    "llama with large heads": LLAMA | {"head_dim": 32},
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3 with biases": QWEN3 | {"attention_bias": True},
}
# What a change of such a configuration means transformers has to say.
NOT_PLAIN: dict[str, dict[str, Any]] = {
    "another kind": LLAMA | {"model_type": "gemma"},
    "no kind": {name: value for name, value in LLAMA.items() if name != "model_type"},
    "an entry that nobody knows": LLAMA | {"logit_scale": 2.0},
    "an entry of another kind": QWEN2 | {"attention_bias": True},
    "an entry whose value says something": LLAMA | {"rope_interleaved": True},
    "code of its own": LLAMA | {"auto_map": {"AutoConfig": "x.Y"}},
    "integers": LLAMA | {"quantization_config": {"bits": 4}},
    "scaled rope": LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "scaled rope, in newer names": QWEN3 | {"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0}},
    "rope of a part of each head": QWEN3
    | {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default", "partial_rotary_factor": 0.5}},
    "two bases": QWEN3 | {"rope_theta": 1e4},
    "a window": MISTRAL | {"sliding_window": 16},
    "the window that transformers adds": {name: value for name, value in MISTRAL.items() if name != "sliding_window"},
    "windows in some layers": QWEN2 | {"use_sliding_window": True},
    "layers that slide": QWEN3 | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    "another number of kinds": QWEN3 | {"layer_types": ["full_attention"] * 2},
    "the size of a head that transformers adds": {name: value for name, value in QWEN3.items() if name != "head_dim"},
    "heads that do not fit": LLAMA | {"num_key_value_heads": 3},
    "a size in words": LLAMA | {"hidden_size": "64"},
    "a flag in numbers": LLAMA | {"tie_word_embeddings": 1},
    "an unknown type": LLAMA | {"torch_dtype": "float64"},
    **{f"no {name}": {key: value for key, value in LLAMA.items() if key != name} for name in [*SIZES][:10]},
}


def written(folder: Path, entries: Mapping[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(entries))
    return folder


def of_transformers(folder: Path) -> PretrainedConfig:
    config: PretrainedConfig = AutoConfig.from_pretrained(folder)
    return config


@pytest.mark.parametrize("name", PLAIN)
def test_it_means_what_transformers_makes_of_it(name: str, tmp_path: Path) -> None:
    plain, whole = plain_config(written(tmp_path, PLAIN[name])), of_transformers(tmp_path)
    assert isinstance(plain, PlainConfig)
    assert (why_not_llama(plain), why_not_llama(whole)) == (None, None)
    assert llama_spec(plain) == llama_spec(whole)
    assert context_limit(plain) == context_limit(whole)
    assert plain.dtype == whole.dtype
    assert thresholds(plain, context_limit(plain)) == thresholds(whole, context_limit(whole)) == {}


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_everything_else_is_left_to_transformers(name: str, tmp_path: Path) -> None:
    assert plain_config(written(tmp_path, NOT_PLAIN[name])) is None


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff", b"null"])
def test_a_file_that_is_broken_is_left_to_transformers(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text)
    assert plain_config(tmp_path) is None


def test_the_angles_have_the_bits_of_transformers(tmp_path: Path) -> None:
    for entries in PLAIN.values():
        config = of_transformers(written(tmp_path, entries))
        rotary: Any = LlamaRotaryEmbedding  # reads only what all of the family have
        cos, sin = rotary(config)(torch.empty(0), torch.arange(128)[None])
        half = cos.shape[-1] // 2
        expected = torch.stack((cos[0, :, :half], sin[0, :, :half]), dim=1)
        assert torch.equal(rope_table(config, 128), expected), entries


@pytest.mark.parametrize("name", PLAIN)
def test_torch_computes_what_transformers_computes(name: str, tmp_path: Path) -> None:
    """The reference of the start-up test stands for transformers: its logits are those of the model itself."""
    plain, whole = plain_config(written(tmp_path, PLAIN[name])), of_transformers(tmp_path)
    assert plain is not None
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(whole, dtype=torch.float32, attn_implementation="eager")
    for parameter in module.parameters():  # biases and norms begin as zeros and ones, which hide a wrong place
        torch.nn.init.normal_(parameter, std=0.3)
    tensors = dict(module.state_dict())
    references = []
    for config in (plain, whole):
        spec = llama_spec(config)
        assert spec is not None
        parts = lambda linear: [tensors[weight] for weight in linear.weights]  # noqa: E731
        arguments = (tensors.__getitem__, parts, torch.float32, torch.device("cpu"), "float32")
        references.append(reference_part(config, spec, *arguments))
    assert [type(each) for each in references] == [TorchReference, TransformersModel]
    tokens = torch.randint(160, (2, 48))
    ours, theirs = (each.reference_logits(tokens) for each in references)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert float(theirs.std()) > 0.1
