"""Kernels in place of functions of transformers that mixers call: Triton's for decodes, those of fla-core for prefills.

The code of a mixer names these functions as globals of its module. A class of mixers gets copies of its forward in
which a name stands for something else; the module itself, and whoever else runs its code, stay as they are.

    rows of one token that go on        causal_conv1d_update(x, state, ...)      steps the state where it is kept
    all others                          torch_chunk_gated_delta_rule(...)        is that of fla-core

Where a state is stepped in place, the forward holds a stand-in for it: a tensor of its shape and type that takes no
memory. The function that gets the stand-in asks the mixer's call for the states themselves (`MixerCall.take_rows`).
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any, Final

import torch
from torch import nn

from gpuworker.models.hf.mixer_calls import MixerCall, Refusal, StateRows

CONV, RECURRENT = "conv", "recurrent"
# Functions that step a state, and the kind of it.
_STEPS: Final = {
    "causal_conv1d_update": CONV,
    "torch_recurrent_gated_delta_rule": RECURRENT,
    "recurrent_kimi_delta_attention": RECURRENT,
    "mamba2_selective_state_update": RECURRENT,
}
# Functions that compute chunks, and what fla-core has for them.
_CHUNKS: Final = {
    "torch_chunk_gated_delta_rule": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    "chunk_kimi_delta_attention": ("fla.ops.kda", "chunk_kda"),
}
_FLA: Final = "fla"
# What transformers takes where it can be imported. On a CPU its functions fail when they are called.
_FOR_GPUS: Final = ("causal_conv1d", "mamba_ssm")
_SILU: Final = ("silu", "swish")


class StateSteps:
    """Functions with the names and parameters of those of transformers, which step states in place.

    `call` is the one that runs. x, out and so on have the shapes that transformers' functions document.
    """

    def __init__(self) -> None:
        self.call: MixerCall | None = None

    def functions(self) -> dict[str, Callable[..., Any]]:
        return {name: getattr(self, name) for name in _STEPS}

    def causal_conv1d_update(
        self,
        hidden_states: torch.Tensor,
        conv_state: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
    ) -> torch.Tensor:
        from gpuworker.kernels.triton_states import step_convolution

        _expect_one_token(hidden_states.shape[-1])
        if activation not in (None, *_SILU):
            raise Refusal(f"the kernel of convolutions has no {activation}")
        rows, silu = self._rows(conv_state), activation is not None
        x = hidden_states[..., 0]
        return step_convolution(x, rows.kept, rows.before, rows.after, weight, bias, silu=silu)[..., None]

    def torch_recurrent_gated_delta_rule(  # noqa: PLR0913
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        from gpuworker.kernels.triton_states import step_delta_rule

        _expect_one_token(query.shape[1])
        rows, (q, k, v, decay, strength) = self._rows(initial_state), (x[:, 0] for x in (query, key, value, g, beta))
        places, normed = (rows.kept, rows.before, rows.after), use_qk_l2norm_in_kernel
        out = step_delta_rule(q, k, v, decay, strength, *places, normed=normed)
        return out[:, None], initial_state if output_final_state else None

    recurrent_kimi_delta_attention = torch_recurrent_gated_delta_rule

    def mamba2_selective_state_update(  # noqa: PLR0913
        self,
        state: torch.Tensor,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,  # noqa: N803
        B: torch.Tensor,  # noqa: N803
        C: torch.Tensor,  # noqa: N803
        D: torch.Tensor | None = None,  # noqa: N803
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        z: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        from gpuworker.kernels.triton_states import step_state_space

        rows = self._rows(state)
        step, rate = _of_head(dt, 2), _of_head(A, 1)
        skip, bias = (None if each is None else _of_head(each, 1) for each in (D, dt_bias))
        places = rows.kept, rows.before, rows.after
        out = step_state_space(hidden_states, step, rate, B, C, skip, bias, *places, softplus=dt_softplus)
        return out if z is None else out * nn.functional.silu(z)

    def _rows(self, state: torch.Tensor | None) -> StateRows:
        if self.call is None or state is None:
            raise Refusal("a step begins without a state")
        return self.call.take_rows(state)


def _expect_one_token(count: int) -> None:
    if count != 1:
        raise Refusal(f"a step of {count} tokens")


def _of_head(numbers: torch.Tensor, axes: int) -> torch.Tensor:
    """Return numbers [..., heads, ...] without what is behind the heads, along which they must be the same."""
    if any(numbers.shape[axis] > 1 and numbers.stride(axis) for axis in range(axes, numbers.dim())):
        raise Refusal("the kernel of state spaces takes one number for all channels of a head")
    return numbers[(slice(None),) * axes + (0,) * (numbers.dim() - axes)]


def kernels_run(device: torch.device) -> bool:
    """Return whether Triton runs kernels on tensors of a device: on a GPU, or anywhere in its interpreter."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def stepped_kinds(module: nn.Module) -> frozenset[str]:
    """Return the kinds of states of a mixer whose step its code leaves to a function that a kernel replaces."""
    return frozenset(_STEPS[name] for name in _STEPS.keys() & _names(module))


def has_chunks(module: nn.Module) -> bool:
    """Return whether the code of a mixer leaves its chunks to a function that fla-core has."""
    return not _CHUNKS.keys().isdisjoint(_names(module))


def with_functions(module: nn.Module, functions: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return the forward of a module, with these functions in place of those of the same names."""
    plain = _plain_forward(module)
    made = FunctionType(
        plain.__code__, {**plain.__globals__, **functions}, plain.__name__, plain.__defaults__, plain.__closure__
    )
    made.__kwdefaults__ = plain.__kwdefaults__
    return MethodType(made, module)


def fla_chunks() -> dict[str, Callable[..., Any]]:
    """Return fla-core's functions for chunks, by the names that mixers know. Raises ImportError where it is missing."""
    return {
        name: _with_known_arguments(getattr(importlib.import_module(place), function))
        for name, (place, function) in _CHUNKS.items()
    }


def _with_known_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that drops what the other one has no name for, as transformers does."""
    known = inspect.signature(function).parameters.keys()

    def called(*given: Any, **named: Any) -> Any:
        return function(*given, **{name: value for name, value in named.items() if name in known})

    return called


@contextmanager
def without_foreign_kernels(device: torch.device) -> Iterator[None]:
    """Within this context transformers finds no packages of kernels that it would take untested.

    It looks when it first imports the code of a model. fla-core is never left to it: its functions are compared with
    transformers' own, which the self-test wants too. On a CPU it finds none for GPUs, since they fail there.
    """
    hidden = (_FLA, *(_FOR_GPUS if device.type == "cpu" else ()))
    found = {name: sys.modules.get(name) for name in hidden}
    sys.modules.update(dict.fromkeys(hidden))  # None: an import of it fails
    try:
        yield
    finally:
        for name, module in found.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def kernel_errors() -> tuple[type[Exception], ...]:
    """Return what kernels raise that cannot be compiled, or that do not take what they get."""
    plain = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError)
    try:
        from triton.errors import TritonError
    except ImportError:
        return (Refusal, ValueError, *plain)
    return (Refusal, ValueError, *plain, TritonError)


def _plain_forward(module: nn.Module) -> Any:
    return inspect.unwrap(type(module).forward)


def _names(module: nn.Module) -> set[str]:
    """Return the names that the code of a module's forward reads; none where the module has another forward."""
    return set() if "forward" in vars(module) else set(_plain_forward(module).__code__.co_names)
