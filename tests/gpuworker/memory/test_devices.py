"""Which device, precision and number of threads are chosen."""

from __future__ import annotations

import os

import pytest
import torch

from common.contracts.errors import InvalidConfig
from gpuworker.memory.devices import default_threads, free_bytes, pick_device, pick_dtype, total_bytes

CPU = torch.device("cpu")


def test_a_device_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="--device: 'toaster' is not a device"):
        pick_device("toaster")


def test_cuda_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidConfig, match="no CUDA device is usable"):
        pick_device("cuda")


@pytest.mark.parametrize(("there", "kind"), [(True, "cuda"), (False, "cpu")])
def test_auto_takes_cuda_where_it_is(monkeypatch: pytest.MonkeyPatch, there: bool, kind: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert pick_device("auto").type == kind


@pytest.mark.parametrize(
    ("name", "of_checkpoint", "expected"),
    [
        ("auto", torch.bfloat16, torch.bfloat16),
        ("auto", None, torch.float32),
        ("auto", torch.int8, torch.float32),
        ("float16", torch.bfloat16, torch.float16),
    ],
)
def test_precision(name: str, of_checkpoint: torch.dtype | None, expected: torch.dtype) -> None:
    assert pick_dtype(name, of_checkpoint) == expected


def test_threads_are_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert default_threads() == 5


@pytest.mark.parametrize(("cores", "threads"), [(8, 7), (1, 1)])
def test_one_core_is_left_to_others(monkeypatch: pytest.MonkeyPatch, cores: int, threads: int) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert default_threads() == threads


def test_less_is_free_than_there_is() -> None:
    assert 0 < free_bytes(CPU) < total_bytes(CPU)
