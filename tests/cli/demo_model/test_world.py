"""The demo world: the seed fixes the text, a subject has one value a relation, and held-out facts stay held out."""

import random

import pytest

from bench.demo_model import grammar
from cli.demo_model import words, world
from cli.demo_model.world import Fact, World


def relation(key: str) -> world.Relation:
    return next(found for found in world.RELATIONS if found.key == key)


def test_a_fact_reads_as_sentence_and_question() -> None:
    fact = Fact("Anna", relation("visits"), "Oslo")
    assert fact.sentence == " Anna visits Oslo."
    assert fact.question == " Which town does Anna visit?"


def test_the_seed_fixes_the_facts() -> None:
    def drawn(seed: int) -> list[Fact | None]:
        document = World(random.Random(seed))
        return [document.fact() for _ in range(50)]

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)


def test_a_subject_has_one_value_for_a_relation() -> None:
    document = World(random.Random(1), people=words.NAMES[:5])
    facts = [fact for fact in (document.fact() for _ in range(300)) if fact]
    assert len({(fact.subject, fact.relation.key) for fact in facts}) == len(facts)


def test_an_exhausted_world_gives_none() -> None:
    document = World(random.Random(1), people=words.NAMES[:1], relations=1)
    assert None in [document.fact() for _ in range(2000)]


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_facts_are_of_the_split_that_was_asked_for(split: world.Split) -> None:
    document = World(random.Random(2))
    facts = [document.fact(split) for _ in range(200)]
    assert {fact.split for fact in facts if fact} == {split}


def test_one_fact_in_ten_is_held_out() -> None:
    visits = relation("visits")
    facts = [Fact(name, visits, town) for name in words.NAMES for town in words.TOWNS]
    share = sum(fact.split == "held_out" for fact in facts) / len(facts)
    assert 0.09 < share < 0.11


def test_numbers_have_their_digits_and_no_leading_zero() -> None:
    drawn = {world.draw_value(random.Random(seed), relation("price")) for seed in range(2000)}
    assert drawn == {str(number) for number in range(10, 100)}


def test_a_story_keeps_its_hero_and_its_grammar() -> None:
    for seed in range(50):
        story = world.story(random.Random(seed), "Anna")
        assert "Anna" in story
        assert grammar.well_formed(story)


def test_every_fact_is_well_formed() -> None:
    document = World(random.Random(5))
    assert all(grammar.well_formed(fact.sentence) for fact in (document.fact() for _ in range(300)) if fact)


@pytest.mark.parametrize(
    "text", ["", "Anna visits.", "Anna visits Oslo", "Anna eats Oslo.", "Anna visits Oslo. And", "anna visits Oslo."]
)
def test_other_text_is_not_well_formed(text: str) -> None:
    assert not grammar.well_formed(text)
