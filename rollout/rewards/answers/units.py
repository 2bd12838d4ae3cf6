r"""Units behind a number: `5 cm`, `3 m/s^2`, `20 apples`, `28%`, `90^\circ`.

A unit that only one side writes is ignored; two different units make two different answers.
"""

from __future__ import annotations

import re
from functools import lru_cache

PERCENT, DEGREE, RADIAN = "%", "deg", "rad^1"

# Spellings of one unit stand on one line, the first names it; a plural s or es is taken off before the look-up.
_TABLE = """
m metre meter|km kilometre kilometer|cm centimetre centimeter|mm millimetre millimeter|nm nanometre nanometer
in inch|ft foot feet|yd yard|mi mile|g gram gm|kg kilogram|mg milligram|lb pound|oz ounce|ton tonne
L l litre liter|mL ml millilitre milliliter|gal gallon|pint|quart|cup|teaspoon|tablespoon|cc
s sec second|ms millisecond|min minute|h hr hour|day|week|wk month|year yr|decade|century centuries
mph|kmh kph kmph|Hz hertz|kHz|MHz|GHz|N newton|J joule|kJ|W watt|kW|kWh|V volt|A amp ampere|ohm|Pa pascal
kPa|atm|kohm|Mohm|mol mole|K kelvin|C celsius|F fahrenheit|cal calorie|kcal|rad radian|rpm
dollar usd buck|cent|euro eur|yen|rupee rs inr|peso|penny pennies|dime|nickel|quarter|pound_sterling gbp
hectare ha|acre|unit|integer|number|digit|point pt|time|way|solution|root|step|trip|turn|round|game|win|vote|goal|mark
person people|student|pupil|child children|boy|girl|man men|woman women|worker|teacher|player|member|passenger|customer
apple|orange|banana|egg|cookie|cake|pie|pizza|slice|piece|candy candies|marble|ball|book|page|pen|pencil|ticket|card
coin|stamp|toy|sticker|flower|tree|plant|animal|dog|cat|cow|chicken|horse|rabbit|bird|fish|monkey|sheep
car|bus|train|bike|bicycle|wheel|house|room|chair|table|seat|box|bag|bottle|glass|jar|basket|item|object|word|letter
team|group|pair|set|row|column|tile|block|cube|square|triangle|circle|rectangle|edge|side|vertex vertices|face|diagonal
bit|byte|kB|MB|GB|mile_per_hour|shirt|shoe|sandwich|sandwiche|bead|rope|cubic_inch|lap|pack|packet|dozen|bushel|load
"""
_CANONICAL = {
    spelling: line.split()[0] for line in _TABLE.replace("\n", "|").split("|") if line for spelling in line.split()
}
_ONE_LETTER = {spelling for spelling in _CANONICAL if len(spelling) == 1}
_POWER_WORDS = {"square": "2", "sq": "2", "cubic": "3", "cu": "3", "squared": "2", "cubed": "3"}
_TAIL = re.compile(
    r"(?P<gap>\s*)(?<![A-Za-z\\])(?P<unit>(?:[A-Za-z]+\.?(?:\s*\^\s*\{?\s*-?\d\s*\}?)?(?:\s*[/*]\s*|\s+|$))+)$"
)
_COMPOUND = {"mph^1": "h^-1*mi^1", "kmh^1": "h^-1*km^1"}
_FEET = re.compile(r"(?<=\d)\s*('{1,2}|\")$")
_OHM = re.compile(r"(?<=[\d\s}])\s*([kM]?)\s*\\Omega$")
_DROPPED = frozenset(("old", "long", "tall", "wide", "high", "deep", "away"))
_TERM = re.compile(r"([A-Za-z]+)\.?(?:\s*\^\s*\{?\s*(-?\d)\s*\}?)?|([/])")


def _name(word: str) -> str | None:
    for spelling in (word, word.lower()):
        for candidate in (spelling, spelling.removesuffix("s"), spelling.removesuffix("es")):
            if (unit := _CANONICAL.get(candidate)) and (len(candidate) > 1 or candidate == word):
                return unit
    return None


def _read(text: str) -> str | None:
    """A canonical name of the unit expression, or None when a word in it is no unit."""
    sign, power = 1, ""
    terms: list[str] = []
    for word, exponent, slash in _TERM.findall(text):
        if slash or word == "per":
            sign = -1
        elif word in _DROPPED and terms:
            continue
        elif word in _POWER_WORDS and terms and word.endswith("ed"):
            terms[-1] = terms[-1].partition("^")[0] + f"^{sign * int(_POWER_WORDS[word])}"
        elif word in _POWER_WORDS and word != "square":
            power = _POWER_WORDS[word]
        elif word in ("square", "squares"):
            power = "2"
        elif (unit := _name(word)) is not None:
            terms.append(f"{unit}^{sign * int(exponent or power or 1)}")
            sign, power = 1, ""
        else:
            return None
    name = "*".join(sorted(terms)) or (f"square^{power}" if power else None)
    return _COMPOUND.get(name or "", name)


@lru_cache(maxsize=8192)
def split_unit(text: str) -> tuple[str, str | None]:
    r"""A canonical answer as (value, unit). Units: None, "%", "deg" or a name; the value keeps everything else.

    One letter counts as a unit only with a space before it: `5 m` is a length, `5m` a product.
    """
    text = text.strip()
    if text.endswith("%"):
        return text[:-1].rstrip(" \\"), PERCENT
    if text.endswith("^{\\circ}") and not re.search(r"(?:sin|cos|tan|cot|sec|csc)(?![a-z])", text):
        return text[: -len("^{\\circ}")].rstrip(), DEGREE
    if temperature := re.search(r"\^\{\\circ\}\s*([CFK])$", text):
        return text[: temperature.start()].rstrip(), temperature[1]
    if feet := _FEET.search(text):
        return text[: feet.start()], "ft^1" if feet[1] == "'" else "in^1"
    text = _OHM.sub(r" \1ohm", text)
    match = _TAIL.search(text)
    if match is None or match.start() == 0 or not re.search(r"(?:[\d}).]|\\[a-zA-Z]+)$", text[: match.start()]):
        return text, None
    unit = _read(match["unit"])
    glued = not match["gap"]
    if unit is None or (glued and len(match["unit"].strip()) == 1):
        return text, None
    return text[: match.start()].rstrip(), unit
