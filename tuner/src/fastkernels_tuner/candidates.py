"""Candidates as people name them: `route`, `route:knob=value,...`, or an id of `status`."""

from __future__ import annotations

import dataclasses
import json
import re

from fastkernels_tuner.errors import SourceError
from fastkernels_tuner.model import Candidate, Knob
from fastkernels_tuner.plan import operator_of
from fastkernels_tuner.space import candidate
from fastkernels_tuner.store import Store

ID = re.compile(r"[0-9a-f]{16}")


def parse(op: str, text: str, store: Store | None = None) -> Candidate:
    """Knobs that are not named keep the route's default. Raises SourceError."""
    if ID.fullmatch(text):
        return _known(op, text, store)
    name, _, rest = text.partition(":")
    route = operator_of(op).route(name)
    if route is None:
        known = ", ".join(route.name for route in operator_of(op).routes)
        raise SourceError(f"{op}: the route {name!r} is unknown, expected one of {known}")
    knobs: dict[str, Knob] = dataclasses.asdict(route.default_config)
    for entry in filter(None, rest.split(",")):
        knob, equals, value = entry.partition("=")
        if not equals or knob not in knobs:
            raise SourceError(
                f"{op}: {entry!r} in {text!r}, expected knob=value of {', '.join(knobs) or 'none'}"
            )
        try:
            knobs[knob] = json.loads(value)
        except ValueError:
            knobs[knob] = value
    try:
        config = dataclasses.asdict(route.make_config(knobs))
    except (ValueError, TypeError) as error:
        raise SourceError(f"{op}: {text!r}: {error}") from None
    return candidate(op, name, config)


def _known(op: str, wanted: str, store: Store | None) -> Candidate:
    for found in of_store(store) if store is not None else ():
        if found.id == wanted:
            if found.op != op:
                raise SourceError(f"{wanted} is a candidate of {found.op}, not of {op}")
            return found
    raise SourceError(f"no campaign in this store knows the candidate {wanted}")


def of_store(store: Store) -> list[Candidate]:
    """Every candidate that some campaign of a store has tried, each once."""
    found: dict[str, Candidate] = {}
    for campaign in store.campaigns():
        found |= {candidate.id: candidate for candidate in of_campaign(store, campaign.id)}
    return list(found.values())


def of_campaign(store: Store, campaign: str) -> list[Candidate]:
    found: dict[str, Candidate] = {}
    for row in store.jobs(campaign, "done"):
        for result in (row.result or {}).get("results", ()):
            each = Candidate(**result["candidate"])
            found[each.id] = each
    return list(found.values())
