"""Where campaigns live: see `store.Store`; `ledger` and `schema` say what is kept and why it can be
trusted, `bundle` how it travels."""

from __future__ import annotations

from fastkernels_tuner.store.errors import (
    CampaignExists,
    DiskFull,
    LeaseLost,
    LeaseTaken,
    StoreCorrupt,
    StoreError,
    StoreUnavailable,
    StoreVersionError,
    UnfitFileSystem,
    UnknownBlob,
    UnknownCampaign,
)
from fastkernels_tuner.store.ledger import Event, Status
from fastkernels_tuner.store.rows import CampaignRow, Job, JobRow
from fastkernels_tuner.store.store import Lease, Store
from fastkernels_tuner.store.studies import study_storage

__all__ = [
    "CampaignExists",
    "CampaignRow",
    "DiskFull",
    "Event",
    "Job",
    "JobRow",
    "Lease",
    "LeaseLost",
    "LeaseTaken",
    "Status",
    "Store",
    "StoreCorrupt",
    "StoreError",
    "StoreUnavailable",
    "StoreVersionError",
    "UnfitFileSystem",
    "UnknownBlob",
    "UnknownCampaign",
    "study_storage",
]
