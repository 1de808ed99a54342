"""Quire from Python with the generated stubs alone: the same three things as client.py, over asyncio."""

import asyncio
import sys
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc as rpc
from quire.types.v1 import types_pb2 as types


def request_of(question: str, **sampling: Any) -> pb.GenerateRequest:
    """Return a request for the answer to a user's message."""
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=question)])
    return pb.GenerateRequest(prompt=pb.Prompt(chat=chat), sampling=types.SamplingParams(**sampling))


async def answer(stub: rpc.InferenceServiceStub, question: str) -> None:
    """Print an answer as it comes: one `admitted`, `tokens` as they are made, one `finished`; gRPC has the deadline."""
    worker_id = ""
    async for event in stub.Generate(request_of(question, temperature=0.0, max_tokens=32), timeout=30.0):
        match event.WhichOneof("event"):
            case "admitted":
                worker_id = event.admitted.worker_id
            case "tokens":
                print(event.tokens.text, end="", flush=True)
            case "finished":
                reason = types.FinishReason.Name(event.finished.reason).removeprefix("FINISH_REASON_").lower()
                print(f"\n{event.finished.usage.output_tokens} tokens, {reason}, from {worker_id}")


async def refusal(stub: rpc.InferenceServiceStub, question: str) -> None:
    """Print what is wrong with a request: the details of a status are a google.rpc.Status in its trailers."""
    wrong = pb.GenerateUnaryRequest(request=request_of(question, temperature=-1.0, top_p=2.0))
    try:
        await stub.GenerateUnary(wrong, timeout=30.0)
    except grpc.aio.AioRpcError as error:
        trailers = dict(error.trailing_metadata() or ())
        packed = trailers["grpc-status-details-bin"]
        assert isinstance(packed, bytes)
        bad = error_details_pb2.BadRequest()
        for detail in status_pb2.Status.FromString(packed).details:
            if detail.Unpack(bad):
                for violation in bad.field_violations:
                    print(f"refused: {violation.field} {violation.description}")


async def cancel(stub: rpc.InferenceServiceStub, question: str) -> None:
    """Cancel a stream after its first tokens."""
    call = stub.Generate(request_of(question, max_tokens=400, ignore_eos=True), timeout=30.0)
    async for event in call:
        if event.tokens.token_ids:
            print(f"cancelled after {len(event.tokens.token_ids)} tokens")
            break
    call.cancel()


async def main(address: str, question: str) -> None:
    """Ask one router a question, three times in different ways."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = rpc.InferenceServiceStub(channel)
        await answer(stub, question)
        await refusal(stub, question)
        await cancel(stub, question)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
