"""Steps of recurrent states in Triton, for rows of one token: short convolutions, the gated delta rule, state spaces.

A row finds its state at one place of a tensor of states and leaves it at another one, or at the same:

    states [places, ...]      row r reads states[before[r]] and writes states[after[r]]

So each byte of a state is read once and written once, and nothing is gathered or put back. Rows of a call write to
places of their own, and read none that another row writes. Arithmetic is float32; a state is rounded as it is stored.
The formulas are those of the functions of transformers that decode (`causal_conv1d_update`,
`torch_recurrent_gated_delta_rule`, `recurrent_kimi_delta_attention`, `mamba2_selective_state_update`).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

# Numbers of a state that one program holds: 32 a thread of four warps.
_TILE: Final = 4096
_CHANNELS: Final = 256
# Beyond these a program would hold too few columns of a state for its loads to be wide.
_LARGEST_HEAD: Final = 1024
_MOST_COLUMNS: Final = 16
_EPS: Final = tl.constexpr(1e-6)  # of the norm of queries and keys


def step_convolution(
    x: torch.Tensor,
    states: torch.Tensor,
    before: torch.Tensor,
    after: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    silu: bool,
) -> torch.Tensor:
    """Append x to the inputs of each row, drop the oldest, and return the convolution of the last ones, [B, channels].

    x [B, channels]; states [places, channels, columns] has the inputs before, the newest last; before and after [B];
    weight [channels, width] with width <= columns; bias [channels]. With `silu` the result goes through it. Raises
    ValueError for shapes that the kernel does not take.
    """
    channels, columns = states.shape[1:]
    width = weight.shape[-1]
    _expect(x.shape == (len(before), channels), f"inputs {list(x.shape)} of {channels} channels")
    _expect(weight.shape == (channels, width) and weight.is_contiguous(), f"a weight {list(weight.shape)}")
    _expect(width <= columns <= _MOST_COLUMNS, f"{columns} columns under a weight of {width}")
    _expect_places(states, before, after)
    out = torch.empty((len(x), channels), dtype=x.dtype, device=x.device)
    if len(x):
        tile = min(_CHANNELS, triton.next_power_of_2(channels))
        conv_step_kernel[(len(x), triton.cdiv(channels, tile))](
            x,
            states,
            before,
            after,
            weight,
            weight if bias is None else bias,
            out,
            x.stride(0),
            x.stride(1),
            states.stride(0),
            CHANNELS=channels,
            COLUMNS=columns,
            WIDTH=width,
            TILE=tile,
            COLUMN_TILE=triton.next_power_of_2(columns),
            WITH_BIAS=bias is not None,
            SILU=silu,
            num_warps=4,
        )
    return out


def step_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    before: torch.Tensor,
    after: torch.Tensor,
    *,
    normed: bool,
) -> torch.Tensor:
    """Step S = exp(decay) S; S += k (beta (v - kᵀ S))ᵀ for each row and head; return qᵀ S / √K, [B, heads, V].

    query, key [B, key_heads, K], each for heads / key_heads adjacent heads; value [B, heads, V]; decay, the logarithm,
    [B, heads], or [B, heads, K] with one for each channel of the key (Kimi's form); beta [B, heads]; states
    [places, heads, K, V]; before and after [B]. With `normed` q and k are divided by √(Σ x² + 1e-6) first. Raises
    ValueError for shapes that the kernel does not take.
    """
    heads, size_k, size_v = states.shape[1:]
    rows, key_heads = len(before), query.shape[1]
    _expect(query.shape == key.shape == (rows, key_heads, size_k), f"queries {list(query.shape)}, {list(key.shape)}")
    _expect(value.shape == (rows, heads, size_v) and heads % key_heads == 0, f"values {list(value.shape)}")
    _expect(decay.shape in ((rows, heads), (rows, heads, size_k)), f"a decay {list(decay.shape)}")
    _expect(beta.shape == (rows, heads), f"a beta {list(beta.shape)}")
    _expect(size_k <= _LARGEST_HEAD, f"keys of {size_k} channels, of which it takes {_LARGEST_HEAD} at most")
    _expect_places(states, before, after)
    query, key, value, decay = (_with_whole_rows(each) for each in (query, key, value, decay))
    out = torch.empty((rows, heads, size_v), dtype=query.dtype, device=query.device)
    if rows:
        tile_k = triton.next_power_of_2(size_k)
        tile_v = min(max(1, _TILE // tile_k), 32, triton.next_power_of_2(size_v))
        delta_step_kernel[(rows, heads, triton.cdiv(size_v, tile_v))](
            query,
            key,
            value,
            decay,
            beta,
            states,
            before,
            after,
            out,
            *query.stride()[:2],
            *key.stride()[:2],
            *value.stride()[:2],
            *decay.stride()[:2],
            *beta.stride(),
            states.stride(0),
            size_k**-0.5,
            HEADS=heads,
            HEADS_A_KEY=heads // key_heads,
            SIZE_K=size_k,
            SIZE_V=size_v,
            TILE_K=tile_k,
            TILE_V=tile_v,
            BY_CHANNEL=decay.dim() == 3,
            NORMED=normed,
            num_warps=4,
        )
    return out


def step_state_space(
    x: torch.Tensor,
    dt: torch.Tensor,
    rate: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    skip: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    states: torch.Tensor,
    before: torch.Tensor,
    after: torch.Tensor,
    *,
    softplus: bool,
) -> torch.Tensor:
    """Step S = exp(dt rate) S + x (dt b)ᵀ for each row and head; return S c + skip x, [B, heads, P].

    x [B, heads, P]; dt [B, heads], with `softplus` that of dt + dt_bias; rate, skip, dt_bias [heads]; b and c
    [B, groups, N], each for heads / groups adjacent heads; states [places, heads, P, N]; before and after [B]. Raises
    ValueError for shapes that the kernel does not take.
    """
    heads, size_p, size_n = states.shape[1:]
    rows, groups = len(before), b.shape[1]
    _expect(x.shape == (rows, heads, size_p) and dt.shape == (rows, heads), f"inputs {list(x.shape)}, {list(dt.shape)}")
    _expect(b.shape == c.shape == (rows, groups, size_n), f"b {list(b.shape)}, c {list(c.shape)}")
    _expect(heads % groups == 0, f"{heads} heads of {groups} groups")
    for each in (rate, skip, dt_bias):
        _expect(each is None or each.shape == (heads,), "numbers that differ within a head")
    _expect(size_n <= _LARGEST_HEAD, f"{size_n} numbers a channel, of which it takes {_LARGEST_HEAD} at most")
    _expect_places(states, before, after)
    x, b, c = (_with_whole_rows(each) for each in (x, b, c))
    rate, of_skip, of_bias = (rate if each is None else each.contiguous() for each in (rate, skip, dt_bias))
    out = torch.empty((rows, heads, size_p), dtype=x.dtype, device=x.device)
    if rows:
        tile_n = triton.next_power_of_2(size_n)
        tile_p = min(max(1, _TILE // tile_n), triton.next_power_of_2(size_p))
        space_step_kernel[(rows, heads, triton.cdiv(size_p, tile_p))](
            x,
            dt,
            rate,
            b,
            c,
            of_skip,
            of_bias,
            states,
            before,
            after,
            out,
            *x.stride()[:2],
            *dt.stride(),
            *b.stride()[:2],
            *c.stride()[:2],
            states.stride(0),
            HEADS=heads,
            HEADS_A_GROUP=heads // groups,
            SIZE_P=size_p,
            SIZE_N=size_n,
            TILE_P=tile_p,
            TILE_N=tile_n,
            WITH_SKIP=skip is not None,
            WITH_BIAS=dt_bias is not None,
            SOFTPLUS=softplus,
            num_warps=4,
        )
    return out


def _expect(fits: bool, what: str) -> None:
    if not fits:
        raise ValueError(f"the kernel does not take {what}")


def _expect_places(states: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> None:
    """Raise ValueError unless the state of a place is contiguous, and rows have two places each."""
    _expect(states.is_floating_point() and states[0].is_contiguous(), "states that do not lie in order")
    _expect(before.shape == after.shape == (len(before),), "rows without a place to read and one to write")


def _with_whole_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x with its last axis contiguous; of two axes, as it is."""
    return x if x.dim() == 2 or x.stride(-1) == 1 else x.contiguous()


# Steps of one row may have other strides: nothing is compiled for them anew.
@triton.jit(do_not_specialize=["x_row"])
def conv_step_kernel(
    x,
    states,
    before,
    after,
    weight,
    bias,
    out,
    x_row,
    x_channel,
    states_row,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    WITH_BIAS: tl.constexpr,
    SILU: tl.constexpr,
):
    """One program steps some channels of one row."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, COLUMN_TILE)
    there = channel < CHANNELS
    at = channel[:, None] * COLUMNS + column[None, :]
    source = states + tl.load(before + row) * states_row + at
    newest = tl.load(x + row * x_row + channel * x_channel, mask=there, other=0.0).to(tl.float32)
    older = tl.load(source + 1, mask=there[:, None] & (column < COLUMNS - 1)[None, :], other=0.0).to(tl.float32)
    inputs = tl.where((column == COLUMNS - 1)[None, :], newest[:, None], older)
    # Where a state is stepped in place, a thread may read what another one writes.
    tl.debug_barrier()
    target = states + tl.load(after + row) * states_row + at
    tl.store(target, inputs.to(states.dtype.element_ty), mask=there[:, None] & (column < COLUMNS)[None, :])
    tap = column - (COLUMNS - WIDTH)
    taken = there[:, None] & ((tap >= 0) & (column < COLUMNS))[None, :]
    taps = tl.load(weight + channel[:, None] * WIDTH + tap[None, :], mask=taken, other=0.0).to(tl.float32)
    y = tl.sum(tl.where(taken, inputs, 0.0) * taps, axis=1)
    if WITH_BIAS:
        y += tl.load(bias + channel, mask=there, other=0.0).to(tl.float32)
    if SILU:
        y = y * tl.sigmoid(y)
    tl.store(out + row * CHANNELS + channel, y.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["query_row", "key_row", "value_row", "decay_row", "beta_row"])
def delta_step_kernel(
    query,
    key,
    value,
    decay,
    beta,
    states,
    before,
    after,
    out,
    query_row,
    query_head,
    key_row,
    key_head,
    value_row,
    value_head,
    decay_row,
    decay_head,
    beta_row,
    beta_head,
    states_row,
    scale,
    HEADS: tl.constexpr,
    HEADS_A_KEY: tl.constexpr,
    SIZE_K: tl.constexpr,
    SIZE_V: tl.constexpr,
    TILE_K: tl.constexpr,
    TILE_V: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    NORMED: tl.constexpr,
):
    """One program steps some columns of the state of one head of one row: those of TILE_V values."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    of_key = head // HEADS_A_KEY
    at_k = tl.arange(0, TILE_K)
    at_v = tl.program_id(2) * TILE_V + tl.arange(0, TILE_V)
    in_k, in_v = at_k < SIZE_K, at_v < SIZE_V
    q = tl.load(query + row * query_row + of_key * query_head + at_k, mask=in_k, other=0.0).to(tl.float32)
    k = tl.load(key + row * key_row + of_key * key_head + at_k, mask=in_k, other=0.0).to(tl.float32)
    v = tl.load(value + row * value_row + head * value_head + at_v, mask=in_v, other=0.0).to(tl.float32)
    if NORMED:
        q = q / tl.sqrt(tl.sum(q * q, axis=0) + _EPS)
        k = k / tl.sqrt(tl.sum(k * k, axis=0) + _EPS)
    strength = tl.load(beta + row * beta_row + head * beta_head).to(tl.float32)
    at = (head * SIZE_K + at_k)[:, None] * SIZE_V + at_v[None, :]
    inside = in_k[:, None] & in_v[None, :]
    state = tl.load(states + tl.load(before + row) * states_row + at, mask=inside, other=0.0).to(tl.float32)
    if BY_CHANNEL:
        rate = tl.load(decay + row * decay_row + head * decay_head + at_k, mask=in_k, other=0.0).to(tl.float32)
        state = state * tl.exp(rate)[:, None]
    else:
        state = state * tl.exp(tl.load(decay + row * decay_row + head * decay_head).to(tl.float32))
    change = (v - tl.sum(state * k[:, None], axis=0)) * strength
    state = state + k[:, None] * change[None, :]
    result = tl.sum(state * (q * scale)[:, None], axis=0)
    tl.debug_barrier()  # as in `conv_step_kernel`
    target = states + tl.load(after + row) * states_row + at
    tl.store(target, state.to(states.dtype.element_ty), mask=inside)
    tl.store(out + (row * HEADS + head) * SIZE_V + at_v, result.to(out.dtype.element_ty), mask=in_v)


@triton.jit
def softplus_of(x):
    """Return ln(1 + eˣ). For small eˣ, 1 + eˣ has lost digits: its logarithm is scaled by what is left of eˣ."""
    e = tl.exp(tl.minimum(x, 20.0))
    above = 1.0 + e
    exact = tl.where(above == 1.0, e, tl.log(above) * (e / tl.where(above == 1.0, 1.0, above - 1.0)))
    return tl.where(x > 20.0, x, exact)


@triton.jit(do_not_specialize=["x_row", "dt_row", "b_row", "c_row"])
def space_step_kernel(
    x,
    dt,
    rate,
    b,
    c,
    skip,
    dt_bias,
    states,
    before,
    after,
    out,
    x_row,
    x_head,
    dt_row,
    dt_head,
    b_row,
    b_group,
    c_row,
    c_group,
    states_row,
    HEADS: tl.constexpr,
    HEADS_A_GROUP: tl.constexpr,
    SIZE_P: tl.constexpr,
    SIZE_N: tl.constexpr,
    TILE_P: tl.constexpr,
    TILE_N: tl.constexpr,
    WITH_SKIP: tl.constexpr,
    WITH_BIAS: tl.constexpr,
    SOFTPLUS: tl.constexpr,
):
    """One program steps TILE_P channels of one head of one row."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    group = head // HEADS_A_GROUP
    at_p = tl.program_id(2) * TILE_P + tl.arange(0, TILE_P)
    at_n = tl.arange(0, TILE_N)
    in_p, in_n = at_p < SIZE_P, at_n < SIZE_N
    step = tl.load(dt + row * dt_row + head * dt_head).to(tl.float32)
    if WITH_BIAS:
        step += tl.load(dt_bias + head).to(tl.float32)
    if SOFTPLUS:
        step = softplus_of(step)
    given = tl.load(x + row * x_row + head * x_head + at_p, mask=in_p, other=0.0).to(tl.float32)
    into = tl.load(b + row * b_row + group * b_group + at_n, mask=in_n, other=0.0).to(tl.float32)
    out_of = tl.load(c + row * c_row + group * c_group + at_n, mask=in_n, other=0.0).to(tl.float32)
    at = (head * SIZE_P + at_p)[:, None] * SIZE_N + at_n[None, :]
    inside = in_p[:, None] & in_n[None, :]
    state = tl.load(states + tl.load(before + row) * states_row + at, mask=inside, other=0.0).to(tl.float32)
    state = state * tl.exp(step * tl.load(rate + head).to(tl.float32)) + given[:, None] * (step * into)[None, :]
    result = tl.sum(state * out_of[None, :], axis=1)
    if WITH_SKIP:
        result += given * tl.load(skip + head).to(tl.float32)
    tl.debug_barrier()  # as in `conv_step_kernel`
    target = states + tl.load(after + row) * states_row + at
    tl.store(target, state.to(states.dtype.element_ty), mask=inside)
    tl.store(out + (row * HEADS + head) * SIZE_P + at_p, result.to(out.dtype.element_ty), mask=in_p)
