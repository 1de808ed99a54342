"""Slots that paging wastes: the worked examples of `quire waste`, and a workload by block size.

The workload runs through the real ledger and lease agent. Waste is the number of reserved slots without a token over
the number of slots with one. The runway (blocks leased ahead of need) counts apart. No model runs and nothing is timed:
the figures are exact for their seed.
"""

from __future__ import annotations

import math
import random

from bench.lib.checkpoints import MAX_MODEL_LEN
from bench.lib.harness import parser, progress, report
from cli.block_size.accounting import (
    BLOCK_SIZES,
    Lengths,
    contiguous_slots,
    count_pressed,
    count_waste,
    paged_slots,
)

# Of some 1,500 that the sequences of the mixed workload would use at once.
PRESSED_BLOCKS = (400, 1000)


def mixed_requests(count: int, seed: int) -> list[Lengths]:
    """Return (prompt, output) lengths: prompts log-normal with median 200 (32 to 1024), outputs 16 to 256."""
    rng = random.Random(seed)
    prompts = (round(math.exp(math.log(200.0) + 0.75 * rng.gauss(0.0, 1.0))) for _ in range(count))
    return [(max(32, min(1024, prompt)), rng.randint(16, 256)) for prompt in prompts]


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
    figures["naive_waste_fraction"] = waste.contiguous_share(MAX_MODEL_LEN)
    report("waste", figures, notes, args.json)


if __name__ == "__main__":
    main()
