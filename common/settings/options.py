"""The kinds of values that options take, and the options that every service has."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def _block_size(value: int) -> int:
    if not 4 <= value <= 256 or value & (value - 1):
        raise ValueError("expected a power of two from 4 to 256")
    return value


def _address(value: str) -> str:
    host, colon, port = value.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError("expected HOST:PORT, with [..] around an IPv6 address")
    return value


def _bytes(value: object) -> object:
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", value.strip().lower())
    if match is None:
        raise ValueError("expected a number of bytes such as 512MiB, 4GiB or 1000000")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def _redis_url(value: str) -> str:
    if value and not value.startswith(("redis://", "rediss://", "unix://")):
        raise ValueError('expected redis://HOST:PORT[/DB], rediss://..., unix://PATH, or "" for none')
    return value


def _split(value: object) -> object:
    """Let an environment variable hold a list: `a:1,b:2`."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


def _one_of(*words: str) -> Callable[[str], str]:
    def check(value: str) -> str:
        if value not in words:
            raise ValueError(f"expected {', '.join(words[:-1])} or {words[-1]}")
        return value

    return check


BlockSize = Annotated[int, AfterValidator(_block_size)]
Address = Annotated[str, AfterValidator(_address)]
Addresses = Annotated[tuple[Address, ...], BeforeValidator(_split)]
Bytes = Annotated[int, BeforeValidator(_bytes), Field(gt=0)]
Port = Annotated[int, Field(ge=0, le=65535)]
RedisUrl = Annotated[str, AfterValidator(_redis_url)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Seconds = Annotated[float, Field(gt=0.0)]
Count = Annotated[int, Field(ge=1)]
DType = Annotated[str, AfterValidator(_one_of("auto", "float32", "float16", "bfloat16"))]
KvCacheDType = Annotated[str, AfterValidator(_one_of("auto", "float32", "bfloat16", "float16", "int8", "fp8"))]
Quantization = Annotated[str, AfterValidator(_one_of("none", "int8", "int4", "w8a8", "auto"))]
LogFormat = Literal["json", "text", "bare"]
LoadFormat = Literal["auto", "dummy"]
ModelImpl = Literal["auto", "native", "transformers"]
Choice = _one_of


class Settings(BaseModel):
    """Base of all option classes; immutable. A field's description is its help."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # The name of the TOML table and of the environment prefix (QUIRE_ROUTER_PORT) that concern this program alone.
    service: ClassVar[str] = ""
    # Options of which at most one may be given.
    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = ()


class ServiceSettings(Settings):
    """options of every service"""

    host: str = Field("127.0.0.1", description="address to listen on")
    redis_url: RedisUrl | None = Field(
        None, description="Redis of the prefix index and of discovery", json_schema_extra={"env": "REDIS_URL"}
    )
    state_dir: Path = Field(Path(".quire"), description="folder of files that outlive the process")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe log line shown")
    log_format: LogFormat = Field(
        "json", description="one JSON object a line; lines for people; bare: those without clock and service"
    )
    trace_sample_ratio: Fraction = Field(1.0, description="share of requests traced if the client sets no sampled flag")
    trace_endpoint: Address | None = Field(
        None, description="HOST:PORT that receives spans (OTLP over gRPC) unless OTEL_EXPORTER_OTLP_ENDPOINT is set"
    )
    drain_timeout: Seconds = Field(30.0, description="seconds that a stopping service waits for running requests")
