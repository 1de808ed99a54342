"""Transformers' continuous batching, as its users start it, on the same lengths as our engine."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, PretrainedConfig

from bench.gpu.engine_harness import Stream, decode_rate


class PeerFailure(Exception):
    """The peer did not finish; the message says why."""


def peer_rate(
    config: PretrainedConfig,
    prompts: list[list[int]],
    output: int,
    skipped: int,
    device: torch.device,
    batching: ContinuousBatchingConfig | None = None,
) -> float:
    """Return tokens a second while all sequences decode, in the second of two runs, with graphs.

    Without `batching` the peer chooses cache, batch, graphs and attention. Raises PeerFailure.
    """
    torch.manual_seed(0)
    with device:
        module: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    module.train(False)
    greedy = GenerationConfig(max_new_tokens=output, do_sample=False, eos_token_id=-1, pad_token_id=0)
    try:
        for _ in range(2):
            found = module.generate_batch(prompts, greedy, batching, record_timestamps=True, persistent_manager=True)
        module.destroy_cached_continuous_batching_manager()
    except (AttributeError, ImportError, RuntimeError, TypeError, ValueError) as error:
        raise PeerFailure(repr(error)) from error
    streams = [Stream(each.generated_tokens, each.timestamps or []) for each in found.values()]
    short = [stream for stream in streams if len(stream.times) < output]
    if len(streams) != len(prompts) or short:
        raise PeerFailure(f"{len(streams)} of {len(prompts)} sequences came, {len(short)} of them short")
    return decode_rate(streams, max(1, skipped))
