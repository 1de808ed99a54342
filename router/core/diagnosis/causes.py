"""The causes that a verdict may name, and what to do about each, in the words of the runbook."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

RUNBOOK: Final = "docker/OPERATING.md"


class Cause(StrEnum):
    """The first group is about time, the second about early ends, the third about the prefix cache."""

    NOT_KNOWN = "not_known"

    READING = "reading"
    WORKER_QUEUE = "worker_queue"
    OUTRANKED = "outranked"
    ROUTER = "router"
    ROUTER_STILL = "router_still"
    ON_THE_WAY = "on_the_way"
    WORKER_STILL = "worker_still"
    SENDING = "sending"
    INDEX_SLOW = "index_slow"
    CONSTRAINT = "constraint"
    BLOCKS = "blocks"
    MESSAGES = "messages"
    MANAGER_AWAY = "manager_away"
    STALLED = "stalled"
    HEAD_OF_LINE = "head_of_line"
    PREFILL = "prefill"
    DECODE = "decode"
    SLOW_DECODE = "slow_decode"
    PREEMPTED = "preempted"
    WORKER_LOST = "worker_lost"
    SLOW_CLIENT = "slow_client"

    REFUSED = "refused"
    TOO_LARGE = "too_large"
    WRONG_REQUEST = "wrong_request"
    HOPELESS_DEADLINE = "hopeless_deadline"
    DEADLINE = "deadline"
    CLIENT_GONE = "client_gone"
    ABORTED = "aborted"
    NO_WORKER = "no_worker"
    FAILED = "failed"

    BELOW_BLOCK = "below_block"
    WHOLE_BLOCKS = "whole_blocks"
    CACHE_OFF = "cache_off"
    BEING_COMPUTED = "being_computed"
    OTHER_DOMAIN = "other_domain"
    STALE_INDEX = "stale_index"
    HOT_WORKER = "hot_worker"
    LATE_WORKER = "late_worker"
    INDEX_UNREACHABLE = "index_unreachable"
    INDEX_SKIPPED = "index_skipped"
    INDEX_LOST = "index_lost"
    NO_INDEX = "no_index"
    EVICTED = "evicted"
    DIVERGED = "diverged"
    NEVER_SEEN = "never_seen"


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do, as the section of the runbook under `anchor` says it."""

    text: str
    anchor: str

    @property
    def link(self) -> str:
        return f"{RUNBOOK}#{self.anchor}"


_MORE_BLOCKS: Final = Advice(
    "Give workers more memory for blocks (`--kv-memory`, `--gpu-memory-utilization`), store K and V in a narrower type "
    "(`--kv-cache-dtype`), or add workers.",
    "quireblocksshort",
)
_SLOW_STEPS: Final = Advice(
    "If mixed steps are long, lower `--max-num-batched-tokens` or set `--long-prefill-cap`. If decode steps are long, "
    "allow fewer sequences (`--max-num-seqs`), or move neighbours off the cores.",
    "quireslowtokens",
)
_REFUSING: Final = Advice("Add workers, or raise `--max-queued-requests` where clients can wait.", "quirerefusing")

ADVICE: Final[Mapping[Cause, Advice]] = {
    Cause.WORKER_QUEUE: Advice("Capacity is short: add workers.", "quirequeuestands"),
    Cause.READING: Advice(
        "Long texts take the router time to tokenise: add routers, or let clients send token ids.", "reading"
    ),
    Cause.ROUTER_STILL: Advice(
        "Give the router's host free processors, and look for what stopped the process or swaps its memory.",
        "router-stood-still",
    ),
    Cause.ON_THE_WAY: Advice(
        "Look at the network between router and worker, and at the processors of both hosts.", "on-the-way"
    ),
    Cause.WORKER_STILL: Advice(
        "Give the worker's host free processors, and look for what stopped the process, or holds up its device.",
        "worker-stood-still",
    ),
    Cause.SENDING: Advice("The router is busy with the output of others: add routers.", "sending"),
    Cause.ROUTER: Advice("The router's event loop may be full (*CPU* near one core: add routers).", "quirelookupsfail"),
    Cause.INDEX_SLOW: Advice("Redis may be slow (`redis-cli --latency`) or far away.", "quirelookupsfail"),
    Cause.OUTRANKED: Advice(
        "Nothing, if the others are to go first: with --max-wait old requests get every eighth place all the same. "
        "Otherwise raise its `priority`, or add workers.",
        "higher-priority",
    ),
    Cause.CONSTRAINT: Advice(
        "Send the same constraint again: it stays compiled. Simplify one that takes long.", "long-constraint"
    ),
    Cause.BLOCKS: _MORE_BLOCKS,
    Cause.STALLED: _MORE_BLOCKS,
    Cause.MANAGER_AWAY: Advice(
        "Start a manager again: workers attach by themselves and nothing is lost.", "quiremanagerdown"
    ),
    Cause.MESSAGES: Advice(
        "Either the manager is slow (its CPU is near one core: split the pool), or the network between manager and "
        "worker is.",
        "quireleasesslow",
    ),
    Cause.HEAD_OF_LINE: _SLOW_STEPS,
    Cause.PREFILL: Advice(
        "If both are fine, prompts are longer (*Lengths*) or steps are slower (QuireSlowTokens).",
        "quireslowfirsttoken",
    ),
    Cause.DECODE: _SLOW_STEPS,
    Cause.SLOW_DECODE: _SLOW_STEPS,
    Cause.PREEMPTED: Advice(
        "As QuireBlocksShort. Or admit fewer sequences at once: set a higher `--watermark` at the manager.",
        "quirepreempting",
    ),
    Cause.WORKER_LOST: Advice("The routers' logs name which and why.", "quiresequencesmove"),
    Cause.SLOW_CLIENT: Advice(
        "The client, or a proxy before it, must read its stream faster; the service is not the reason.", "slow-client"
    ),
    Cause.REFUSED: _REFUSING,
    Cause.TOO_LARGE: Advice("Shorten the prompt, lower `max_tokens`, or give workers more blocks.", "too-large"),
    Cause.WRONG_REQUEST: Advice("The client must change its request; the service is not the reason.", "wrong-request"),
    Cause.HOPELESS_DEADLINE: Advice(
        "The client should allow more time. Where it cannot, add workers: the prediction has queue and prefill. The "
        "error says how far the last such predictions were off.",
        "hopeless-deadline",
    ),
    Cause.DEADLINE: Advice("The client should allow more time, or what took the time must go.", "deadline"),
    Cause.CLIENT_GONE: Advice("Where many clients leave, look at what they waited for.", "client-gone"),
    Cause.ABORTED: Advice("A request that another call aborted needs nothing.", "client-gone"),
    Cause.NO_WORKER: Advice("If workers are up but not connected, check three things.", "quirenoworkers"),
    Cause.FAILED: Advice(
        "ENGINE_FAILURE: a worker's steps fail; its log says why. INTERNAL: this is a defect; the router's log has the "
        "traceback.",
        "quirerefusing",
    ),
    Cause.BELOW_BLOCK: Advice(
        "Nothing for one prompt. Where most are so short, `quire advise-block-size` names a better block size.",
        "shorter-than-a-block",
    ),
    Cause.WHOLE_BLOCKS: Advice(
        "Nothing for one prompt: the last token is always computed, and with it its block. Smaller blocks "
        "(`--block-size`) share more: `quire advise-block-size`.",
        "whole-blocks-alone",
    ),
    Cause.CACHE_OFF: Advice(
        "The client or the worker's options turned the cache off. Neither is a fault.", "cache-off"
    ),
    Cause.BEING_COMPUTED: Advice(
        "Nothing: once those blocks are computed, the next such prompt has them as hits.", "being-computed"
    ),
    Cause.OTHER_DOMAIN: Advice(
        "Where the prompt is public, let its clients name a `shared_domain`, or send the same `cache_salt`.",
        "other-cache-domain",
    ),
    Cause.STALE_INDEX: Advice(
        "Nothing, if a worker has just restarted. Otherwise see QuireIndexBehind.", "stale-index"
    ),
    Cause.HOT_WORKER: Advice(
        "The router compared the wait with the work that the hit saves. Add workers if this is frequent.", "hot-worker"
    ),
    Cause.LATE_WORKER: Advice(
        "A longer deadline lets that worker be chosen. If it is often too late, its queue is long or its steps are "
        "slow: compare it with the others.",
        "late-worker",
    ),
    Cause.INDEX_UNREACHABLE: Advice(
        "Start Redis again; an empty one is fine, because managers publish everything anew.", "quireindexunreachable"
    ),
    Cause.INDEX_SKIPPED: Advice(
        "A router that had no answer three times in a row asks Redis again after 1 s, later after up to 10 s. See why "
        "it had none.",
        "quirelookupsfail",
    ),
    Cause.INDEX_LOST: Advice(
        "Nothing, if Redis was emptied or the managers have just started: they publish everything anew.", "index-lost"
    ),
    Cause.NO_INDEX: Advice(
        "Give several workers one `--redis-url`: without it a router knows only what it sent itself.", "no-index"
    ),
    Cause.EVICTED: Advice("evicted: the pool is too small, see QuireBlocksShort.", "quirehitratefell"),
    Cause.DIVERGED: Advice(
        "diverged_at: a client changed its prompts, and something that varies now stands early in them.",
        "quirehitratefell",
    ),
    Cause.NEVER_SEEN: Advice("never_seen: the traffic is new, or a worker restarted.", "quirehitratefell"),
}
NOTHING: Final = Advice(
    "Ask again when the request has ended, or where the service that kept the records answers again.", "not-known"
)


def advice_for(cause: Cause) -> Advice:
    return ADVICE.get(cause, NOTHING)
