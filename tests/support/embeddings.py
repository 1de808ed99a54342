"""Checkpoints that embed, in the folders of sentence-transformers, and vectors pooled by hand from transformers."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from tests.support.checkpoints import checkpoint

# Names of the modes as older versions of sentence-transformers store them.
_FLAGS: Final = {"last": "pooling_mode_lasttoken", "mean": "pooling_mode_mean_tokens"}
_PACKAGE: Final = "sentence_transformers.models"

Vectors = npt.NDArray[np.float32]


@functools.cache
def embedding_checkpoint(kind: str, mode: str, normalised: bool = True) -> Path:
    """Return a folder as sentence-transformers writes it: a bare decoder, whose tensors have no prefix and no head."""
    plain = checkpoint(kind)
    directory = plain.with_name(f"{plain.name}-{mode}-{normalised}")
    shutil.copytree(plain, directory)
    _bare(directory)
    parts = ["Transformer", "Pooling", "Normalize"][: 3 if normalised else 2]
    modules = [
        {"idx": index, "name": str(index), "path": f"{index}_{part}" if index else "", "type": f"{_PACKAGE}.{part}"}
        for index, part in enumerate(parts)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    flags = {flag: mode == name for name, flag in _FLAGS.items()}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **flags}))
    return directory


def _bare(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    bare = {name.removeprefix("model."): weight for name, weight in weights.items() if name != "lm_head.weight"}
    save_file(bare, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["architectures"] = [name.replace("ForCausalLM", "Model") for name in config["architectures"]]
    (directory / "config.json").write_text(json.dumps(config))


@torch.inference_mode()
def pooled_by_hand(directory: Path, prompts: Sequence[Sequence[int]], mode: str, normalised: bool = True) -> Vectors:
    """Return the vectors [N, hidden] of transformers' hidden states, one prompt at a time, in float32."""
    vectors = []
    for prompt in prompts:
        hidden = _model(directory)(input_ids=torch.tensor([list(prompt)])).last_hidden_state[0]
        vectors.append(hidden[-1] if mode == "last" else hidden.mean(dim=0))
    found = torch.stack(vectors)
    exact: Vectors = (torch.nn.functional.normalize(found, dim=1) if normalised else found).numpy()
    return exact


@functools.cache
def _model(directory: Path) -> torch.nn.Module:
    model: torch.nn.Module = AutoModel.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def unpacked(vectors: Sequence[bytes]) -> Vectors:
    """Return vectors that travelled packed."""
    return np.stack([np.frombuffer(each, dtype="<f4") for each in vectors])
