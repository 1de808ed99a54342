"""Steps of recurrent states on a GPU: kernels that step them in place, against a copy of their bytes and torch.

In torch a step gathers the states of its rows, runs transformers' function, and puts the states back. Each kind of
step is compared with that in float32 first. Times are of CUDA graphs, over so many layers in turn that states stay out
of the L2 cache. Bandwidth is the bytes of the states, read once and written once, over that time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers.models.bamba.modeling_bamba import mamba2_selective_state_update
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_update, torch_recurrent_gated_delta_rule

from bench.gpu.measure import Figure, checked, copy_bandwidth, graph_seconds, parser, report, rotation, the_device
from gpuworker.kernels.triton_states import step_convolution, step_delta_rule, step_state_space

_BATCHES = (1, 8, 32, 128)
_CHECKED_ROWS = 3
_TOLERANCE = 1e-5

Inputs = dict[str, Any]


class Step(Protocol):
    """A kind of step with the sizes of a model."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the state of one row."""
        ...

    def state_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type of states where activations have `dtype`."""
        ...

    def inputs(self, rows: int, dtype: torch.dtype, device: torch.device) -> Inputs: ...

    def in_place(
        self, given: Inputs, states: torch.Tensor, before: torch.Tensor, after: torch.Tensor
    ) -> torch.Tensor: ...

    def in_torch(self, given: Inputs, taken: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the result, and the states behind it, for the states that were gathered."""
        ...


def _plain(function: Any) -> Callable[..., Any]:
    """Return transformers' own code, whichever package it would take in its place."""
    plain: Callable[..., Any] = inspect.unwrap(function)
    return plain


def _drawn(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


@dataclass(frozen=True, slots=True)
class Convolution:
    channels: int
    columns: int
    silu: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        return self.channels, self.columns

    def state_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def inputs(self, rows: int, dtype: torch.dtype, device: torch.device) -> Inputs:
        x, weight = (_drawn(n, w, dtype=dtype, device=device) for n, w in ((rows, self.channels), self.shape))
        return {"x": x, "weight": weight}

    def in_place(self, given: Inputs, states: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        return step_convolution(given["x"], states, before, after, given["weight"], None, silu=self.silu)

    def in_torch(self, given: Inputs, taken: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        activation = "silu" if self.silu else None
        out = _plain(causal_conv1d_update)(given["x"][..., None], taken, given["weight"], None, activation)
        return out[..., 0], taken


@dataclass(frozen=True, slots=True)
class DeltaRule:
    key_heads: int
    heads: int
    size_k: int
    size_v: int
    by_channel: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.heads, self.size_k, self.size_v

    def state_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32

    def inputs(self, rows: int, dtype: torch.dtype, device: torch.device) -> Inputs:
        query, key = (_drawn(rows, self.key_heads, self.size_k, dtype=dtype, device=device) for _ in range(2))
        value = _drawn(rows, self.heads, self.size_v, dtype=dtype, device=device)
        size = (rows, self.heads, self.size_k) if self.by_channel else (rows, self.heads)
        decay = -_drawn(*size, dtype=torch.float32, device=device).abs()
        beta = _drawn(rows, self.heads, dtype=dtype, device=device).sigmoid()
        return {"query": query, "key": key, "value": value, "decay": decay, "beta": beta}

    def in_place(self, given: Inputs, states: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        return step_delta_rule(**given, states=states, before=before, after=after, normed=True)

    def in_torch(self, given: Inputs, taken: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        times = self.heads // self.key_heads
        query, key = (given[name].repeat_interleave(times, dim=1)[:, None] for name in ("query", "key"))
        function = recurrent_kimi_delta_attention if self.by_channel else torch_recurrent_gated_delta_rule
        value, decay, beta = (given[name][:, None] for name in ("value", "decay", "beta"))
        options = {"initial_state": taken, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        out, made = _plain(function)(query, key, value, g=decay, beta=beta, **options)
        return out[:, 0], made


@dataclass(frozen=True, slots=True)
class StateSpace:
    groups: int
    heads: int
    size_p: int
    size_n: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.heads, self.size_p, self.size_n

    def state_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32

    def inputs(self, rows: int, dtype: torch.dtype, device: torch.device) -> Inputs:
        x = _drawn(rows, self.heads, self.size_p, dtype=dtype, device=device)
        b, c = (_drawn(rows, self.groups, self.size_n, dtype=dtype, device=device) for _ in range(2))
        dt, rate = (_drawn(*size, dtype=dtype, device=device) for size in ((rows, self.heads), (self.heads,)))
        skip, bias = (_drawn(self.heads, dtype=dtype, device=device) for _ in range(2))
        return {"x": x, "dt": dt, "rate": -rate.float().abs(), "b": b, "c": c, "skip": skip, "dt_bias": bias}

    def in_place(self, given: Inputs, states: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        return step_state_space(**given, states=states, before=before, after=after, softplus=True)

    def in_torch(self, given: Inputs, taken: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        p, n = self.size_p, self.size_n
        dt, skip, bias = (given[name][..., None].expand(*given[name].shape, p) for name in ("dt", "skip", "dt_bias"))
        rate = given["rate"][:, None, None].expand(-1, p, n)
        step = _plain(mamba2_selective_state_update)
        out = step(taken, given["x"], dt, rate, given["b"], given["c"], skip, dt_bias=bias, dt_softplus=True)
        return out, taken


STEPS: dict[str, Step] = {
    "qwen3_next_80b_delta": DeltaRule(16, 32, 128, 128),
    "kimi_linear_48b_delta": DeltaRule(32, 32, 128, 128, by_channel=True),
    "nemotron_h_8b_space": StateSpace(8, 128, 64, 128),
    "granite_4_h_small_space": StateSpace(1, 128, 64, 128),
    "qwen3_next_80b_conv": Convolution(8192, 4),
    "lfm2_1b_conv": Convolution(2048, 3, silu=False),
}


def main() -> None:
    args = parser(__doc__).parse_args()
    device = the_device("gpu_states")
    for name, step in STEPS.items():
        check(name, step, device)
    copied = copy_bandwidth(device)
    figures = [Figure("copy_gb_s", copied / 1e9, "copy of 1 GiB on the device, bytes read and written")]
    for name, step in STEPS.items():
        for batch in _BATCHES[: 1 if args.quick else None]:
            figures += measured(name, step, batch, copied, device)
    report("gpu_states", device, figures)


def check(name: str, step: Step, device: torch.device) -> None:
    """Compare the kernel with torch in float32: its result, and the states it leaves, in place and at other places."""
    given = step.inputs(_CHECKED_ROWS, torch.float32, device)
    states = _drawn(5, *step.shape, dtype=torch.float32, device=device)
    before, after = (torch.tensor(places, device=device) for places in ([4, 1, 2], [0, 1, 3]))
    with torch.inference_mode():
        wanted, left = step.in_torch(given, states[before])
        found = step.in_place(given, states, before, after)
    for what, ours, theirs in (("results", found, wanted), ("states", states[after], left)):
        checked(f"{name}, {what}", float((ours - theirs).norm() / theirs.norm()), _TOLERANCE)


def measured(name: str, step: Step, batch: int, copied: float, device: torch.device) -> Iterator[Figure]:
    """Yield the bandwidth of the kernel over a copy's, and its time over that of torch."""
    dtype = torch.bfloat16
    of_states = step.state_dtype(dtype)
    moved = 2 * batch * of_states.itemsize * torch.Size(step.shape).numel()
    layers = [_drawn(batch, *step.shape, dtype=of_states, device=device) for _ in range(rotation(moved // 2, device))]
    given, places = step.inputs(batch, dtype, device), torch.randperm(batch, device=device)

    def in_place() -> None:
        for states in layers:
            step.in_place(given, states, places, places)

    def in_torch() -> None:
        for states in layers:
            _, made = step.in_torch(given, states.index_select(0, places))
            states.index_copy_(0, places, made.to(of_states))

    seconds, in_torch_seconds = (graph_seconds(work) / len(layers) for work in (in_place, in_torch))
    what = f"{batch} rows, {moved / (1 << 20):.3g} MiB of states read and written"
    yield Figure(f"{name}_{batch}_over_copy", moved / seconds / copied, f"bandwidth of the kernel over copy: {what}")
    yield Figure(
        f"{name}_{batch}_over_torch",
        seconds / in_torch_seconds,
        f"{batch} rows: time of the kernel over that of torch with states gathered and put back",
        1.0,
        at_most=True,
    )


if __name__ == "__main__":
    main()
