"""Slots that paging wastes: the worked examples of `quire waste`, and a workload by block size.

The workload runs through the real ledger and lease agent. Waste is the number of reserved slots without a token over
the number of slots with one. The runway (blocks leased ahead of need) counts apart. Of layers with two lifetimes (full,
and a window), the bytes count that hold nothing which a running sequence reads. No model runs and nothing is timed: the
figures are exact for their seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from bench.lib.checkpoints import MAX_MODEL_LEN
from bench.lib.harness import parser, progress, report
from cli.block_size.accounting import (
    BLOCK_SIZES,
    Lengths,
    contiguous_slots,
    count_pages,
    count_pressed,
    count_waste,
    paged_slots,
)
from common.contracts.types import KvGroup, KvGroupKind

# Of some 1,500 that the sequences of the mixed workload would use at once.
PRESSED_BLOCKS = (400, 1000)
# gpt-oss-20b: every second layer has a window. A page has K and V of 16 tokens in 12 layers: 8 heads of 64 in bf16.
GROUPS = (
    KvGroup(KvGroupKind.FULL, 0, 1, tuple(range(1, 24, 2))),
    KvGroup(KvGroupKind.WINDOW, 128, 1, tuple(range(0, 24, 2))),
)
PAGE_BYTES = 16 * 12 * 2 * 8 * 64 * 2


def mixed_requests(count: int, seed: int) -> list[Lengths]:
    """Return (prompt, output) lengths: prompts log-normal with median 200 (32 to 1024), outputs 16 to 256."""
    rng = random.Random(seed)
    prompts = (round(math.exp(math.log(200.0) + 0.75 * rng.gauss(0.0, 1.0))) for _ in range(count))
    return [(max(32, min(1024, prompt)), rng.randint(16, 256)) for prompt in prompts]


def unread_bytes(requests: Sequence[Lengths]) -> dict[str, float]:
    """Return by group the bytes of pages in tables, and of those that hold nothing that the step reads; means of steps.

    `one_group` is what would be unread if all layers had one table and kept K/V alike.
    """
    sums = count_pages(16, requests, GROUPS)
    full, window = sums.groups
    counts = {
        "held_bytes_full": full.held,
        "unread_bytes_full": full.unread,
        "held_bytes_window128": window.held,
        "unread_bytes_window128": window.unread,
        "unread_bytes_one_group": full.unread + full.held - window.read,
        "leased_bytes_groups": sums.leased,
    }
    return {name: count * PAGE_BYTES / sums.steps for name, count in counts.items()}


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--requests", type=int, default=256, help="requests of the mixed workload")
    args = flags.parse_args()
    first, second = (800, 2300, 3900), (600, 900, 1300, 1700)
    figures: dict[str, float] = {
        "example_contiguous_slots": contiguous_slots(first, 4096).wasted,
        "example_paged_slots": paged_slots(first, 256).wasted,
        "example2_contiguous_slots": contiguous_slots(second, 2048).wasted,
        "example2_paged_slots": paged_slots(second, 256).wasted,
    }
    notes = {
        "example_contiguous_slots": "800, 2300 and 3900 tokens, 4096 reserved for each",
        "example_paged_slots": "the same in blocks of 256",
        "example2_contiguous_slots": "600, 900, 1300 and 1700 tokens, 2048 reserved for each",
        "example2_paged_slots": "the same in blocks of 256",
        "naive_waste_fraction": f"mixed workload, {MAX_MODEL_LEN} reserved for each: unused part of what is reserved",
    }
    requests = mixed_requests(args.requests, seed=0)
    for block_size in BLOCK_SIZES:
        waste = count_waste(block_size, requests)
        figures[f"waste_block{block_size}"] = waste.share
        figures[f"runway_block{block_size}"] = waste.runway_share
        notes[f"waste_block{block_size}"] = "mixed workload: slots in rows without a token over slots with one"
        notes[f"runway_block{block_size}"] = "slots leased ahead of need over slots with a token"
    for blocks in PRESSED_BLOCKS:
        pressed = count_pressed(16, requests, blocks)
        if not pressed.used:
            progress(f"no sequence waited for one of {blocks} blocks: more --requests are needed for that figure")
            continue
        figures[f"runway_pressed_{blocks}"] = pressed.runway_share
        notes[f"runway_pressed_{blocks}"] = f"the same in blocks of 16, of which {blocks} make others wait for blocks"
    figures |= unread_bytes(requests)
    for group in ("full", "window128"):
        notes[f"held_bytes_{group}"] = "mixed workload, layers of gpt-oss-20b: bytes in tables of that group, a step"
        notes[f"unread_bytes_{group}"] = "those of them in pages that hold nothing a running sequence reads"
    notes["unread_bytes_one_group"] = "the same of all layers if they were one group"
    notes["leased_bytes_groups"] = "bytes of pages leased ahead of need, which are of no group yet"
    figures["naive_waste_fraction"] = waste.contiguous_share(MAX_MODEL_LEN)
    report("waste", figures, notes, args.json)


if __name__ == "__main__":
    main()
