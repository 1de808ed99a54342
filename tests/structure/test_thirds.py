"""The thirds of the rest."""

from __future__ import annotations

from pathlib import Path

from tests.support.thirds import THIRDS, change_kernels, in_third, third_of


def test_days_take_turns() -> None:
    assert [third_of(seconds) for seconds in (0, 86399, 86400, 172800, 259199, 259200)] == [0, 0, 1, 2, 2, 0]


def test_each_file_is_in_one_third_unless_it_has_changed() -> None:
    names = [path.as_posix() for path in Path("tests").rglob("test_*.py")]
    thirds = [sum(in_third(name, third) for name in names) for third in range(THIRDS)]
    assert sum(thirds) == len(names)
    assert min(thirds) > len(names) / (THIRDS + 1)
    assert all(in_third(name, third, names) for name in names for third in range(THIRDS))


def test_all_tests_of_kernels_run_once_one_of_them_or_a_kernel_has_changed() -> None:
    assert change_kernels(["tests/router/test_process.py", "gpuworker/kernels/triton_rope.py"])
    assert change_kernels(["tests/suites/triton_compiled/workloads.py"])
    assert not change_kernels(["tests/suites/e2e/test_states.py"])
