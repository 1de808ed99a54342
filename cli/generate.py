"""`quire generate "..."`: streams an answer to the terminal, and says in one line where its time went."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import grpc
from rich.console import Console

from cli.client import add_address, router_channel, run_command
from common.errors import DeadlineExceeded
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc as rpc
from quire.types.v1 import types_pb2 as types


def parser() -> argparse.ArgumentParser:
    """Return the command's flags."""
    flags = argparse.ArgumentParser("quire generate", description=__doc__)
    flags.add_argument("prompt", help="the text; - reads it from standard input")
    flags.add_argument("--system", help="a system message in front of it")
    flags.add_argument("--raw", action="store_true", help="complete the text as it is, without the chat template")
    flags.add_argument("--max-tokens", type=int, help="output tokens at most")
    flags.add_argument("--temperature", type=float, help="0 is greedy")
    flags.add_argument("--seed", type=int, help="the same seed draws the same tokens")
    flags.add_argument("--timeout", type=float, help="seconds until the request is given up")
    flags.add_argument("--quiet", action="store_true", help="print the answer alone")
    add_address(flags)
    return flags


def request_of(args: argparse.Namespace) -> pb.GenerateRequest:
    """Return the request that the flags describe."""
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    if args.raw:
        prompt = pb.Prompt(text=text)
    else:
        messages = [pb.ChatMessage(role="user", content=text)]
        if args.system:
            messages.insert(0, pb.ChatMessage(role="system", content=args.system))
        prompt = pb.Prompt(chat=pb.Chat(messages=messages))
    sampling = types.SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed)
    return pb.GenerateRequest(prompt=prompt, sampling=sampling)


async def stream_answer(
    channel: grpc.aio.Channel, request: pb.GenerateRequest, console: Console, timeout: float | None = None
) -> tuple[pb.Admitted, pb.Finished]:
    """Print the text of an answer as it comes; return how it began and how it ended.

    Raises DeadlineExceeded, with how far it came, when it has not ended after `timeout` seconds.
    """
    admitted, finished, tokens, begun = pb.Admitted(), pb.Finished(), 0, False
    try:
        async for event in rpc.InferenceServiceStub(channel).Generate(request, timeout=timeout):
            match event.WhichOneof("event"):
                case "admitted":
                    admitted = event.admitted
                case "tokens":
                    tokens += len(event.tokens.token_ids)
                    text = event.tokens.text if begun else event.tokens.text.lstrip()
                    begun = begun or bool(text)
                    console.print(text, end="", markup=False, soft_wrap=True)
                case "finished":
                    finished = event.finished
    except grpc.aio.AioRpcError as error:
        if timeout is None or error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
        raise DeadlineExceeded(_gave_up(timeout, tokens, admitted, error.details() or "")) from error
    finally:
        if begun:
            console.print()
    return admitted, finished


def _gave_up(timeout: float, tokens: int, admitted: pb.Admitted, details: str) -> str:
    """Return how far a request came; what the router says matters where it refused to begin."""
    if not admitted.trace_id:
        return f"not begun within --timeout {timeout:g} s: {details}"
    return f"gave up after --timeout {timeout:g} s with {tokens} output tokens; quire trace {admitted.trace_id}"


def summary(admitted: pb.Admitted, finished: pb.Finished) -> str:
    """Return one line: tokens, cache, times, worker, and how to see more."""
    timings, usage = finished.timings, finished.usage
    reason = types.FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_").lower()
    return (
        f"{admitted.prompt_tokens} prompt tokens, {usage.cached_tokens} cached; {usage.output_tokens} output tokens "
        f"({reason}); first token {1e3 * timings.time_to_first_token:.1f} ms, "
        f"then {1e3 * timings.time_per_output_token:.1f} ms each; {admitted.worker_id}; quire trace {admitted.trace_id}"
    )


def main(argv: Sequence[str]) -> int:
    """Run `quire generate`."""
    args = parser().parse_args(argv)

    async def body(console: Console) -> None:
        async with router_channel(args.address) as channel:
            admitted, finished = await stream_answer(channel, request_of(args), console, args.timeout)
        if not args.quiet:
            console.print(summary(admitted, finished), style="dim", soft_wrap=True)

    return run_command(body)
