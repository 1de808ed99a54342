"""Compiles production kernels for chips that this machine does not have.

The host code runs unchanged, on CPU tensors. A driver that only describes its chip replaces Triton's own, and each
launch ends when its kernel is compiled. So tiles, types and specialisation are those of production.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from gpuworker.attention.triton_tuning import Chip

# Multiprocessors and shared memory of one program: A100, H100, B200.
CHIPS = {
    80: Chip(80, 108, 163 << 10),
    90: Chip(90, 132, 227 << 10),
    100: Chip(100, 148, 227 << 10),
}


_MATRIX_UNITS = ("tcgen05.mma", "wgmma.mma_async", "mma.sync")


@dataclass(frozen=True)
class Compiled:
    """The resources that a kernel takes of its chip."""

    kernel: str
    warps: int
    registers: int  # a thread
    stack_bytes: int  # a thread; spilled registers lie here
    shared_bytes: int  # a program
    matrix_unit: str  # the instruction that multiplies tiles: mma, wgmma (sm_90), tcgen05 (sm_100), or none
    loads_ahead: bool  # whether global memory is copied to shared memory asynchronously


class ChipDriver:
    """Describes a chip; can neither allocate nor launch."""

    def __init__(self, chip: Chip) -> None:
        self._chip = chip

    def get_current_device(self) -> int:
        return self._chip.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._chip.capability, 32)


def compile_launches(chip: Chip, work: Callable[[], object]) -> list[Compiled]:
    """Run host code and return what it launched, each kernel once; nothing is kept on disk."""
    kernels: dict[int, Any] = {}
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        kernels[id(kernel)] = kernel

    driver.set_active(ChipDriver(chip))
    with tempfile.TemporaryDirectory() as cache, triton.knobs.cache.scope():
        triton.knobs.cache.dir = cache
        JITFunction.run = compile_only
        try:
            work()
        finally:
            JITFunction.run = launch
        return [_measured(kernel) for kernel in kernels.values()]


def _measured(kernel: Any) -> Compiled:
    with tempfile.TemporaryDirectory() as directory:
        cubin = Path(directory, "kernel.cubin")
        cubin.write_bytes(kernel.asm["cubin"])
        command = (triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin))
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
    ptx, metadata = kernel.asm["ptx"], kernel.metadata
    units = [name for name in _MATRIX_UNITS if re.search(rf"\b{name}\b", ptx)]
    return Compiled(
        metadata.name,
        metadata.num_warps,
        int(found["REG"]),
        int(found["STACK"]) + int(found["LOCAL"]),
        metadata.shared,
        units[0].split(".")[0] if units else "none",
        "cp.async." in ptx,
    )
