"""Fingerprints of a checkpoint: everything besides tokens that K/V content depends on. Standard library only.

Two directories with equal weights, configuration and tokenizer have equal fingerprints wherever they lie. Weights enter
by the header of each safetensors file (names, types, shapes, offsets), its size and a sample of its content. Hashing
hundreds of gigabytes would delay every start. Small files are hashed whole.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from common.checkpoint.files import read_config, refuse_pointers

_WHOLE_FILE_BYTES = 64 << 20
_SAMPLE_BYTES = 1 << 20
_SAMPLES = 16
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "gguf_tensors.json")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt")
_IGNORED_CONFIG_KEYS = frozenset({"transformers_version", "_name_or_path", "use_cache"})


def model_fingerprint(directory: Path, dummy_seed: int | None = None) -> str:
    """Return 32 hexadecimal digits for configuration and weights; random weights count by their seed.

    Raises InvalidConfig when the directory holds no config.json, a broken one, or Git LFS pointers.
    """
    digest = hashlib.sha256(b"quire-model-v1")
    config = {key: value for key, value in read_config(directory).items() if key not in _IGNORED_CONFIG_KEYS}
    digest.update(json.dumps(config, sort_keys=True).encode())
    if dummy_seed is not None:
        digest.update(b"dummy" + str(dummy_seed).encode())
        return digest.hexdigest()[:32]
    weights = sorted(path for kind in _WEIGHTS for path in directory.glob(kind))
    refuse_pointers(weights)
    for path in weights:
        digest.update(path.name.encode())
        _add_file(digest, path)
    return digest.hexdigest()[:32]


def tokenizer_fingerprint(directory: Path) -> str:
    """Return 32 hexadecimal digits for the tokenizer's files; "none" without any. Raises InvalidConfig for pointers."""
    found = [directory / name for name in _TOKENIZER_FILES if (directory / name).is_file()]
    refuse_pointers(found)
    if not found:
        return "none"
    digest = hashlib.sha256(b"quire-tokenizer-v1")
    for path in found:
        digest.update(path.name.encode())
        _add_file(digest, path)
    return digest.hexdigest()[:32]


def _add_file(digest: hashlib._Hash, path: Path) -> None:
    size = path.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        if size <= _WHOLE_FILE_BYTES:
            digest.update(file.read())
            return
        if path.suffix == ".safetensors":
            digest.update(file.read(int.from_bytes(file.read(8), "little")))
        for index in range(_SAMPLES):
            file.seek((size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
