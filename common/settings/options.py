"""The kinds of values that options take, and the options that every service has."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from common.addresses.host_port import bare_host, checked_redis_url, is_tls_url
from common.contracts.errors import FieldViolation
from common.contracts.limits import MAX_METRICS_TENANTS
from common.cpu_list import cpus_of
from common.untrusted.ids import ID_WORDS, is_id

# What other engines call our types.
_URL_PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)+")
_DTYPE_NAMES = {"half": "float16", "float": "float32"}
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

# A port each, and more than any machine has cores.
_MOST_PROCESSES = 4096


def _block_size(value: int) -> int:
    if not 4 <= value <= 256 or value & (value - 1):
        raise ValueError("expected a power of two from 4 to 256")
    return value


def checked_address(value: str) -> str:
    """Return an address as it is. Raises ValueError when it is not HOST:PORT."""
    host, colon, port = value.rpartition(":")
    if not (
        colon and host and "/" not in host and _is_host_of_address(host) and port.isdecimal() and 0 < int(port) < 65536
    ):
        raise ValueError("expected HOST:PORT, with [..] around an IPv6 address")
    return value


def _is_host_of_address(host: str) -> bool:
    """Return whether a host is a name or an IPv4 address, or an IPv6 address in brackets."""
    if not host.startswith("["):
        return ":" not in host and "]" not in host
    try:
        ipaddress.IPv6Address(host.removeprefix("[").removesuffix("]").partition("%")[0])
    except ValueError:
        return False
    return host.endswith("]")


def _network(value: str) -> str:
    try:
        ipaddress.ip_network(value)
    except ValueError:
        if "/" in value or not value.strip("."):
            raise ValueError("expected an address with its length such as 10.0.0.0/8, a host, or .DOMAIN") from None
    return value


def _bytes(value: object) -> object:
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", value.strip().lower())
    if match is None:
        raise ValueError("expected a number of bytes such as 512MiB, 4GiB or 1000000")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def _count(value: object) -> object:
    """Let a count have a unit: 8k is 8000, 8Ki is 8192, 1.5M is 1500000; any other text is left as it is."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]i?)", value.strip().lower()) if isinstance(value, str) else None
    if match is None:
        return value
    whole, rest = divmod(Decimal(match[1]) * _UNITS[match[2]], 1)
    return value if rest else int(whole)


def _count_or_auto(value: object) -> object:
    if value == "auto":
        return value
    try:
        count = int(str(_count(value)))
    except ValueError:
        count = 0
    if not 1 <= count <= _MOST_PROCESSES:
        raise ValueError(f"expected a whole number from 1 to {_MOST_PROCESSES}, or auto")
    return count


def _cpus(value: str) -> str:
    try:
        found = cpus_of(value)
    except ValueError:
        found = frozenset()
    if not found:
        raise ValueError("expected numbers and ranges of cpus such as 0-7,16-23")
    return value


def _duration(value: object) -> object:
    """Let seconds have a unit: 90s, 30m, 12h or 7d."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])?", value.strip().lower())
    if match is None:
        raise ValueError("expected seconds, or a span of time such as 30m, 12h or 7d")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}[match[2] or ""]


def _dtype(value: object) -> object:
    return _DTYPE_NAMES.get(value, value) if isinstance(value, str) else value


def _url_prefix(value: str) -> str:
    if value and not _URL_PREFIX.fullmatch(value):
        raise ValueError("expected a path such as /quire or /models/one, without a slash at its end")
    return value


def _id(value: str) -> str:
    if not is_id(value):
        raise ValueError(f"expected {ID_WORDS}")
    return value


def _tokenizer_folder(value: Path) -> Path:
    if not (value / "tokenizer.json").is_file():
        raise ValueError("expected a folder with a tokenizer.json")
    return value


def _file(value: Path) -> Path:
    if not value.is_file():
        raise ValueError("expected a file of this machine")
    return value


def _split(value: object) -> object:
    """Let an environment variable hold a list: `a:1,b:2`."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


def _split_each(value: object) -> object:
    """Let a flag hold a list too, where no element has a comma: `--manager a:1,b:2`."""
    if isinstance(value, list | tuple):
        return [part.strip() for each in value for part in str(each).split(",") if part.strip()]
    return _split(value)


def one_of(*words: str) -> Callable[[str], str]:
    """Return a validator that takes these words alone."""

    def check(value: str) -> str:
        if value not in words:
            raise ValueError(f"expected {', '.join(words[:-1])} or {words[-1]}")
        return value

    return check


# An address to listen on, without the brackets that an IPv6 address may be given with.
UrlPrefix = Annotated[str, AfterValidator(_url_prefix)]
Host = Annotated[str, AfterValidator(bare_host)]
BlockSize = Annotated[int, AfterValidator(_block_size)]
Address = Annotated[str, AfterValidator(checked_address)]
Network = Annotated[str, AfterValidator(_network)]
Addresses = Annotated[tuple[Address, ...], BeforeValidator(_split_each)]
WorkerId = Annotated[str, AfterValidator(_id)]
Networks = Annotated[tuple[Network, ...], BeforeValidator(_split)]
Bytes = Annotated[int, BeforeValidator(_bytes), Field(gt=0)]
Port = Annotated[int, Field(ge=0, le=65535)]
TokenizerFolder = Annotated[Path, AfterValidator(_tokenizer_folder)]
ExistingFile = Annotated[Path, AfterValidator(_file)]
RedisUrl = Annotated[str, AfterValidator(checked_redis_url)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Seconds = Annotated[float, Field(gt=0.0)]
Duration = Annotated[float, BeforeValidator(_duration), Field(gt=0.0, allow_inf_nan=False)]
Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_split)]
Count = Annotated[int, BeforeValidator(_count), Field(ge=1)]
MetricsTenants = Annotated[int, Field(ge=0, le=MAX_METRICS_TENANTS)]
CountOrAuto = Annotated[int | Literal["auto"], BeforeValidator(_count_or_auto)]
Cpus = Annotated[str, AfterValidator(_cpus)]
DType = Annotated[str, BeforeValidator(_dtype), AfterValidator(one_of("auto", "float32", "float16", "bfloat16"))]
KvCacheDType = Annotated[
    str, BeforeValidator(_dtype), AfterValidator(one_of("auto", "float32", "bfloat16", "float16", "int8", "fp8"))
]
Quantization = Annotated[str, AfterValidator(one_of("none", "int8", "int4", "w8a8", "auto"))]
_X86_LEVELS = ("avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx")
CpuLevel = Annotated[str, AfterValidator(one_of("auto", "scalar", *_X86_LEVELS, "neon", "neon_dotprod"))]
Speculative = Annotated[str, AfterValidator(one_of("none", "ngram", "draft"))]
LogFormat = Literal["json", "text", "bare"]
LoadFormat = Literal["auto", "dummy"]
DrainMode = Literal["finish", "migrate"]
DisaggregationMode = Literal["none", "prefill", "decode"]
RemotePrefillMode = Literal["auto", "off", "always"]
MetricsAlias = Literal["none", "vllm"]
ModelImpl = Literal["auto", "native", "transformers"]
Choice = one_of


class Settings(BaseModel):
    """Base of all option classes; immutable. A field's description is its help."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # The name of the TOML table and of the environment prefix (QUIRE_ROUTER_PORT) that concern this program alone.
    service: ClassVar[str] = ""
    # The option that a word without a flag sets; "" where such a word is a mistake.
    positional: ClassVar[str] = ""
    # Options of which at most one may be given.
    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = ()

    def problems(self) -> Iterator[FieldViolation]:
        """Yield what is wrong with options that are right one by one."""
        yield from ()


class TlsSettings(Settings):
    """options of TLS between services"""

    tls_cert: Path | None = Field(
        None, description="PEM file: this service's certificate, which names its role; read again when it changes"
    )
    tls_key: Path | None = Field(None, description="PEM file: the key of the certificate")
    tls_ca: Path | None = Field(None, description="PEM file: the CA that signs the certificates of all services")
    insecure: bool = Field(
        False, description="allow plain text, without any identity, between services that are not on one machine"
    )

    def problems(self) -> Iterator[FieldViolation]:
        yield from super().problems()
        yield from together(self, "tls_cert", "tls_key", "tls_ca")

    def beyond_loopback(self, flag: str, hosts: Iterable[str]) -> Iterator[FieldViolation]:
        """Yield a violation for each host that plain text would reach, unless --insecure or TLS is given."""
        if self.insecure or self.tls_cert or self.tls_key or self.tls_ca:
            return
        for host in hosts:
            if not is_loopback(host):
                instead = "--tls-cert, --tls-key and --tls-ca (`quire certs` makes them), or --insecure"
                yield FieldViolation(flag, f"is {host!r}, beyond loopback, without TLS; expected {instead}")


def together(settings: Settings, *keys: str) -> Iterator[FieldViolation]:
    """Yield a violation for each missing option of a group that is given as a whole or not at all."""
    missing = [key for key in keys if getattr(settings, key) is None]
    if 0 < len(missing) < len(keys):
        given = next(key for key in keys if key not in missing)
        for key in missing:
            flag, other = (f"--{each.replace('_', '-')}" for each in (key, given))
            yield FieldViolation(flag, f"is missing; expected together with {other}")


def is_loopback(host: str) -> bool:
    """Return whether what is sent to a host stays on this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def host_of(address: str) -> str:
    """Return the host of HOST:PORT."""
    return address.rpartition(":")[0]


class ServiceSettings(TlsSettings):
    """options of every service"""

    host: Host = Field("127.0.0.1", description="address to listen on")
    redis_url: RedisUrl | None = Field(
        None, description="Redis of the prefix index and of discovery", json_schema_extra={"env": "REDIS_URL"}
    )
    redis_ca: Path | None = Field(
        None, description="PEM file: the CA of a rediss:// Redis; unset: those that this machine trusts"
    )
    state_dir: Path = Field(Path(".quire"), description="folder of files that outlive the process")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe log line shown")
    log_format: LogFormat = Field(
        "json", description="one JSON object a line; lines for people; bare: those without clock and service"
    )
    trace_sample_ratio: Fraction = Field(1.0, description="share of requests that are traced")
    trace_endpoint: Address | None = Field(
        None, description="HOST:PORT that receives spans (OTLP over gRPC), beside OTEL_EXPORTER_OTLP_ENDPOINT"
    )
    drain_timeout: Seconds = Field(30.0, description="seconds that a stopping service waits for running requests")
    stall_timeout: Seconds = Field(
        30.0,
        description="seconds for which work may wait while nothing goes on and nothing explains it; then health is "
        "NOT_SERVING with the reason, until work goes on (a manager serves on and shows it)",
    )

    def problems(self) -> Iterator[FieldViolation]:
        yield from super().problems()
        flag, host = self.internal_host()
        yield from self.beyond_loopback(flag, [host])
        if self.redis_ca is not None and self.redis_url and not is_tls_url(self.redis_url):
            yield FieldViolation("--redis-ca", "has no effect; expected it with a --redis-url of rediss://...")

    def internal_host(self) -> tuple[str, str]:
        """Return the option that names where this service listens for other services, and its value."""
        return "--host", self.host
