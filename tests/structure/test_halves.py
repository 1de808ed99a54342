"""The two halves of the rest."""

from __future__ import annotations

from pathlib import Path

from tests.support.halves import change_kernels, half_of, in_half


def test_days_take_turns() -> None:
    assert [half_of(seconds) for seconds in (0, 86399, 86400, 172799, 172800)] == [0, 0, 1, 1, 0]


def test_each_file_is_in_one_half_unless_it_has_changed() -> None:
    names = [path.as_posix() for path in Path("tests").rglob("test_*.py")]
    halves = [sum(in_half(name, half) for name in names) for half in (0, 1)]
    assert sum(halves) == len(names)
    assert min(halves) > len(names) / 3
    assert all(in_half(name, half, names) for name in names for half in (0, 1))


def test_all_tests_of_kernels_run_once_one_of_them_or_a_kernel_has_changed() -> None:
    assert change_kernels(["tests/router/test_process.py", "gpuworker/kernels/triton_rope.py"])
    assert change_kernels(["tests/suites/triton_compiled/workloads.py"])
    assert not change_kernels(["tests/suites/e2e/test_states.py"])
