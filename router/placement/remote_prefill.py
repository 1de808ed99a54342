"""Whether a prompt is computed at another worker first, and at which one: predicted seconds of both ways.

    here   =  queue_delay(D) + prefill(D, all that no worker has)                         + its delay of those that run
    there  =  queue_delay(P) + prefill(P, full blocks) + fetch + queue_delay(D) + prefill(D, the rest) + that delay

D is a worker that serves requests, P one that computes prompts. A step of D computes its part of a prompt before any
sequence of that step gets its next token. So each sequence that runs at D waits for about as long as the prompt takes
there, and these seconds count as those of the request do. P decodes nothing, so nobody waits for tokens there.

A worker that computes only the ends of prompts learns a rate that is mostly the constant part of its steps. So a token
at D is taken to cost no more than one at P.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from common.contracts.transfers import FETCH_MARGIN
from router.placement.fetches import FetchRates, measured_rates, passes_blocks, usual_rates
from router.placement.placement_request import PlacementRequest
from router.placement.routing import WorkerCost
from router.placement.worker_model import Disaggregation, WorkerModel

Mode = Literal["auto", "off", "always"]

MARGIN: Final = FETCH_MARGIN
"""The way by another worker must take less than this share of the other way, as a fetch must."""
SETUP_S: Final = 0.01
"""Of a further submit and of the turn in which the KV manager orders a fetch."""
LEAST_PATIENCE_S: Final = 5.0
PATIENCE: Final = 4.0
"""A prompt that takes so many times the predicted seconds is not waited for, after at least LEAST_PATIENCE_S."""


def has_workers_for_prompts(workers: Sequence[WorkerModel]) -> bool:
    return any(_is_for_prompts(each) for each in workers)


def serving(workers: Sequence[WorkerModel]) -> Sequence[WorkerModel]:
    """Return the workers that take whole requests: those for prompts alone only where no other one is there to stay.

    The list itself is returned where it has no such worker.
    """
    if not has_workers_for_prompts(workers):
        return workers
    others = [each for each in workers if not _is_for_prompts(each)]
    return others if any(not each.drains for each in others) else workers


def for_prompts(workers: Sequence[WorkerModel]) -> list[WorkerModel]:
    """Return the workers that compute prompts for others; none where they have to take whole requests."""
    if serving(workers) is workers:
        return []
    return [each for each in workers if _is_for_prompts(each) and passes_blocks(each)]


def _is_for_prompts(worker: WorkerModel) -> bool:
    return worker.capacity.disaggregation is Disaggregation.PREFILL


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Both ways for one prompt in predicted seconds; `blocks` full ones would be computed at `prefill`."""

    prefill: WorkerCost
    decode: WorkerCost
    blocks: int
    here_s: float
    there_s: float
    # Of `there_s`: until the prompt is computed.
    computed_s: float

    @property
    def figures(self) -> tuple[tuple[str, float], ...]:
        """What the record of the choice says of it."""
        return ("prefill_here_s", self.here_s), ("prefill_there_s", self.there_s)

    @property
    def patience_s(self) -> float:
        """Seconds for which the prompt is waited for."""
        return max(LEAST_PATIENCE_S, PATIENCE * self.computed_s)


def full_blocks(prompt_tokens: int, block_size: int) -> int:
    """Return how many full blocks of a prompt another worker can spare the one that samples: not the last token."""
    return max(0, prompt_tokens - 1) // block_size


def prompt_alone(placement: PlacementRequest, blocks: int, block_size: int) -> PlacementRequest:
    """Return the request for the full blocks of a prompt, of which nothing is sampled."""
    tokens = blocks * block_size
    return PlacementRequest(
        placement.request_id, tokens, tokens, 0, traceparent=placement.traceparent, entitled=placement.entitled
    )


def compare_ways(
    placement: PlacementRequest, prefill: Sequence[WorkerCost], decode: Sequence[WorkerCost], held_blocks: int
) -> Elsewhere | None:
    """Return the cheapest pair of workers and what both ways cost; None where there is no pair, or nothing to spare.

    `prefill` are prices of the full blocks of the prompt, `decode` those of the whole request. The published index says
    that some worker has `held_blocks`, which others fetch.
    """
    fetching = [each for each in decode if passes_blocks(each.worker)]
    if not prefill or not fetching:
        return None
    first = min(prefill, key=lambda each: each.queue_delay + each.prefill)
    then = min(fetching, key=lambda each: each.total)
    size = then.worker.capacity.block_size
    blocks = full_blocks(placement.prompt_tokens, size)
    if max(held_blocks, then.hit_blocks) >= blocks:
        return None
    waiting = 1 + min(then.worker.sequences, then.worker.capacity.max_num_seqs)
    token_s = min(first.token_s, then.token_s)
    here = _seconds_at(then, placement.prompt_tokens, max(held_blocks, then.hit_blocks), waiting * token_s)
    usual = usual_rates(each.worker for each in decode)
    here += _fetch_s(then.worker, held_blocks - then.hit_blocks, usual)
    computed = first.queue_delay + first.prefill + _fetch_s(first.worker, held_blocks - first.hit_blocks, usual)
    if held_blocks > first.hit_blocks:
        computed -= (held_blocks - first.hit_blocks) * size * first.token_s
    there = computed + SETUP_S + _fetch_s(then.worker, blocks - then.hit_blocks, usual)
    there += _seconds_at(then, placement.prompt_tokens, blocks, waiting * token_s)
    return Elsewhere(first, then, blocks, here, there, computed)


def is_worth_it(ways: Elsewhere, mode: Mode, left: float | None) -> bool:
    """Return whether the prompt is computed elsewhere. `left` are the seconds until the deadline, None without one."""
    if mode == "off" or (left is not None and ways.there_s > left):
        return False
    return mode == "always" or ways.there_s < MARGIN * ways.here_s


def _seconds_at(cost: WorkerCost, prompt_tokens: int, cached_blocks: int, token_s: float) -> float:
    """Return the wait at the worker that samples, and what it computes there, at so many seconds a token."""
    computed = prompt_tokens - cached_blocks * cost.worker.capacity.block_size
    return cost.queue_delay + computed * token_s


def _fetch_s(worker: WorkerModel, blocks: int, usual: FetchRates) -> float:
    """Return the seconds of a fetch, as the worker reports it, or others do, or as assumed."""
    return (measured_rates(worker.load) or usual).seconds(blocks)
