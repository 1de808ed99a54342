"""The C interface of a whole forward (gpuworker/native/quire_llama.h) as ctypes sees it."""

from __future__ import annotations

import ctypes
from enum import IntEnum
from typing import Final

from gpuworker.native.linear import LinearStruct, declared
from gpuworker.native.ranks import RanksStruct

PHASES: Final = ("norm", "qkv", "rope", "attention", "output", "gate_up", "down", "head")
_int32, _int64, _float, _pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class Refusal(IntEnum):
    """quire_llama_refusal and quire_step_refusal: why a step was not computed."""

    NONE = 0
    TOKEN = 1
    POSITION = 2
    BLOCK = 3
    PLACE = 4
    ADAPTER = 5


class ExpertStruct(ctypes.Structure):
    """quire_expert."""

    _fields_ = (("gate_up", LinearStruct), ("down", LinearStruct))


class ExpertsStruct(ctypes.Structure):
    """quire_experts."""

    _fields_ = (
        ("router", LinearStruct),
        ("each", ctypes.POINTER(ExpertStruct)),
        ("shared", ExpertStruct),
        *((name, _pointer) for name in ("shared_gate", "bias", "scales")),
        *((name, _int32) for name in ("count", "top_k", "normalised", "sigmoid")),
        ("factor", _float),
        ("reserved", _int32),
    )


class ConvStruct(ctypes.Structure):
    """quire_conv."""

    _fields_ = (("weight", _pointer), ("bias", _pointer), ("width", _int32), ("channels", _int32))


class SpreadStruct(ctypes.Structure):
    """quire_spread."""

    _fields_ = (("first", _int32), ("step", _int32))


class DeltaStruct(ctypes.Structure):
    """quire_delta."""

    _fields_ = (
        ("gates", LinearStruct),
        *((name, _pointer) for name in ("decay_rate", "decay_bias", "norm")),
        *((name, SpreadStruct) for name in ("query", "key", "value", "gate", "update", "decay")),
        *((name, _int32) for name in ("key_heads", "value_heads", "key_dim", "value_dim")),
    )


class AddedNormsStruct(ctypes.Structure):
    """quire_added_norms."""

    _fields_ = (
        *((name, _pointer) for name in ("attention", "mlp", "router", "experts", "behind_shared", "behind_experts")),
        ("scalar", _float),
        ("reserved", _int32),
    )


class TokenGateStruct(ctypes.Structure):
    """quire_token_gate."""

    _fields_ = (("gate", LinearStruct), ("output", LinearStruct), ("norm", _pointer))


class TokenInputsStruct(ctypes.Structure):
    """quire_token_inputs."""

    _fields_ = (
        ("projection", LinearStruct),
        *((name, _pointer) for name in ("table", "norm")),
        *((name, _float) for name in ("projection_scale", "row_scale")),
        *((name, _int32) for name in ("table_type", "size", "count", "reserved")),
    )


class RopeStruct(ctypes.Structure):
    """quire_rope."""

    _fields_ = (("table", _pointer), ("pairs", _int32), ("apart", _int32))


class LlamaLayerStruct(ctypes.Structure):
    """quire_llama_layer."""

    _fields_ = (
        *((name, LinearStruct) for name in ("qkv", "output", "gate_up", "down")),
        ("experts", ctypes.POINTER(ExpertsStruct)),
        ("conv", ctypes.POINTER(ConvStruct)),
        ("delta", ctypes.POINTER(DeltaStruct)),
        ("added", ctypes.POINTER(AddedNormsStruct)),
        ("token_gate", ctypes.POINTER(TokenGateStruct)),
        *((name, _pointer) for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm")),
        ("state", _int64),
        *((name, _int32) for name in ("window", "head_dim", "num_kv_heads", "rope")),
        *((name, _int32) for name in ("borrows", "same_values", "normed_values", "input")),
    )


class LlamaStruct(ctypes.Structure):
    """quire_llama."""

    _fields_ = (
        *((name, _int32) for name in ("num_layers", "hidden", "num_heads", "vocab")),
        ("norm_eps", _float),
        ("scale", _float),
        ("layers", ctypes.POINTER(LlamaLayerStruct)),
        ("final_norm", _pointer),
        ("head", LinearStruct),
        ("embedding", _pointer),
        ("rows", LinearStruct),
        ("inputs", ctypes.POINTER(TokenInputsStruct)),
        ("ropes", RopeStruct * 2),
        ("embedding_type", _int32),
        ("num_positions", _int32),
        ("embedding_scale", _float),
        ("logit_cap", _float),
        ("gelu", _int32),
        ("gated", _int32),
        ("clip", _float),
        ("joint_norm", _int32),
        ("ranks", ctypes.POINTER(RanksStruct)),
        ("lora_rank", _int32),
        ("reserved", _int32),
    )


class LoraStruct(ctypes.Structure):
    """quire_lora."""

    _fields_ = (
        *((name, _pointer) for name in ("a", "b")),
        *((name, _int64) for name in ("first", "n")),
        ("rank", _int32),
        ("type", _int32),
    )


class LoraLayerStruct(ctypes.Structure):
    """quire_lora_layer."""

    _fields_ = (
        ("qkv", LoraStruct * 3),
        ("output", LoraStruct * 1),
        ("gate_up", LoraStruct * 2),
        ("down", LoraStruct * 1),
    )


class LlamaRunStruct(ctypes.Structure):
    """quire_llama_run."""

    _fields_ = (
        *((name, _pointer) for name in ("token_ids", "positions", "keep", "logits", "hidden", "scratch")),
        ("seconds", ctypes.POINTER(ctypes.c_double)),
        ("num_keep", _int64),
        ("beside", _pointer),
        ("beside_of", _pointer),
        ("num_beside", _int64),
        ("states", _pointer),
        ("places", _pointer),
        ("state_stride", _int64),
        ("num_places", _int64),
        ("adapters", ctypes.POINTER(ctypes.POINTER(LoraLayerStruct))),
        ("adapter_of", _pointer),
        ("num_adapters", _int64),
    )


class PartsStruct(ctypes.Structure):
    """quire_parts."""

    _fields_ = (
        ("plans", ctypes.POINTER(_pointer)),
        ("caches", _pointer),
        *((name, ctypes.POINTER(_int32)) for name in ("heads", "first", "part", "lane")),
        *((name, _int32) for name in ("num_plans", "reserved")),
    )


def bind(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the functions of quire_llama.h and quire_linear.h on the library, and return it."""
    model, parts, run = map(ctypes.POINTER, (LlamaStruct, PartsStruct, LlamaRunStruct))
    library.quire_llama_scratch.argtypes, library.quire_llama_scratch.restype = [model, _int64, _int64], ctypes.c_size_t
    library.quire_llama_forward.argtypes = [model, parts, run]
    state_bytes = library.quire_llama_state_bytes
    state_bytes.argtypes, state_bytes.restype = [ctypes.POINTER(LlamaLayerStruct)], ctypes.c_size_t
    return declared(library)
