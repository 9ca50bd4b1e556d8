"""Numbers with units, and text from elsewhere made harmless to layouts."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from datetime import datetime, timezone

NARROW = "\N{NARROW NO-BREAK SPACE}"
MINUS = "\N{MINUS SIGN}"
_UNSEEN = {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"}
NOTHING = "\N{EN DASH}"


def clean(text: str) -> str:
    """With escapes for control, format (bidirectional overrides), unassigned characters and
    separators of lines other than the usual one; that and tabs stay."""
    return "".join(
        char
        if char in "\n\t" or unicodedata.category(char) not in _UNSEEN
        else char.encode("unicode_escape", "surrogatepass").decode()
        for char in text
    )


def count(number: int) -> str:
    return f"{number:,}".replace(",", NARROW)


def some(number: int, one: str) -> str:
    return f"{count(number)} {one}{'' if number == 1 else 's'}"


def us(value: float | None) -> str:
    """Three significant digits, never an exponent; the unit stands in the head of the column."""
    if value is None:
        return NOTHING
    if abs(value) >= 100:
        return count(round(value))
    if abs(value) < 0.001:
        return f"{value:.1g}" if value else "0"
    digits = 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:.{digits}f}"


def percent(value: float | None, digits: int = 1) -> str:
    return NOTHING if value is None else f"{100 * value:.{digits}f}{NARROW}%".replace("-", MINUS)


def signed_percent(value: float, digits: int = 2) -> str:
    sign = MINUS if value < 0 else "+"
    return f"{sign}{abs(100 * value):.{digits}f}{NARROW}%"


def rate(value: float) -> str:
    """A small probability in percent, three significant digits."""
    return f"{100 * value:.3g}{NARROW}%"


def ratio(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3f}{NARROW}\N{MULTIPLICATION SIGN}"


def seconds(value: float | None) -> str:
    if value is None:
        return NOTHING
    if value < 59.95:
        return f"{value:.1f}{NARROW}s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes}{NARROW}min {rest:02d}{NARROW}s"
    return f"{minutes // 60}{NARROW}h {minutes % 60:02d}{NARROW}min"


def moment(value: datetime | None) -> str:
    if value is None:
        return NOTHING
    return f"{value.astimezone(timezone.utc):%Y-%m-%d %H:%M} UTC"


def pairs(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def group(mode: str, constants: Mapping[str, int], fixed: Mapping[str, int] | None = None) -> str:
    """What a choice of mode and constants is called."""
    parts = [mode, pairs(constants), pairs(fixed or {})]
    return ", ".join(part for part in parts if part) or "every mode"


def span(bounds: tuple[int, int]) -> str:
    low, high = bounds
    return count(low) if low == high else f"{count(low)}{NOTHING}{count(high)}"


def shorten(text: str, limit: int = 600) -> str:
    text = text.strip()
    if len(text) <= limit:
        return text
    return f"{text[:limit].rstrip()} … ({count(len(text) - limit)} characters more)"
