"""The kernels run in Triton's interpreter, which must be enabled before the first kernel is defined.

The interpreter does three things again and again that change nothing, and they take half of the time of these tests.
For each call of a function within a kernel it patches the whole language, which the kernel has patched. For each
operation it builds a table of types. For each sum of integers it computes whether it overflows, and drops the result.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from typing import Any

if os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError(
        "run these tests in a process of their own: TRITON_INTERPRET=1 pytest tests/suites/triton_interpreted"
    )

from triton.runtime import interpreter

_dtype_of = interpreter._get_np_dtype
_dtype_of_scalar = cache(_dtype_of)
_patch_once = cache(interpreter._patch_lang)


def _get_np_dtype(type_: Any) -> Any:
    """Return the dtype of a type's elements; a type of pointers cannot be hashed."""
    scalar = type_.scalar
    return _dtype_of(scalar) if scalar.is_ptr() else _dtype_of_scalar(scalar)


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function within a kernel."""
    _patch_once(function.fn)
    return function.rewrite()(*args, **kwargs)


interpreter._get_np_dtype = _get_np_dtype
interpreter.InterpretedFunction.__call__ = _call
interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
