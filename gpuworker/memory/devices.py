"""The device that steps run on: its choice, its types, its number of threads, and its free memory."""

from __future__ import annotations

import math
import mmap
import os

import torch

from common.contracts.errors import FieldViolation, InvalidConfig
from common.process.cores import threads_of_each
from gpuworker.memory import host_memory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# The types of K and V in a cache. The last two carry a float32 scale for each (slot, head): stored = value / scale.
QUANTISED_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
CACHE_DTYPES = DTYPES | QUANTISED_DTYPES


def pick_device(name: str) -> torch.device:
    """Return the device called `name`; "auto" is the first CUDA device, else the CPU.

    Raises InvalidConfig when the device is unknown or not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        what = f"{name!r} is not a device; expected auto, cpu or cuda"
        raise InvalidConfig(FieldViolation("--device", what)) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidConfig(FieldViolation("--device", f"{name!r} was asked for and no CUDA device is usable; try cpu"))
    return device


def pick_dtype(name: str, of_checkpoint: torch.dtype | None) -> torch.dtype:
    """Return the precision called `name`; "auto" is that of the checkpoint, float32 when it names none.

    Raises InvalidConfig for an unknown name.
    """
    if name == "auto":
        return torch.float32 if of_checkpoint not in DTYPES.values() or of_checkpoint is None else of_checkpoint
    if name not in DTYPES:
        raise InvalidConfig(FieldViolation("--dtype", f"{name!r}; expected auto, {', '.join(DTYPES)}"))
    return DTYPES[name]


def pick_cache_dtype(name: str, of_model: torch.dtype) -> str:
    """Return the key of CACHE_DTYPES called `name`; "auto" is that of the model.

    Raises InvalidConfig for an unknown name.
    """
    if name == "auto":
        return dtype_name(of_model)
    if name not in CACHE_DTYPES:
        raise InvalidConfig(FieldViolation("--kv-cache-dtype", f"{name!r}; expected auto, {', '.join(CACHE_DTYPES)}"))
    return name


def sent(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the host on the device; on CUDA the copy is queued behind what runs, and nothing waits.

    From pageable memory it would first wait for all that is queued.
    """
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name without "torch.", e.g. "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def default_threads() -> int:
    """Return the number of threads for tensor operations on CPU: OMP_NUM_THREADS, else as the cores have it."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) else threads_of_each()


def free_bytes(device: torch.device) -> int:
    """Return the memory that this process can still take on the device, in bytes; a container's limit counts."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    return host_memory.available_bytes()


def total_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        total: int = torch.cuda.mem_get_info(device)[1]
        return total
    return host_memory.total_bytes()


def unwritten(shape: tuple[int, ...]) -> torch.Tensor:
    """Return zero bytes of this machine in pages that the system maps at their first write."""
    size = math.prod(shape)
    if not size:
        return torch.zeros(shape, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(shape)
