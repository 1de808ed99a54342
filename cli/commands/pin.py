"""`quire pin`: keeps the beginning of prompts cached on every worker that computes it, such as a system prompt.

Full blocks of the beginning are kept, behind all other cached blocks. The KV manager and Redis get hashes, no text.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from google.protobuf.json_format import MessageToDict
from rich.console import Console

from cli.client import add_admin_address, add_json, admin_channel, print_json, run_command, unheard_in_words
from cli.commands.explain import chat_of, text_of, token_ids_of
from common.contracts.errors import FieldViolation, InvalidRequest
from quire.client import Message, Options
from quire.client.request import request_of
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc as rpc

# A prompt may be computed on many workers, one after the other.
_PATIENCE_S: Final = 600.0
# Flags of the fields of a request that the router may refuse.
_FLAGS: Final = {
    "name": "--name",
    "tenant": "--tenant",
    "duration": "--for",
    "compute_on": "--compute",
    "worker_id": "--worker",
    "cache.salt": "--salt",
    "cache.shared_domain": "--shared-domain",
}
_KINDS: Final = ("system", "chat", "text", "token_ids")


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser("quire pin", description=__doc__)
    add_prompt(flags)
    flags.add_argument("--name", default="", help="name of the pin; default: one that is made of the prompt")
    text = "how long it stays pinned; default: until it is unpinned"
    flags.add_argument("--for", dest="duration", type=float, metavar="SECONDS", help=text)
    flags.add_argument("--compute", type=int, default=0, metavar="N", help="compute it on so many workers now")
    add_admin_address(flags)
    add_json(flags)
    return flags


def add_prompt(flags: argparse.ArgumentParser) -> None:
    """Add the flags that say which prompts are meant: their beginning, and whose they are."""
    flags.add_argument("--system", metavar="TEXT", help="a system message; @FILE reads a file, - standard input")
    text = "messages of a chat as JSON, or a body of /v1/chat/completions with tools (- is standard input)"
    flags.add_argument("--chat", metavar="FILE", help=text)
    flags.add_argument("--text", help="the beginning as it is, without the chat template; @FILE, -")
    flags.add_argument("--token-ids", metavar="IDS", help="token ids with spaces or commas between, or @FILE")
    flags.add_argument("--tenant", default="", help="the tenant whose prompts begin so, where tenants have keys")
    flags.add_argument("--salt", default="", help="the cache_salt of these prompts")
    flags.add_argument("--shared-domain", default="", help="the shared domain of these prompts")


def question_of(args: argparse.Namespace) -> pb.PinRequest:
    """Return what the flags ask. Raises InvalidRequest."""
    if not 0 <= args.compute < 1 << 31:
        raise InvalidRequest(FieldViolation("--compute", f"is {args.compute}; expected a number of workers"))
    return pb.PinRequest(
        prompt=prompt_of(args),
        tenant=args.tenant,
        cache=cache_of(args),
        name=args.name,
        duration=args.duration,
        compute_on=args.compute,
    )


def prompt_of(args: argparse.Namespace) -> pb.Prompt:
    """Return the beginning that the flags of `add_prompt` name. Raises InvalidRequest."""
    given = [name for name in _KINDS if getattr(args, name) is not None]
    if len(given) != 1:
        what = f"{len(given)} of them are given; expected one"
        raise InvalidRequest(FieldViolation("--system, --chat, --text, --token-ids", what))
    prompt, options = _content_of(args)
    tools = {name: value for name, value in options.items() if name == "tools"}
    return request_of(prompt, Options(**tools)).prompt  # type: ignore[typeddict-item]


def cache_of(args: argparse.Namespace) -> pb.CacheOptions:
    return pb.CacheOptions(salt=args.salt, shared_domain=args.shared_domain)


def _content_of(args: argparse.Namespace) -> tuple[str | list[int] | list[Message], dict[str, Any]]:
    if args.token_ids is not None:
        return token_ids_of(text_of("--token-ids", args.token_ids)), {}
    if args.chat is not None:
        return chat_of(text_of("--chat", args.chat if args.chat == "-" else f"@{args.chat}"))
    if args.text is not None:
        return text_of("--text", args.text), {}
    return [Message(role="system", content=text_of("--system", args.system))], {}


def named_by_flags(error: InvalidRequest) -> InvalidRequest:
    """Return a refusal whose fields have the names that they have on the command line."""
    return InvalidRequest(*(replace(each, field=_on_the_command_line(each.field)) for each in error.violations))


def _on_the_command_line(field: str) -> str:
    if field.partition(".")[0] == "prompt":
        return "the prompt"
    return _FLAGS.get(field, field)


def in_words(answer: pb.PinResponse, wanted: int, now: float) -> str:
    end = f"for {answer.expires - now:.0f} s" if answer.HasField("expires") else "until it is unpinned"
    lines = [f"pinned {answer.name}: {answer.num_blocks} blocks of {answer.num_tokens} tokens, {end}"]
    if wanted:
        lines.append(f"  computed on {', '.join(answer.computed_on) or 'no worker'}")
    if answer.not_computed:
        lines.append(f"  not on more: {answer.not_computed}")
    if not answer.durable:
        lines.append("  there is no Redis: the pin ends with the KV manager")
    lines += unheard_in_words(answer.unheard_managers, "it keeps the pin")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)

    async def body(console: Console) -> None:
        try:
            question = question_of(args)
            async with admin_channel(args.admin_address, args.state_dir) as channel:
                answer = await rpc.InferenceServiceStub(channel).Pin(question, timeout=_PATIENCE_S)
        except InvalidRequest as refused:
            raise named_by_flags(refused) from refused
        if args.json:
            whole = MessageToDict(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
            print_json(whole)
        else:
            console.print(in_words(answer, args.compute, time.time()), markup=False)

    return run_command(body)
