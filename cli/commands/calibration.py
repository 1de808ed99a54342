"""`quire calibration`: how well the router predicts waits, hits, prefill and first tokens, as a table and a plot."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from rich.console import Console

from cli.client import add_admin_address, add_json, print_json, run_command
from cli.views.calibration import CalibrationView
from cli.why.choice import seconds_of
from cli.why.pages import Listed, Lister
from cli.why.source import Source, add_log, opened
from common.contracts.errors import FieldViolation, InvalidConfig, NotFound
from common.contracts.types import Decision, DecisionKind
from common.wire.decision_codec import known_decisions
from quire.decision.v1 import decision_pb2 as pb
from router.observe.diagnosis.calibration import Predicted, calibrations, predictions

_DEFAULT: Final = 5_000
# A request that waits is routed again: there are more choices than requests.
_CHOICES: Final = 2


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser("quire calibration", description=__doc__)
    flags.add_argument("--since", metavar="TIME", help="requests of so much time, such as 30s, 5m or 2h")
    flags.add_argument("--worker", default="", metavar="ID", help="requests of this worker alone")
    flags.add_argument("--limit", type=int, default=_DEFAULT, metavar="N", help="the newest N requests (%(default)s)")
    add_log(flags)
    add_admin_address(flags)
    add_json(flags)
    return flags


async def gathered(source: Source, args: argparse.Namespace) -> tuple[list[Predicted], tuple[str, ...]]:
    """Return the requests that count, and in words which records are missing."""
    if args.limit < 1:
        raise InvalidConfig(FieldViolation("--limit", f"is {args.limit}; expected 1 or more"))
    since = 0 if args.since is None else max(1, time.time_ns() - int(seconds_of(args.since) * 1e9))
    lister, listed, records = Lister(source), Listed(), list[Decision]()
    for kind, limit in ((DecisionKind.OUTCOME, args.limit), (DecisionKind.ROUTING, _CHOICES * args.limit)):
        asked = pb.ListDecisionsRequest(kind=kind, worker=args.worker, since_unix_nano=since)
        found = await lister.newest(asked, from_manager=False, limit=limit)
        listed.add("router", found, since)
        records += known_decisions(found.records)
    missing = dict.fromkeys((*listed.missing, *(f"records of {each}" for each in source.missing())))
    return predictions(records), tuple(missing)


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)

    async def body(console: Console) -> None:
        async with opened(args) as source:
            found, missing = await gathered(source, args)
            if not found:
                what = "no request here was placed at a worker and got a first token, as far as records go back"
                raise NotFound(f"{what} ({source.bound}); leave --since and --worker out, or send some requests")
        if args.json:
            print_json(plain(found, missing))
        else:
            console.print(CalibrationView(calibrations(found), found, missing), soft_wrap=not console.is_terminal)

    return run_command(body)


def plain(found: Sequence[Predicted], missing: Sequence[str]) -> dict[str, Any]:
    """Return the table and each request as JSON has them; times are in seconds."""
    requests = [
        {
            "request_id": each.request_id,
            "worker": each.worker,
            "at": each.time_ns / 1e9,
            **{measure.value: asdict(pair) for measure, pair in each.pairs.items()},
        }
        for each in found
    ]
    return {"measures": [asdict(each) for each in calibrations(found)], "requests": requests, "missing": list(missing)}
