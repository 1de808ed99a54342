"""Training's parts: the drafted first weights already recall, longer rows open in turn, and a step learns."""

import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from bench.demo_model import network, rows
from bench.demo_model.tokenizer import Encoder
from bench.demo_model.train import LENGTHS, Curriculum, Options, Trainer
from cli.demo_model import CHECKPOINT


@pytest.fixture(scope="module")
def encode() -> Encoder:
    return Encoder(Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json")))


def recall(model: Qwen3ForCausalLM, row: rows.Row) -> float:
    with torch.inference_mode():
        logits = model(torch.tensor([row.ids])).logits[0]
    guesses: list[int] = logits.argmax(-1).tolist()
    asked = [i for i, stated in enumerate(row.recalled) if stated]
    return sum(guesses[i - 1] == row.ids[i] for i in asked) / len(asked)


def test_the_drafted_weights_find_what_two_words_led_to(encode: Encoder) -> None:
    torch.manual_seed(0)
    vocabulary = encode.tokenizer.get_vocab_size()
    model = network.build(network.configuration(vocabulary, pad=0, bos=1, eos=5))
    stated = [rows.triples(random.Random(seed), encode, 256).cut(256) for seed in range(4)]
    assert sum(recall(model, row) for row in stated) / len(stated) > 0.8


def test_noise_alone_finds_nothing(encode: Encoder) -> None:
    torch.manual_seed(0)
    vocabulary = encode.tokenizer.get_vocab_size()
    model = network.build(network.configuration(vocabulary, pad=0, bos=1, eos=5), drafted=False)
    assert recall(model, rows.triples(random.Random(0), encode, 256).cut(256)) < 0.1


def test_good_recall_opens_longer_rows() -> None:
    curriculum = Curriculum()
    for _ in range(20):
        curriculum.note(LENGTHS[0], 0.99, elapsed=0.0)
    assert curriculum.level == 1


def test_poor_recall_keeps_rows_short_until_time_opens_them() -> None:
    curriculum = Curriculum()
    for _ in range(40):
        curriculum.note(LENGTHS[0], 0.5, elapsed=0.0)
    assert curriculum.level == 0
    for _ in range(10):
        curriculum.note(LENGTHS[0], 0.5, elapsed=0.9)
    assert curriculum.level == len(LENGTHS) - 1


def test_lengths_are_drawn_from_the_open_ones() -> None:
    rng = random.Random(0)
    assert {Curriculum(level=2).draw(rng) for _ in range(100)} == set(LENGTHS[:3])


def test_training_leaves_a_checkpoint_without_a_second_embedding(tmp_path: Path) -> None:
    trainer = Trainer(Options(tmp_path, minutes=0.01, processes=1, tokens=256, seed=0), rank=0)
    trainer.run()
    trainer.save(tmp_path)
    loaded = Qwen3ForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    weights = sum(weight.numel() for weight in loaded.parameters())  # tied: counted once
    assert (tmp_path / "model.safetensors").stat().st_size < 2 * weights + 10_000
