"""Checks a new sequence: one that could never run is refused at once, with the numbers."""

from __future__ import annotations

from common.contracts.errors import FieldViolation, InvalidRequest
from common.contracts.lease import blocks_needed
from gpuworker.scheduling.outcomes import AgentConfig
from gpuworker.scheduling.sequence import Sequence


def check_request(sequence: Sequence, config: AgentConfig) -> None:
    """Raise InvalidRequest when a sequence has no token or no room for one more, or needs more blocks than there are.

    A sequence that samples nothing needs no room.
    """
    prompt, limit = sequence.prompt_tokens, sequence.limit
    sampled = int(sequence.new.stop.max_tokens != 0)
    if not 0 < prompt <= limit - sampled:
        text = f"{prompt} tokens, with room for {limit} in all: at least one is needed, and room to sample one"
        raise InvalidRequest(FieldViolation("prompt", text))
    needed = blocks_needed(prompt, limit, config.block_size, config.window)
    if needed > config.num_blocks:
        text = (
            f"{limit} tokens (prompt {prompt}) need {needed} blocks of {config.block_size}; "
            f"the worker has {config.num_blocks}: shorten the prompt or lower max_tokens"
        )
        raise InvalidRequest(FieldViolation("sampling.max_tokens", text))
