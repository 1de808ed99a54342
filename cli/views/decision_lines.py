"""A decision record in one line: when, which service, what kind, whose request, what was chosen and why.

03:31:59.123  router   routing     r-17          worker-0  (lowest cost)
"""

from __future__ import annotations

from datetime import datetime
from typing import Final

from rich.text import Text

from cli.views.cutting import cut
from quire.decision.v1 import decision_pb2 as pb

_KIND_WIDTH: Final = 10
_REQUEST_WIDTH: Final = 18
_BECAUSE: Final = {
    "ring_moved_on": "newer ones took their place before they were read (--decision-ring)",
    "gone": "the process does not answer, or has ended",
}
_SHOWN_REASONS: Final = 2


def decision_line(record: pb.DecisionRecord, service: str, dated: bool = False) -> Text:
    """Return the line of a record; `dated` with its day."""
    form = "%Y-%m-%d %H:%M:%S.%f" if dated else "%H:%M:%S.%f"
    moment = datetime.fromtimestamp(record.time_unix_nano / 1e9).astimezone().strftime(form)[:-3]
    request = cut(record.request_id or "-", _REQUEST_WIDTH)
    line = Text.assemble((f"{moment}  ", "dim"), f"{service:<7}  ", f"{record.kind:<{_KIND_WIDTH}}  ")
    line.append(f"{request:<{_REQUEST_WIDTH}}  ").append(record.chosen, "bold")
    if record.worker and record.worker != record.chosen:
        line.append(f" at {record.worker}")
    if record.victim and record.beneficiary:
        line.append(f" gave way to {record.beneficiary}", "yellow")
    if reasons := _reasons(record):
        line.append(f"  ({reasons})", "dim")
    return line


def lost_line(response: pb.WatchDecisionsResponse, service: str) -> Text:
    """Return the line about records that a watch missed."""
    source, why = response.position.source, _BECAUSE.get(response.lost_because, response.lost_because)
    what = f"{response.lost:,} records of {source} are missing"
    if not response.lost:
        what = f"records of {source} may be missing"
    return Text(f"{service}: {what}: {why}", "yellow")


def _reasons(record: pb.DecisionRecord) -> str:
    shown = ", ".join(record.reasons[:_SHOWN_REASONS])
    more = len(record.reasons) - _SHOWN_REASONS
    return f"{shown} and {more} more" if more > 0 else shown
