"""The tokens of simulated workers on the demo model, as a client knows them beforehand."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from cli.demo_model import CHECKPOINT
from gpuworker.simulated.plane import simulated_tokens
from gpuworker.simulated.tokens import SimulatedTokens
from quire.inference.v1 import inference_pb2 as pb
from tests.support.suite import greedy


@functools.cache
def _tokens() -> SimulatedTokens:
    return simulated_tokens(CHECKPOINT)


def seeded(prompt: Sequence[int], max_tokens: int, seed: int = 1) -> pb.GenerateRequest:
    """Return a request for token ids that runs to its length; a simulated worker's tokens follow from its seed."""
    request = greedy(prompt, max_tokens)
    request.sampling.seed = seed
    return request


def expected(prompt: Sequence[int], count: int, seed: int = 1) -> list[int]:
    """Return the first `count` tokens of the request above."""
    return list(_tokens().expected(seed, len(prompt), count))
