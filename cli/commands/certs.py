"""`quire certs DIR`: makes a development CA and a certificate for each role, for TLS between services.

A folder that has a CA keeps it: further certificates are signed by the same one. `quire serve` makes its own.
"""

from __future__ import annotations

import argparse
import ipaddress
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from rich.console import Console

from cli.certificates.authority import LEAF_DAYS, RENEW_DAYS, Wanted, ends_at, ensure, make, wanted
from cli.certificates.folder import CertificateFolder
from cli.client import add_json, path_of, print_json, run_command
from common.contracts.errors import FieldViolation, InvalidConfig
from common.rpc.roles import Role

# What a DNS name may have: `<id>.worker.quire.internal`.
_LABELS: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")
_LABEL: Final = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST: Final = re.compile(rf"(\*\.)?{_LABEL}(\.{_LABEL})*")
_LONGEST_NAME: Final = 253
_ALWAYS_PUBLIC: Final = ("localhost", "127.0.0.1", "::1")


def worker_id(word: str) -> str:
    """Return a worker's id that can stand in a certificate. Raises ArgumentTypeError."""
    if not _LABELS.fullmatch(word):
        raise argparse.ArgumentTypeError(f"is {word!r}; expected 1 to 63 of a-z, 0-9, '-' and '.', as in worker-0")
    return word


def public_name(word: str) -> str:
    """Return a host name or an address that can stand in a certificate. Raises ArgumentTypeError."""
    with suppress(ValueError):
        return str(ipaddress.ip_address(word))
    if len(word) > _LONGEST_NAME or not _HOST.fullmatch(word):
        what = f"is {word!r}; expected a host name such as quire.example.org or *.example.org, or an address"
        raise argparse.ArgumentTypeError(what)
    return word


def days(word: str) -> int:
    if not word.isdecimal() or not 1 <= int(word) <= 3650:
        raise argparse.ArgumentTypeError(f"is {word!r}; expected a number of days from 1 to 3650")
    return int(word)


def parser() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    flags = argparse.ArgumentParser("quire certs", description=__doc__, formatter_class=form)
    flags.add_argument("folder", type=path_of, metavar="DIR", help="where to write them")
    flags.add_argument(
        "--worker-id", type=worker_id, action="append", default=[], metavar="ID", help="also one for this worker alone"
    )
    flags.add_argument(
        "--public-name",
        type=public_name,
        action="append",
        default=[],
        metavar="NAME",
        help="also one for the router's public ports, under this host name or address; repeatable",
    )
    flags.add_argument("--days", type=days, default=LEAF_DAYS, help="how long they are valid (default %(default)s)")
    what = flags.add_mutually_exclusive_group()
    what.add_argument("--force", action="store_true", help="write over certificates that are there; the CA stays")
    what.add_argument(
        "--if-needed", action="store_true", help=f"write what is missing or ends within {RENEW_DAYS} days"
    )
    add_json(flags)
    return flags


def certificates(args: argparse.Namespace, folder: CertificateFolder) -> list[Wanted]:
    """Return what to make. A folder that has a CA gets single certificates alone, if any are named."""
    public = (*_ALWAYS_PUBLIC, *args.public_name) if args.public_name else ()
    alone = bool(args.worker_id or args.public_name) and folder.ca_cert.exists()
    roles = () if alone and not (args.force or args.if_needed) else tuple(Role)
    return wanted(folder, roles, args.worker_id, public)


def write(args: argparse.Namespace) -> list[Wanted]:
    """Make the certificates; return those that were written. Raises InvalidConfig."""
    folder = CertificateFolder(args.folder)
    todo = certificates(args, folder)
    if args.if_needed:
        return ensure(folder, todo, args.days)
    there = [str(each.leaf.cert) for each in todo if each.leaf.cert.exists()]
    if there and not args.force:
        what = f"{', '.join(there)} exist; --force writes over them, --if-needed makes what is missing"
        raise InvalidConfig(FieldViolation("DIR", what))
    make(folder, todo, args.days)
    return todo


def show(console: Console, written: Sequence[Wanted], folder: CertificateFolder) -> None:
    for each in written:
        until = f"{ends_at(each.leaf.cert):%Y-%m-%d}"
        console.print(f"{each.leaf.path}  {', '.join(each.names)}  until {until}", soft_wrap=True)
    if not written:
        console.print(f"every certificate in {folder.path} lasts more than {RENEW_DAYS} days")
    until = f"{ends_at(folder.ca_cert):%Y-%m-%d}"
    console.print(f"CA: {folder.ca_cert}  until {until}; keep {folder.ca_key} to yourself", soft_wrap=True)


def facts(written: Sequence[Wanted], folder: CertificateFolder) -> dict[str, Any]:
    """Return the certificates that were written, and the CA, for `--json`."""
    made = [
        {"path": str(each.leaf.path), "names": list(each.names), "until": f"{ends_at(each.leaf.cert):%Y-%m-%d}"}
        for each in written
    ]
    return {"written": made, "ca": str(folder.ca_cert), "ca_until": f"{ends_at(folder.ca_cert):%Y-%m-%d}"}


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)

    async def body(console: Console) -> None:
        written, folder = write(args), CertificateFolder(args.folder)
        if args.json:
            print_json(facts(written, folder))
        else:
            show(console, written, folder)

    return run_command(body)
