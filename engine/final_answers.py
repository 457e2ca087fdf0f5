"""The final answer of a text, read as a whole to its end: a number after `####`, or LaTeX in a box.

All graders, and the filters of data templates, read answers here. Digits of any script, minus
signs, blanks and full-width forms become ASCII's; markup, currency and separators of thousands are
taken off. A unit or a remark in words may follow an answer. Anything else that is left over (a
second number, an operator, "or", "million") means that there is no answer: never is a part of it
taken for the whole.
"""

import re
import unicodedata
from functools import cache
from typing import Literal, TypeAlias

DecimalMark: TypeAlias = Literal[".", ","]
Method: TypeAlias = Literal["strict", "flexible"]
LONGEST = 1000  # characters of an answer in LaTeX
_LONGEST_NUMBER = 64  # characters; no answer needs more, and a longer one must not cost time
_LONGEST_REST = 300  # characters of the remark after a number
_TAIL = 2000  # characters at the end in which an answer without a box or `####` may be

_CHARACTERS = {
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63", "-"),
    **dict.fromkeys("\u200b\u200c\u200d\u200e\u200f\u2060\u061c\ufeff\u00ad", ""),
    **dict(zip("\u066b\u066c\u2019\u201c\u201d", '.,\'""', strict=True)),
}


def as_ascii(text: str) -> str:
    """Digits of any script as 0 to 9; minus signs, blanks and full-width letters as ASCII's.

    Superscripts, fractions such as ½ and digits in circles stay: they are more than their digits.

    >>> as_ascii("−١٨"), as_ascii("１８．５"), as_ascii("18²")
    ('-18', '18.5', '18²')
    """
    return text if text.isascii() else "".join(map(_character, text))


@cache
def _character(character: str) -> str:
    if character in _CHARACTERS:
        return _CHARACTERS[character]
    if (digit := unicodedata.decimal(character, None)) is not None:
        return str(digit)
    kind = unicodedata.decomposition(character).partition(">")[0]
    alike = kind in ("<wide", "<narrow", "<small", "<font", "<noBreak") or character.isspace()
    return unicodedata.normalize("NFKC", character) if alike else character


def after_thinking(text: str) -> str:
    """What follows the last `</think>`; nothing where a later `<think>` isn't closed."""
    rest = text.rpartition("</think>")[2]
    return "" if "<think>" in rest else rest


# Markup. Where it parts digits a bar stays: "**1** 234" is no number.

_EDGE = "\0"
_COMMAND = r"boxed|fbox|d?text(?:bf|it|rm|up)?|math(?:bf|it|rm|sf)|bm|emph|displaystyle"
_LATEX = (
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\[,:; ]|~(?=[A-Za-z\\])"), " "),
    (re.compile(r"\\!|\\[()\[\]]|\\(?:displaystyle|left|right)(?![A-Za-z])|</?answer>"), ""),
    (re.compile(r"\\([$%])"), r"\1"),
    (re.compile(r"\^\{?\\circ\}?"), "°"),
)
_WRAPPED = re.compile(rf"\\(?:{_COMMAND})(?![A-Za-z])\s*\{{([^{{}}]*)\}}")
_QUOTED = re.compile(
    r"""(?<![\w*])(\*{1,3}|_{1,3}|`{1,3}|"|')(?=\S)([^*_`"'\n]+?)(?<=\S)\1(?!\w)"""
)
_END_OF_BOLD = re.compile(r"(?<=\S)[*_`]+\s*$")
_BESIDE_DIGITS = re.compile(rf"(?<=\d)([\s,.']*){_EDGE}+(?=[\s,.']*\d)")


def without_markup(text: str) -> str:
    """Text without Markdown's emphasis, LaTeX's text commands and boxes, and answer tags."""
    if not any(sign in text for sign in "\\*_`\"'<{~"):
        return text
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    for _ in range(4):  # nested ones, from the inside
        text, count = _WRAPPED.subn(rf"{_EDGE}\1{_EDGE}", text)
        if not count:
            break
    text = _END_OF_BOLD.sub("", _QUOTED.sub(rf"{_EDGE}\2{_EDGE}", text))
    return _BESIDE_DIGITS.sub(r"\1|", text).replace(_EDGE, "")


# Numbers.

_DIGITS = r"[-+]?\$?[-+]?(?:\d(?:[\d.,]*\d)?|[.,]\d+)"
_ANYWHERE = re.compile(rf"(?<![0-9A-Za-z.,]){_DIGITS}|(?<=[A-Za-z=(]){_DIGITS}", re.ASCII)
_CURRENCY = r"(?:US|A|C|HK)?[$€£¥₹₩₽₺₪₫฿₴₦₱¢]{1,3}"


_PLAIN = re.compile(  # the most usual number, which needs no more work
    r"[ \t]*(0|-?(?:0(?=\.\d)|[1-9]\d{0,30})(?:\.\d{0,29}[1-9])?)\.?\s*", re.ASCII
)


@cache
def _number(mark: DecimalMark) -> re.Pattern[str]:
    """A number at the start: groups `sign`, `sign2`, `whole` and `part`, what follows the mark."""
    thousands, decimal = (",", r"\.") if mark == "." else (r"\.", ",")
    grouped = rf"\d{{1,3}}(?:(?P<by>[{thousands} '])\d{{3}}(?:(?P=by)\d{{3}})*)"
    indian = rf"\d{{1,2}}(?:{thousands}\d\d)+{thousands}\d{{3}}"  # 12,34,567
    return re.compile(
        rf"[ \t]*(?P<sign>[-+]?)(?:{_CURRENCY}[ ]?)?(?P<sign2>[-+]?)"
        rf"(?:(?P<whole>{grouped}(?!\d)|{indian}(?!\d)|\d+)(?:{decimal}(?P<part>\d+))?"
        rf"|{decimal}(?P<bare>\d+))",
        re.ASCII,
    )


_SIGN = rf"[ ]?(?:%|°(?:[CFK]\b)?|{_CURRENCY})"
# What may begin what follows a number, its sign left out. A letter glued to it is a unit in the
# scripts that write no blanks only.
_AFTER = re.compile(
    rf"(?:{_SIGN})?(?:\s*\Z|\.(?=\s|\Z)|[,;](?=\s+[^\W\d_])|\s+(?=[(]?[^\W\d_])|/(?=[A-Za-z])"
    r"|(?=[\u2e80-\U0003ffff]))"
)
_AREA = re.compile(r"\b([cdkm]?m|ft|in|yd|mi)(?:\^?[23]|\^\{[23]\}|[²³])(?!\w)")
_NUMBER_WORDS = """
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred
hundreds thousand thousands million millions billion billions trillion trillions mio mrd bn mn tsd
lakh lakhs crore crores dozen dozens half halves third thirds quarter quarters fourth fourths fifth
fifths sixth sixths seventh sevenths eighth eighths ninth ninths tenth tenths hundredth hundredths
thousandth thousandths pi squared cubed factorial mod modulo plus minus divided multiplied ish
something odd
"""
_ALTERNATIVES = """
and or nor to through till until versus vs either neither both but except unless otherwise else
instead rather than between not no never none cannot wrong incorrect false mistake error oops wait
actually correction sorry should could might oder und bis nicht ou et pas ni или и
"""
NUMBER_WORDS = frozenset(_NUMBER_WORDS.split())
ALTERNATIVES = frozenset(_ALTERNATIVES.split())
# Units and other words that change no answer before them: none of those above, no letter that may
# be a variable.
_REMARK = re.compile(
    rf"(?:(?!\b(?:{'|'.join(NUMBER_WORDS | ALTERNATIVES)})\b|\.\.|n't|[又或和到至半]"
    r"|\b(?![aimgshl]\b)[^\W\d_\u2e80-\U0003ffff]\b)(?:[^\W\d_]|[\s,.;:!()'\"/-]))*",
    re.IGNORECASE,
)


def _is_remark(text: str) -> bool:
    text = _AREA.sub(r"\1", text[: _LONGEST_REST + 1])
    plain = len(text) <= _LONGEST_REST and not any(map(str.isnumeric, text))
    return plain and _REMARK.fullmatch(text) is not None


def read_number(text: str, decimal_mark: DecimalMark = ".", *, remark: bool = True) -> str | None:
    """The number that a text is, in plain digits, e.g. "-1234.5"; None where it isn't one number.

    Thousands may be grouped by blanks, apostrophes, and by "," (with decimal_mark="," by "."), in
    threes or as in India. With `remark`, a unit or a remark in words may follow.

    >>> read_number("$1,234.50 in all."), read_number("1 234"), read_number("**18**")
    ('1234.5', '1234', '18')
    >>> read_number("1.5 million"), read_number("18-20"), read_number("1,8")
    (None, None, None)
    >>> read_number("1.234,5 €", ",")
    '1234.5'
    """
    if decimal_mark == "." and (plain := _PLAIN.fullmatch(text)):
        return plain[1]
    text = without_markup(as_ascii(text))
    match = _number(decimal_mark).match(text)
    if match is None or (match["sign"] and match["sign2"]) or match.end() > _LONGEST_NUMBER:
        return None
    rest = text[match.end() :]
    if rest and rest != ".":
        after = _AFTER.match(rest)
        words = rest[after.end() :] if after else ""
        if after is None or (words and not (remark and _is_remark(words))):
            return None
    whole = re.sub(r"\D", "", match["whole"] or "").lstrip("0") or "0"
    part = (match["part"] or match["bare"] or "").rstrip("0")
    number = f"{whole}.{part}" if part else whole
    return f"-{number}" if "-" in match["sign"] + match["sign2"] and number != "0" else number


def normalise_number(value: object, decimal_mark: DecimalMark = ".") -> str | None:
    """The number that a ground truth is, without unit or remark, in plain digits; else None."""
    if not isinstance(value, str):
        value, decimal_mark = str(value), "."
    return None if "%" in value else read_number(value.strip(), decimal_mark, remark=False)


def extract_answer(
    text: str, *, method: Method = "strict", decimal_mark: DecimalMark = "."
) -> str | None:
    """The number after the last `####` outside of thinking (GSM8K's rule), or None.

    `flexible` is the lenient reading: the last number of the text, whatever stands around it.

    >>> extract_answer("<<600+634=1234>>1234\\n#### $1,234."), extract_answer("#### 18 or 19")
    ('1234', None)
    >>> extract_answer("So she pays $1,234.50 (or 5% less).", method="flexible")
    '5'
    """
    if method == "flexible":
        numbers = _ANYWHERE.findall(as_ascii(text[-_TAIL:]))
        return read_number(numbers[-1], decimal_mark, remark=False) if numbers else None
    _, mark, rest = after_thinking(text).rpartition("####")
    return read_number(rest[: 2 * _LONGEST_REST], decimal_mark) if mark else None


def has_format(text: str) -> bool:
    """Whether the text ends with a line `#### <number>`, and has no other `####`."""
    before, mark, last = text.rstrip().rpartition("\n")[2].rpartition("####")
    if not mark or before or text.count("####") != 1:
        return False
    last = without_markup(as_ascii(last)).removesuffix(".")
    return any(_number(mark).fullmatch(last) for mark in (".", ","))


# Boxes: `\boxed{…}`, `\fbox{…}` and, without braces, `\boxed 5`.

_BRACES = r"(?:[^{}\\]|\\.)*+"
for _ in range(15):  # as deep as braces may be nested
    _BRACES = rf"(?:[^{{}}\\]|\\.|\{{{_BRACES}\}})*+"
_BARE = r"(?![A-Za-z])\s*([^\s{}$,;\\]*[^\s{}$.,;\\])"
_BOX = re.compile(rf"\\(?:boxed|fbox)(?:\s*\{{({_BRACES})\}}|{_BARE})", re.DOTALL)
_FORMULA = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
# What may stand between boxes that are one answer, and what goes on with an answer beside a box.
_GLUE = re.compile(r"[\s$*,;()\[\]\\]*(?:(?:\\text\{)?\s*(?:or|and|to|-)\s*\}?)?[\s$*()\[\]\\]*")
_COMMANDS = r"\\(?![()\[\]$%,;:! ]|(?:text|mathrm|mbox|quad|qquad|end|right)\b)"
_MATHS = rf"[\s$*(\[]*(?:[-+]?\d|{_COMMANDS})"
_GOES_ON = re.compile(
    r"[\s$*}\\)\]]*(?:[,;]?\s*(?:\\text\{\s*)?(?:(?:n?or|oder|ou)\b|(?:and|to|not)\b\s*\}?"
    rf"{_MATHS})|[-+*/^=<>,;~±≈]{_MATHS}|[+*/=]\s*[A-Za-z]\b|\^|\.?\d)|\}}*(?:[A-Za-z]\b|{_COMMANDS})"
)
_BEGAN = re.compile(
    r"(?:(?<=[\d$)}\]])\s*\bor\b[\s$*\\(\[]*|\d\s*[-+*/^±]\s*|[-+/^±]|\d\.?|\\pm\s*"
    r"|(?:\\sqrt(?:\[[^\]]*\])?|\\d?frac(?:\{[^{}]*\})?|[\^_])\{\s*)\$?\Z"
)
# A quick test for what any match of `_BEGAN` ends with.
_MAY_BEGIN = re.compile(r"(?:[-+*/^±{rm][\s$*\\(\[]*|[\d.])\$?\Z")
_OPERATOR = re.compile(r"[\s$]*[-+*/=^<>±][\s$]*")
_WORD = re.compile(r"[\s$*}\\)\]]*(?:\\text\{\s*)?([a-z]+)")
_STATES = re.compile(r"(?i)(?:####|\banswer\b(?:\s+is\b|\s*[:=]))[\s*:]*")


def has_box(text: str) -> bool:
    """Whether a box begins in a text, closed or not."""
    return "\\boxed" in text or "\\fbox" in text


def last_boxed(text: str) -> str | None:
    """The content of the last box, which may be inside of another one; None for none or no end.

    >>> last_boxed(r"so \\boxed{1} or \\boxed{\\frac{1}{2}}.")
    '\\\\frac{1}{2}'
    """
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    match = _BOX.match(text, start, start + LONGEST + 10) if start >= 0 else None
    return _content(match) if match else None


def _content(match: re.Match[str]) -> str:
    return match[match.lastindex or 0].strip()


def boxed_answer(text: str) -> str | None:
    """The last box as a whole, with those that it is listed with; None where text goes on with it.

    >>> boxed_answer(r"\\boxed{1} or \\boxed{2}."), boxed_answer(r"\\boxed{1} million")
    ('1 or 2', None)
    """
    if last_boxed(text) is None:
        return None
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    answer = _last_as_whole(text[max(0, start - LONGEST) : start + 2 * LONGEST], _BOX)
    while answer and (inner := _BOX.search(answer)):
        answer = f"{answer[: inner.start()]}{_content(inner)}{answer[inner.end() :]}"
    return answer and answer.strip()


def stated_answer(text: str) -> str | None:
    """The answer, as LaTeX, of a text without a box; None where text goes on with it.

    It is the last formula, or what follows `####` or "answer is".

    >>> stated_answer("So $x = 7$."), stated_answer("The answer is 7."), stated_answer("It is 7.")
    ('x = 7', '7.', None)
    """
    text = as_ascii(text[-_TAIL:]).strip()
    stated = list(_STATES.finditer(text))
    text = text[stated[-1].end() :] if stated else text
    if _FORMULA.search(text):
        return _last_as_whole(text, _FORMULA)
    return text if stated else None


def _last_as_whole(text: str, pattern: re.Pattern[str]) -> str | None:
    """The last match, with those that it is listed with; None in a chain, or where text goes on."""
    *matches, last = pattern.finditer(text)
    answer, begin, after = _content(last), last.start(), text[last.end() :]
    for match in reversed(matches):
        between = text[match.end() : begin]
        if _OPERATOR.fullmatch(between):
            return None
        if not _GLUE.fullmatch(between):
            break
        sign = without_markup(between.replace("$", "")).strip(" \\()[]") or ","
        answer, begin = f"{_content(match)} {sign} {answer}", match.start()
    word, before = _WORD.match(after), text[:begin]
    if _GOES_ON.match(after) or (word and word[1] in NUMBER_WORDS):
        return None
    if _MAY_BEGIN.search(before) and _BEGAN.search(before):
        return None
    return answer if pattern is _BOX or _is_remark(after) else None


# The letter of a multiple choice.

_NEAR = 60  # characters before a letter that name it beside another
_LETTER = re.compile(r"(?<![\w'\\$])[(\[]?([A-Z])(?![\w'])[)\]]?")
# What a letter that is chosen follows; the first ones count most.
_CHOOSES = [
    re.compile(rf"(?i)\b{words}[\s:]*(?:(?:option|choice)\b[\s:]*)?")
    for words in (
        r"answer\b(?:\s+(?:is|would be|must be)\b|\s*[:=])?",
        r"(?:choice|option)\b(?:[\s:]*is\b)?",
        r"(?:it'?s|it is|say|choose|pick)\b",
    )
]
# "A triangle", "I think": a word and no letter of a choice, unless one of these follows.
_IS_WORD = re.compile(r"\s+(?!(?:is|are|was|and|or|nor|because|since|as|due|for|which)\b)[a-z]")
_GOES_ON_LOWER = re.compile(r"\s+(?!(?:is|because|since|and|or)\b)\w")  # "b equals 5"
_DENIED = re.compile(
    r"(?:\s*(?:,|&|and|or)\s*[(\[]?[A-Z][)\]]?)*\s*(?:(?:is|are|was|were)(?:n't)?|can(?:not|'t))\b"
    r"\s*(?:both |all |clearly )?(?:not|wrong|incorrect|false|out|impossible|be)\b|\s+isn't\b"
)
_MORE = re.compile(
    r"(?i)(?:\A[\s.,/&|;+=≠≈→-]*|\b(?:or|and|nor|also|maybe|perhaps|wait|actually|instead|possibly|no)"
    r"\b[\s,:.]*(?:(?:it'?s|it is|the|an?|answer|is|could be|option|choice|maybe|also)\s+)*)\Z"
)


def _is_word(match: re.Match[str]) -> bool:
    bare = match[0].strip() == match[1]
    return bare and match[1] in "AaIi" and _IS_WORD.match(match.string, match.end()) is not None


def _leading_letter(text: str, *, alone: bool = False) -> str | None:
    """The letter that a text begins with; "" where others are named beside it, None for none."""
    match = re.match(r"[\s(\[]*([A-Za-z])(?![\w'])[)\]]?", text)
    if match is None or _is_word(match) or _DENIED.match(text, match.end()):
        return None
    letter, rest = match[1].upper(), text[match.end() :]
    if match[1].islower():  # so may be the others
        if match[0].strip() == match[1] and _GOES_ON_LOWER.match(rest):
            return None
        rest = re.sub(r"\b[b-hj-z]\b", lambda other: other[0].upper(), rest)
    for other in _LETTER.finditer(rest):
        start = other.start()
        if other[1] == letter or _is_word(other) or _DENIED.match(rest, other.end()):
            continue
        if _MORE.search(rest, max(0, start - _NEAR), start) or (
            alone and rest[:start].rstrip(" ")[-1:] == "\n"  # a line of its own: an option
        ):
            return ""
    return letter


def choice(text: str) -> str | None:
    """The letter that a text chooses: in a box, after "answer" or "option", or at its start.

    >>> choice("Not A, since … so the answer is (C)."), choice("B, I think."), choice("B or C")
    ('C', 'B', None)
    """
    text = after_thinking(text)
    if has_box(text):
        boxed = without_markup(as_ascii(boxed_answer(text) or "")).replace("$", "")
        return _leading_letter(boxed, alone=True) or None
    text = without_markup(as_ascii(text[-_TAIL:])).strip()
    for pattern in _CHOOSES:
        for match in reversed(list(pattern.finditer(text))):
            if (letter := _leading_letter(text[match.end() :])) is not None:
                return letter or None
    return _leading_letter(text, alone=True) or None


def last_letter(text: str) -> str | None:
    """The lenient reading: the last capital letter that stands alone."""
    letters = _LETTER.findall(as_ascii(text[-_TAIL:]))
    return letters[-1] if letters else None
