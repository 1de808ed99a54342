"""Checkpoints that a comparison makes in the folder of the peers, in a form that each of them reads.

`smollm2` is a real model on a real text: the weights that the four bits of its file stand for, in bf16. `mixtral` and
`qwen3_moe` have experts and random weights. OpenVINO reads an export beside the checkpoint, which its own tool makes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from bench.comparison.peer_process import TEXT
from bench.lib.real_text import real_text
from common.checkpoint.gguf.names import gguf_file, served_folder
from common.contracts.errors import Unavailable

_TEXT_SIZE: Final = 128 << 10  # characters
_TOKENIZER: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_EXPORT_SECONDS: Final = 1800.0

_MIXTURE: Final[Mapping[str, object]] = {
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
MIXTURES: Final[Mapping[str, Mapping[str, object]]] = {
    "mixtral": {
        **_MIXTURE,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": 1792,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "qwen3_moe": {
        **_MIXTURE,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": 64,
        "intermediate_size": 1792,
        "moe_intermediate_size": 448,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
    },
}
"""Shapes of 150 million parameters: few large experts, and many small ones."""


def prepare(peers: Path, name: str, exported: bool) -> None:
    """Make the checkpoint of this name in the folder of the peers, unless it is there; `exported`: for OpenVINO too.

    A name that is none of `MADE` is a folder that is there already. Raises Unavailable where it cannot be made.
    """
    if name not in MADE:
        return
    if not (peers / name / "config.json").is_file():
        with tempfile.TemporaryDirectory(dir=peers) as scratch:
            made = Path(scratch, name)
            made.mkdir()
            MADE[name](peers, made)
            made.rename(peers / name)
    if exported and not (peers / f"{name}-ov").is_dir():
        export(peers, name)


def export(peers: Path, name: str) -> None:
    """Write the checkpoint in OpenVINO's form, in float32, to NAME-ov. Raises Unavailable."""
    tool = peers / "ovexport/bin/optimum-cli"
    if not tool.is_file():
        raise Unavailable(f"OpenVINO needs an export of {name}, which {tool} would make; it is not there")
    with tempfile.TemporaryDirectory(dir=peers) as scratch:
        made = Path(scratch, f"{name}-ov")
        words = ("export", "openvino", "--model", name, "--task", "text-generation-with-past")
        command = [str(tool), *words, "--weight-format", "fp32", str(made)]
        alone = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
        print(f"exporting {name} for OpenVINO", file=sys.stderr)
        done = subprocess.run(
            command, cwd=peers, env=alone, capture_output=True, text=True, timeout=_EXPORT_SECONDS, check=False
        )
        if done.returncode:
            raise Unavailable(f"the export of {name} for OpenVINO failed: {done.stderr[-2000:]}")
        made.rename(peers / made.name)


def _smollm2(peers: Path, target: Path) -> None:
    import torch
    from tokenizers import Tokenizer

    from bench.lib.gguf_engine import widened

    file = gguf_file("smollm2")
    assert file is not None
    folder = widened(served_folder(file), target, torch.bfloat16)
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(real_text(_TEXT_SIZE)).ids
    (folder / TEXT).write_text(json.dumps(ids))


def _mixture(name: str) -> Callable[[Path, Path], None]:
    def make(peers: Path, target: Path) -> None:
        import torch
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM

        shape: dict[str, Any] = {key: value for key, value in MIXTURES[name].items() if key != "model_type"}
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            config = CONFIG_MAPPING[name](**shape)
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(target)
        for each in _TOKENIZER:
            if (peers / "model" / each).is_file():
                shutil.copy(peers / "model" / each, target)

    return make


MADE: Final[Mapping[str, Callable[[Path, Path], None]]] = {
    "smollm2": _smollm2,
    **{name: _mixture(name) for name in MIXTURES},
}
