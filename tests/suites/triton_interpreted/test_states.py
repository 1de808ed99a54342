"""Steps of states in Triton against their formulas in float64: any sizes, each type, in place and to other places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpuworker.kernels import triton_states
from gpuworker.kernels.triton_states import step_convolution, step_delta_rule, step_state_space

DRAW = torch.Generator().manual_seed(0)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# Rows of five places: one moves, one stays, one moves to where none was.
BEFORE, AFTER = torch.tensor([4, 1, 2]), torch.tensor([0, 1, 3])
ROWS = len(BEFORE)


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """A test draws the same numbers, whichever ran before it in its process."""
    DRAW.manual_seed(0)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=DRAW).to(dtype)


def kept(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return states [5, *shape] that lie in longer rows of bytes, as those of a layer among others do."""
    size = torch.Size(shape).numel() * dtype.itemsize
    memory = torch.zeros((5, size + 48), dtype=torch.uint8)
    states = memory[:, 16 : 16 + size].view(dtype).view(5, *shape)
    states.copy_(drawn(5, *shape))
    return states


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.shape == wanted.shape
    assert (found.double() - wanted).norm() / wanted.norm() < TOLERANCE[found.dtype]


class Checked:
    """Compares what a step returns and leaves, and sees that no other place changes."""

    def __init__(self, states: torch.Tensor) -> None:
        self.states, self.before = states, states.clone()

    def __call__(self, out: torch.Tensor, wanted: torch.Tensor, left: torch.Tensor) -> None:
        close(out, wanted)
        close(self.states[AFTER], left)
        assert torch.equal(self.states[[2, 4]], self.before[[2, 4]])


def convolved(
    x: torch.Tensor, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results in float64, and the states that are left."""
    inputs = torch.cat((states[BEFORE].double(), x.double()[..., None]), dim=-1)[..., 1:]
    y = (inputs[..., -weight.shape[-1] :] * weight.double()).sum(-1) + (0 if bias is None else bias.double())
    return y * y.sigmoid() if silu else y, inputs


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("channels", "columns", "width"), [(1, 1, 1), (5, 3, 3), (96, 4, 4), (300, 4, 4), (7, 5, 4), (32, 9, 2)]
)
def test_convolutions_append_a_column_and_drop_the_oldest(
    channels: int, columns: int, width: int, dtype: torch.dtype
) -> None:
    for with_bias in (False, True):
        states, x = kept(channels, columns, dtype=dtype), drawn(ROWS, channels + 2, dtype=dtype)[:, 1:-1]
        weight, bias = drawn(channels, width, dtype=dtype), drawn(channels, dtype=dtype) if with_bias else None
        check, wanted = Checked(states), convolved(x, states, weight, bias, silu=with_bias)
        check(step_convolution(x, states, BEFORE, AFTER, weight, bias, silu=with_bias), *wanted)


def normed(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(
    ("key_heads", "heads", "size_k", "size_v", "dtype"),
    [
        (1, 1, 1, 1, torch.float32),
        (2, 4, 16, 8, torch.float32),
        (3, 3, 24, 40, torch.float32),
        (1, 2, 128, 128, torch.float32),
        (2, 2, 256, 33, torch.float32),
        (2, 4, 16, 8, torch.float16),
        (2, 4, 16, 8, torch.bfloat16),
    ],
)
def test_the_delta_rule_is_that_of_the_formula(
    key_heads: int, heads: int, size_k: int, size_v: int, dtype: torch.dtype, with_norm: bool, by_channel: bool
) -> None:
    wide = drawn(ROWS, key_heads, 2 * size_k, dtype=dtype)
    query, key, value = wide[..., :size_k], wide[..., size_k:], drawn(ROWS, heads, size_v, dtype=dtype)
    decay = -drawn(ROWS, heads, *([size_k] if by_channel else [])).abs()
    beta, states = drawn(ROWS, heads, dtype=dtype).sigmoid(), kept(heads, size_k, size_v)
    check = Checked(states)
    q, k = (each.double().repeat_interleave(heads // key_heads, dim=1) for each in (query, key))
    if with_norm:
        q, k = normed(q), normed(k)
    state = states[BEFORE].double() * decay.double().exp().reshape(ROWS, heads, -1, 1)
    change = (value.double() - (state * k[..., None]).sum(-2)) * beta.double()[..., None]
    state = state + k[..., None] * change[..., None, :]
    wanted = (state * q[..., None]).sum(-2) * size_k**-0.5
    out = step_delta_rule(query, key, value, decay, beta, states, BEFORE, AFTER, normed=with_norm)
    assert out.dtype == dtype
    check(out, wanted, state)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(
    ("groups", "heads", "size_p", "size_n", "dtype"),
    [
        (1, 1, 1, 1, torch.float32),
        (2, 8, 16, 8, torch.float32),
        (3, 3, 12, 20, torch.float32),
        (1, 2, 64, 128, torch.float32),
        (1, 2, 48, 256, torch.float32),
        (2, 8, 16, 8, torch.float16),
        (2, 8, 16, 8, torch.bfloat16),
    ],
)
def test_state_spaces_step_as_the_formula_says(
    groups: int, heads: int, size_p: int, size_n: int, dtype: torch.dtype, plain: bool
) -> None:
    x, (b, c) = drawn(ROWS, heads, size_p, dtype=dtype), (drawn(ROWS, groups, size_n, dtype=dtype) for _ in range(2))
    dt = drawn(ROWS, heads, dtype=dtype).abs() if plain else 4 * drawn(ROWS, heads, dtype=dtype) - 4
    rate, states = -drawn(heads).abs(), kept(heads, size_p, size_n)
    skip, bias = (None, None) if plain else (drawn(heads, dtype=dtype), drawn(heads, dtype=dtype))
    check, step = Checked(states), dt.double()
    if not plain:
        assert bias is not None
        step = torch.log1p((step + bias.double()).exp())
    into, out_of = (each.double().repeat_interleave(heads // groups, dim=1) for each in (b, c))
    state = states[BEFORE].double() * (step * rate.double())[..., None, None].exp()
    state = state + x.double()[..., None] * (step[..., None] * into)[..., None, :]
    wanted = (state * out_of[..., None, :]).sum(-1) + (0 if skip is None else x.double() * skip.double()[:, None])
    out = step_state_space(x, dt, rate, b, c, skip, bias, states, BEFORE, AFTER, softplus=not plain)
    assert out.dtype == dtype
    check(out, wanted, state)


def test_the_softplus_of_a_time_step_keeps_its_digits() -> None:
    """Where eˣ is small, 1 + eˣ rounds it away: the state then forgets by e.g. 0 in place of 1e-8."""
    given = torch.cat((torch.linspace(-80, 19.9, 300), torch.tensor([20.1, 50.0, 1e4])))
    states, one = torch.zeros(1, len(given), 1, 1), torch.ones(1, 1, 1)
    place = torch.zeros(1, dtype=torch.int64)
    x, rate = torch.ones(1, len(given), 1), torch.zeros(len(given))
    found = step_state_space(x, given[None], rate, one, one, None, None, states, place, place, softplus=True)
    wanted = torch.where(given > 20, given.double(), given.double().exp().log1p())
    torch.testing.assert_close(found.flatten().double(), wanted, rtol=2e-6, atol=0)


def test_no_rows_launch_nothing() -> None:
    none, states = torch.empty(0, dtype=torch.int64), kept(2, 4)
    x, weight = torch.empty(0, 2), drawn(2, 4)
    assert step_convolution(x, states, none, none, weight, None, silu=True).shape == (0, 2)


def delta(**changed: Any) -> Callable[[], torch.Tensor]:
    given: dict[str, Any] = {
        "query": drawn(ROWS, 2, 8),
        "key": drawn(ROWS, 2, 8),
        "value": drawn(ROWS, 4, 8),
        "decay": drawn(ROWS, 4),
        "beta": drawn(ROWS, 4),
        "states": kept(4, 8, 8),
        "before": BEFORE,
        "after": AFTER,
        "normed": True,
    }
    return lambda: step_delta_rule(**given | changed)


def space(**changed: Any) -> Callable[[], torch.Tensor]:
    given: dict[str, Any] = {
        "x": drawn(ROWS, 4, 8),
        "dt": drawn(ROWS, 4),
        "rate": drawn(4),
        "b": drawn(ROWS, 2, 8),
        "c": drawn(ROWS, 2, 8),
        "skip": drawn(4),
        "dt_bias": drawn(4),
        "states": kept(4, 8, 8),
        "before": BEFORE,
        "after": AFTER,
        "softplus": True,
    }
    return lambda: step_state_space(**given | changed)


def convolution(**changed: Any) -> Callable[[], torch.Tensor]:
    given: dict[str, Any] = {
        "x": drawn(ROWS, 4),
        "states": kept(4, 3),
        "before": BEFORE,
        "after": AFTER,
        "weight": drawn(4, 3),
        "bias": None,
        "silu": True,
    }
    return lambda: step_convolution(**given | changed)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (delta(key=drawn(ROWS, 2, 7)), r"queries \[3, 2, 8\], \[3, 2, 7\]"),
        (delta(value=drawn(ROWS, 4, 9)), r"values \[3, 4, 9\]"),
        (delta(query=drawn(ROWS, 3, 8), key=drawn(ROWS, 3, 8)), "values"),
        (delta(decay=drawn(ROWS, 4, 5)), r"a decay \[3, 4, 5\]"),
        (delta(beta=drawn(ROWS, 2)), r"a beta \[3, 2\]"),
        (delta(states=kept(4, 8, 8).transpose(2, 3)), "states that do not lie in order"),
        (delta(states=kept(4, 8, 8).int()), "states that do not lie in order"),
        (delta(after=AFTER[:2]), "rows without a place to read and one to write"),
        (space(dt=drawn(ROWS, 4, 8)), "inputs"),
        (space(c=drawn(ROWS, 2, 9)), r"b \[3, 2, 8\], c \[3, 2, 9\]"),
        (space(b=drawn(ROWS, 3, 8), c=drawn(ROWS, 3, 8)), "4 heads of 3 groups"),
        (space(skip=drawn(4, 8)), "numbers that differ within a head"),
        (convolution(x=drawn(ROWS, 4, 1)), "inputs"),
        (convolution(weight=drawn(4, 4)), "3 columns under a weight of 4"),
        (convolution(weight=drawn(3, 4).t()), "a weight"),
        (convolution(states=kept(4, 17)), "17 columns under a weight of 3"),
    ],
)
def test_what_the_kernels_do_not_take_is_said(step: Callable[[], torch.Tensor], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        step()


def test_heads_that_are_too_large_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_states, "_LARGEST_HEAD", 4)
    with pytest.raises(ValueError, match="keys of 8 channels, of which it takes 4 at most"):
        delta()()
    with pytest.raises(ValueError, match="8 numbers a channel, of which it takes 4 at most"):
        space()()
