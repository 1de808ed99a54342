"""Demonstration prompts for a model of general English: a few questions, and two over one long text."""

from typing import Final

QUESTIONS: Final = (
    "Hello! Who are you?",
    "What is the capital of France?",
    "Write one sentence about the sea.",
)
ABOUT_TEXT: Final = (
    "Write one sentence about Clara Berg.",
    "Write one sentence about the island of Holm.",
)
SYSTEM_TEXT: Final = (
    "You know this text. Clara Berg is the keeper of the lighthouse on the "
    "island of Holm. The island is small: one house, one garden, a harbour for two boats, and the lighthouse, "
    "which was built of white stone in the year 1871. It has one hundred and forty steps, and Clara climbs them "
    "every evening before sunset to light the lamp. In the morning she climbs them again to put it out and to "
    "clean the glass. Between the two climbs she works in the garden, mends nets for the fishermen of the "
    "mainland, and paints small pictures of birds, which a shop in the town sells to visitors in summer. A boat "
    "comes on Mondays and Thursdays when the weather allows it. It brings flour, coffee, oil, letters and "
    "newspapers, and takes away the nets, the pictures and Clara's own letters. Her brother Jonas is the captain "
    "of the boat. He has a loud voice, a red beard and an old dog, which is called Biscuit and is afraid of "
    "seagulls. In winter the sea is often too rough for the boat, and no one comes to the island for three or "
    "four weeks. Clara does not mind. She has a shelf of two hundred books, a radio, and a grey cat that sleeps "
    "in the basket with the wool. Every night she writes the wind, the weather and the ships that passed into a "
    "large green book. The first line in it is from her grandfather, who was keeper before her mother. He wrote "
    "that a light which is seen by nobody is worth as much as a light that saves a ship, because the keeper never "
    "knows which night it is. Once, in a storm in November, a sailing boat with three students lost its mast near "
    "the rocks. They saw the light, steered for it, and reached the harbour of Holm at two in the morning. Clara "
    "gave them soup and dry clothes. Since then a parcel with chocolate and oranges comes to the island every "
    "year at the end of November, and Clara shares it with Jonas."
)
