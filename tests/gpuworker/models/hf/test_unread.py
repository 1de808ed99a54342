"""Entries of config.json without any effect: those that change numbers are named, all others are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from gpuworker.models.hf.unread import unread_entries
from tests.support.checkpoints import SERVED, config_of

LINEAR = {"rope_type": "linear", "factor": 8.0}


def unread(folder: Path, **entries: Any) -> list[str]:
    (folder / "config.json").write_text(json.dumps(entries))
    return unread_entries(folder, AutoConfig.from_pretrained(folder))


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"model_type": "llama", "logit_scale": 0.5}, ["logit_scale"]),
        (
            {"model_type": "llama", "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, "clip_qkv": 8},
            ["attn_logit_softcapping", "clip_qkv", "final_logit_softcapping"],
        ),
        ({"model_type": "llama", "embedding_multiplier": 12.0, "residual_multiplier": 1.0}, ["embedding_multiplier"]),
        ({"model_type": "llama", "use_qk_norm": True, "sliding_window": 64}, ["sliding_window", "use_qk_norm"]),
        ({"model_type": "qwen2", "rope_scaling": {**LINEAR, "mystery": 3}}, ["rope_scaling.mystery"]),
        (
            {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "logit_scale": 2.0}},
            ["text_config.logit_scale"],
        ),
    ],
)
def test_an_entry_that_changes_numbers_and_that_no_code_reads_is_named(
    entries: dict[str, Any], named: list[str], tmp_path: Path
) -> None:
    assert unread(tmp_path, **entries) == named


@pytest.mark.parametrize(
    "entries",
    [
        # Those of public checkpoints, with their older names and remarks.
        {
            "model_type": "llama",
            "_name_or_path": "x",
            "architectures": ["LlamaForCausalLM"],
            "torch_dtype": "float32",
            "rope_theta": 1e4,
            "rope_scaling": LINEAR,
            "pretraining_tp": 1,
            "unsloth_fixed": True,
            "auto_map": {"AutoModel": "x.y"},
            "logit_scale": None,
            "use_qk_norm": False,
            "embedding_multiplier": 1.0,
        },
        {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28},
        {"model_type": "gpt2", "n_ctx": 1024, "embd_pdrop": 0.1, "task_specific_params": {"a": 1}, "n_embd": 64},
        {"model_type": "phi3", "original_max_position_embeddings": 4096, "resid_pdrop": 0.0, "rope_scaling": None},
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                "sliding_window_pattern": 6,
                "rope_local_base_freq": 1e4,
                "rope_scaling": LINEAR,
            },
            "vision_config": {"model_type": "siglip_vision_model", "strange": 3},
        },
        {
            "model_type": "deepseek_v3",
            "ep_size": 1,
            "rope_scaling": {
                "type": "yarn",
                "factor": 40,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
            },
        },
    ],
    ids=lambda entries: str(entries["model_type"]),
)
def test_entries_that_are_read_or_change_nothing_are_not_named(entries: dict[str, Any], tmp_path: Path) -> None:
    assert unread(tmp_path, **entries) == []


@pytest.mark.parametrize("kind", SERVED)
def test_what_transformers_writes_is_read(kind: str, tmp_path: Path) -> None:
    config_of(kind).save_pretrained(tmp_path)
    assert unread_entries(tmp_path, AutoConfig.from_pretrained(tmp_path)) == []
