"""The constitution: read, rendered, enforced; plans; skills from the package's own data."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastkernels import catalog
from fastkernels.core.device import named_device
from fastkernels_tuner import plan as campaign_plan
from fastkernels_tuner.agent import policy, proposal, skills
from fastkernels_tuner.agent.files import Refused
from fastkernels_tuner.agent.workspace import Patch
from fastkernels_tuner.errors import SourceError
from fastkernels_tuner.policy import default as default_policy

CONSTITUTION = policy.default()
NAME = "src/fastkernels/ops/gdn_decode/routes/torch_recurrent.py"
BASE = {NAME: "import torch\n\n\ndef launch(x, out):\n    out.copy_(x)\n"}


def test_every_rule_is_enforced_by_something() -> None:
    assert {rule.enforced_by for rule in CONSTITUTION.rule} == set(policy.ENFORCERS)
    assert len({rule.name for rule in CONSTITUTION.rule}) == len(CONSTITUTION.rule)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name = 3", "name"),
        ("[", "not TOML"),
        ("name = 'x'\nlanguages = []\nmax_file = 3", "max_file"),
        (
            "name = 'x'\nlanguages = []\n[[rule]]\nname='r'\ntext='t'\nenforced_by='hope'",
            "rule 'r' is enforced by 'hope'",
        ),
    ],
)
def test_a_constitution_that_is_none(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "agent.toml"
    path.write_text(text)
    with pytest.raises(SourceError, match=words):
        policy.read(path)
    with pytest.raises(SourceError, match="cannot be read"):
        policy.read(tmp_path / "none.toml")


def test_an_agent_is_shown_every_rule_and_every_file() -> None:
    text = policy.render(CONSTITUTION, "gdn_decode", "torch_recurrent", BASE)
    for rule in CONSTITUTION.rule:
        assert rule.text in text
    assert NAME in text
    assert "src/fastkernels/ops/gdn_decode/kernels/*.py" in text
    assert proposal.EXAMPLE.splitlines()[0] in text


def test_new_files_lie_beside_the_kernels_of_the_operator() -> None:
    permit = CONSTITUTION.permit("gdn_decode", BASE)
    assert permit.allows(NAME)
    assert permit.allows("src/fastkernels/ops/gdn_decode/kernels/rows.py")
    for name in (
        "src/fastkernels/ops/gdn_decode/reference.py",
        "src/fastkernels/ops/gdn_prefill/kernels/rows.py",
        "tuner/src/fastkernels_tuner/gates.py",
    ):
        assert not permit.allows(name)


BROKEN = {
    "a container": ("memory", "_kept = {}\n"),
    "a container with a type": ("memory", "_kept: dict[int, object] = dict()\n"),
    "a global": ("memory", "def f():\n    global n\n    n = 1\n"),
    "a cache": ("memory", "import functools\n\n\n@functools.lru_cache\ndef f(x):\n    return x\n"),
    "a default": ("memory", "def f(x, kept=[]):\n    kept.append(x)\n"),
    "a pointer": ("memory", "def f(x):\n    return x.data_ptr()\n"),
    "reflection": ("memory", "def f(x):\n    setattr(f, 'kept', x)\n"),
    "a graph": ("static", "import torch\n\ng = torch.cuda.CUDAGraph()\n"),
    "the clock": ("static", "import time\n"),
    "the network": ("static", "import socket\n"),
    "a library": ("static", "import flashinfer\n"),
    "the judge": ("static", "import fastkernels_tuner\n"),
    "an answer to an exception": ("static", "try:\n    x = 1\nexcept ValueError:\n    x = 2\n"),
    "no Python": ("static", "def f(:\n"),
    "many lines": ("size", "x = 1\n" * 700),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_patch_that_breaks_a_rule(name: str) -> None:
    by, text = BROKEN[name]
    found = policy.breaches(CONSTITUTION, Patch(files={NAME: BASE[NAME] + text}), BASE)
    assert by in {breach.by for breach in found}, found


def test_what_was_there_before_is_no_breach() -> None:
    base = {NAME: "import functools\n\n\n@functools.cache\ndef f(x):\n    return x\n"}
    patch = Patch(files={NAME: "\n\n" + base[NAME] + "y = 1\n"})
    assert policy.breaches(CONSTITUTION, patch, base) == []
    twice = Patch(files={NAME: base[NAME] + "\n\n@functools.cache\ndef g(x):\n    return x\n"})
    assert [b.by for b in policy.breaches(CONSTITUTION, twice, base)] == ["memory"]


def test_languages_are_those_that_are_permitted() -> None:
    only = CONSTITUTION.model_copy(update={"languages": ("torch",)})
    patch = Patch(files={NAME: "import triton\n"})
    assert [b.message for b in policy.breaches(only, patch, BASE)] == [
        f"{NAME}: is written in triton"
    ]
    assert policy.breaches(CONSTITUTION, patch, BASE) == []
    data = Patch(files={"src/fastkernels/ops/gdn_decode/kernels/table.bin": "x"})
    assert [b.by for b in policy.breaches(CONSTITUTION, data, BASE)] == ["languages"]


# ---- plans --------------------------------------------------------------------------------------


def test_a_plan_is_parsed_and_rendered() -> None:
    text = proposal.EXAMPLE.replace("# parameters", "parameters").split("# notes")[0]
    plan = proposal.parse(text)
    assert plan.expected_gain == 0.05
    assert plan.parameters == {"chunk_size": (64, 128)}
    shown = proposal.render(plan)
    assert "5.0%" in shown
    assert "chunk_size of [64, 128]" in shown


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("expected_gain = 0.05", "expected_gain = 5", "expected_gain"),
        ("expected_gain = 0.05", "expected_gain = nan", "as asked for"),
        ("expected_gain = 0.05", "expected_gain = 2026-01-01", "as asked for"),
        ("family", "famly", "famly|family"),
        ('falsified_by = "', 'falsified_by = ""#', "falsified_by"),
        ("hypothesis", "[", "not TOML"),
    ],
)
def test_a_plan_that_is_none(old: str, new: str, words: str) -> None:
    with pytest.raises(Refused, match=words):
        proposal.parse(proposal.EXAMPLE.replace(old, new))
    with pytest.raises(Refused, match="missing"):
        proposal.parse("")


# ---- skills -------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [operator.name for operator in catalog.OPERATORS])
def test_skills_are_made_from_the_package(op: str) -> None:
    """Every operator has techniques, every tensor and limit is there, and floors of an H200."""
    operator, info, rules = catalog.operator(op), named_device("h200"), default_policy("cuda")
    route = operator.safe_route
    workloads = list(campaign_plan.to_search(operator, info, rules))[:3]
    found = skills.skills(operator, route, info, workloads, rules)
    assert set(found) == {f"skills/{n}/SKILL.md" for n in ("operator", "device", "torch")}
    contract = found["skills/operator/SKILL.md"]
    for tensor in (*operator.spec.inputs, *operator.spec.outputs):
        assert f"`{tensor.name}`" in contract
    for limit in operator.spec.tolerances:
        assert f"{limit.limit:g}" in contract
    assert skills.TECHNIQUES[op][0] in contract
    device = found["skills/device/SKILL.md"]
    assert "4.8 TB/s" in device
    assert str(workloads[0]) in device
    assert "context/reference.py" in skills.context(op)
    assert str(workloads[0]) in skills.workload_profile(workloads)
    shown = skills.profile(workloads, {workloads[0].id: 10.0}, {workloads[0].id: 4.0})
    assert "60%" in shown
    assert "Nothing" in skills.profile(workloads, {}, {})


def test_every_language_has_a_checklist() -> None:
    languages = {route.language for each in catalog.OPERATORS for route in each.routes}
    assert languages <= set(skills.CHECKLISTS)
