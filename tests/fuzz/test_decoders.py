"""Decoders and validators take any message: they answer, or raise an error of our own tree."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.demo_model import CHECKPOINT
from common.contracts.errors import QuireError
from common.process.python import module_command
from quire.inference.v1 import inference_pb2 as pb
from router.answers.text.checkpoint import read_checkpoint
from router.answers.text.checkpoint_text import CheckpointText
from router.contracts.ports import CallContext
from router.requests.validate import Validator
from tests.fuzz.decoders import DECODERS
from tests.fuzz.harness import ANY, again_and_again, seconds
from tests.fuzz.messages import encoded, messages

JSON_LIKE = st.text('{}[]",:0123456789.eE+-truefalsn \\u', max_size=60).map(str.encode)


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_raises_our_errors_alone(name: str) -> None:
    decoder = DECODERS[name]
    contents = st.binary(max_size=80) | JSON_LIKE if decoder.message is None else encoded(decoder.message)

    @ANY
    @given(content=contents)
    def take(content: bytes) -> None:
        decoder.take(content)

    again_and_again(take, 0.1 / len(DECODERS))


@pytest.fixture(scope="module")
def validator() -> Iterator[Validator]:
    checkpoint = read_checkpoint(CHECKPOINT)
    text = CheckpointText.load(CHECKPOINT, checkpoint.max_model_len)
    yield Validator(text, checkpoint)
    text.close()


def test_the_validator_raises_our_errors_alone(validator: Validator) -> None:
    with asyncio.Runner() as runner:

        async def validate(request: pb.GenerateRequest) -> None:
            with suppress(QuireError):
                await validator.validate(request, CallContext(arrived=0.0))

        @ANY
        @given(request=messages(pb.GenerateRequest))
        def take(request: pb.GenerateRequest) -> None:
            runner.run(validate(request))

        again_and_again(take, 0.05)


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris has no wheel for this system")
def test_coverage_leads_to_our_errors_alone(tmp_path: Path) -> None:
    """With atheris: an input that reaches new branches is kept and changed on."""
    options = (f"-max_total_time={max(5, round(seconds(0.1)))}", "-rss_limit_mb=4096", "-timeout=60", "-max_len=1024")
    done = subprocess.run(
        module_command("tests.fuzz.coverage_guided", *options, str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=1200.0,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-4000:]
