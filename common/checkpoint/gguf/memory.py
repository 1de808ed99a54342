"""How much memory weights take in a worker, of a GGUF file by the index in the folder that stands for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from common.checkpoint.files import read_config, weight_bytes
from common.checkpoint.gguf.config import NATIVE
from common.checkpoint.gguf.folder import WEIGHTS, read_places

# Bits of a weight as the native CPU path keeps it: of its value, and of the scale and the shift of its group.
KEPT_BITS: Final[Mapping[str, int]] = {
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "Q8_0": 9,
    "Q4_0": 5,
    "Q4_1": 6,
    "Q5_0": 9,
    "Q5_1": 10,
    "Q2_K": 8,
    "Q3_K": 6,
    "Q4_K": 6,
    "Q5_K": 10,
    "Q6_K": 10,
}
_WIDE_BITS: Final = {"float32": 32, "bfloat16": 16, "float16": 16}


def weight_memory(directory: Path) -> int:
    """Return the bytes that the weights of a checkpoint take: those on disk, but of a GGUF file as it is kept."""
    path = directory / WEIGHTS
    if not path.is_file():
        return weight_bytes(directory)
    config, stored = read_config(directory), [each.stored for each in read_places(directory).values()]
    wide = None if config.get("model_type") in NATIVE else _WIDE_BITS.get(str(config.get("dtype")), 32)
    return sum(math.prod(each.shape) * (wide or KEPT_BITS[each.type]) for each in stored) // 8
