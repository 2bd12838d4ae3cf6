r"""One spelling for one thing: an answer as written, to a canonical line of LaTeX.

Only notation is changed here (Unicode, spacing, `\dfrac`, `\text{}`, delimiters); nothing is computed.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from functools import lru_cache

LONGEST = 1000
"""Characters beyond which an answer is compared as text only."""

_SUPERSCRIPT = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUBSCRIPT = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
# Characters whose compatibility form would lose their meaning (NFKC turns ½ into 1⁄2, x² into x2, ℝ into R).
_BEFORE_NFKC = {"ℝ": r"\mathbb{R}", "ℕ": r"\mathbb{N}", "ℤ": r"\mathbb{Z}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}"}
_BEFORE_NFKC |= {"º": "°", "˚": "°", "…": r"\ldots "}
_AFTER_NFKC = {
    "−": "-", "–": "-", "‐": "-", "‑": "-", "—": "-", "×": "*", "·": "*", "⋅": "*", "∙": "*", "∗": "*",
    "÷": "/", "⁄": "/", "∕": "/", "∞": r"\infty ", "≤": r"\le ", "⩽": r"\le ", "≥": r"\ge ", "⩾": r"\ge ",
    "≠": r"\ne ", "≈": r"\approx ", "∈": r"\in ", "∪": r"\cup ", "∩": r"\cap ", "∖": r"\setminus ", "±": r"\pm ",
    "∓": r"\mp ", "∅": r"\emptyset ", "°": r"^{\circ}", "′": "'", "’": "'", "‘": "'", "“": '"', "”": '"',
    "⟨": r"\langle ", "⟩": r"\rangle ", "⋯": r"\ldots ", "。": ".", "、": ",", "∣": "|", "∠": r"\angle ",
}  # fmt: skip
_ROOT_SIGN = re.compile(r"([√∛])\s*(\d+(?:\.\d+)?|[a-zA-Z])?")
_WORD_ROOT = re.compile(r"(?<![\\a-zA-Z])sqrt\s*(\d+(?:\.\d+)?)?")

_WRAPPERS = re.compile(
    r"\\(?:text(?:bf|it|rm|normal|sf|tt)?|math(?:rm|bf|it|sf|tt|cal|ord|bin|rel)|mbox|hbox|operatorname\*?|boxed|fbox"
    r"|underline|boldsymbol|bm|emph|ensuremath)\s*(?=\{)"
)
_DROPPED = re.compile(r"\\(?:[hv]space\*?|phantom|label|tag\*?|color|textcolor)\s*(?=\{)")
_SIZES = re.compile(
    r"\\(?:left|right|middle|[bB]igg?[lrm]?|(?:display|text|script)style|limits|nolimits|rm|bf|it|tt|sf|sl|em|tiny"
    r"|scriptsize|footnotesize|small|normalsize|[lL]arge|LARGE|[hH]uge|checkmark|blacksquare|therefore)(?![a-zA-Z])\.?"
)
_SPACES = re.compile(
    r"\\(?:quad|qquad|thinspace|enspace|space|nobreakspace|medspace|thickspace)(?![a-zA-Z])|(?<!\\)\\[,;: ]|~"
)
_NAMES = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "geq": "ge", "geqslant": "ge", "leq": "le", "leqslant": "le",
    "neq": "ne", "lt": "<", "gt": ">", "cdot": "*", "times": "*", "ast": "*", "div": "/", "lbrace": r"\{",
    "rbrace": r"\}", "lbrack": "[", "rbrack": "]", "langle": "(", "rangle": ")", "lvert": "|", "rvert": "|",
    "vert": "|", "mid": "|", "varnothing": "emptyset", "dots": "ldots", "cdots": "ldots", "dotsc": "ldots",
    "dotsb": "ldots", "colon": ":", "degree": r"^{\circ}", "infin": "infty", "arctg": "arctan", "tg": "tan",
    "ctg": "cot", "Reals": r"\mathbb{R}", "R": r"\mathbb{R}", "lparen": "(", "rparen": ")", "slash": "/",
    "dbinom": "binom", "tbinom": "binom", "widebar": "overline", "bar": "overline", "backslash": "setminus",
    "smallsetminus": "setminus", "bigcup": "cup", "lor": "or", "vee": "or", "land": "and", "wedge": "and",
    "textdollar": "¤", "pounds": "£", "euro": "€", "yen": "¥",
}  # fmt: skip
_PLAIN = {"or", "and"}
_COMMAND = re.compile(r"\\([a-zA-Z]+)")
_GROUPED_DIGITS = re.compile(r"(?<=\d)(?:,\s*\\!\s*|\\!\s*,\s*|\{,\}|\\,|\\!)\s*(?=\d{3}(?!\d))")
_DELIMITERS = re.compile(r"\$|(?<!\\)\\[!()\[\]]|`")
_QUOTED = re.compile(r"``?([^`']*)''?")
_OVER = re.compile(r"\{([^{}]*)\\(over|choose)(?![a-zA-Z])([^{}]*)\}")
_AMOUNT = r"(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:\s*\*10\^\{\d+\})?"
_MONEY = re.compile(rf"(-?)\s*([¤€£¥₹])\s*(-?{_AMOUNT})|()({_AMOUNT})\s*([¤€£¥₹¢])")
_CURRENCIES = {"¤": "dollar", "€": "euro", "£": "gbp", "¥": "yen", "₹": "rupee", "¢": "cent"}
_WORDS = (
    (re.compile(r"(?<![\\a-zA-Z])inf(?:inity)?(?![a-zA-Z])", re.I), r"\\infty "),
    (re.compile(r"(?<![\\a-zA-Z])(?:minus|negative)\s+(?=[\d.\\])", re.I), "-"),
    (re.compile(r"(?<=\d)\s*thousand(?![a-zA-Z])", re.I), "*10^{3}"),
    (re.compile(r"(?<=\d)\s*million(?![a-zA-Z])", re.I), "*10^{6}"),
    (re.compile(r"(?<=\d)\s*billion(?![a-zA-Z])", re.I), "*10^{9}"),
    (re.compile(r"(?<=\d)\s*trillion(?![a-zA-Z])", re.I), "*10^{12}"),
    (re.compile(r"(?<=\d)\s+out of\s+(?=\d)", re.I), "/"),
    (re.compile(r"\s*(?<![\\a-zA-Z])(?:per\s?cent(?:age)?(?:\s+points?)?|pct)(?![a-zA-Z])", re.I), "%"),
    (re.compile(r"\s*(?<![\\a-zA-Z])deg(?:ree)?s?(?![a-zA-Z])", re.I), r"^{\\circ}"),
    (re.compile(r"(?<![\\a-zA-Z])pi(?![a-zA-Z])"), r"\\pi "),
    (re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z])|o(?![a-zA-Z]))"), r"^{\\circ}"),
    (re.compile(r"\.\s?\.\s?\."), r"\\ldots "),
    (re.compile(r"<\s*="), r"\\le "),
    (re.compile(r">\s*="), r"\\ge "),
    (re.compile(r"!\s*="), r"\\ne "),
    (re.compile(r"\*\*"), "^"),
)
_GOES_ON = re.compile(r"(?<!\d)(\d{0,30}\.\d{0,20}?)(\d{1,12}?)\2{2,40}\s*\\ldots")
_SPACE_NOT_BETWEEN_WORDS = re.compile(r"(?<![0-9A-Za-z])\s+|\s+(?![0-9A-Za-z])")
_TAKES_ARGUMENTS = re.compile(r"\\(frac|binom|sqrt)(?![a-zA-Z])\s*")
_SINGLE = re.compile(r"(?<=[\^_])\{([0-9A-Za-z])\}")


def balanced_end(text: str, start: int, opening: str = "{", closing: str = "}") -> int:
    """Index of the bracket that closes the one at `start`, or -1; escaped characters do not count."""
    depth = 0
    i = start
    while i < len(text):
        if text[i] == "\\":
            i += 2
            continue
        depth += (text[i] == opening) - (text[i] == closing)
        if depth == 0:
            return i
        i += 1
    return -1


def _with_group(text: str, command: re.Pattern[str], rewrite: Callable[[str], str]) -> str:
    """Replace each `command{content}` by `rewrite(content)`, inner ones as well."""
    at = 0
    while match := command.search(text, at):
        end = balanced_end(text, match.end())
        if end < 0:
            at = match.end()
            continue
        text = text[: match.start()] + rewrite(text[match.end() + 1 : end]) + text[end + 1 :]
        at = match.start()
    return text


def _argument(text: str, at: int) -> tuple[str, int] | None:
    """The TeX argument that starts at `at` (a group, a command or one character) and where it ends."""
    while at < len(text) and text[at] == " ":
        at += 1
    if at >= len(text) or text[at] in "})]":
        return None
    if text[at] == "{":
        end = balanced_end(text, at)
        return (text[at + 1 : end], end + 1) if end > 0 else None
    if command := _COMMAND.match(text, at):
        return command.group(), command.end()
    return text[at], at + 1


def _brace_arguments(text: str) -> str:
    r"""`\frac12`, `\frac\pi2`, `\sqrt2` and the like with braces around every argument."""
    at = 0
    while match := _TAKES_ARGUMENTS.search(text, at):
        at = position = match.end()
        root = ""
        if match[1] == "sqrt" and text.startswith("[", position):
            end = text.find("]", position)
            if end < 0:
                continue
            root, position = text[position : end + 1], end + 1
        first = None if text.startswith("(", position) else _argument(text, position)
        if first is None:
            continue
        arguments, position = "{" + first[0] + "}", first[1]
        if match[1] != "sqrt":
            second = _argument(text, position)
            if second is None:
                continue
            arguments, position = arguments + "{" + second[0] + "}", second[1]
        head = f"{text[: match.start()]}\\{match[1]}{root}"
        text, at = head + arguments + text[position:], len(head)
    return text


def _plain_unicode(text: str) -> str:
    out = []
    for char in text:
        if char in _BEFORE_NFKC:
            out.append(_BEFORE_NFKC[char])
        elif "¼" <= char <= "¾" or "⅐" <= char <= "⅞":
            above, _, below = unicodedata.normalize("NFKC", char).partition("⁄")
            out.append(f" \\frac{{{above}}}{{{below}}}")
        elif char < " " and not char.isspace():
            out.append(" ")
        elif unicodedata.category(char) != "Cf":
            out.append(char)
    text = "".join(out)
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+", lambda m: "^{" + m[0].translate(_SUPERSCRIPT) + "}", text)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉]+", lambda m: "_{" + m[0].translate(_SUBSCRIPT) + "}", text)
    text = unicodedata.normalize("NFKC", text)

    def root(match: re.Match[str]) -> str:
        return (r"\sqrt" if match[1] == "√" else r"\sqrt[3]") + (f"{{{match[2]}}}" if match[2] else "")

    text = _ROOT_SIGN.sub(root, text)
    return "".join(_AFTER_NFKC.get(char) or _greek(char) for char in text)


def _greek(char: str) -> str:
    if "Ͱ" <= char <= "Ͽ" and (name := unicodedata.name(char, "")).startswith("GREEK ") and " LETTER " in name:
        letter = name.rpartition(" ")[2].lower()
        return f"\\{letter.title() if 'CAPITAL' in name else letter} "
    return char


def _command(match: re.Match[str]) -> str:
    name = _NAMES.get(match[1])
    if name is None:
        return match[0]
    if name in _PLAIN:
        return f" {name} "
    return f"\\{name}" if name.isalpha() else f" {name} " if name in "<>" else name


@lru_cache(maxsize=8192)
def canonical(text: str) -> str:
    """The answer in one spelling; at most LONGEST characters are ever looked at this way."""
    text = _QUOTED.sub(r"\1", _plain_unicode(text).replace("¤", "").replace("\\$", "¤"))
    text = _GROUPED_DIGITS.sub(",", text)
    if text.count("$") == 1:  # one sign alone is no delimiter
        text = text.replace("$", "¤")
    text = _DELIMITERS.sub("", text)
    text = re.sub(r"^\s*(\*\*|__)(.*)\1\s*$", r"\2", text, flags=re.DOTALL)
    text = _with_group(text, _DROPPED, lambda _: " ")
    text = _with_group(text, _WRAPPERS, lambda content: f" {content} ")
    text = re.sub(r"\\mathbb\s*([A-Z])|\\Bbb\s*\{?([A-Z])\}?", lambda m: f"\\mathbb{{{m[1] or m[2]}}}", text)
    text = _SPACES.sub(" ", _SIZES.sub("", text))
    text = _COMMAND.sub(_command, text).replace("\\%", "%").replace("\\|", "|").replace("\\#", "#").replace("\\&", "&")
    while (rewritten := _OVER.sub(_over, text)) != text:
        text = rewritten
    text = _WORD_ROOT.sub(lambda m: r"\sqrt" + (f"{{{m[1]}}}" if m[1] else ""), text)
    for pattern, replacement in _WORDS:
        text = pattern.sub(replacement, text)
    text = _GOES_ON.sub(r"\1\\overline{\2}", text)
    text = _brace_arguments(text)
    text = re.sub(r"\s+", " ", text).strip().rstrip("\\").rstrip()
    return _currency(text if text.endswith("\\ldots") else _unquoted(text).rstrip(".,;: "))


def _over(match: re.Match[str]) -> str:
    return f"\\{'frac' if match[2] == 'over' else 'binom'}{{{match[1]}}}{{{match[3]}}}"


def _currency(text: str) -> str:
    """An amount of money as a number and its unit; in anything else the sign of a currency says nothing."""
    if not (match := _MONEY.fullmatch(text)):
        return re.sub("[¤€£¥₹¢]", "", text)
    sign, mark, amount = (match[1], match[2], match[3]) if match[2] else ("", match[6], match[5])
    return f"{sign}{amount} {_CURRENCIES[mark]}"


def _unquoted(text: str) -> str:
    """Without the quotes around all of it; a prime at the end is no quote."""
    while len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        text = text[1:-1].strip()
    return text


def key(text: str) -> str:
    """What two spellings of the same text share; `text` is canonical. Case, spacing and articles do not count."""
    text = re.sub(r"^(?:the|an?)\s+(?=[a-z]{2})", "", text.lower())
    return _unquoted(_SINGLE.sub(r"\1", _SPACE_NOT_BETWEEN_WORDS.sub("", text))).rstrip(".,;: ")
