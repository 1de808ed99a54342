"""`quire waste LENGTH...`: the slots that sequences of these lengths reserve and waste, contiguous and in blocks.

A slot holds one token. Contiguous, each sequence reserves --max-len slots; in blocks, whole blocks for its tokens.
All percentages are of one base, the slots that hold a token.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.table import Table

from cli.block_size.accounting import BLOCK_SIZES, ReservedSlots, contiguous_slots, paged_slots
from cli.client import add_json, print_json, run_command
from common.contracts.errors import FieldViolation, InvalidRequest
from common.contracts.limits import MAX_WORKER_SEQUENCES

_MOST: Final = (1 << 31) - 1
_NUMBER: Final = f"a whole number from 1 to {_MOST}"


def count_of(word: str) -> int:
    """Return a number of slots of the command line. Raises ArgumentTypeError."""
    if not (word.isascii() and word.isdecimal() and len(word) <= len(str(_MOST)) and 1 <= int(word) <= _MOST):
        raise argparse.ArgumentTypeError(f"is {word!r}; expected {_NUMBER}")
    return int(word)


def block_sizes_of(word: str) -> tuple[int, ...]:
    """Return block sizes of the command line, the smallest first. Raises ArgumentTypeError."""
    return tuple(sorted({count_of(each.strip()) for each in word.split(",")}))


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser("quire waste", description=__doc__)
    flags.add_argument("lengths", type=count_of, nargs="+", metavar="LENGTH", help="tokens of a sequence")
    sizes = ",".join(map(str, BLOCK_SIZES))
    text = f"slots in a block, or several sizes (default {sizes})"
    flags.add_argument("--block-size", type=block_sizes_of, default=BLOCK_SIZES, metavar="N[,N...]", help=text)
    text = "slots of a contiguous reservation (default: the least power of two that holds the longest sequence)"
    flags.add_argument("--max-len", type=count_of, metavar="N", help=text)
    add_json(flags)
    return flags


def table_of(contiguous: ReservedSlots, max_len: int, paged: dict[int, ReservedSlots]) -> Table:
    """Return a row for the contiguous reservation, and one for each block size."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("reservation")
    for heading in ("reserved", "used", "wasted", "wasted %"):
        table.add_column(heading, justify="right")
    rows = {
        f"contiguous, {max_len:,} each": contiguous,
        **{f"blocks of {size:,}": each for size, each in paged.items()},
    }
    for name, each in rows.items():
        table.add_row(name, f"{each.reserved:,}", f"{each.used:,}", f"{each.wasted:,}", f"{100 * each.waste:.1f} %")
    return table


def _check(lengths: Sequence[int], max_len: int) -> None:
    """Raise InvalidRequest for too many sequences, and for one that its reservation does not hold."""
    wrong = []
    if len(lengths) > MAX_WORKER_SEQUENCES:
        what = f"is given {len(lengths)} times; expected at most {MAX_WORKER_SEQUENCES}, the sequences of a worker"
        wrong.append(FieldViolation("LENGTH", what))
    if max(lengths) > max_len:
        what = f"is {max_len}, and a sequence has {max(lengths)} tokens; expected the longest sequence or more"
        wrong.append(FieldViolation("--max-len", what))
    if wrong:
        raise InvalidRequest(*wrong)


def _as_json(slots: ReservedSlots) -> dict[str, float]:
    return {"reserved": slots.reserved, "used": slots.used, "wasted": slots.wasted, "waste": slots.waste}


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    lengths: list[int] = args.lengths
    max_len: int = args.max_len or 1 << (max(lengths) - 1).bit_length()

    async def body(console: Console) -> None:
        _check(lengths, max_len)
        contiguous = contiguous_slots(lengths, max_len)
        paged = {size: paged_slots(lengths, size) for size in args.block_size}
        if args.json:
            blocks = [{"block_size": size, **_as_json(each)} for size, each in paged.items()]
            print_json(
                {"lengths": lengths, "contiguous": {"max_len": max_len, **_as_json(contiguous)}, "paged": blocks}
            )
            return
        head = f"{len(lengths):,} sequence{'s' * (len(lengths) > 1)} with {contiguous.used:,} tokens"
        console.print(f"{head}; percentages are of the {contiguous.used:,} slots that hold a token", soft_wrap=True)
        console.print(table_of(contiguous, max_len, paged))

    return run_command(body)
