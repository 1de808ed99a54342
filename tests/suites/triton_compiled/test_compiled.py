"""Production kernels, compiled for three generations of chips: nothing spills, all fits, the right units work.

Run in a process of their own (`pytest tests/suites/triton_compiled`): compiling and interpreting do not mix.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.suites.triton_compiled.compiling import CHIPS
from tests.suites.triton_compiled.workloads import WORKLOADS, Attention, ExpertLayer, Results, StateStep, is_quick

WAIT_SECONDS = 500  # the first test of a chip waits for nearly all kernels of the chips before it


def on_chips(names: Iterable[str]) -> pytest.MarkDecorator:
    """Run a test for every chip and each of these workloads."""
    names = list(names)
    pairs = [
        pytest.param(chip, name, id=f"sm_{chip}-{name}", marks=() if is_quick(chip, name) else pytest.mark.exhaustive)
        for chip in CHIPS
        for name in names
    ]
    return pytest.mark.parametrize(("chip", "name"), pairs)


@on_chips(WORKLOADS)
def test_nothing_spills_and_all_fits(results: Results, chip: int, name: str) -> None:
    for found in results[chip, name].result(WAIT_SECONDS):
        assert found.stack_bytes == 0, found
        assert found.shared_bytes <= CHIPS[chip].shared_bytes, found
        # A multiprocessor has 64 K registers.
        assert found.registers * found.warps * 32 <= 65536, found


@on_chips(name for name, workload in WORKLOADS.items() if isinstance(workload, Attention))
def test_a_layer_writes_attends_twice_and_merges(results: Results, chip: int, name: str) -> None:
    kernels = [found.kernel for found in results[chip, name].result(WAIT_SECONDS)]
    assert kernels == ["write_kv_kernel", "attend_kernel", "attend_kernel", "merge_kernel"]


@on_chips(["llama", "mistral, large blocks", "llama, int8", "llama, fp8", "gemma2 9b", "gpt-oss"])
def test_products_run_on_the_units_of_the_chip_behind_loads_ahead(results: Results, chip: int, name: str) -> None:
    prefill, decode = results[chip, name].result(WAIT_SECONDS)[1:3]
    assert prefill.matrix_unit == {80: "mma", 90: "wgmma", 100: "tcgen05"}[chip]
    assert decode.matrix_unit == "mma"  # 16 rows: the larger units take 64 and more
    assert prefill.loads_ahead
    assert decode.loads_ahead


@on_chips(["llama", "llama, int8", "llama, fp8", "qwen2 0.5b, float16", "gpt-oss"])
def test_two_programs_at_least_decode_on_a_multiprocessor(results: Results, chip: int, name: str) -> None:
    """And with two tiles ahead in each, loads outlast what a program computes."""
    decode = results[chip, name].result(WAIT_SECONDS)[2]
    assert 2 * (decode.shared_bytes + 1024) <= CHIPS[chip].shared_bytes + 1024
    assert 2 * decode.registers * decode.warps * 32 <= 65536


@on_chips(name for name, workload in WORKLOADS.items() if isinstance(workload, ExpertLayer))
def test_experts_are_chosen_grouped_multiplied_and_added_up(results: Results, chip: int, name: str) -> None:
    kernels = [found.kernel for found in results[chip, name].result(WAIT_SECONDS)]
    assert kernels == ["choose_kernel", "group_kernel", *2 * ["expert_product_kernel"], "add_up_kernel"]


@on_chips(["mixtral 8x7b, a prefill", "mixtral 8x7b, a decode", "qwen3 30b a3b, float16"])
def test_products_by_expert_run_on_the_units_of_the_chip(results: Results, chip: int, name: str) -> None:
    gate_up, down = results[chip, name].result(WAIT_SECONDS)[2:4]
    prefill = {80: "mma", 90: "wgmma", 100: "tcgen05"}[chip]
    wanted = prefill if "prefill" in name or "float16" in name else "mma"
    assert [gate_up.matrix_unit, down.matrix_unit] == [wanted, wanted]
    assert gate_up.loads_ahead
    assert down.loads_ahead


@on_chips(name for name, workload in WORKLOADS.items() if isinstance(workload, StateStep))
def test_a_step_of_states_is_one_kernel_with_many_programs_on_a_multiprocessor(
    results: Results, chip: int, name: str
) -> None:
    """Four at least, each with 16 KiB of a state: loads of some hide behind those of others."""
    (found,) = results[chip, name].result(WAIT_SECONDS)
    assert found.kernel.endswith("_step_kernel")
    assert 4 * found.registers * found.warps * 32 <= 65536
