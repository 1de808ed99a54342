"""Options of the commands that call a router, from flags, environment and a TOML file.

They stand apart from those of `quire serve`, which take longer to import than most commands to run.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from common.settings.options import Address, TlsSettings


class ClientSettings(TlsSettings):
    """options of the commands that talk to a router"""

    service: ClassVar[str] = "client"

    address: Address = Field("127.0.0.1:50051", description="HOST:PORT of the router")
    http_address: Address = Field("127.0.0.1:8000", description="HOST:PORT of the router's HTTP port")
    ca: Path | None = Field(None, description="PEM file: the CA of the router's public ports; given, TLS is used")
    api_key: str | None = Field(None, description="API key that calls carry")
    state_dir: Path = Field(
        Path(".quire"), description="folder of `quire serve`, whose certs/operator opens the admin plane"
    )
    admin_address: Address = Field("127.0.0.1:50050", description="HOST:PORT of the router's admin plane")
