"""Quire from Python with its client library: a streamed answer, a refusal by field, and a stream that is cancelled."""

import sys

from quire.client import Client, InvalidRequest, Message


def main(address: str, question: str) -> None:
    """Ask one router a question, three times in different ways."""
    chat = [Message(role="user", content=question)]
    with Client(address, timeout=30.0) as client:
        # A stream yields text as it is made; at its end it has the whole answer, and what it cost.
        with client.stream(chat, temperature=0.0, max_tokens=32) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
        answer = stream.completion
        print(f"\n{answer.usage.output_tokens} tokens, {answer.finish_reason}, from {answer.worker_id}")

        # Errors are exceptions of one tree; a refused request names every wrong field at once.
        try:
            client.generate(chat, temperature=-1.0, top_p=2.0)
        except InvalidRequest as refused:
            for violation in refused.violations:
                print(f"refused: {violation.field} {violation.description}")

        # Leaving a stream cancels it: the worker stops within two steps and has its memory back.
        with client.stream(chat, max_tokens=400, ignore_eos=True) as stream:
            next(stream)
        print(f"cancelled after {len(stream.completion.token_ids)} tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])
