"""Tiny models of published families with random weights: as checkpoints for real workers, and as who knows the tokens.

As they are initialised, states forget within a few tokens, and whether one was right would not show. So they decay
slowly here.
"""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cli.demo_model import CHECKPOINT

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FAMILIES: Final = ("qwen3_next", "falcon_h1", "minimax", "nemotron_h")
"""Families whose layers keep states of which there are checkpoints."""
FLAGS: Final = {"dtype": "float32", "device": "cpu", "threads": 1}
"""Options of `quire serve` for such a checkpoint."""
_POSITIONS: Final = 4096
_DECAY, _SLOW = "A_log", -5.0


@contextmanager
def tiny_checkpoint(family: str) -> Iterator[Path]:
    """Yield a folder with a tiny model of a family, and the tokenizer of the demo model."""
    import torch
    from transformers import CONFIG_MAPPING

    from gpuworker.models.hf.loader import random_module
    from gpuworker.models.hf.tiny import tiny_config

    own = json.loads((CHECKPOINT / "config.json").read_text())
    ids = {name: own[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    config = tiny_config(CONFIG_MAPPING[family](), max_position_embeddings=_POSITIONS, **ids)
    module = random_module(config, torch.float32, 0, torch.device("cpu"))
    for name, parameter in module.named_parameters():
        if name.endswith(_DECAY):
            torch.nn.init.constant_(parameter, _SLOW)
    with tempfile.TemporaryDirectory(prefix="quire-tiny-") as folder:
        made = Path(folder) / family
        shutil.copytree(CHECKPOINT, made, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
        module.save_pretrained(made)
        yield made


class TinyReference:
    """Tells the greedy tokens of a tiny checkpoint, by transformers' code over a whole sequence in float32."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @functools.cached_property
    def _module(self) -> PreTrainedModel:
        from transformers import AutoModelForCausalLM

        from gpuworker.models.hf.mixers import correct_mixers

        module: PreTrainedModel = AutoModelForCausalLM.from_pretrained(self._folder, dtype="float32")
        correct_mixers(module)  # as workers do: of nemotron_h, transformers' prefills differ from its decodes
        return module

    def expected(self, seed: int, prompt: Sequence[int], tokens: Sequence[int]) -> Sequence[int]:
        """Return the token that must stand at the place of each of `tokens`, given those before it."""
        import torch

        ids = torch.tensor([[*prompt, *tokens]])
        with torch.inference_mode():
            logits = self._module(ids[:, :-1], use_cache=False).logits  # [1, tokens - 1, vocabulary]
        found: list[int] = logits[0, len(prompt) - 1 :].argmax(-1).tolist()
        return found
