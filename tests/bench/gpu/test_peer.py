"""The peer of the GPU engine's benchmark runs through, tiny and on the CPU."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig

from bench.gpu.engine_harness import random_prompts
from bench.gpu.models import TINY, config_of
from bench.gpu.peer import PeerFailure, peer_rate

SMALL = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}
CONFIG = config_of((TINY[0], TINY[1] | SMALL | {"vocab_size": 96}))
PROMPTS = random_prompts(3, 20, 96, seed=0)


@pytest.mark.filterwarnings("ignore")  # its own
def test_the_peer_decodes_all_that_was_asked_for() -> None:
    batching = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    assert peer_rate(CONFIG, PROMPTS, 8, 3, torch.device("cpu"), batching) > 0


def test_what_goes_wrong_in_the_peer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def train(self, mode: bool) -> None: ...

        def generate_batch(self, *args: object, **options: object) -> None:
            raise RuntimeError("no memory")

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", lambda config, **options: Failing())
    with pytest.raises(PeerFailure, match="no memory"):
        peer_rate(CONFIG, PROMPTS, 8, 3, torch.device("cpu"))
