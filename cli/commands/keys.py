"""`quire keys TENANT`: makes an API key, shows it once, and prints the hash that the file of tenants takes.

The file of tenants (--tenants) holds hashes alone, so a lost key is replaced, not found.
Routers read a changed file again within a second.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console

from cli.client import add_json, path_of, print_json, run_command
from common.contracts.errors import FieldViolation, InvalidRequest
from router.tenants.keys import hash_of, new_key

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser("quire keys", description=__doc__)
    flags.add_argument("tenant", help="letters, digits, dots, hyphens and underscores; at most 64")
    flags.add_argument("--append", type=path_of, metavar="FILE", help="add the tenant to this file, which may be new")
    add_json(flags)
    return flags


def table_of(tenant: str, key: str) -> str:
    """Return the table of a new tenant in TOML."""
    return f'[tenants."{tenant}"]\nkeys = ["{hash_of(key)}"]\n'


def append_tenant(path: Path, tenant: str, key: str) -> None:
    """Add a tenant to a file. Raises InvalidRequest when it is there already, or the file is of no use."""
    try:
        before = path.read_text() if path.exists() else ""
        known = tomllib.loads(before).get("tenants", {})
    except OSError as error:
        raise InvalidRequest(FieldViolation("--append", f"{path} cannot be read: {error.strerror}")) from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidRequest(FieldViolation("--append", f"{path} is not a TOML file of tenants: {error}")) from None
    if not isinstance(known, dict):
        what = f"{path} is not a file of tenants: `tenants` must be a table; expected tables such as [tenants.red]"
        raise InvalidRequest(FieldViolation("--append", what))
    if tenant in known:
        what = f"{path} has tenant {tenant}; leave --append out and add the hash to its keys"
        raise InvalidRequest(FieldViolation("tenant", what))
    gap = "\n" if before and not before.endswith("\n\n") else ""
    try:
        with path.open("a") as file:
            file.write(gap + table_of(tenant, key))
    except OSError as error:
        what = f"{path} cannot be written: {error.strerror}; name a file in a folder that is there"
        raise InvalidRequest(FieldViolation("--append", what)) from None


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)

    async def body(console: Console) -> None:
        if not _NAME.fullmatch(args.tenant):
            what = f"is {args.tenant!r}; expected letters, digits, dots, hyphens and underscores, 64 at most"
            raise InvalidRequest(FieldViolation("tenant", what))
        key = new_key()
        if args.append is not None:
            append_tenant(args.append, args.tenant, key)
        if args.json:
            print_json({"tenant": args.tenant, "key": key, "hash": hash_of(key)})
            return
        if args.append is None:
            console.print(table_of(args.tenant, key), markup=False, soft_wrap=True)
        console.print(f"{key}   (the key: shown once)", markup=False, soft_wrap=True)

    return run_command(body)
