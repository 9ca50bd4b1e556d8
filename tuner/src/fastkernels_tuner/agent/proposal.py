"""What an agent hands in besides a patch: `plan.toml`, one change with what is expected of it."""

from __future__ import annotations

import json
import sys
from typing import Any

from pydantic import Field, ValidationError

from fastkernels_tuner.agent.files import Refused
from fastkernels_tuner.agent.workspace import PLAN
from fastkernels_tuner.model import Knob, Model

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class Plan(Model):
    """One experiment, before it is made. `parameters`: values of the route's knobs to search with
    the change in place; `family` names the structural idea, the same for its variations."""

    hypothesis: str = Field(min_length=1, max_length=4000)
    change: str = Field(min_length=1, max_length=2000)
    family: str = Field(min_length=1, max_length=100)
    bottleneck: str = Field(min_length=1, max_length=200)
    expected_gain: float = Field(gt=0, lt=1)
    falsified_by: str = Field(min_length=1, max_length=2000)
    parameters: dict[str, tuple[Knob, ...]] = {}
    notes: str = Field(default="", max_length=4000)


EXAMPLE = """\
hypothesis = "q is read from memory once for each head of its group"
change = "keep q in registers over the heads of a group"
family = "register_reuse"
bottleneck = "memory"
expected_gain = 0.05           # of the time: 5 % faster
falsified_by = "no gain where num_v_heads is twice num_q_heads"
# parameters = { chunk_size = [64, 128] }   # optional: knobs to search with the change in place
# notes = "..."
"""


def parse(text: str) -> Plan:
    """Raises Refused, by the name of the file, over anything but a plan."""
    if not text:
        raise Refused(PLAN, "is missing")
    try:
        data: dict[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused(PLAN, f"is not TOML: {error}") from None
    try:
        # By way of JSON, in which TOML's dates and infinities are no plan's.
        return Plan.model_validate_json(json.dumps(data, allow_nan=False))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise Refused(PLAN, f"is not as asked for: {where}: {first['msg']}") from None
    except (TypeError, ValueError) as error:
        raise Refused(PLAN, f"is not as asked for: {error}") from None


def render(plan: Plan) -> str:
    """As Markdown, for experiments/exp_N/plan.md."""
    lines = [
        f"**Hypothesis.** {plan.hypothesis}",
        f"**Change.** {plan.change}",
        f"**Family.** {plan.family}   **Bottleneck.** {plan.bottleneck}",
        f"**Expected gain.** {plan.expected_gain:.1%}   **Falsified by.** {plan.falsified_by}",
    ]
    if plan.parameters:
        searched = ", ".join(f"{k} of {list(v)}" for k, v in plan.parameters.items())
        lines.append(f"**Searched.** {searched}")
    if plan.notes:
        lines.append(plan.notes)
    return "\n\n".join(lines) + "\n"
