"""Experts in Triton against the same sums in float64: any choice, any sizes, each type."""

from __future__ import annotations

from itertools import product as every
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
from triton.runtime import interpreter

from gpuworker.kernels import torch_experts, triton_experts
from gpuworker.kernels.torch_experts import Experts
from gpuworker.kernels.triton_experts import choose, gate_up_product, group, mix_experts, most_tiles, product, tiles_for

DRAW = torch.Generator().manual_seed(0)
TOLERANCE = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """A test draws the same numbers, whichever ran before it in its process."""
    DRAW.manual_seed(0)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return normal numbers whose products with one another stay about as large as they are."""
    made: torch.Tensor = torch.randn(shape, generator=DRAW) * float(shape[-1]) ** -0.5
    return made.to(dtype)


def experts_of(count: int, hidden: int, inner: int, top_k: int, dtype: torch.dtype = torch.float32) -> Experts:
    weights = drawn(count, 2 * inner, hidden, dtype=dtype), drawn(count, hidden, inner, dtype=dtype)
    return Experts(drawn(count, hidden, dtype=dtype), *weights, top_k, normalised=True)


def pairs_by_expert(x: torch.Tensor, experts: Experts, chosen: torch.Tensor) -> torch.Tensor:
    """Return the output of every pair in float64, [T, top_k, hidden]."""
    gate, up = (experts.gate_up.double()[chosen] @ x.double()[:, None, :, None]).squeeze(-1).chunk(2, dim=-1)
    return (experts.down.double()[chosen] @ (gate * gate.sigmoid() * up)[..., None]).squeeze(-1)


def close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    error = (found.double() - wanted).norm() / wanted.norm()
    assert error < TOLERANCE[dtype]


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize(("count", "top_k"), [(1, 1), (3, 3), (8, 2), (40, 5), (64, 8)])
def test_a_token_takes_the_experts_of_its_largest_logits(count: int, top_k: int, normalised: bool) -> None:
    wide = torch.randn((5, count + 3), generator=DRAW)  # rows of a wider tensor
    chosen, weights = choose(wide[:, :count], top_k, normalised=normalised)
    shares = torch.softmax(wide[:, :count].double(), dim=-1)
    largest, numbers = shares.topk(top_k, dim=-1)
    assert chosen.tolist() == numbers.tolist()
    wanted = largest / largest.sum(dim=-1, keepdim=True) if normalised else largest
    torch.testing.assert_close(weights.double(), wanted, atol=1e-6, rtol=1e-6)


def test_of_equal_logits_the_lower_number_is_taken() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0], [1.0, 2.0, 2.0]])
    assert choose(logits, 2, normalised=True)[0].tolist() == [[0, 1], [1, 2]]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_logit_that_is_no_number_leads_to_an_expert_of_the_layer(bad: float) -> None:
    logits = torch.zeros((3, 5))
    logits[0], logits[1, 2] = bad, bad
    chosen, _ = choose(logits, 3, normalised=False)
    assert 0 <= int(chosen.min()) <= int(chosen.max()) < 5
    assert chosen[2].tolist() == [0, 1, 2]
    assert sorted(group(chosen, 5).order.tolist()) == list(range(9))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_token_that_is_no_number_spoils_itself_alone() -> None:
    x, experts = drawn(4, 40), experts_of(3, 40, 16, 2)
    spoilt = x.clone()
    spoilt[1] = float("nan")
    others = [0, 2, 3]
    torch.testing.assert_close(mix_experts(spoilt, experts)[others], mix_experts(x, experts)[others], rtol=0, atol=0)


@pytest.mark.parametrize("tile", [4, 1024])
def test_pairs_are_ordered_by_expert_and_then_by_token(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_experts, "_PLACE_TILE", tile)
    chosen = torch.tensor([[4, 1], [1, 4], [0, 1], [4, 0]], dtype=torch.int32)  # none takes 2 or 3
    found = group(chosen, 5)
    assert found.counts.tolist() == [2, 3, 0, 0, 3]
    assert found.order.tolist() == [4, 7, 1, 2, 5, 0, 3, 6]


@pytest.mark.parametrize(("pairs", "count", "rows"), list(every((1, 7, 16, 33), (1, 4, 40), (1, 16))))
def test_the_grid_has_the_tiles_of_the_least_favourable_choice(pairs: int, count: int, rows: int) -> None:
    """That is: one pair at each of the other experts, and all that remain at one."""
    others = min(pairs, count) - 1
    worst = others + triton.cdiv(pairs - others, rows)
    assert worst <= most_tiles(pairs, count, rows) <= worst + 1


CHOICES = {
    "all tokens at one expert": lambda tokens, top_k: torch.zeros((tokens, top_k), dtype=torch.int32) + 2,
    "all tokens at the last": lambda tokens, top_k: torch.zeros((tokens, top_k), dtype=torch.int32) + 5,
    "experts without tokens": lambda tokens, top_k: torch.arange(tokens * top_k).view(tokens, top_k).int() % 3 * 2,
    "all experts alike": lambda tokens, top_k: torch.arange(tokens * top_k).view(tokens, top_k).int() % 6,
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("choice", CHOICES)
def test_each_pair_is_multiplied_by_its_expert(choice: str, dtype: torch.dtype) -> None:
    x, experts = drawn(19, 70, dtype=dtype), experts_of(6, 70, 67, 2, dtype)
    chosen = CHOICES[choice](19, 2)
    groups = group(chosen, 6)
    made = product(gate_up_product(x, experts.gate_up, groups, 2), experts.down, groups)
    assert made.dtype == dtype
    close(made.view(19, 2, 70), pairs_by_expert(x, experts, chosen), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("tokens", "count", "hidden", "inner", "top_k"),
    [(1, 8, 64, 128, 2), (1, 3, 33, 47, 3), (7, 40, 48, 24, 8), (90, 5, 130, 31, 1), (40, 2, 16, 8, 2)],
)
def test_layers_of_any_size(tokens: int, count: int, hidden: int, inner: int, top_k: int, dtype: torch.dtype) -> None:
    x, experts = drawn(tokens, hidden, dtype=dtype), experts_of(count, hidden, inner, top_k, dtype)
    found = mix_experts(x, experts)
    chosen, weights = choose(torch.nn.functional.linear(x, experts.router), top_k, normalised=True)
    wanted = (pairs_by_expert(x, experts, chosen.long()) * weights.double()[..., None]).sum(dim=1)
    assert (found.shape, found.dtype) == (x.shape, dtype)
    close(found, wanted, dtype)


def test_plain_torch_computes_the_same() -> None:
    x, experts = drawn(9, 40), experts_of(6, 40, 20, 3)
    torch.testing.assert_close(mix_experts(x, experts), torch_experts.mix_experts(x, experts), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_no_bit_depends_on_the_tokens_beside(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps with tiles of one shape; in the second, other tokens stand before and behind.

    The interpreter multiplies with numpy, where the bits of a row depend on its place among the rows; a GPU's do not.
    """

    def by_row(a: np.ndarray, b: np.ndarray, dtype: object) -> np.ndarray:
        return np.stack([np.matmul(row[None], b, dtype=dtype)[0] for row in a])  # type: ignore[call-overload]

    monkeypatch.setattr(interpreter, "np", SimpleNamespace(**vars(np) | {"matmul": by_row}))
    DRAW.manual_seed(seed)
    experts, x, others = experts_of(4, 48, 24, 2), drawn(5, 48), drawn(6, 48)
    alone = mix_experts(torch.cat((x, others)), experts)[:5]
    beside = mix_experts(torch.cat((others[3:], x, others[:3])), experts)[3:8]
    assert tiles_for(22, 4, x.dtype).rows == 16
    torch.testing.assert_close(alone, beside, rtol=0, atol=0)


def test_rows_of_a_wider_tensor_are_read_by_their_stride() -> None:
    wide, experts = drawn(4, 90), experts_of(3, 40, 16, 2)
    found = mix_experts(wide[:, 20:60], experts)
    # The logits come from torch's product, whose bits depend on where in memory the rows begin.
    wanted = mix_experts(wide[:, 20:60].contiguous(), experts)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)


def test_a_step_without_tokens_launches_nothing() -> None:
    assert mix_experts(torch.empty((0, 40)), experts_of(3, 40, 16, 2)).shape == (0, 40)


class RecordedKernel:
    """Launches a kernel, and keeps its grids."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        return self._kernel[grid]


def test_no_grid_depends_on_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph that was captured with one choice is replayed with others."""
    names = ("choose_kernel", "group_kernel", "expert_product_kernel", "add_up_kernel")
    kernels = [RecordedKernel(getattr(triton_experts, name)) for name in names]
    for name, kernel in zip(names, kernels, strict=True):
        monkeypatch.setattr(triton_experts, name, kernel)
    experts, choices = experts_of(6, 40, 16, 2), []
    for x in (drawn(9, 40), drawn(1, 40).expand(9, 40)):
        mix_experts(x, experts)
        choices.append(choose(x @ experts.router.t(), 2, normalised=True)[0].unique().numel())
    assert choices[0] > choices[1] == 2
    for kernel in kernels:
        assert len(kernel.grids) % 2 == 0
        assert kernel.grids[: len(kernel.grids) // 2] == kernel.grids[len(kernel.grids) // 2 :]
