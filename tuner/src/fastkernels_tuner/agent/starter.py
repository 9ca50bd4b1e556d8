"""A folder to begin with: the rules to edit, a script to try it with, what to do next."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

from fastkernels.core.route import Operator
from fastkernels_tuner.agent import sources
from fastkernels_tuner.agent.backends import Script, Scripted
from fastkernels_tuner.agent.proposal import EXAMPLE
from fastkernels_tuner.agent.workspace import PLAN
from fastkernels_tuner.errors import SourceError, UnfitError

README = """\
# Campaigns of {op}

- `policy.toml`: how candidates are measured and judged
- `agent.toml`: what an agent may do; rendered into its AGENTS.md
- `script.json`: a campaign without an agent, to see the harness at work

```
cd {folder}
fastkernels-tune agent --op {op} --backend replay --script script.json --rounds 1{more}
fastkernels-tune agent --op {op} --command 'claude -p' --budget-usd 20 --gpu-hours 2{more}
fastkernels-tune resume
fastkernels-tune export-route
```
Records of every experiment are in `tuning/<campaign>/`. docs/tuning.md tells the rest.
"""


def make(folder: Path, operator: Operator, device: str) -> list[Path]:
    """Raises SourceError where there is something already."""
    name = "cpu" if device == "cpu" else "gpu"
    policies = resources.files("fastkernels_tuner").joinpath("policies")
    more = f" --device {device} --policy policy.toml --constitution agent.toml"
    texts = {
        "README.md": README.format(op=operator.name, folder=folder, more=more),
        "policy.toml": policies.joinpath(f"{name}.toml").read_text(encoding="utf-8"),
        "agent.toml": policies.joinpath("agent.toml").read_text(encoding="utf-8"),
        "script.json": _script(operator),
    }
    there = [each for each in texts if (folder / each).exists()]
    if there:
        raise SourceError(f"{folder} has a {there[0]} already")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for each, text in texts.items():
            (folder / each).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UnfitError(f"{folder}: {error}") from error
    return [folder / each for each in texts]


def _script(operator: Operator) -> str:
    """One turn that changes nothing that matters: an honest try that gains nothing."""
    route = operator.safe_route
    (name, text), *_ = sources.editable(operator, route).items()
    plan = EXAMPLE.replace("register_reuse", "nothing")
    turn = Scripted(files={name: f"{text}\nNOTHING = 0\n", PLAN: plan}, said="an example")
    return json.dumps(Script(turns=(turn,)).model_dump(mode="json"), indent=1) + "\n"
