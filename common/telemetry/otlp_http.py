"""Delivers spans over HTTP, as OTLP has it for `http/protobuf` and `http/json`: one POST for each batch."""

from __future__ import annotations

import base64
import gzip
import json
import logging
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.util.re import parse_env_headers

from common.contracts.errors import FieldViolation, InvalidConfig

log = logging.getLogger(__name__)

GRPC, PROTOBUF, JSON = "grpc", "http/protobuf", "http/json"
_PROTOCOLS: Final = (GRPC, PROTOBUF, JSON)
_CONTENT_TYPES: Final = {PROTOBUF: "application/x-protobuf", JSON: "application/json"}
_PREFIXES: Final = ("OTEL_EXPORTER_OTLP_TRACES_", "OTEL_EXPORTER_OTLP_")
_PATH: Final = "v1/traces"
_IDS: Final = frozenset({"traceId", "spanId", "parentSpanId"})


@dataclass(frozen=True, slots=True)
class Collector:
    """Where spans go, by OpenTelemetry's variables. `headers` and the rest count over HTTP alone."""

    url: str
    protocol: str
    headers: Mapping[str, str]
    compress: bool
    context: ssl.SSLContext | None


def collector_of(environ: Mapping[str, str]) -> Collector | None:
    """Return the collector that the variables name; None without one. Raises InvalidConfig, with the variable."""
    protocol_name, protocol = _variable(environ, "PROTOCOL")
    if protocol and protocol not in _PROTOCOLS:
        what = f"is {protocol!r}; expected {', '.join(_PROTOCOLS[:-1])} or {_PROTOCOLS[-1]}"
        raise InvalidConfig(FieldViolation(protocol_name, what))
    name, url = _variable(environ, "ENDPOINT")
    if not url:
        return None
    if protocol in ("", GRPC):
        return Collector(url, GRPC, {}, False, None)
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise InvalidConfig(
            FieldViolation(name, f"is {url!r}; expected http://HOST:PORT or https://... for {protocol}")
        )
    if name == f"{_PREFIXES[1]}ENDPOINT":  # that of all signals; the one for traces names its path
        url = f"{url.rstrip('/')}/{_PATH}"
    compression_name, compression = _variable(environ, "COMPRESSION")
    if compression not in ("", "none", "gzip"):
        raise InvalidConfig(FieldViolation(compression_name, f"is {compression!r}; expected gzip or none"))
    headers = parse_env_headers(_variable(environ, "HEADERS")[1], liberal=True)
    return Collector(url, protocol, headers, compression == "gzip", _context(environ))


def _variable(environ: Mapping[str, str], what: str) -> tuple[str, str]:
    """Return the name and value of a variable, the one for traces first; "" where neither is set."""
    found = [
        (name, value) for name in (prefix + what for prefix in _PREFIXES) if (value := environ.get(name, "").strip())
    ]
    return found[0] if found else (_PREFIXES[1] + what, "")


def _context(environ: Mapping[str, str]) -> ssl.SSLContext | None:
    """Return what to trust and to show over https; None for what Python trusts."""
    name, ca = _variable(environ, "CERTIFICATE")
    own_name, own = _variable(environ, "CLIENT_CERTIFICATE")
    if not ca and not own:
        return None
    try:
        context = ssl.create_default_context(cafile=ca or None)
    except (OSError, ssl.SSLError) as error:
        raise InvalidConfig(FieldViolation(name, f"{ca}: {error}; expected a PEM file")) from None
    if own:
        try:
            context.load_cert_chain(own, _variable(environ, "CLIENT_KEY")[1] or None)
        except (OSError, ssl.SSLError) as error:
            raise InvalidConfig(FieldViolation(own_name, f"{own}: {error}; expected a PEM file, and its key")) from None
    return context


class HttpExporter(SpanExporter):
    """Sends spans to a collector; a batch that it does not take is lost. It blocks for `timeout` seconds at most."""

    def __init__(
        self,
        collector: Collector,
        request_of: Callable[[Sequence[Any]], ExportTraceServiceRequest],
        timeout: float,
        by_proxy: bool,
    ) -> None:
        self._collector, self._request_of, self._timeout = collector, request_of, timeout
        handlers: list[Any] = [] if by_proxy else [ProxyHandler({})]
        if collector.context is not None:
            handlers.append(HTTPSHandler(context=collector.context))
        self._opener = build_opener(*handlers)

    def export(self, spans: Sequence[Any]) -> SpanExportResult:
        collector = self._collector
        body = _body(self._request_of(spans), collector.protocol)
        headers = {**collector.headers, "content-type": _CONTENT_TYPES[collector.protocol]}
        if collector.compress:
            body, headers["content-encoding"] = gzip.compress(body, compresslevel=1), "gzip"
        try:
            with self._opener.open(Request(collector.url, body, headers), timeout=self._timeout) as answer:
                answer.read()
        except (OSError, HTTPException) as error:  # a refusal too
            log.debug("spans are lost: %s", error)
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS


def _body(request: ExportTraceServiceRequest, protocol: str) -> bytes:
    if protocol == PROTOBUF:
        return request.SerializeToString()
    return json.dumps(_with_hex(MessageToDict(request, use_integers_for_enums=True))).encode()


def _with_hex(value: Any) -> Any:
    """Return a message with its ids in hexadecimal, which OTLP wants and the usual JSON of protobuf has not."""
    if isinstance(value, list):
        return [_with_hex(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: base64.b64decode(each).hex() if name in _IDS and isinstance(each, str) else _with_hex(each)
        for name, each in value.items()
    }
