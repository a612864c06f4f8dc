"""Chinese text as it is spoken: figures are written out in characters, and punctuation is left out.

Two transcripts that differ only in `23%` and `百分之二十三` are the same then.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable

_DIGITS = "零一二三四五六七八九"
#: power of ten → its character; from 10⁴ on they are four powers apart
_UNITS = dict(enumerate("十百千", start=1)) | {4 * n: unit for n, unit in enumerate("万亿兆京垓秭穰沟涧正载", start=1)}

_MONEY_UNIT = "(?:千万|百万|[亿万千百元块角毛分])"
_QUANTIFIERS = (
    "(?:[匹张座回场尾条个首阙阵网炮顶丘棵只支袭辆挑担颗壳窠曲墙群腔砣客贯扎捆刀令打手罗坡山岭江溪钟队单双对出"
    "口头脚板跳枝件贴针线管名位身堂课本页家户层丝毫厘分钱两斤铢石钧锱忽寸尺丈里寻常铺程撮勺合升斗盘碗碟叠桶笼"
    "盆盒杯斛锅簋篮罐瓶壶卮盏箩箱煲啖袋钵年月日季刻时周天秒旬纪岁世更夜春夏秋冬代伏辈丸泡粒幢堆根道面片块"
    "]|[千微][克米])"
)
#: Chinese and full-width punctuation
_PUNCTUATION_RANGES = (
    "·–—‘’…‧〰﹏／",
    "\u201b-\u201f",
    "\u3001-\u3003",
    "\u3008-\u3011",
    "\u3014-\u301f",
    "\u303e-\u303f",
    "\uff01-\uff0d",
    "\uff1a-\uff20",
    "\uff3b-\uff40",
    "\uff5b-\uff64",
)
_PUNCTUATION = re.compile(f"[{re.escape(string.punctuation)}{''.join(_PUNCTUATION_RANGES)}]")


#: 二 is read 两 before a unit above ten, unless 十 or 零 stands before it
_TWO = re.compile(f"(?<![{_DIGITS}十])二(?=[{''.join(_UNITS.values()).removeprefix('十')}])")


def digits_in_chinese(digits: str) -> str:
    """Return digits one by one: `1998` is 一九九八."""
    return "".join(_DIGITS[int(digit)] for digit in digits)


def number_in_chinese(number: str) -> str:
    """Return a number as it is read: `22000` is 两万两千, `10.5` is 十点五, `105` is 一百零五.

    Args:
        number: decimal digits; there may be a point between them.
    """
    whole, _, decimals = number.partition(".")
    text = _TWO.sub("两", _read(whole) if len(whole) > 1 else digits_in_chinese(whole))
    if decimals:
        text = f"{text or '零'}点{digits_in_chinese(decimals)}"
    return text.removeprefix("一") if text.startswith("一十") else text


def _read(digits: str) -> str:
    significant = digits.lstrip("0")
    if len(significant) < 2:
        return ("零" if significant and len(digits) > 1 else "") + digits_in_chinese(significant)
    power = max(power for power in _UNITS if power < len(significant))
    return _read(digits[:-power]) + _UNITS[power] + _read(significant[-power:])


def _date(text: str) -> str:
    year, mark, rest = text.rpartition("年")
    return digits_in_chinese(year) + mark + _numbers(rest)


def _numbers(text: str) -> str:
    return re.sub(r"\d+(?:\.\d+)?", lambda found: number_in_chinese(found[0]), text)


def _telephone(text: str) -> str:
    return digits_in_chinese("".join(filter(str.isdecimal, text)))


def _fraction(text: str) -> str:
    numerator, denominator = text.split("/")
    return f"{number_in_chinese(denominator)}分之{number_in_chinese(numerator)}"


def _percentage(text: str) -> str:
    return f"百分之{number_in_chinese(text.removesuffix('%'))}"


#: what is written out, in this order: its pattern, whose first group it is → its characters
_RULES: tuple[tuple[re.Pattern[str], Callable[[str], str]], ...] = tuple(
    (re.compile(pattern), written)
    for pattern, written in (
        (r"\D+((?:(?:[089]\d|(?:19|20)\d{2})年)?(?:\d{1,2}月(?:\d{1,2}[日号])?)?)", _date),
        (rf"\D+(\d+(?:\.\d+)?[多余几]?{_MONEY_UNIT}(?:\d{_MONEY_UNIT}?)?)", _numbers),
        (r"\D((?:\+?86 ?)?1(?:[38]\d|5[0-35-9]|7[678]|9[89])\d{8})\D", _telephone),
        (r"\D((?:0(?:10|2[1-3]|[3-9]\d{2})-?)?[1-9]\d{6,7})\D", _telephone),
        (r"(\d+/\d+)", _fraction),
        (r"(\d+(?:\.\d+)?%)", _percentage),
        (rf"(\d+(?:\.\d+)?)[多余几]?{_QUANTIFIERS}", number_in_chinese),
        (r"(\d{4,32})", digits_in_chinese),
        (r"(\d+(?:\.\d+)?)", number_in_chinese),
    )
)
_LETTERS_AROUND_TWO = re.compile("([a-zA-Z]+)二([a-zA-Z]+)")


def normalise_chinese(text: str) -> str:
    """Return a text with its figures written out in characters, and spaces in the place of punctuation.

    Dates, sums of money, telephone numbers, fractions, percentages, numbers before a measure word, and numbers of four
    digits and more, which are read digit by digit, have rules of their own; `B2B` stays. What a rule finds is replaced
    where it first occurs.

    Source: the rules of https://github.com/speechio/chinese_text_normalization; lmms-eval 0.7.3,
    `tasks.librispeech.cn_tn.TextNorm` with the options of its tasks.
    """
    text = f"^{text}$"  # so that a number is never the first or the last character
    for pattern, written in _RULES:
        if written is _percentage:
            text = text.replace("％", "%")
        for found in pattern.findall(text):
            text = text.replace(found, written(found), 1)
    for before, after in _LETTERS_AROUND_TWO.findall(text):
        text = text.replace(f"{before}二{after}", f"{before}2{after}", 1)
    return _PUNCTUATION.sub(" ", text)
