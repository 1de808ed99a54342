"""Tiny models of published families with random weights: as checkpoints for real workers, and as who knows the tokens.

As they are initialised, states forget within a few tokens, and whether one was right would not show. So they decay
slowly here.
"""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cli.demo_model import CHECKPOINT

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PLAIN: Final = "qwen3"
"""A family whose layers all see every token. It has 25 million parameters, so that fetching its blocks pays."""
FAMILIES: Final = (PLAIN, "qwen3_next", "falcon_h1", "minimax", "nemotron_h")
"""That one, and families whose layers keep states of which there are checkpoints."""
_FLAGS: Final = {"dtype": "float32", "device": "cpu", "threads": 1}
_PLAIN_SIZES: Final[Mapping[str, object]] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_hidden_layers": 8,
    "layer_types": ["full_attention"] * 8,
    "initializer_range": 0.1,
}
_POSITIONS: Final = 4096
_DECAY, _SLOW = "A_log", -5.0


def tiny_flags(family: str) -> dict[str, object]:
    """Return options of `quire serve` for a checkpoint of a family; the plain one gives equal tokens to the bit."""
    return {**_FLAGS, "deterministic": True} if family == PLAIN else dict(_FLAGS)


@contextmanager
def tiny_checkpoint(family: str) -> Iterator[Path]:
    """Yield a folder with a tiny model of a family, and the tokenizer of the demo model."""
    import torch
    from transformers import CONFIG_MAPPING

    from gpuworker.models.hf.loader import random_module
    from gpuworker.models.hf.tiny import tiny_config

    own = json.loads((CHECKPOINT / "config.json").read_text())
    if family == PLAIN:
        config = CONFIG_MAPPING[family](**own | dict(_PLAIN_SIZES))
    else:
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
