"""The native linears at every level that this processor runs: against float64, against exact integers, and themselves.

Results must not depend on the batch: that is compared bit by bit.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuworker.native import library as native
from gpuworker.native.library import levels_here, load
from gpuworker.native.linear import IntegerWeight, Kind, PackedLinear, Rows, Store

WEIGHT_ONLY = (Kind.I8_F32, Kind.I8_BF16, Kind.I4_F32, Kind.I4_BF16)
# Every number of rows of a tile, and both sides of each limit: pairs of panels, tiles, unpacked integers, blocks.
BATCHES = (*range(1, 18), 29, 32, 33, 43, 64, 65, 136, 137, 141, 150, 256, 257)
pytestmark = pytest.mark.skipif(native.best() is None, reason="the native library was not built")


@pytest.fixture(params=levels_here())
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """The library of each level."""
    return load(request.param)


def _numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _integers(kind: Kind, n: int, k: int, group: int = 0, zeros: bool = False) -> IntegerWeight:
    made = torch.Generator().manual_seed(n + k)
    low, high = (-8, 8) if kind in (Kind.I4_F32, Kind.I4_BF16) else (-128, 128)
    groups = k // group if group else 1
    return IntegerWeight(
        torch.randint(low, high, (n, k), dtype=torch.int8, generator=made),
        torch.rand(n, groups, generator=made) + 0.5,
        torch.randint(-8, 8, (n, groups), generator=made) if zeros else None,
    )


def _as_taken(kind: Kind, x: torch.Tensor) -> torch.Tensor:
    """Return the activations as the kind rounds them."""
    return x.bfloat16().float() if kind in (Kind.BF16, Kind.I8_BF16, Kind.I4_BF16) else x


def _as_held(kind: Kind, weight: torch.Tensor) -> torch.Tensor:
    """Return a weight of floats as the kind rounds it."""
    return weight.half().float() if kind == Kind.F16 else _as_taken(kind, weight)


def _exact(weight: IntegerWeight) -> torch.Tensor:
    """Return the weight in float64."""
    groups = weight.scales.shape[1]
    values = weight.values.double().unflatten(1, (groups, -1))
    zeros = torch.zeros_like(weight.scales) if weight.zeros is None else weight.zeros
    exact: torch.Tensor = (values - zeros.double()[..., None]) * weight.scales.double()[..., None]
    return (exact if weight.minimums is None else exact + weight.minimums.double()[..., None]).flatten(1)


def _assert_close(result: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, epsilon: float = 2.0**-19) -> None:
    """Hold a result to the sum of the magnitudes that it was summed from."""
    magnitude = x.double().abs() @ weight.double().abs().T
    error = (result.double() - x.double() @ weight.double().T).abs()
    assert (error <= epsilon * magnitude + 1e-30).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [Kind.F32, Kind.BF16, Kind.F16])
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(rows=st.integers(1, 32), n=st.integers(1, 70), k=st.integers(1, 130))
def test_any_shape_is_the_product_in_float64(
    library: ctypes.CDLL, kind: Kind, dtype: torch.dtype, rows: int, n: int, k: int
) -> None:
    x, weight = _numbers(rows, k), _numbers(n, k, seed=1).to(dtype)
    result = PackedLinear([Rows(weight)], kind, library=library)(x)
    # The other levels widen weights and keep activations in float32.
    rounds = native.level_of(library) in ("avx512_bf16", "amx")
    _assert_close(result, _as_taken(kind, x) if rounds else x, _as_held(kind, weight.float()))


@pytest.mark.parametrize("kind", [Kind.F32, Kind.BF16, Kind.F16])
def test_many_inputs_are_summed_block_by_block(library: ctypes.CDLL, kind: Kind) -> None:
    x, weight = _as_taken(kind, _numbers(17, 4200)), _as_held(kind, _numbers(33, 4200, seed=1))
    _assert_close(PackedLinear([Rows(weight)], kind, library=library)(x), x, weight)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(rows=st.integers(1, 70), n=st.integers(1, 70), k=st.integers(1, 1200), seed=st.integers(0, 99))
def test_float16_gives_the_bits_of_float32(library: ctypes.CDLL, rows: int, n: int, k: int, seed: int) -> None:
    x, weight = _numbers(rows, k), _numbers(n, k, seed=seed).half()
    halves, floats = (PackedLinear([Rows(weight)], kind, library=library) for kind in (Kind.F16, Kind.F32))
    assert torch.equal(halves(x), floats(x))


@pytest.mark.parametrize("rows", [1, 2, 6, 7, 14, 28, 29, 70, 71, 140, 141, 256])
def test_float16_in_several_blocks_gives_the_bits_of_float32(library: ctypes.CDLL, rows: int) -> None:
    x, weight = _numbers(rows, 2100), _numbers(101, 2100, seed=1).half()
    halves, floats = (PackedLinear([Rows(weight)], kind, library=library) for kind in (Kind.F16, Kind.F32))
    assert torch.equal(halves(x), floats(x))
    assert halves.nbytes < 0.52 * floats.nbytes


@pytest.mark.parametrize("rows", [1, 3, 141])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_every_float16_is_held_and_widened_exactly(library: ctypes.CDLL, dtype: torch.dtype, rows: int) -> None:
    """One input a product: what comes out is the weight. Subnormal numbers, infinities and NaN are among them."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.float16)[:, None]
    result = PackedLinear([Rows(every.to(dtype))], Kind.F16, library=library)(torch.ones(rows, 1))
    torch.testing.assert_close(result, every.T.float().expand(rows, -1), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("kind", WEIGHT_ONLY)
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    rows=st.integers(1, 32), n=st.integers(1, 70), groups=st.integers(1, 5), group=st.sampled_from([16, 32, 48, 64, 96])
)
def test_integers_in_groups_are_the_product_in_float64(
    library: ctypes.CDLL, kind: Kind, zeros: bool, rows: int, n: int, groups: int, group: int
) -> None:
    weight, x = _integers(kind, n, groups * group, group, zeros), _as_taken(kind, _numbers(rows, groups * group))
    _assert_zeros_close(PackedLinear([Rows(weight)], kind, library=library)(x), x, weight)


def _assert_zeros_close(result: torch.Tensor, x: torch.Tensor, weight: IntegerWeight) -> None:
    """Hold it to the magnitudes of values and zeros apart: that is what is summed."""
    apart = weight.values.double().abs().unflatten(1, (weight.scales.shape[1], -1))
    if weight.zeros is not None:
        apart = apart + weight.zeros.double().abs()[..., None]
    magnitude = x.double().abs() @ (apart * weight.scales.double()[..., None]).flatten(1).T
    error = (result.double() - x.double() @ _exact(weight).T).abs()
    assert (error <= 2.0**-19 * magnitude).all()


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("kind", WEIGHT_ONLY)
@pytest.mark.parametrize("rows", [1, 5, 31])
def test_minimums_of_groups_are_added(library: ctypes.CDLL, kind: Kind, zeros: bool, rows: int) -> None:
    weight, x = _integers(kind, 45, 160, 32, zeros), _as_taken(kind, _numbers(rows, 160))
    weight = replace(weight, minimums=8 * _numbers(45, 5, seed=2))
    result = PackedLinear([Rows(weight)], kind, library=library)(x)
    magnitude = x.double().abs() @ (_exact(weight).abs() + 150).T
    assert ((result.double() - x.double() @ _exact(weight).T).abs() <= 2.0**-19 * magnitude).all()


@pytest.mark.parametrize("kind", WEIGHT_ONLY)
@pytest.mark.parametrize("k", [1, 7, 130, 2100])
def test_integers_with_one_scale_an_output_are_the_product_in_float64(library: ctypes.CDLL, kind: Kind, k: int) -> None:
    weight, x = _integers(kind, 45, k), _as_taken(kind, _numbers(31, k))
    _assert_close(PackedLinear([Rows(weight)], kind, library=library)(x), x, _exact(weight))


@pytest.mark.parametrize("kind", WEIGHT_ONLY)
def test_groups_of_more_inputs_than_a_block_are_cut(library: ctypes.CDLL, kind: Kind) -> None:
    weight, x = _integers(kind, 3, 2176, 2176, zeros=True), _as_taken(kind, _numbers(2, 2176))
    _assert_zeros_close(PackedLinear([Rows(weight)], kind, library=library)(x), x, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(rows=st.integers(1, 32), n=st.integers(1, 70), k=st.integers(1, 130))
def test_w8a8_is_the_product_of_quantised_rows_bit_by_bit(
    library: ctypes.CDLL, dtype: torch.dtype, rows: int, n: int, k: int
) -> None:
    weight, x = _integers(Kind.W8A8, n, k), _numbers(rows, k).to(dtype)
    result = PackedLinear([Rows(weight)], Kind.W8A8, library=library)(x)
    assert np.array_equal(result.numpy(), _w8a8(x.float().numpy(), weight))


def test_w8a8_does_not_overflow_at_its_longest_rows(library: ctypes.CDLL) -> None:
    weight = IntegerWeight(torch.full((2, 65536), -128, dtype=torch.int8), torch.ones(2, 1))
    x = torch.ones(1, 65536)
    result = PackedLinear([Rows(weight)], Kind.W8A8, library=library)(x)
    assert np.array_equal(result.numpy(), _w8a8(x.numpy(), weight))


def _w8a8(x: np.ndarray, weight: IntegerWeight) -> np.ndarray:
    """Return what dynamic 8-bit rows give, rounding where the kernel rounds."""
    largest = np.abs(x).max(1, keepdims=True)
    quantised = np.rint(x * (np.float32(127) / largest)).astype(np.int64)
    sums = quantised @ weight.values.numpy().astype(np.int64).T
    result: np.ndarray = sums.astype(np.float32) * (weight.scales[:, 0].numpy() * (largest / np.float32(127)))
    return result


def test_a_row_of_zeros_stays_zero_in_w8a8(library: ctypes.CDLL) -> None:
    packed = PackedLinear([Rows(_integers(Kind.W8A8, 40, 50))], Kind.W8A8, library=library)
    assert torch.equal(packed(torch.zeros(2, 50)), torch.zeros(2, 40))


@pytest.mark.parametrize(
    ("kind", "group"), [*((kind, 0) for kind in Kind), *((kind, group) for kind in WEIGHT_ONLY for group in (16, 32))]
)
def test_neither_batch_nor_place_nor_threads_change_a_bit(library: ctypes.CDLL, kind: Kind, group: int) -> None:
    n, k = 70, 2112  # several blocks of k
    weight = _integers(kind, n, k, group, group > 0) if kind.whole else _numbers(n, k, seed=2)
    packed = [PackedLinear([Rows(weight)], kind, threads=threads, library=library) for threads in (1, 2, 3)]
    x = _numbers(max(BATCHES), k)
    alone = torch.cat([packed[0](x[row : row + 1]) for row in range(len(x))])
    for number, rows in enumerate(BATCHES):
        begin = len(x) - rows if number % 2 else 0
        assert torch.equal(packed[number % 3](x[begin : begin + rows]), alone[begin : begin + rows])


@pytest.mark.parametrize("kind", WEIGHT_ONLY)
@pytest.mark.parametrize("group", [0, 16, 32, 96])
@pytest.mark.parametrize("scale", [2.0**-140, 2.0**-133, 2.0**-120, 2.0**110])
def test_a_row_alone_has_its_bits_where_numbers_are_tiny_or_huge(
    library: ctypes.CDLL, kind: Kind, group: int, scale: float
) -> None:
    packed = PackedLinear([Rows(_integers(kind, 70, 672, group, zeros=group > 0))], kind, library=library)
    x = _numbers(8, 672) * scale
    together = packed(x)
    assert together.isfinite().all()
    for row in range(len(x)):
        assert torch.equal(packed(x[row : row + 1])[0], together[row])


@pytest.mark.parametrize("kind", [Kind.F32, Kind.BF16, Kind.F16, Kind.I8_BF16, Kind.W8A8])
@pytest.mark.parametrize("n", [40, 64])
def test_sources_stand_one_below_the_other_with_their_biases(library: ctypes.CDLL, kind: Kind, n: int) -> None:
    x = _numbers(5, 64)
    parts = [_integers(kind, rows, 64) if kind.whole else _numbers(rows, 64, seed=rows) for rows in (n, 7, 1)]
    biases = [_numbers(n), None, _numbers(1, seed=3)]
    rows = [Rows(part, bias) for part, bias in zip(parts, biases, strict=True)]
    together = PackedLinear(rows, kind, library=library)(x)
    plain = [PackedLinear([Rows(part)], kind, library=library)(x) for part in parts]
    for result, part, bias in zip(together.split([n, 7, 1], 1), plain, biases, strict=True):
        torch.testing.assert_close(result, part if bias is None else part + bias, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.BF16, Kind.F16, Kind.I4_F32])
@pytest.mark.parametrize("width", [16, 37, 64])
@pytest.mark.parametrize("store", [Store.SILU_F32, Store.SILU_BF16, Store.GELU_F32, Store.GELU_BF16])
def test_a_paired_weight_gives_the_gated_product(library: ctypes.CDLL, kind: Kind, width: int, store: Store) -> None:
    x = _numbers(19, 96)
    parts = [_integers(kind, width, 96, 32) if kind.whole else _numbers(width, 96, seed=seed) for seed in (1, 2)]
    biased = [Rows(part, _numbers(width, seed=4)) for part in parts]
    gate, up = (PackedLinear([rows], kind, library=library)(x) for rows in biased)
    gated = PackedLinear(biased, kind, paired=True, library=library)(x, store)
    silu, gelu = torch.nn.functional.silu, partial(torch.nn.functional.gelu, approximate="tanh")
    gated_by = gelu if store in (Store.GELU_F32, Store.GELU_BF16) else silu
    expected = (gated_by(gate) * up).to(store.dtype)
    tolerance = 1e-2 if store.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(gated, expected, rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("n", [16, 40, 64])
def test_stores_round_or_add(library: ctypes.CDLL, n: int) -> None:
    x, packed = _numbers(15, 40), PackedLinear([Rows(_numbers(n, 40, seed=1))], Kind.F32, library=library)
    plain, residual = packed(x), _numbers(15, n, seed=2)
    assert torch.equal(packed(x, Store.BF16), plain.bfloat16())
    assert torch.equal(packed(x, Store.ADD_F32, residual.clone()), residual + plain)


def test_only_the_output_is_written(library: ctypes.CDLL) -> None:
    packed = PackedLinear([Rows(_numbers(37, 40))], Kind.F32, library=library)
    around = torch.full((7, 60), 3.5)
    packed(_numbers(5, 40), out=around[1:6, 8:45])
    around[1:6, 8:45] = 3.5
    assert (around == 3.5).all()


def test_rows_may_be_apart_in_memory(library: ctypes.CDLL) -> None:
    wide = _numbers(9, 100)
    for kind in (Kind.F32, Kind.BF16, Kind.F16):
        packed = PackedLinear([Rows(_numbers(33, 40, seed=1))], kind, library=library)
        assert torch.equal(packed(wide[:, 10:50]), packed(wide[:, 10:50].contiguous()))


def test_garbage_behind_a_row_of_odd_length_is_not_read(library: ctypes.CDLL) -> None:
    wide = torch.full((4, 48), torch.nan, dtype=torch.bfloat16)
    wide[:, :41] = _numbers(4, 41)
    assert PackedLinear([Rows(_numbers(33, 41))], Kind.BF16, library=library)(wide[:, :41]).isfinite().all()


def test_what_does_not_fit_is_refused(library: ctypes.CDLL) -> None:
    with pytest.raises(ValueError, match=r"beyond \[-8, 7\]"):
        PackedLinear([Rows(IntegerWeight(torch.full((1, 32), 8, dtype=torch.int8), torch.ones(1, 1)))], Kind.I4_F32)
    with pytest.raises(ValueError, match="no native linear"):
        PackedLinear([Rows(_integers(Kind.I8_F32, 1, 40, 20))], Kind.I8_F32, library=library)
    with pytest.raises(ValueError, match="no native linear"):
        PackedLinear([Rows(_integers(Kind.I8_BF16, 1, 64, 8))], Kind.I8_BF16, library=library)
    with pytest.raises(ValueError, match="cannot be packed"):
        PackedLinear([Rows(_numbers(2, 2))], Kind.W8A8, library=library)
    with pytest.raises(ValueError, match="cannot store"):
        PackedLinear([Rows(_numbers(2, 2))], Kind.F32, library=library)(_numbers(1, 2), Store.SILU_F32)
