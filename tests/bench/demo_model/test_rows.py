"""Training rows: what is weighed, what counts as recalled, and that no held-out fact is ever stated."""

import random
import re

import pytest
from tokenizers import Tokenizer

from bench.demo_model import probes, rows
from bench.demo_model.tokenizer import Encoder
from cli.demo_model import CHECKPOINT, words, world
from cli.demo_model.world import Fact


def relation(key: str) -> world.Relation:
    return next(found for found in world.RELATIONS if found.key == key)


@pytest.fixture(scope="module")
def encode() -> Encoder:
    return Encoder(Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json")))


def test_the_seed_fixes_a_row(encode: Encoder) -> None:
    assert rows.draw(random.Random(8), encode, 128).ids == rows.draw(random.Random(8), encode, 128).ids


@pytest.mark.parametrize("length", [64, 500])
def test_a_row_is_at_most_as_long_as_asked(encode: Encoder, length: int) -> None:
    for seed in range(30):
        row = rows.draw(random.Random(seed), encode, length)
        assert len(row.ids) == len(row.weights) == len(row.recalled) <= length


def test_only_the_value_of_a_recalled_fact_counts(encode: Encoder) -> None:
    row = rows.Row(encode)
    row.recall(Fact("lamp", relation("price"), "42"), rows.ANSWER_WEIGHT)
    stated = [row.encode.tokenizer.id_to_token(i) for i, hit in zip(row.ids, row.recalled, strict=True) if hit]
    assert stated == ["4", "2"]
    assert row.ids == encode(" The lamp costs 42 coins.")


def test_a_chat_asks_only_for_what_it_stated(encode: Encoder) -> None:
    for seed in range(20):
        text = encode.tokenizer.decode(rows.chat(random.Random(seed), encode, 600).ids, skip_special_tokens=False)
        answers = re.findall(r"<\|assistant\|>( \w+ visits \w+\.)<\|end\|>", text)
        assert all(text.index(answer) < text.index("<|assistant|>" + answer) for answer in answers)


def test_no_held_out_fact_is_ever_stated(encode: Encoder) -> None:
    visits = relation("visits")
    stated: set[tuple[str, str]] = set()
    for seed in range(300):
        ids = rows.draw(random.Random(seed), encode, 256).ids
        stated |= set(re.findall(r"(\w+) visits (\w+)\.", encode.tokenizer.decode(ids)))
    facts = [Fact(name, visits, town) for name, town in stated if name in words.NAMES]
    assert len(facts) > 100
    assert {fact.split for fact in facts} == {"train"}


@pytest.mark.parametrize("distance", [64, 700])
def test_a_probe_asks_for_a_held_out_fact_at_its_distance(encode: Encoder, distance: int) -> None:
    for seed in range(20):
        probe = probes.draw(random.Random(seed), encode, distance, 1.0)
        assert probe.fact.split == "held_out"
        assert distance <= probe.distance <= distance + 12
        assert (
            encode(probe.fact.value if probe.fact.relation.digits else f" {probe.fact.value}")[-1]
            == (probe.context[probe.value_at])
        )
