"""The causes that a verdict may name, and what to do about each in one sentence, which stands in the runbook too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

# Where a router's admin HTTP port serves the runbook, which is `router/api/page/runbook.md`.
RUNBOOK: Final = "/page/runbook"


class Cause(StrEnum):
    """The first group is about time, the second about early ends, the third about the prefix cache.

    LOADED, FETCHING and FETCH_FAILED are about both: cached blocks that were copied from host memory, or had to come
    there first, and the time of that.
    """

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
    PREFILL_ELSEWHERE = "prefill_elsewhere"
    ADAPTER = "adapter"
    CONSTRAINT = "constraint"
    BLOCKS = "blocks"
    FETCHING = "fetching"
    FETCH_FAILED = "fetch_failed"
    MESSAGES = "messages"
    MANAGER_AWAY = "manager_away"
    STALLED = "stalled"
    HEAD_OF_LINE = "head_of_line"
    LOADED = "loaded"
    PREFILL = "prefill"
    DECODE = "decode"
    SLOW_DECODE = "slow_decode"
    PREEMPTED = "preempted"
    WORKER_LOST = "worker_lost"
    SLOW_CLIENT = "slow_client"

    REFUSED = "refused"
    RATE_LIMITED = "rate_limited"
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
    WINDOW_MISSING = "window_missing"
    NO_CHECKPOINT = "no_checkpoint"
    OTHER_DOMAIN = "other_domain"
    STALE_INDEX = "stale_index"
    HOT_WORKER = "hot_worker"
    LATE_WORKER = "late_worker"
    NOT_FETCHED = "not_fetched"
    INDEX_UNREACHABLE = "index_unreachable"
    INDEX_SKIPPED = "index_skipped"
    INDEX_LOST = "index_lost"
    NO_INDEX = "no_index"
    EVICTED = "evicted"
    DIVERGED = "diverged"
    NEVER_SEEN = "never_seen"


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do, in one sentence; the section of the runbook under `anchor` says more."""

    text: str
    anchor: str

    def link(self, runbook: str = RUNBOOK) -> str:
        """Return where the section stands, given where the runbook does."""
        return f"{runbook}#{self.anchor}"


ADVICE: Final[Mapping[Cause, Advice]] = {
    Cause.READING: Advice(
        "Add routers, or let clients send token ids: making long texts into tokens takes the router time.", "reading"
    ),
    Cause.WORKER_QUEUE: Advice(
        "Add workers, because those that run have no room for more requests.", "quirequeuestands"
    ),
    Cause.OUTRANKED: Advice(
        "Raise the request's priority or add workers, unless the requests that went first are meant to.",
        "higher-priority",
    ),
    Cause.ROUTER: Advice("Add routers if the event loop of this one uses nearly a whole core.", "quirelooplags"),
    Cause.ROUTER_STILL: Advice(
        "Give the router's host free processors, and look for what stops the process or swaps its memory.",
        "router-stood-still",
    ),
    Cause.ON_THE_WAY: Advice(
        "Check the network between router and worker, and whether the hosts of both have free processors.",
        "on-the-way",
    ),
    Cause.WORKER_STILL: Advice(
        "Give the worker's host free processors, and look for what stops its process or holds up its device.",
        "worker-stood-still",
    ),
    Cause.SENDING: Advice("Add routers, because this one is busy with the output of other requests.", "sending"),
    Cause.INDEX_SLOW: Advice(
        "Check with redis-cli --latency on the router's host how fast Redis answers.", "quirelookupsfail"
    ),
    Cause.PREFILL_ELSEWHERE: Advice(
        "Add prefill workers if this is long, and start routers with --remote-prefill off if it is in vain.",
        "computed-elsewhere",
    ),
    Cause.ADAPTER: Advice(
        "Keep more adapters in memory with --max-loras, or load them before requests name them.",
        "adapter-loads",
    ),
    Cause.CONSTRAINT: Advice(
        "Send a constraint again word for word, because it stays compiled, and simplify one that takes long.",
        "long-constraint",
    ),
    Cause.BLOCKS: Advice(
        "Give the workers more memory for blocks with --kv-memory or --gpu-memory-utilization, or add workers.",
        "quireblocksshort",
    ),
    Cause.FETCHING: Advice(
        "Do nothing if that is faster than computing, and give the workers more host memory if requests wait often.",
        "fetched",
    ),
    Cause.FETCH_FAILED: Advice(
        "Do nothing for one request, and look at the disk, or at the worker that had the blocks, if many fail.",
        "fetch-failed",
    ),
    Cause.STALLED: Advice(
        "Lower --max-num-seqs or add workers, so that running requests find blocks for their next tokens.",
        "quireblocksshort",
    ),
    Cause.MESSAGES: Advice(
        "Check whether the KV manager has a free processor, and how slow the network between it and the worker is.",
        "quireleasesslow",
    ),
    Cause.MANAGER_AWAY: Advice(
        "Start the KV manager again: its workers attach by themselves, and nothing is lost.", "quiremanagerdown"
    ),
    Cause.HEAD_OF_LINE: Advice(
        "Set --long-prefill-cap at the workers, so that one long prompt does not hold up the others.",
        "quireslowtokens",
    ),
    Cause.LOADED: Advice(
        "Do nothing if that is faster than computing, and give the workers more memory for blocks if it takes much of "
        "the time.",
        "loaded-from-host-memory",
    ),
    Cause.PREFILL: Advice(
        "Let prompts begin with text that is cached, shorten them, or take faster workers.", "quireslowfirsttoken"
    ),
    Cause.DECODE: Advice(
        "Lower --max-num-seqs at the workers or take faster ones, if tokens must come faster.", "quireslowtokens"
    ),
    Cause.SLOW_DECODE: Advice(
        "Lower --max-num-batched-tokens at the worker, or move other processes off its cores.", "quireslowtokens"
    ),
    Cause.PREEMPTED: Advice(
        "Set a higher --watermark at the KV manager, or give the workers more memory for blocks.", "quirepreempting"
    ),
    Cause.WORKER_LOST: Advice(
        "Read in the router's log which worker was lost and why, and then the log of that worker.",
        "quiresequencesmove",
    ),
    Cause.SLOW_CLIENT: Advice(
        "Let the client, or the proxy before it, read the stream faster: the service waited for it.", "slow-client"
    ),
    Cause.REFUSED: Advice(
        "Add workers, or raise the limit that refused the request if its clients can wait.", "quirerefusing"
    ),
    Cause.RATE_LIMITED: Advice(
        "Let the client send less, or raise the limit of its tenant, because more workers would not help it.",
        "rate-limited",
    ),
    Cause.TOO_LARGE: Advice("Shorten the prompt, lower max_tokens, or give the workers more blocks.", "too-large"),
    Cause.WRONG_REQUEST: Advice(
        "Correct in the client what the first line names, because the service is not the reason.", "wrong-request"
    ),
    Cause.HOPELESS_DEADLINE: Advice(
        "Allow the request more time, or add workers so that the first token comes sooner.", "hopeless-deadline"
    ),
    Cause.DEADLINE: Advice(
        "Allow the request more time, or remove what took most of it, as the first line says.", "deadline"
    ),
    Cause.CLIENT_GONE: Advice(
        "Look at what the request waited for, if many clients leave like this one.", "client-gone"
    ),
    Cause.ABORTED: Advice("Do nothing, because that call asked for this end.", "client-gone"),
    Cause.NO_WORKER: Advice(
        "Look with quire status at which workers the router sees, and why it does not use them.", "quirenoworkers"
    ),
    Cause.FAILED: Advice(
        "Read the worker's log after ENGINE_FAILURE, and the router's log after any other error.", "quirerefusing"
    ),
    Cause.BELOW_BLOCK: Advice(
        "Do nothing for one prompt, and ask quire advise-block-size for a better size if most are so short.",
        "shorter-than-a-block",
    ),
    Cause.WHOLE_BLOCKS: Advice(
        "Do nothing for one prompt, and take a smaller --block-size if prompts share short beginnings.",
        "whole-blocks-alone",
    ),
    Cause.CACHE_OFF: Advice(
        "Turn the cache on, in the request or in the worker's options, unless it is meant to be off.", "cache-off"
    ),
    Cause.WINDOW_MISSING: Advice(
        "Do nothing for one prompt, because the next such one has that window, and add memory if many prompts lack it.",
        "window-missing",
    ),
    Cause.NO_CHECKPOINT: Advice(
        "Do nothing for one prompt, because it has left a checkpoint there, and add memory if many prompts lack one.",
        "no-checkpoint",
    ),
    Cause.OTHER_DOMAIN: Advice(
        "Let clients name one shared_domain, or send one cache_salt, if the prompt is public.", "other-cache-domain"
    ),
    Cause.STALE_INDEX: Advice(
        "Do nothing after a restart of the worker, and otherwise check whether Redis is slow or evicts.",
        "stale-index",
    ),
    Cause.HOT_WORKER: Advice(
        "Add workers if this is frequent, because waiting for the worker with the prefix costs more than computing it.",
        "hot-worker",
    ),
    Cause.LATE_WORKER: Advice(
        "Allow a longer deadline, or compare the worker that has the prefix with the others if it is often slow.",
        "late-worker",
    ),
    Cause.NOT_FETCHED: Advice(
        "Do nothing if computing is as fast as the disk, and give the worker more host memory otherwise.",
        "not-fetched",
    ),
    Cause.INDEX_UNREACHABLE: Advice(
        "Start Redis again: an empty one is fine, because managers publish everything anew.", "quireindexunreachable"
    ),
    Cause.INDEX_SKIPPED: Advice(
        "Find out why Redis did not answer several times in a row, or whether it is too far from the router.",
        "quirelookupsfail",
    ),
    Cause.INDEX_LOST: Advice(
        "Do nothing if Redis was emptied or the managers have just started, because they publish everything anew.",
        "index-lost",
    ),
    Cause.NO_INDEX: Advice(
        "Give the routers one --redis-url, because without it each router knows only what it sent itself.", "no-index"
    ),
    Cause.EVICTED: Advice(
        "Give the workers more memory for blocks, because the pool is too small for such prefixes.",
        "quirehitratefell",
    ),
    Cause.DIVERGED: Advice(
        "Let what varies stand at the end of the prompts, so that they begin with the same text.", "quirehitratefell"
    ),
    Cause.NEVER_SEEN: Advice(
        "Do nothing if such prompts are new or a worker has restarted, because the next ones find the prefix.",
        "quirehitratefell",
    ),
}
NOTHING: Final = Advice(
    "Ask again when the request has ended, or when the service that kept its records answers again.", "not-known"
)


def advice_for(cause: Cause) -> Advice:
    return ADVICE.get(cause, NOTHING)
