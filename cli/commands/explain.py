"""`quire explain PROMPT`: says what would happen to a prompt now; nothing is sent to a worker, and nothing reserved."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from google.protobuf.json_format import MessageToDict
from rich.console import Console

from cli.client import add_admin_address, add_json, admin_channel, print_json, run_command
from cli.views.explain import ExplainView
from common.contracts.errors import FieldViolation, InvalidRequest
from quire.client import Message, Options
from quire.client.request import request_of
from quire.decision.v1 import decision_pb2 as pb
from quire.decision.v1 import decision_pb2_grpc as rpc

# A long prompt is tokenised; the lookup in the index has a time limit of its own.
_PATIENCE_S: Final = 30.0
# Fields of a request that have a flag.
_FLAGS: Final = frozenset({"max_tokens", "n", "priority", "salt", "tenant", "deadline_seconds"})
# Keys of a body of /v1/chat/completions that count here.
_OF_BODY: Final = ("tools", "max_tokens", "n")


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser("quire explain", description=__doc__)
    flags.add_argument("prompt", nargs="?", help="a message of the user; @FILE reads a file, - standard input")
    flags.add_argument("--raw", action="store_true", help="the prompt as it is, without the chat template")
    flags.add_argument("--system", help="a system message in front of it")
    text = "messages of a chat as JSON, or a body of /v1/chat/completions (- is standard input)"
    flags.add_argument("--chat", metavar="FILE", help=text)
    flags.add_argument("--token-ids", metavar="IDS", help="token ids with spaces or commas between, or @FILE")
    flags.add_argument("--max-tokens", type=int, help="output tokens at most")
    flags.add_argument("--n", type=int, help="sequences")
    flags.add_argument("--priority", type=int, help="-100 to 100; lowered to the tenant's maximum")
    flags.add_argument("--salt", help="the request's cache_salt")
    flags.add_argument("--no-cache", action="store_true", help="the request does not use the cache")
    flags.add_argument("--deadline", type=float, default=0.0, metavar="SECONDS", help="how long the client would wait")
    flags.add_argument("--tenant", default="", help="the tenant that would send it, where tenants have keys")
    add_admin_address(flags)
    add_json(flags)
    return flags


def question_of(args: argparse.Namespace) -> pb.ExplainRequest:
    """Return what the flags ask. Raises InvalidRequest for none or several prompts, and for what cannot be read."""
    given = [name for name in ("prompt", "chat", "token_ids") if getattr(args, name) is not None]
    if len(given) != 1:
        what = f"is given {len(given)} times" if given else "is missing"
        raise InvalidRequest(FieldViolation("PROMPT", f"{what}; expected a text, --chat FILE or --token-ids IDS"))
    prompt, options = _prompt_of(args)
    chosen = {
        name: value for name in ("max_tokens", "n", "priority", "salt") if (value := getattr(args, name)) is not None
    }
    request = request_of(prompt, Options(**{**options, **chosen, "no_cache": args.no_cache or None}))  # type: ignore[typeddict-item]
    return pb.ExplainRequest(request=request, tenant=args.tenant, deadline_seconds=args.deadline)


def _prompt_of(args: argparse.Namespace) -> tuple[str | list[int] | list[Message], dict[str, Any]]:
    """Return the prompt, and the options that came with it."""
    if args.token_ids is not None:
        return token_ids_of(text_of("--token-ids", args.token_ids)), {}
    if args.chat is not None:
        return chat_of(text_of("--chat", args.chat if args.chat == "-" else f"@{args.chat}"))
    text = text_of("PROMPT", args.prompt)
    if args.raw:
        return text, {}
    system = [Message(role="system", content=args.system)] if args.system else []
    return [*system, Message(role="user", content=text)], {}


def text_of(flag: str, word: str) -> str:
    """Return a flag's text: its own, that of a file (@FILE), or standard input (-)."""
    try:
        return sys.stdin.read() if word == "-" else Path(word[1:]).read_text() if word.startswith("@") else word
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidRequest(FieldViolation(flag, f"{word.lstrip('@')} cannot be read: {why}")) from None


def token_ids_of(text: str) -> list[int]:
    """Return the numbers in a text. Raises InvalidRequest."""
    words = [word for word in re.split(r"[\s,\[\]]+", text) if word]
    wrong = next((word for word in words if not re.fullmatch(r"\d{1,9}", word)), None)
    if wrong is not None or not words:
        what = f"has {wrong[:40]!r}" if wrong is not None else "is empty"
        raise InvalidRequest(FieldViolation("--token-ids", f"{what}; expected numbers such as 12 7 530"))
    return [int(word) for word in words]


def chat_of(text: str) -> tuple[list[Message], dict[str, Any]]:
    """Return the messages in a text, and the options that stand beside them. Raises InvalidRequest."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(FieldViolation("--chat", f"is not valid JSON: {error}")) from None
    options = {name: found[name] for name in _OF_BODY if name in found} if isinstance(found, Mapping) else {}
    messages = found.get("messages") if isinstance(found, Mapping) else found
    if not isinstance(messages, list) or not messages or not isinstance(messages[0], Mapping):
        what = 'has no messages; expected [{"role": "user", "content": "..."}], or an object with "messages"'
        raise InvalidRequest(FieldViolation("--chat", what))
    return messages, options


def named_by_flags(error: InvalidRequest) -> InvalidRequest:
    """Return a refusal whose fields have the names that they have on the command line."""
    return InvalidRequest(*(replace(each, field=_on_the_command_line(each.field)) for each in error.violations))


def _on_the_command_line(field: str) -> str:
    name = field.removeprefix("request.").removeprefix("sampling.").removeprefix("cache.")
    if name in _FLAGS:
        return f"--{name.removesuffix('_seconds').replace('_', '-')}"
    return "the prompt" if name.partition(".")[0] == "prompt" else field


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)

    async def body(console: Console) -> None:
        try:
            question = question_of(args)
            async with admin_channel(args.admin_address, args.state_dir) as channel:
                answer = await rpc.DecisionServiceStub(channel).Explain(question, timeout=_PATIENCE_S)
        except InvalidRequest as refused:
            raise named_by_flags(refused) from refused
        if args.json:
            whole = MessageToDict(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
            print_json(whole)
        else:
            console.print(ExplainView(answer), soft_wrap=not console.is_terminal)

    return run_command(body)
