"""What can go wrong, with the exit status that says so."""

from __future__ import annotations


class TunerError(Exception):
    exit_code = 2


class SourceError(TunerError):
    """A sweep or rule file is malformed, or was made for another version of the operator."""


class EvidenceError(TunerError):
    """A sound source does not carry a table: failures, missing rows, a table that lint rejects."""

    exit_code = 5


class OutOfBudget(TunerError):
    """What was allowed is used up, time or money; the campaign can go on later."""

    exit_code = 4


class UnfitError(TunerError):
    """The machine does not let us write."""

    exit_code = 3
