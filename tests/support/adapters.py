"""LoRA adapters of tiny checkpoints, written by PEFT, and the tokens that PEFT's own forward gives."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tests.support.checkpoints import checkpoint

EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
VARIANTS: tuple[dict[str, Any], ...] = (
    {"r": 4, "lora_alpha": 8, "target_modules": list(EVERY)},
    {"r": 16, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    {"r": 3, "lora_alpha": 5, "target_modules": ["gate_proj", "down_proj"], "use_rslora": True},
    {"r": 8, "lora_alpha": 4, "target_modules": ["o_proj", "up_proj"]},
    {"r": 1, "lora_alpha": 2, "target_modules": list(EVERY)},
    {"r": 5, "lora_alpha": 7, "target_modules": ["k_proj"], "use_rslora": True},
    {"r": 16, "lora_alpha": 32, "target_modules": list(EVERY)},
    {"r": 2, "lora_alpha": 9, "target_modules": ["gate_proj", "up_proj"]},
)
"""Options of eight adapters: their ranks, scales and linears differ."""


def adapted(kind: str, variant: int, **options: Any) -> Any:
    """Return PEFT's model of a tiny checkpoint with an adapter whose factors are random, and not small."""
    from peft import LoraConfig, get_peft_model  # it takes a second to import

    base: Any = AutoModelForCausalLM.from_pretrained(
        checkpoint(kind), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    base.generation_config.eos_token_id = None
    with torch.random.fork_rng([]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT reads a name that transformers is about to drop
        torch.manual_seed(variant)
        model: Any = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **(VARIANTS[variant] | options)))
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.data = 0.2 * torch.randn_like(weight)
    return model.eval()


@functools.cache
def adapter(kind: str, variant: int) -> Path:
    """Return the folder of an adapter of a tiny checkpoint, as PEFT writes it."""
    folder = _root() / f"{kind}-{variant}"
    adapted(kind, variant).save_pretrained(folder)
    return folder


@functools.cache
def peft_greedy(kind: str, variant: int, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return the tokens that PEFT's model appends greedily to a prompt; no token ends it."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = _model(kind, variant).generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
        )
    return tuple(out[0, len(prompt) :].tolist())


def digits_of(kind: str, variant: int, prompt: Sequence[int], count: int) -> list[int]:
    """Return the tokens that PEFT's model appends greedily where each must be a single digit."""
    tokenizer = Tokenizer.from_file(str(checkpoint(kind) / "tokenizer.json"))
    allowed = torch.tensor([tokenizer.token_to_id(each) for each in "0123456789"])
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            logits = _model(kind, variant)(input_ids=torch.tensor([tokens])).logits[0, -1]
            tokens.append(int(allowed[logits[allowed].argmax()]))
    return tokens[len(prompt) :]


@functools.lru_cache(16)
def _model(kind: str, variant: int) -> Any:
    return adapted(kind, variant)


def tokens_of(kind: str, variant: int | None, prompt: Sequence[int], count: int) -> list[int]:
    """Return what a stream must put out: PEFT's tokens, or those of the base for None."""
    from tests.support.checkpoints import hf_greedy

    if variant is None:
        return hf_greedy(checkpoint(kind), prompt, count)
    return list(peft_greedy(kind, variant, tuple(prompt), count))


@functools.cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="quire-adapters-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root
