"""The C interface of a whole forward (gpuworker/native/quire_llama.h) as ctypes sees it."""

from __future__ import annotations

import ctypes
from enum import IntEnum
from typing import Final

from gpuworker.native.linear import LinearStruct, declared

PHASES: Final = ("norm", "qkv", "rope", "attention", "output", "gate_up", "down", "head")
_int32, _int64, _float, _pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class Refusal(IntEnum):
    """quire_llama_refusal and quire_step_refusal: why a step was not computed."""

    NONE = 0
    TOKEN = 1
    POSITION = 2
    BLOCK = 3
    PLACE = 4


class ExpertStruct(ctypes.Structure):
    """quire_expert."""

    _fields_ = (("gate_up", LinearStruct), ("down", LinearStruct))


class ExpertsStruct(ctypes.Structure):
    """quire_experts."""

    _fields_ = (
        ("router", LinearStruct),
        ("each", ctypes.POINTER(ExpertStruct)),
        ("shared", ExpertStruct),
        ("shared_gate", _pointer),
        *((name, _int32) for name in ("count", "top_k", "normalised", "reserved")),
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


class LlamaLayerStruct(ctypes.Structure):
    """quire_llama_layer."""

    _fields_ = (
        *((name, LinearStruct) for name in ("qkv", "output", "gate_up", "down")),
        ("experts", ctypes.POINTER(ExpertsStruct)),
        ("conv", ctypes.POINTER(ConvStruct)),
        ("delta", ctypes.POINTER(DeltaStruct)),
        *((name, _pointer) for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm")),
        ("state", _int64),
        ("window", _int32),
        ("reserved", _int32),
    )


class LlamaStruct(ctypes.Structure):
    """quire_llama."""

    _fields_ = (
        *((name, _int32) for name in ("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim", "vocab")),
        ("norm_eps", _float),
        ("scale", _float),
        ("layers", ctypes.POINTER(LlamaLayerStruct)),
        ("final_norm", _pointer),
        ("head", LinearStruct),
        ("embedding", _pointer),
        ("rows", LinearStruct),
        ("rope_table", _pointer),
        ("embedding_type", _int32),
        ("num_positions", _int32),
        ("rope_dim", _int32),
        ("gated", _int32),
        ("clip", _float),
        ("joint_norm", _int32),
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
    )


class PartsStruct(ctypes.Structure):
    """quire_parts."""

    _fields_ = (
        ("plans", ctypes.POINTER(_pointer)),
        *((name, ctypes.POINTER(_int32)) for name in ("part", "lane")),
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
