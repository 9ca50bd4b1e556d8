"""Who is drawn how: one letter and one colour per chosen candidate, the same on the whole page."""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fastkernels_tuner.report.data import CampaignReport

# Seven colours of style.css, apart from one another also without red, green or blue cones; an
# eighth could not be. Further candidates take them again with broken lines; the letters differ.
NUM_COLOURS = 7


class Look(NamedTuple):
    letter: str
    colour: int  # --series-<colour> of style.css
    is_broken: bool


class Cast:
    """Looks of the candidates that serve a regime, in the order of the regimes."""

    def __init__(self, chosen: Iterable[str]) -> None:
        self._looks = {
            name: Look(_letter(i), i % NUM_COLOURS, i // NUM_COLOURS % 2 == 1)
            for i, name in enumerate(dict.fromkeys(chosen))
        }

    @classmethod
    def of(cls, report: CampaignReport) -> Cast:
        return cls(regime.candidate for regime in report.regimes)

    @property
    def looks(self) -> Mapping[str, Look]:
        return self._looks

    def look(self, name: str) -> Look | None:
        return self._looks.get(name)


def _letter(i: int) -> str:
    """A … Z, A2 … Z2, and so on."""
    turn, i = divmod(i, 26)
    return string.ascii_uppercase[i] + (str(turn + 1) if turn else "")
