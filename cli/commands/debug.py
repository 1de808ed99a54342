"""`quire debug dump`: the thread stacks, asyncio tasks and state of running services on this machine.

It reads the entries that services leave in their state directory, and changes nothing in a service. Where a service
does not answer, its event loop or interpreter is blocked in C: its stderr then has the stacks of all its threads.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.text import Text

from cli.client import path_of, run_command
from common.contracts.errors import NotFound
from common.process.debug import dump_path, entry_path

_ANSWER_SECONDS = 5.0
_POLL_SECONDS = 0.02

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Service:
    """A running process: the file that announces it, and what that file says."""

    path: Path
    entry: Record


def services(state_dir: Path, address: str | None) -> list[Service]:
    """Return the services that still run, in the order of their start. Raises NotFound."""
    folder = entry_path(state_dir, 0).parent
    # Each further KV manager of `quire serve` has a state directory of its own below the suite's.
    paths = [*folder.glob("*.json"), *folder.parent.glob(f"*/*/{folder.name}/*.json")]
    known = [Service(path, json.loads(path.read_text())) for path in paths]
    running = sorted((each for each in known if _runs(each.entry)), key=lambda each: float(each.entry["created"]))
    found = [each for each in running if address in (None, each.entry["address"])]
    if not found:
        addresses = ", ".join(each.entry["address"] for each in running) or "none"
        raise NotFound(
            f"no service{f' at {address}' if address else ''} has an entry in {folder} (running: {addresses}); "
            "name the folder with --state-dir, or send SIGUSR1 to the process and read its stderr"
        )
    return found


def _runs(entry: Record) -> bool:
    """Return whether the entry's process runs, and not a later one with the same number."""
    try:
        return abs(psutil.Process(entry["pid"]).create_time() - float(entry["created"])) < 1.0
    except psutil.NoSuchProcess:
        return False


def dump(service: Service, patience: float = _ANSWER_SECONDS) -> Record:
    """Return a service's entry with its dump, or with an `error` where it does not answer."""
    path, entry = dump_path(service.path), service.entry
    path.unlink(missing_ok=True)
    os.kill(entry["pid"], signal.SIGUSR2)
    deadline = time.monotonic() + patience
    while not path.exists():
        if time.monotonic() > deadline:
            os.kill(entry["pid"], signal.SIGUSR1)
            words = f"no answer within {patience:g} s; the service's stderr now has the stacks of all its threads"
            return entry | {"error": words}
        time.sleep(_POLL_SECONDS)
    found: Record = json.loads(path.read_text())
    path.unlink(missing_ok=True)
    return entry | found


def show(console: Console, found: Record) -> None:
    console.print(Text(f"{found['service']} {found['address']} (process {found['pid']})", "bold cyan"))
    if "error" in found:
        console.print(Text(f"  {found['error']}", "red"))
        return
    for heading, stacks in (("threads", found["threads"]), ("tasks", found["tasks"])):
        console.print(Text(f"  {heading}", "bold"))
        _show_stacks(console, stacks)
    console.print(Text("  state", "bold"))
    lines = json.dumps(found["state"], indent=2).splitlines()
    console.print(Text("\n".join(f"    {line}" for line in lines)), soft_wrap=True)


def _show_stacks(console: Console, stacks: Mapping[str, Sequence[str]]) -> None:
    for name, lines in stacks.items():
        console.print(Text(f"    {name}", "yellow"), soft_wrap=True)
        for line in lines:
            console.print(Text(f"      {line}", "dim"), soft_wrap=True)


def parser() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    flags = argparse.ArgumentParser("quire debug", description=__doc__, formatter_class=form)
    flags.add_argument("what", choices=["dump"], help="what to do")
    flags.add_argument("--address", help="HOST:PORT where the service listens (default: every service)")
    folder = Path(os.environ.get("QUIRE_STATE_DIR", ".quire"))
    text = "state directory of the services (default %(default)s; environment: QUIRE_STATE_DIR)"
    flags.add_argument("--state-dir", type=path_of, default=folder, help=text)
    flags.add_argument("--json", action="store_true", help="print one JSON document a service, on a line of its own")
    return flags


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)

    async def body(console: Console) -> None:
        for service in services(args.state_dir, args.address):
            found = dump(service)
            if args.json:
                sys.stdout.write(json.dumps(found) + "\n")
            else:
                show(console, found)

    return run_command(body)
