"""The stages of a campaign, in order. One file each; a new one is a line here.

A stage asks for pieces of work (`jobs`), any worker does one at a time (`run`), and when nothing is
left to ask for the controller draws the conclusion (`finish`). A conclusion is an event of the
ledger: a stage that has one is over, whatever happens later.
"""

from __future__ import annotations

from typing import Any, Protocol

from fastkernels_tuner.campaign import Campaign, Measures
from fastkernels_tuner.stages import compare, confirm, emit, fit, promote, report, search, verify


class Stage(Protocol):
    """A module with a docstring and these functions."""

    __name__: str

    def jobs(self, campaign: Campaign) -> list[dict[str, Any]]:
        """What is to be done, given what is done so far; asked again after each round, until it
        brings nothing new. Equal payloads are one job. One with a UUID under `gpu` is that GPU's,
        as long as somebody serves it."""

    def run(self, campaign: Campaign, payload: dict[str, Any], bench: Measures) -> dict[str, Any]:
        """One piece of work, on a worker, which adds under `gpu` where it was done. It may be run
        again after a crash."""

    def finish(self, campaign: Campaign) -> dict[str, Any]:
        """The conclusion; plain data."""


STAGES: tuple[Stage, ...] = (search, compare, fit, verify, confirm, emit, report)


def name_of(stage: Stage) -> str:
    return stage.__name__.rpartition(".")[2]


BY_NAME: dict[str, Stage] = {name_of(stage): stage for stage in (*STAGES, promote)}
