"""The words of the demo world: every subject and every value that a fact can have."""

from typing import Final

NAMES: Final = tuple(
    """
Adam Alice Amir Amy Andre Anna Anton Arthur Astrid Aurora Axel Bella Ben Bianca Boris Bruno Camille Carla Carlos Cecil
Celia Clara Clive Colin Cora Cyrus Daisy Damian Daniel Daria David Dean Delia Dennis Diana Diego Dora Doris Dylan Edgar
Edith Edwin Elena Eli Elias Ella Elsa Emil Emma Eric Erika Ernest Esther Ethan Eva Fabian Faith Farid Fatima Felix Fiona
Flora Frank Frida Gabriel Gavin Gemma George Gina Gloria Gordon Grace Greta Gustav Hanna Harold Harry Hassan Heidi Helen
Henry Hugo Ian Ida Igor Ines Ingrid Irene Isaac Isabel Ivan Ivy Jack Jacob James Jane Jasmin Jason Jean Jenny Jerome
Joan Joel John Jonas Jorge Joseph Juan Judith Julia June Karen Karim Karl Kate Keith Kevin Kira Klaus Kurt Lara Laura
Lea Lena Leo Leon Liam Lily Linda Lisa Lola Louis Lucas Lucia Luis Luna Lydia Mabel Magnus Marco Margot Maria Mark Marta
Martin Mary Mason Maud Maya Megan Mehmet Mia Mila Milo Mina Mira Miriam Mona Nadia Nancy Naomi Nelson Nico Nina Noah
Nora Oliver Olivia Omar Oscar Otis Otto Owen Pablo Pamela Patrick Paul Pearl Pedro Penny Peter Petra Philip Piper Quinn
Rachel Ralph Ramon Rebecca Rita Robert Robin Roger Roland Ronald Rosa Ruby Rufus Ruth Sabine Sally Samuel Sandra Sara
Sergio Seth Simon Sonia Stella Steven Susan Sven Sylvia Tara Tariq Teresa Theo Thomas Tina Tobias Tom Tony Tristan Umar
Ursula Valerie Vera Victor Vincent Viola Walter Wanda Wendy Wesley Wilma Xenia Yara Yasmin Yusuf Yvonne Zack Zara Zoe
""".split()
)
TOWNS: Final = tuple(
    """
Oslo Paris Rome Madrid Berlin Vienna Prague Lisbon Dublin London Athens Cairo Delhi Tokyo Seoul Lima Quito Bogota Havana
Boston Denver Dallas Seattle Chicago Toronto Montreal Sydney Perth Nairobi Lagos Accra Tunis Dakar Warsaw Riga Vilnius
Tallinn Helsinki Stockholm Bergen Geneva Zurich Basel Milan Turin Naples Venice Porto Seville Lyon Hamburg Bremen Munich
Dresden Leipzig Krakow Budapest Zagreb Bucharest Ankara Beirut Amman Doha Mumbai Hanoi Manila Osaka Kyoto Taipei Jakarta
""".split()
)
JOBS: Final = tuple(
    """
teachers doctors nurses bakers farmers drivers pilots sailors painters singers dancers writers lawyers judges cooks
waiters plumbers carpenters tailors barbers butchers gardeners miners soldiers dentists librarians mechanics potters
florists bankers chemists clowns guides guards hunters jewellers poets reporters scientists surgeons weavers actors
editors
""".split()
)
ANIMALS: Final = tuple(
    """
dogs cats rabbits parrots hamsters turtles ponies goats lizards snakes mice frogs ducks geese chickens pigeons donkeys
sheep lambs ferrets crabs spiders snails hedgehogs ravens cows pigs horses llamas bees
""".split()
)
FOODS: Final = tuple(
    """
bread rice soup pasta pizza cheese salad fish beans potatoes noodles cake pie stew pancakes sausages mushrooms toast
dumplings honey yogurt curry lentils waffles ham
""".split()
)
PLANTS: Final = tuple(
    """
apples pears plums cherries grapes lemons melons peaches figs dates berries limes roses tulips daisies carrots onions
cabbages pumpkins tomatoes spinach corn peas herbs
""".split()
)
COLOURS: Final = tuple(
    """
red blue green yellow purple black white brown pink grey silver golden violet scarlet beige turquoise crimson orange
""".split()
)
GAMES: Final = tuple(
    """
chess tennis football golf poker hockey cricket rugby darts cards dominoes squash polo snooker basketball bowls
""".split()
)
DRINKS: Final = tuple("tea coffee milk water juice cocoa lemonade cider wine beer soda punch tonic sherry".split())
LANGUAGES: Final = tuple(
    """
English French German Spanish Italian Polish Greek Turkish Arabic Hindi Russian Swedish Danish Dutch Finnish Latin
Korean Chinese Japanese Czech Irish Welsh
""".split()
)
OBJECTS: Final = tuple(
    """
key book lamp cup hat coin ring map letter clock scarf umbrella camera knife bottle candle ball pen phone basket hammer
rope mirror pillow blanket brush spoon torch whistle compass medal ticket wallet glove kite drum ladder saw bucket toy
""".split()
)
ROOMS: Final = tuple(
    """
drawer box cupboard garage kitchen cellar attic garden bathroom bedroom office shed tent boat bus suitcase bag barn
chest closet hall library museum tower cave well stable church school station
""".split()
)
STORES: Final = ("box", "safe", "jar", "crate")
