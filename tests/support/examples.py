"""How many examples Hypothesis tries where a test asks for more, or fewer, than the profile has."""

from __future__ import annotations

from hypothesis import settings


def up_to(count: int) -> int:
    """Return so many, or fewer at a first look (`--fast`, `make coverage`): a test's own number overrides a profile."""
    few = settings.get_current_profile_name() == "few-examples"
    return min(count, settings().max_examples) if few else count
