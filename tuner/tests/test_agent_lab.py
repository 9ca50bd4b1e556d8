"""Edited kernels in real processes on the CPU: what is measured is what was edited, and nobody else
sees it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fastkernels import catalog
from fastkernels_tuner import plan, policy
from fastkernels_tuner.agent import policy as constitutions
from fastkernels_tuner.agent import sources
from fastkernels_tuner.agent.backends import Scripted
from fastkernels_tuner.agent.lab import Laboratory
from fastkernels_tuner.agent.loop import Loop
from fastkernels_tuner.agent.memory import BEGUN, Begun, Memory
from fastkernels_tuner.agent.workspace import PLAN, version_of
from fastkernels_tuner.campaign import Campaign
from fastkernels_tuner.model import Candidate, Cause
from fastkernels_tuner.space import candidate
from tuner.tests.agents import decisions, history, opened, plan_text, script
from tuner.tests.test_measure import DECODE, POLICY, Quiet

OP = catalog.operator("gdn_decode")
FILES = sources.editable(OP, OP.safe_route)
(NAME,) = FILES
SHIPPED = candidate("gdn_decode", OP.safe_route, {})
LINE = "    output.copy_(result[:, None])\n"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laboratory]:
    folder = tmp_path_factory.mktemp("versions")
    with Laboratory("cpu", POLICY, folder, seed=1, code="commit", guard=Quiet()) as made:
        yield made


def edited(lab: Laboratory, old: str, new: str) -> Candidate:
    files = {NAME: replaced(old, new)}
    source = version_of(files)
    lab.provide(source, files)
    return SHIPPED.model_copy(update={"source": source})


def replaced(old: str, new: str) -> str:
    assert FILES[NAME].count(old) == 1
    return FILES[NAME].replace(old, new)


SLOW = "    x = torch.ones(1000, 1000)\n    x @ x\n"


def test_a_campaign_in_earnest(lab: Laboratory, tmp_path: Path) -> None:
    """A slow edit, paired with what is installed, each in processes of its own."""
    turn = Scripted(files={NAME: replaced(LINE, LINE + SLOW), PLAN: plan_text()})
    rules = policy.default("cpu").model_copy(
        update={"max_workloads": 1, "buckets": 1, "iterations": 3, "looks": (2,)}
    )
    spec = plan.make(
        "gdn_decode", "cpu", rules, lab.environment, routes=(OP.safe_route.name,), seed=1
    )
    row = spec.workloads[0]  # a few of them take a minute on busy cores
    regimes = tuple(regime for regime in spec.regimes if plan.inside(OP, regime, row))
    spec = spec.model_copy(update={"workloads": (row,), "regimes": regimes})
    with opened(tmp_path) as store:
        number = store.create(spec)
        campaign = Campaign(store, number, tmp_path / number)
        with store.hold(number, "test", 600) as lease:
            ledger = Memory(store, number, lease)
            rulebook = constitutions.default()
            begun = Begun(
                route=OP.safe_route.name, files=ledger.keep(FILES),
                constitution=rulebook.model_dump(mode="json"),
            )  # fmt: skip
            ledger.add(BEGUN, begun)
            loop = Loop(campaign, ledger, lab, rulebook, (script(turn),), script(), rounds=1)
            loop.run()
        assert decisions(campaign) == [("archive", "not_faster")]
        gain = history(campaign).decisions[0].gain
        assert gain is not None
        assert gain < -4  # five times as long
        store.check(number)


def test_a_wrong_edit_is_wrong_and_the_judge_is_not(lab: Laboratory) -> None:
    """Though the edit reaches for the reference and the comparators: its process has others."""
    reach = (
        "from fastkernels.ops.gdn_decode import reference\n"
        "from fastkernels.testing import compare\n"
        "reference.reference = compare.compare = None\n"
    )
    files = {NAME: replaced("output.copy_(result", "output.copy_(1.05 * result") + reach}
    lab.provide("reaches", files)
    wrong = SHIPPED.model_copy(update={"source": "reaches"})
    for seed in (1, 2):
        (failure,) = lab.judge(wrong, DECODE, [seed]).failures
        assert failure.cause is Cause.NUMERIC
        assert lab.judge(SHIPPED, DECODE, [seed]).failures == ()


def test_files_that_cannot_be_imported_are_the_candidates_fault(lab: Laboratory) -> None:
    broken = edited(lab, "import torch\n", "import torch\nimport no_such_module\n")
    (failure,) = lab.judge(broken, DECODE, [1]).failures
    assert failure.cause is Cause.COMPILE
    assert "no_such_module" in failure.message
    assert lab.judge(SHIPPED, DECODE, [1]).failures == ()


def test_copies_are_whole(lab: Laboratory, tmp_path: Path) -> None:
    lab._folder, before = tmp_path, lab._folder
    try:
        made = edited(lab, LINE, f"{LINE}    # once more\n")
        (folder,) = tmp_path.iterdir()
        assert folder.name == made.source[:16]
        assert "# once more" in (folder / NAME).read_text()
        assert (folder / "src/fastkernels/ops/gdn_prefill/spec.py").exists()
        edited(lab, LINE, f"{LINE}    # once more\n")
    finally:
        lab._folder = before
