"""The task of the first demo: turn an order in plain words into JSON. The examples are generated, not downloaded."""

from __future__ import annotations

import json
import random
from typing import Any, NamedTuple

STOP = "}"
MOST_TOKENS = 48

NAMES = (
    "Anna Ben Carla David Elena Felix Grace Hugo Irene Jonas Karen Liam Maria Noah Olga Peter Quinn Rosa Simon Tara "
    "Victor Wendy Yusuf Zoe Amir Bella Cesar Dora Emil Fiona George Hanna Ivan Julia Kofi Lena Miguel Nora Omar Paula"
).split()
CITIES = (
    "Lisbon Oslo Madrid Vienna Prague Dublin Athens Boston Denver Seoul Tokyo Cairo Lima Quito Milan Zurich Turin "
    "Sydney Dallas Warsaw Naples Austin Bergen Seville Lagos Manila Delhi Kyoto Havana Tunis"
).split()
ITEMS = (
    "lamps chairs tables mugs plates scarves shirts hats books candles clocks mirrors pillows baskets shoes gloves "
    "knives forks bowls towels blankets pens bags belts rings bottles pots pans curtains carpets radios kites drums "
    "brushes ladders tents bells buckets toys coats tools doors seeds coins stamps flags jars keys dolls cards maps "
    "nails ropes tiles bricks wires pipes bulbs fans desks sofas stools shelves boxes cups jugs trays socks ties vests "
    "skirts robes sandals slippers roofs boards sheets posters"
).split()
COLOURS = "red blue green yellow black white grey purple orange brown".split()
HELD_OUT_NAMES = "Alice Bruno Diana Oscar Nina Marco Stella Tom".split()
HELD_OUT_CITIES = "Berlin Paris Rome Porto Geneva Chicago London Bern".split()
HELD_OUT_ITEMS = "vases boots spoons jackets guitars umbrellas".split()
"""Words that appear in no example: a model that has only memorised the examples gets these wrong."""
SENTENCES = (
    "{name} from {city} wants {count} {colour} {item}.",
    "Please send {count} {colour} {item} to {name} in {city}.",
    "{count} {colour} {item} for {name}, {city}.",
    "Hi, this is {name} in {city}. I would like {count} {colour} {item}.",
    "{name} ({city}) ordered {colour} {item}, {count} of them.",
)


class Order(NamedTuple):
    text: str
    wanted: dict[str, Any]

    @property
    def prompt(self) -> str:
        return f"Order: {self.text}\nJSON:"

    @property
    def answer(self) -> str:
        return f" {json.dumps(self.wanted)}"


def example(seed: int, number: int) -> Order:
    """Return one of any number of examples. The same number always gives the same example."""
    return _order(random.Random(f"{seed}/{number}"), NAMES, CITIES, ITEMS)


def held_out(count: int) -> list[Order]:
    """Return the test questions, always the same."""
    dice = random.Random("held out")
    return [_order(dice, HELD_OUT_NAMES, HELD_OUT_CITIES, HELD_OUT_ITEMS) for _ in range(count)]


def is_right(answer: str, order: Order) -> bool:
    """Whether the answer is JSON with exactly the expected values, and nothing else."""
    try:
        return bool(json.loads(answer) == order.wanted)
    except ValueError:
        return False


def _order(dice: random.Random, names: list[str], cities: list[str], items: list[str]) -> Order:
    wanted = {
        "name": dice.choice(names),
        "city": dice.choice(cities),
        "count": dice.randint(2, 12),
        "colour": dice.choice(COLOURS),
        "item": dice.choice(items),
    }
    return Order(dice.choice(SENTENCES).format(**wanted), wanted)
