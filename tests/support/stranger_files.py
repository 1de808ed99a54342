"""Files of checkpoints as strangers have them: Git LFS pointers, weights cut short."""

from __future__ import annotations

import json
from pathlib import Path

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4920733888\n"


def safetensors(path: Path, missing: int = 0) -> None:
    """Write a file with one tensor of 8 bytes, without its last `missing` bytes."""
    header = json.dumps({"weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    whole = len(header).to_bytes(8, "little") + header + bytes(8)
    path.write_bytes(whole[: len(whole) - missing])
