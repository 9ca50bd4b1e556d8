"""Measuring and judging candidates: `Bench`, in front of a judge and candidate processes.

`broker` starts and asks them, `judge` and `worker` are what runs in them, `protocol` what they say,
`buffers` the memory that is lent, `guards` whether the machine is fit.
"""

from fastkernels_tuner.measure.broker import (
    Bench,
    InfrastructureFault,
    Rejected,
    TimerMissing,
    Unstable,
)
from fastkernels_tuner.measure.guards import DeviceBusy

__all__ = [
    "Bench",
    "DeviceBusy",
    "InfrastructureFault",
    "Rejected",
    "TimerMissing",
    "Unstable",
]
