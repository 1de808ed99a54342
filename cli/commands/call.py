"""`quire call`: any method of any gRPC server that has reflection, in JSON: services of Quire, and others."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import grpc
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.rpc import error_details_pb2

from cli.client import add_address
from cli.describe import describe, signature
from cli.reflection import Reflection, path_of
from common.errors import FieldViolation, InvalidRequest, NotFound, QuireError
from quire.api.channel import channel_options
from quire.api.status import RpcFailure, status_from_rpc

_EXAMPLES = """examples:
  quire call                                               the services of the server
  quire call quire.inference.v1.InferenceService           the methods of one
  quire call describe quire.types.v1.SamplingParams        the fields of a message
  quire call GetStatus
  quire call Generate '{"prompt": {"text": "Hello"}, "sampling": {"max_tokens": 8}}'
  quire call SomeClientStream - < one_document_a_line.json
"""


def parser() -> argparse.ArgumentParser:
    """Return the command's flags."""
    form = argparse.RawDescriptionHelpFormatter
    flags = argparse.ArgumentParser("quire call", description=__doc__, epilog=_EXAMPLES, formatter_class=form)
    flags.add_argument(
        "method", nargs="?", help="Method, Service/Method, a service, or `describe`; none lists services"
    )
    flags.add_argument(
        "data", nargs="?", help="the request as JSON; @FILE or - (standard input) has one or more; none is an empty one"
    )
    flags.add_argument("--timeout", type=float, help="seconds until the call is given up")
    flags.add_argument("--header", action="append", default=[], metavar="'KEY: VALUE'", help="metadata of the call")
    flags.add_argument("--defaults", action="store_true", help="print fields that have their default value too")
    add_address(flags)
    return flags


class Requests:
    """The requests of one call, from JSON; gRPC takes them on a thread of its own, so a mistake is kept for later."""

    def __init__(self, data: str, method: MethodDescriptor, pool: DescriptorPool) -> None:
        self._data, self._many, self._pool = data, method.client_streaming, pool
        self._kind = message_factory.GetMessageClass(method.input_type)
        self.mistake: InvalidRequest | None = None

    def __iter__(self) -> Iterator[Message]:
        try:
            for text in self._documents():
                yield json_format.Parse(text, self._kind(), descriptor_pool=self._pool)
        except (json_format.ParseError, OSError) as error:
            told = f"{error.filename} cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
            self.mistake = InvalidRequest(FieldViolation("request", told))
            raise self.mistake from error

    def _documents(self) -> Iterable[str]:
        """Yield one document a line where the method takes many, else everything as one."""
        if not self._many:
            return [self._text()]
        lines = sys.stdin if self._data == "-" else self._text().splitlines()
        return (line for line in lines if line.strip())

    def _text(self) -> str:
        if self._data == "-":
            return sys.stdin.read()
        return Path(self._data[1:]).read_text() if self._data.startswith("@") else self._data


def call(channel: grpc.Channel, reflection: Reflection, args: argparse.Namespace) -> None:
    """Make the call that the flags describe, and print each response as a JSON document, a line each in a stream."""
    method = reflection.method(args.method)
    requests = Requests(args.data or "{}", method, reflection.pool)
    # On the wire a call of one message is a stream of one: one kind of call serves all four.
    rpc: grpc.StreamStreamMultiCallable[Message, Message] = channel.stream_stream(
        path_of(method),
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
    )
    given = requests if method.client_streaming else list(requests)
    try:
        for response in cast("Iterable[Any]", rpc(iter(given), timeout=args.timeout, metadata=headers(args.header))):
            print(_shown(response, args.defaults, method.server_streaming, reflection.pool), flush=True)
    except grpc.RpcError:
        if requests.mistake is not None:
            raise requests.mistake from None
        raise


def _shown(response: Message, defaults: bool, line: bool, pool: DescriptorPool) -> str:
    shown: str = json_format.MessageToJson(
        response,
        indent=None if line else 2,
        preserving_proto_field_name=True,
        always_print_fields_with_no_presence=defaults,
        descriptor_pool=pool,
        ensure_ascii=False,
    )
    return shown


def headers(given: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return metadata from `key: value`. Raises InvalidRequest."""
    wrong = [each for each in given if ":" not in each]
    if wrong:
        raise InvalidRequest(*(FieldViolation("--header", f"is {each!r}; expected 'KEY: VALUE'") for each in wrong))
    pairs = (each.split(":", 1) for each in given)
    return tuple((key.strip().lower(), value.strip()) for key, value in pairs)


def failure(error: RpcFailure, address: str) -> str:
    """Return a failed RPC in words: the code, the message, and each detail on a line of its own."""
    status = status_from_rpc(error)
    if error.code() is grpc.StatusCode.UNAVAILABLE and "connect" in status.message.lower():
        return f"no server answers at {address}"
    lines = [f"{error.code().name}: {status.message}"]
    for packed in status.details:
        name = packed.type_url.rpartition("/")[2]
        kind = error_details_pb2.DESCRIPTOR.message_types_by_name.get(name.removeprefix("google.rpc."))
        if kind is None:
            lines.append(f"  {name} ({len(packed.value)} bytes)")
            continue
        detail = message_factory.GetMessageClass(kind).FromString(packed.value)
        shown = json_format.MessageToDict(detail, preserving_proto_field_name=True)
        lines.append(f"  {kind.name} {json.dumps(shown, ensure_ascii=False)}")
    return "\n".join(lines)


def described(reflection: Reflection, name: str | None) -> list[str]:
    """Return the lines of a declaration. Raises InvalidRequest and NotFound."""
    if name is None:
        raise InvalidRequest(
            FieldViolation("describe", "names nothing; expected a type, as quire.types.v1.SamplingParams")
        )
    reflection.load(name)
    try:
        return list(describe(reflection.pool, name))
    except KeyError:
        raise NotFound(f"{name} is neither a message, nor an enum, nor a service") from None


def run(args: argparse.Namespace) -> None:
    """Do what the flags ask for. Raises QuireError and grpc.RpcError."""
    with grpc.insecure_channel(args.address, options=channel_options()) as channel:
        reflection = Reflection(channel, args.timeout, headers(args.header))
        if args.method is None:
            print("\n".join(reflection.services()))
        elif args.method == "describe":
            print("\n".join(described(reflection, args.data)))
        elif args.method in reflection.services():
            print("\n".join(map(signature, reflection.service(args.method).methods)))
        else:
            call(channel, reflection, args)


def main(argv: Sequence[str]) -> int:
    """Run `quire call`."""
    args = parser().parse_args(argv)
    try:
        run(args)
    except QuireError as error:
        print(f"quire: {error}", file=sys.stderr)
        return 2
    except grpc.RpcError as error:
        print(f"quire: {failure(cast('RpcFailure', error), args.address)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0
