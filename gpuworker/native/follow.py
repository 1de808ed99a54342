"""Constraints that native steps follow (gpuworker/native/follow.h): its structures, and the functions that it calls."""

from __future__ import annotations

import ctypes
from typing import Final

_pointer, _size, _int32, _int64 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int32, ctypes.c_int64
LEFT = ctypes.CFUNCTYPE(_int32, _int64, ctypes.POINTER(_int32), _int64, _pointer)
"""`left` of quire_grammar: the id of a follower, its output [count], count, the mask; returns whether it has ended."""
TOKENIZE = ctypes.CFUNCTYPE(_size, _pointer, _pointer, _size, ctypes.POINTER(ctypes.c_uint32), _size)
"""quire_slow_tokenize: nothing, bytes [size], size, tokens [room], room; returns how many tokens there are."""
LEFT_TO_PYTHON: Final = 2  # of quire_follower_state


class GrammarStruct(ctypes.Structure):
    """quire_grammar."""

    _fields_ = (
        *((name, _pointer) for name in ("clone", "reset", "consume", "mask", "is_stopped", "forced")),
        ("left", LEFT),
        *((name, _pointer) for name in ("prototype", "ends", "tails", "whole")),
        ("vocab", _int64),
        ("num_ends", _int32),
        ("most_digits", _int32),
    )


class FollowerStruct(ctypes.Structure):
    """quire_follower."""

    _fields_ = (
        *((name, _pointer) for name in ("grammar", "matcher", "bits")),
        *((name, _int64) for name in ("id", "begin", "position", "filled")),
        *((name, _int32) for name in ("digits", "state")),
    )
