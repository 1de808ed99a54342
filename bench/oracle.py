"""What the prefix cache discloses to a tenant: about the prompts of another one, and about its own.

    python -m bench.oracle --json

A victim sends half of the prompts. An attacker then sends all of them once, in random order, and guesses from each
answer whether the victim had sent its prompt. The area under the ROC curve says how good the guess is: 0.5 is chance,
1 is certainty. As a control the victim probes its own prompts in the same way. Simulated workers: a step takes 2 ms and
50 us for each computed prompt token, so a hit saves 15 ms.
"""

from __future__ import annotations

import asyncio
import bisect
import random
from collections.abc import Sequence

from bench.lib.harness import parser, progress, report
from bench.lib.tenants import Answer, Prompts, Tenant, tenants_on_suite


# How well one figure separates two kinds of request.
def auc(higher: Sequence[float], lower: Sequence[float]) -> float:
    """Return the chance that a sample of `higher` exceeds one of `lower`; ties count half. 0.5 separates nothing.

    That is the area under the ROC curve (Mann and Whitney's U over the number of pairs).
    """
    ordered = sorted(lower)
    wins = sum(bisect.bisect_left(ordered, each) + bisect.bisect_right(ordered, each) for each in higher)
    return wins / (2 * len(higher) * len(ordered))


PROMPT_TOKENS = 320
_BLOCKS = 131_072
_OPTIONS = ("--simulate", "base=2ms,prefill=50us", "--kv-blocks", str(_BLOCKS))
_AT_ONCE = 16


async def _send(tenant: Tenant, prompts: list[list[int]]) -> None:
    """Send prompts, several at once, so that their blocks are cached."""
    for start in range(0, len(prompts), _AT_ONCE):
        await asyncio.gather(*(tenant.ask(prompt, 1) for prompt in prompts[start : start + _AT_ONCE]))


async def probe(victim: Tenant, prober: Tenant, probes: int, seed: int) -> tuple[float, float]:
    """Return the areas by cached tokens and by time to first token over so many probes."""
    prompts, rng = Prompts(seed), random.Random(seed)
    sent = [prompts.new(PROMPT_TOKENS) for _ in range(probes // 2)]
    asked = [(prompt, True) for prompt in sent] + [(prompts.new(PROMPT_TOKENS), False) for _ in range(probes // 2)]
    await _send(victim, sent)
    rng.shuffle(asked)
    answers: dict[bool, list[Answer]] = {True: [], False: []}
    for number, (prompt, was_sent) in enumerate(asked, start=1):
        answers[was_sent].append(await prober.ask(prompt, 1))
        progress(f"probe {number} of {probes}", end=number == probes)
    yes, no = answers[True], answers[False]
    # A hit has more cached tokens and less time.
    by_tokens = auc([each.cached_tokens for each in yes], [each.cached_tokens for each in no])
    return by_tokens, auc([-each.first_token for each in yes], [-each.first_token for each in no])


async def measure(probes: int) -> dict[str, float]:
    async with tenants_on_suite(_OPTIONS, {"victim": "", "attacker": ""}) as tenants:
        victim, attacker = tenants["victim"], tenants["attacker"]
        await _send(attacker, [Prompts(3).new(PROMPT_TOKENS) for _ in range(_AT_ONCE)])  # warms up
        across = await probe(victim, attacker, probes, seed=1)
        within = await probe(victim, victim, probes, seed=2)
    return {
        "probes": float(probes),
        "auc_cached_tokens": across[0],
        "auc_ttft": across[1],
        "auc_cached_tokens_within": within[0],
        "auc_ttft_within": within[1],
    }


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--probes", type=int, default=1000, help="probes across tenants, and as many within one")
    args = flags.parse_args()
    notes = {
        "probes": "across tenants, and as many within one; half of the prompts had been sent",
        "auc_cached_tokens": "how well another tenant tells sent prompts by cached_tokens; 0.5 is chance",
        "auc_ttft": "the same by time to first token",
        "auc_cached_tokens_within": "the same for the tenant's own prompts: 1 if the cache works",
        "auc_ttft_within": "the same by time to first token",
    }
    report("oracle", asyncio.run(measure(args.probes)), notes, args.json)


if __name__ == "__main__":
    main()
