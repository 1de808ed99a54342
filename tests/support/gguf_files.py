"""Tiny models of each family in GGUF files, in any type of tensors, and what transformers makes of the same file.

Files are written with the gguf package, as llama.cpp's converter would: queries and keys of llama interleaved. The
package quantises where it can; the other types get random blocks that are valid.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import numpy.typing as npt
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from transformers import AutoModelForCausalLM, PretrainedConfig

from tests.support.checkpoints import EOS, SPECIAL, VOCAB_SIZE, tokenizer

NATIVE: Final = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}
FAMILIES: Final = NATIVE | {"gemma3": "Gemma3TextConfig"}
CONTEXT: Final = 512
_SHAPE: Final[dict[str, Any]] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.1,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}
# Two layers of gemma3 see all positions, by a rope of their own; a score is scaled by another number than a head has.
_GEMMA3: Final[dict[str, Any]] = {
    "head_dim": 64,
    "num_hidden_layers": 6,
    "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
    "sliding_window": 16,
    "query_pre_attn_scalar": 64,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
_PARTS: Final = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA_PARTS: Final = _PARTS | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_TOP: Final = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
# Bytes of a block of 256, the offsets of the float16 scales in it, and their mean, for numbers of about 0.1.
_RANDOM_BLOCKS: Final = {
    "Q2_K": (84, (80, 82), 4e-4),
    "Q3_K": (110, (108,), 4e-4),
    "Q4_K": (144, (0, 2), 4e-4),
    "Q5_K": (176, (0, 2), 4e-4),
    "Q6_K": (210, (208,), 1e-4),
}
Bytes = npt.NDArray[np.uint8]


@functools.cache
def model_of(family: str, tied: bool = False) -> tuple[PretrainedConfig, Mapping[str, torch.Tensor]]:
    """Return a configuration and random weights; norms and biases are random too, which shows mistakes."""
    shape = _SHAPE | (_GEMMA3 if family == "gemma3" else {})
    config: PretrainedConfig = getattr(transformers, FAMILIES[family])(**shape, tie_word_embeddings=tied)
    with torch.random.fork_rng([]):
        torch.manual_seed(11)
        module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for tensor in module.parameters():
                if tensor.dim() == 1:
                    tensor.add_(0.3 * torch.randn(tensor.shape))
    weights = {name: tensor for name, tensor in module.state_dict().items() if name != "lm_head.weight" or not tied}
    return config, weights


def write_model(
    path: Path,
    family: str = "llama",
    kind: str | Callable[[str], str] = "F32",
    *,
    tied: bool = False,
    facts: Callable[[GGUFWriter], None] = lambda _: None,
) -> Path:
    """Write a model of a family, its matrices in a type of tensors, or in one by name; `facts` may add metadata."""
    config, weights = model_of(family, tied)
    of_name = kind if callable(kind) else lambda _: kind
    writer = GGUFWriter(path, family)
    add_facts(writer, config)
    add_tokenizer(writer)
    facts(writer)
    for name, tensor in weights.items():
        stored = interleaved(family, config, name, tensor) + above(family, name)
        add_tensor(writer, gguf_name(name, family), stored.numpy(), of_name(name))
    return finish(writer, path)


def finish(writer: GGUFWriter, path: Path) -> Path:
    """Write what was added into the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def above(family: str, name: str) -> int:
    """Return how much larger a file's numbers are: gemma multiplies by 1 + the weight of a norm."""
    return int(family == "gemma3" and "norm" in name)


def gguf_name(name: str, family: str = "llama") -> str:
    """Return the name of a tensor in a GGUF file."""
    if name in _TOP:
        return _TOP[name]
    _, _, layer, rest = name.split(".", 3)
    part, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{(_GEMMA_PARTS if family == 'gemma3' else _PARTS)[part]}.{kind}"


def interleaved(family: str, config: PretrainedConfig, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as a GGUF file has it: in llama, rows i and i + half of each head stand side by side."""
    if family != "llama" or not any(part in name for part in ("q_proj", "k_proj")):
        return tensor
    heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
    half = len(tensor) // heads // 2
    order = [head * 2 * half + side * half + i for head in range(heads) for i in range(half) for side in (0, 1)]
    return tensor[torch.tensor(order)]


def add_facts(writer: GGUFWriter, config: PretrainedConfig) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    if "full_attention" in rope:
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([each == "sliding_attention" for each in config.layer_types])
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["full_attention"]["factor"])
        rope = rope["full_attention"]
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)


def add_tokenizer(writer: GGUFWriter) -> None:
    """Add the tokenizer of the tiny checkpoints: one token a byte."""
    made: dict[str, int] = tokenizer().get_vocab()
    tokens = sorted(made, key=made.__getitem__)
    types = [gguf.TokenType.CONTROL if token in SPECIAL else gguf.TokenType.NORMAL for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tokens, *(f"[PAD{index}]" for index in range(len(tokens), VOCAB_SIZE))])
    writer.add_token_types([*types, *[gguf.TokenType.UNUSED] * (VOCAB_SIZE - len(tokens))])
    writer.add_token_merges([])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(EOS)
    writer.add_chat_template(str(tokenizer().chat_template))


def add_tensor(writer: GGUFWriter, name: str, numbers: npt.NDArray[np.float32], kind: str) -> None:
    """Add a tensor in a type; one of one dimension is always F32, as converters have it."""
    if numbers.ndim == 1 or kind == "F32":
        writer.add_tensor(name, np.ascontiguousarray(numbers))
        return
    stored = random_blocks(kind, numbers.shape) if kind in _RANDOM_BLOCKS else quantised(kind, numbers)
    writer.add_tensor(name, stored, raw_dtype=GGMLQuantizationType[kind])


def quantised(kind: str, numbers: npt.NDArray[np.float32]) -> Any:
    return gguf.quantize(numbers, GGMLQuantizationType[kind])


def random_blocks(kind: str, shape: Sequence[int], seed: int = 5) -> Bytes:
    """Return rows of blocks of 256 numbers: random bytes, with scales that give numbers of about 0.1."""
    nbytes, scales, mean = _RANDOM_BLOCKS[kind]
    made = np.random.default_rng(seed)
    blocks = made.integers(0, 256, (shape[0] * shape[1] // 256, nbytes), dtype=np.uint8)
    for at in scales:
        numbers = made.uniform(mean / 2, 1.5 * mean, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = numbers.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(shape[0], -1)


def reference(path: Path, family: str = "llama", *, tied: bool = False) -> Any:
    """Return transformers' model on the weights of a file as the gguf package widens them, in float32."""
    config, weights = model_of(family, tied)
    stored = {each.name: gguf.dequantize(each.data, each.tensor_type) for each in GGUFReader(path).tensors}
    found = {}
    for name, made in weights.items():
        places = interleaved(family, config, name, torch.arange(len(made)))
        tensor = torch.empty_like(made)
        tensor[places] = torch.from_numpy(np.array(stored[gguf_name(name, family)])) - above(family, name)
        found[name] = tensor
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    module.load_state_dict(found, strict=not tied)
    return module.eval()
