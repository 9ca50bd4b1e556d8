"""From rows to ratios: peer over ours, above 1 is faster, per list, mode and peer."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

BEST = "best"
"""Pseudo-peer: row by row the fastest peer that is right."""


def summarise(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    groups: dict[str, dict[str, list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        groups[row["list"]][row["mode"]].append(row)
    found: dict[str, Any] = {"contest": {}, "serving": {}, "gap": {}}
    for listed, modes in groups.items():
        found[listed] = {mode: _peers(own) for mode, own in modes.items()}
    return found


def _peers(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = sorted({name for row in rows for name, peer in row["peers"].items() if _counts(peer)})
    found = {name: ratios(rows, name) for name in names}
    return found | ({BEST: ratios(rows, BEST)} if names else {})


def _counts(peer: Mapping[str, Any]) -> bool:
    return bool(peer.get("sum_us"))


def peer_us(row: Mapping[str, Any], name: str, field: str) -> float | None:
    """`sum_us` or `span_us` of a peer that is right on this row."""
    peers = {n: p for n, p in row["peers"].items() if _counts(p)}
    if name == BEST:
        return min((peer[field] for peer in peers.values()), default=None)
    return peers[name][field] if name in peers else None


def ratios(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    pairs = [
        (row, us, span)
        for row in rows
        if (us := peer_us(row, name, "sum_us")) and (span := peer_us(row, name, "span_us"))
    ]
    by_sum = [us / row["us"]["median"] for row, us, _ in pairs]
    by_span = [span / row["span_us"] for row, _, span in pairs]
    worst = by_sum.index(min(by_sum))
    found = {
        "ratio_of_means": sum(us for _, us, _ in pairs)
        / sum(r["us"]["median"] for r, _, _ in pairs),
        "mean_of_ratios": statistics.mean(by_sum),
        "geomean": math.exp(statistics.mean(math.log(ratio) for ratio in by_sum)),
        "worst": by_sum[worst],
        "ratio_of_means_span": sum(span for *_, span in pairs)
        / sum(r["span_us"] for r, _, _ in pairs),
        "mean_of_ratios_span": statistics.mean(by_span),
        "worst_span": min(by_span),
    }
    return {
        "rows": len(pairs),
        **{key: round(value, 4) for key, value in found.items()},
        "worst_id": pairs[worst][0]["id"],
    }


def finite(value: Any) -> Any:
    """The same data without what JSON cannot hold: NaN and infinities become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(entry) for entry in value]
    return value
