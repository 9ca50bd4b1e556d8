"""What can go wrong with a store, with the exit status that says so."""

from __future__ import annotations

from datetime import datetime

from fastkernels_tuner.errors import TunerError, UnfitError


class StoreError(TunerError):
    """A store is asked for something it does not have or cannot do."""


class UnknownCampaign(StoreError):
    """No campaign of that name is in the store."""


class UnknownBlob(StoreError):
    """No blob of that digest is in the store."""


class CampaignExists(StoreError):
    """The store has a campaign of that name with another history than the bundle's."""


class StoreVersionError(StoreError):
    """The store, a bundle or a campaign was written by another version of the tuner or Optuna."""


class LeaseTaken(StoreError):
    """Another controller holds the campaign: `owner`, until `expires` unless it renews."""

    def __init__(self, campaign: str, owner: str, expires: datetime) -> None:
        super().__init__(
            f"campaign {campaign} is held by {owner} until {expires.isoformat(timespec='seconds')}"
        )
        self.owner = owner
        self.expires = expires


class LeaseLost(StoreError):
    """The token is no longer the current one: what was done under it does not count."""

    exit_code = 3


class StoreCorrupt(StoreError):
    """The store or a bundle is not what was written: an edit, a gap, a truncation, a lost file."""

    exit_code = 7


class StoreUnavailable(UnfitError):
    """The database does not answer, or stays locked."""


class UnfitFileSystem(UnfitError):
    """SQLite's locks are not safe where the database would lie."""


class DiskFull(UnfitError):
    """Too little space for new work; what runs can still be finished."""
