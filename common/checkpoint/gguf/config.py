"""The configuration of a GGUF file in the words of Hugging Face, and the plain names of its tensors.

Four architectures are read: llama (Mistral too), qwen2, qwen3 and gemma3. Anything that would change the computation
and has no place in those configurations is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from common.checkpoint.bounded_json import shown
from common.checkpoint.encoders import encoder_reason
from common.checkpoint.gguf.header import Header, Tensor
from common.checkpoint.sizes import config_problems

# Those that the native path runs, and all.
NATIVE: Final = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
FAMILIES: Final = NATIVE | {"gemma3": "Gemma3ForCausalLM"}
_ENCODERS: Final = frozenset(
    {
        *(
            "bert",
            "nomic-bert",
            "nomic-bert-moe",
            "jina-bert-v2",
            "jina-bert-v3",
            "modern-bert",
            "neo-bert",
            "eurobert",
        ),
        *("gemma-embedding", "t5encoder"),
    }
)
EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
_PLAIN: Final = {
    EMBEDDING: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    HEAD: "lm_head.weight",
}
_IN_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Gemma norms the output of a block before it is added, too.
_IN_GEMMA: Final = _IN_LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER_NAME: Final = re.compile(r"blk\.(?P<layer>[0-9]{1,6})\.(?P<part>\w+)\.(?P<kind>weight|bias)")
_UNUSED: Final = re.compile(r"blk\.\d+\.attn_rot_embd|rope_freqs\.weight")
# Weights in these types are floats; the others are quantised, and computed with in bfloat16 unless an option says more.
_FLOATS: Final = {"F32": "float32", "F16": "float32", "BF16": "bfloat16"}
# The bands of Llama 3's rope scaling, the same in all its versions, and the context that its first one was trained on.
_LOW, _HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192
_MOST: Final = {"block_count": 4096, "context_length": 2**31 - 1}
_MOST_OF_OTHERS: Final = 1 << 24
_CLOSE: Final = 1e-3
# What files of gemma3 leave out, or left out at first: every sixth layer sees all positions, and has a rope of its own.
_PERIOD, _THETA, _NEAR_THETA = 6, 1e6, 1e4
_LAYERS_OF_27B: Final = 62  # the one size whose scores are scaled by another number than the size of a head


@dataclass(frozen=True, slots=True)
class PlainTensor:
    """A tensor under its plain name. With `heads`, the rows of each head are interleaved: element i, then i + half.

    `above`: the file has numbers that are so much larger.
    """

    name: str
    stored: Tensor
    heads: int = 0
    above: int = 0


class _Facts:
    """The metadata of the file's own architecture. Raises InvalidConfig for what is missing."""

    def __init__(self, header: Header) -> None:
        self.header, self.family = header, str(header.metadata.get("general.architecture"))
        if self.family not in FAMILIES:
            if self.family in _ENCODERS:
                raise header.refuse(encoder_reason(self.family))
            known = ", ".join(FAMILIES)
            raise header.refuse(
                f"its architecture is {self.family}; of GGUF files {known} are served. Serve the model's checkpoint in"
                " Hugging Face format instead"
            )

    def get(self, key: str, default: Any = None) -> Any:
        return self.header.metadata.get(f"{self.family}.{key}", default)

    def number(self, key: str, default: int | None = None) -> int:
        """Return a whole number that is the same for all layers."""
        found = self.get(key, default)
        if isinstance(found, list) and found and all(each == found[0] for each in found):
            found = found[0]
        if type(found) is int and found > (most := _MOST.get(key, _MOST_OF_OTHERS)):
            raise self.header.refuse(f"{self.family}.{key} is {found}; expected at most {most}")
        if type(found) is not int or found < 1:
            what = f"{self.family}.{key} is {'missing' if found is None else shown(found)}; expected one number"
            raise self.header.refuse(f"{what} for all layers")
        return found


def configuration(header: Header) -> dict[str, Any]:
    """Return what config.json would hold. Raises InvalidConfig for a file that cannot be served, saying why."""
    facts = _Facts(header)
    _refuse_unknown(facts)
    tensors = header.tensors
    if EMBEDDING not in tensors:
        raise header.refuse(f"tensor {EMBEDDING} is missing: the file does not hold a whole model")
    heads = facts.number("attention.head_count")
    hidden = facts.number("embedding_length")
    head_dim = facts.number("attention.key_length", facts.get("rope.dimension_count") or hidden // heads)
    config = {
        "architectures": [FAMILIES[facts.family]],
        "hidden_size": hidden,
        "intermediate_size": facts.number("feed_forward_length"),
        "num_hidden_layers": facts.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": facts.number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": tensors[EMBEDDING].shape[0],
        "max_position_embeddings": facts.number("context_length"),
        "rms_norm_eps": _short(facts.get("attention.layer_norm_rms_epsilon", 1e-5)),
        "tie_word_embeddings": HEAD not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "dtype": _dtype(tensors),
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": header.metadata.get("tokenizer.ggml.eos_token_id"),
        **(_gemma3(facts, heads, head_dim) if facts.family == "gemma3" else _llama(facts, head_dim)),
    }
    if problems := config_problems(config):
        raise header.refuse("; ".join(problems))
    return config


def _llama(facts: _Facts, head_dim: int) -> dict[str, Any]:
    return {
        "model_type": facts.family,
        "hidden_act": "silu",
        "rope_parameters": _rope(facts, head_dim),
        "mlp_bias": "blk.0.ffn_gate.bias" in facts.header.tensors,
        "use_sliding_window": False,
    }


def _gemma3(facts: _Facts, heads: int, head_dim: int) -> dict[str, Any]:
    """Return the entries of a gemma3 that others do not have, or have with another meaning."""
    layers = facts.number("block_count")
    scaled_by = facts.number("embedding_length") // heads if layers == _LAYERS_OF_27B else head_dim
    return {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scaled_by,
        "sliding_window": facts.number("attention.sliding_window"),
        "layer_types": [_sees(facts, layer) for layer in range(layers)],
        "rope_parameters": {
            "full_attention": _rope(facts, head_dim, _THETA),
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": _short(facts.get("rope.freq_base_swa", _NEAR_THETA)),
            },
        },
        "attn_logit_softcapping": facts.get("attn_logit_softcapping"),
        "final_logit_softcapping": facts.get("final_logit_softcapping"),
    }


def _sees(facts: _Facts, layer: int) -> str:
    """Return what a layer attends to, by the period of the layers with full attention, or by a mark for each layer."""
    pattern = facts.get("attention.sliding_window_pattern", _PERIOD)
    slides = pattern[layer] if isinstance(pattern, list) else bool((layer + 1) % pattern)
    return "sliding_attention" if slides else "full_attention"


def plain_tensors(header: Header) -> Iterator[PlainTensor]:
    """Yield the tensors under the names of a Hugging Face checkpoint. Raises InvalidConfig for one without a name.

    Files of the llama architecture store queries and keys for a rope that turns neighbours, instead of halves of a
    head.
    """
    facts = _Facts(header)
    turned = facts.family == "llama"
    heads = facts.number("attention.head_count")
    of_part = {"attn_q": heads, "attn_k": facts.number("attention.head_count_kv", heads)}
    _check_layers(facts)
    is_gemma = facts.family == "gemma3"
    in_layer = _IN_GEMMA if is_gemma else _IN_LAYER
    for name, stored in header.tensors.items():
        found = _LAYER_NAME.fullmatch(name)
        above = int(is_gemma and name.endswith("norm.weight"))  # gemma multiplies by 1 + weight, and the file has that
        if name in _PLAIN:
            yield PlainTensor(_PLAIN[name], stored, above=above)
        elif found is not None and found["part"] in in_layer:
            plain = f"model.layers.{found['layer']}.{in_layer[found['part']]}.{found['kind']}"
            yield PlainTensor(plain, stored, of_part.get(found["part"], 0) if turned else 0, above)
        elif not _UNUSED.match(name):
            raise header.refuse(
                f"tensor {name} is not of a plain {facts.family} model, so it cannot be served from GGUF"
            )


def _check_layers(facts: _Facts) -> None:
    """Raise InvalidConfig where the file does not have tensors of each layer and of no other."""
    count = facts.number("block_count")
    stored = {int(found["layer"]) for name in facts.header.tensors if (found := _LAYER_NAME.fullmatch(name))}
    if len(stored) != count or max(stored) != count - 1:
        what = f"{facts.family}.block_count is {count}, and its tensors are of {len(stored)} layers"
        raise facts.header.refuse(f"{what}; download or convert it again")


def _refuse_unknown(facts: _Facts) -> None:
    header, metadata = facts.header, facts.header.metadata
    if int(metadata.get("split.count", 1)) > 1:
        whole = "merge them into one (llama-gguf-split --merge)"
        raise header.refuse(f"it is one of {metadata['split.count']} files of a model; {whole}")
    if facts.get("expert_count", 0):
        raise header.refuse(f"it has {facts.get('expert_count')} experts; of GGUF files only dense models are served")
    window = facts.get("attention.sliding_window", 0)
    if window and window < facts.number("context_length") and facts.family != "gemma3":
        raise header.refuse(f"its attention sees {window} tokens; of GGUF files only full attention is served")


def _dtype(tensors: Mapping[str, Tensor]) -> str:
    """Return the type to compute in: floats keep what they hold, exactly; quantised weights are known to fewer bits."""
    kinds = {tensor.type for tensor in tensors.values() if len(tensor.shape) > 1}
    return "float32" if any(_FLOATS.get(kind) == "float32" for kind in kinds) else "bfloat16"


def _rope(facts: _Facts, head_dim: int, theta: float = 10000.0) -> dict[str, Any]:
    base: dict[str, Any] = {"rope_type": "default", "rope_theta": _short(facts.get("rope.freq_base", theta))}
    if facts.get("rope.dimension_count", head_dim) != head_dim:
        raise facts.header.refuse(f"it rotates {facts.get('rope.dimension_count')} of {head_dim} elements of a head")
    if ROPE_FACTORS in facts.header.tensors:
        return base | _llama3(facts, base["rope_theta"], head_dim)
    kind, factor = facts.get("rope.scaling.type", "none"), facts.get("rope.scaling.factor", 1.0)
    if kind == "none" or factor in (0.0, 1.0):
        return base
    if kind == "linear":
        return base | {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = facts.number("rope.scaling.original_context_length")
        return base | {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise facts.header.refuse(f"its rope is scaled by {kind}; linear, yarn and that of Llama 3 are served")


def _llama3(facts: _Facts, theta: float, head_dim: int) -> dict[str, Any]:
    """Return the parameters from which Llama 3 makes the divisors of its frequencies that a file stores.

    A frequency of fewer than 1 turn in the original context is divided by the factor, one of more than 4 turns is not.
    """
    stored = facts.header.floats(ROPE_FACTORS)
    factor = max(stored)
    context = facts.get("rope.scaling.original_context_length", _LLAMA3_CONTEXT)
    if len(stored) == head_dim // 2:
        turns = [context / (2 * math.pi * theta ** (2 * index / head_dim)) for index in range(len(stored))]
        made = (_divisor(each, factor) for each in turns)
        if all(math.isclose(one, other, rel_tol=_CLOSE) for one, other in zip(stored, made, strict=True)):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": _LOW,
                "high_freq_factor": _HIGH,
                "original_max_position_embeddings": context,
            }
    raise facts.header.refuse(f"{ROPE_FACTORS} is not that of Llama 3; no other table of rope factors is served")


def _divisor(turns: float, factor: float) -> float:
    if turns > _HIGH:
        return 1.0
    if turns < _LOW:
        return factor
    kept = (turns - _LOW) / (_HIGH - _LOW)
    return 1 / ((1 - kept) / factor + kept)


def _short(number: float) -> float:
    """Return the shortest decimal that a float32 of the file stands for, such as 1e-05."""
    return float(f"{number:.7g}")
