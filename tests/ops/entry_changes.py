"""Ways to change an argument of a legal call, for tests of what a library's entry takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

ANY_ARGUMENT: dict[str, Callable[[torch.Tensor], Any]] = {
    "double": lambda t: t.double(),
    "longer": lambda t: torch.cat((t, t[:1])),
    "shorter": lambda t: t[:-1],
    "no rows": lambda t: t[:0],
    "one more axis": lambda t: t[None],
    "one axis less": lambda t: t[0],
    "reversed axes": lambda t: t.movedim(0, -1),
    "last axes swapped": lambda t: t.mT,
    "gaps between elements": lambda t: torch.stack((t, t), -1)[..., 0],
    "expanded": lambda t: t[:1].expand(t.shape),
    "meta": lambda t: t.to("meta"),
    "none": lambda t: None,
    "gaps between rows": lambda t: torch.cat((t, t), -1)[..., : t.shape[-1]],
    "narrow": lambda t: t[..., :-1],
    "shifted": lambda t: torch.cat((t.reshape(-1)[:1], t.reshape(-1)))[1:].view(t.shape),
}
