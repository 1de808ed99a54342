"""How many of a trace's sequences fit into equal bytes: in blocks, and where each reserves its greatest length.

The trace's lengths are asked for one after the other, so that others always wait; times are not used. Blocks, and
regions of the greatest length, are granted by the real ledger: such a region is a block of that size. The regions that
are the least power of two for a whole sequence, as a buddy allocator would give to who knew its length, are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from bench.lib.harness import progress
from bench.lib.trace_rows import Rows
from cli.block_size.accounting import Lengths, Waste, count_fitting, count_reserved
from cli.replay.trace import Trace
from common.contracts.errors import FieldViolation, InvalidConfig

BLOCK: Final = 16
CAPACITY_NOTES: Final = {
    "fit_paged": "sequences at once in blocks of 16, mean of steps",
    "fit_buddy": "where each has the least power of two that holds all its tokens",
    "fit_reserved": "where each reserves the greatest length",
    "paged_over_reserved": "sequences at once, blocks over regions of the greatest length",
    "paged_over_buddy": "the same over powers of two",
    "waste_paged": "slots of block tables without a token, over slots with one",
    "leased_paged": "slots leased ahead of need, over slots with a token",
    "waste_buddy": "slots of powers of two without a token, over slots with one",
    "waste_reserved": "slots of the greatest length without a token, over slots with one",
    "tokens_paged": "slots of the memory with a token, in blocks",
    "tokens_buddy": "the same in powers of two",
    "tokens_reserved": "the same in regions of the greatest length",
    "preempted_paged": "preemptions for each request, in blocks",
    "requests_left_out": "part of the trace that is longer than the greatest length",
}


def columns_of(
    trace: Trace, name: str, reserved: Sequence[int], memories: Sequence[int], rows: Rows
) -> dict[str, dict[str, float]]:
    """Return a column for each greatest length and each memory in slots. Raises InvalidConfig where none would fit."""
    if max(reserved) > min(memories):
        what = f"{max(reserved)} is more than a pool of {min(memories)} tokens; expected less, or larger --pools"
        raise InvalidConfig(FieldViolation("--reserved", what))
    lengths = [(each.prompt_tokens, max(1, each.output_tokens)) for each in trace.arrivals]
    found = dict[str, dict[str, float]]()
    for slots in memories:
        for greatest in reserved:
            progress(f"{slots} slots, {greatest} reserved")
            row = {"trace": name, "requests": len(lengths), "slots": slots, "reserved": greatest}
            found[f"{greatest}_of_{slots}"] = rows.figures(row, partial(_figures_of, lengths, greatest, slots))
    return found


def _figures_of(lengths: Sequence[Lengths], greatest: int, slots: int) -> dict[str, float]:
    requests = [each for each in lengths if sum(each) <= greatest]
    kinds = {
        "paged": count_fitting(BLOCK, requests, slots // BLOCK),
        "buddy": count_reserved(lambda each: 1 << (sum(each) - 1).bit_length(), requests, slots),
        "reserved": count_fitting(greatest, requests, slots // greatest),
    }
    if not all(each.steps for each in kinds.values()):
        what = f"all requests that keep {greatest} tokens fit into {slots}; expected a smaller pool, or more requests"
        raise InvalidConfig(FieldViolation("--reserved", what))
    figures = {f"fit_{name}": each.rows / each.steps for name, each in kinds.items()}
    paged: Waste = kinds["paged"]
    figures["paged_over_reserved"] = figures["fit_paged"] / figures["fit_reserved"]
    figures["paged_over_buddy"] = figures["fit_paged"] / figures["fit_buddy"]
    figures |= {f"waste_{name}": each.share for name, each in kinds.items()}
    figures |= {f"tokens_{name}": each.used / each.steps / slots for name, each in kinds.items()}
    figures["leased_paged"], figures["preempted_paged"] = paged.runway_share, paged.preempted / len(requests)
    return figures | {"requests_left_out": 1 - len(requests) / len(lengths)}
