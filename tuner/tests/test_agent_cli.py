"""Commands about agents, in this process, over a lab that measures nothing."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fastkernels import catalog
from fastkernels_tuner.agent import enter, export, sandbox, sources
from fastkernels_tuner.agent.backends import Script, Scripted
from fastkernels_tuner.campaign import Campaign
from fastkernels_tuner.cli import agents, main
from fastkernels_tuner.errors import EvidenceError
from fastkernels_tuner.model import Policy
from fastkernels_tuner.promote import NotPromoted
from fastkernels_tuner.store import Store
from tuner.tests.agents import NAME, FakeLab, begin, edits, go_on, kernel, opened, plan_text, script


def invoke(*arguments: str | Path | float) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)))


def write_script(path: Path, *turns: Scripted) -> Path:
    path.write_text(Script(turns=turns).model_dump_json())
    return path


class CliLab(FakeLab):
    """As `Laboratory` is made."""

    def __init__(self, device: str, policy: Policy, folder: Path, *, seed: int) -> None:
        super().__init__(None, noise=0.002)
        assert folder.is_dir()


@pytest.fixture
def fake_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "Laboratory", CliLab)


@pytest.mark.usefixtures("fake_lab")
def test_a_campaign_from_the_command_line(tmp_path: Path) -> None:
    """It ends with its device's share, and goes on by `resume` with what it was begun with."""
    folder = tmp_path / "tuning"
    turns = write_script(tmp_path / "script.json", edits("us=1.2"), edits("us=0.5"))
    begun = invoke(
        "agent", "--op", "gdn_prefill", "--device", "cpu", "--backend", "replay",
        "--script", turns, "--rounds", 2, "--budget-usd", 5, "--gpu-hours", 1e-9,
        "--folder", folder, "--json",
    )  # fmt: skip
    assert begun.exit_code == 4, begun.output
    first = json.loads(begun.stdout)
    assert first["decisions"] == {"archive": 1}
    assert first["spent_usd"] == 0.5
    assert "archive | not_faster" in (folder / first["campaign"] / "summary.md").read_text()
    again = invoke("resume", "--folder", folder, "--json")
    assert again.exit_code == 4, again.output
    assert json.loads(again.stdout)["decisions"] == {"archive": 1}
    shown = invoke("status", first["campaign"], "--folder", folder)
    assert shown.exit_code == 0, shown.output
    refused = invoke("export-route", "--folder", folder)
    assert refused.exit_code == 1
    assert "nothing was promoted" in refused.output


@pytest.mark.usefixtures("fake_lab")
def test_a_campaign_that_promotes_says_what_is_next(tmp_path: Path) -> None:
    turns = write_script(tmp_path / "script.json", edits("us=0.5"))
    found = invoke(
        "agent", "--op", "gdn_prefill", "--device", "cpu", "--backend", "replay",
        "--script", turns, "--folder", tmp_path, "--rounds", 1,
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    assert "1 promote_global" in found.output
    assert "export-route" in found.output
    idle = invoke(
        "agent", "--op", "gdn_prefill", "--device", "cpu", "--backend", "replay",
        "--script", write_script(tmp_path / "idle.json"), "--folder", tmp_path,
    )  # fmt: skip
    assert idle.exit_code == 1, idle.output
    assert "3 turns in a row" in idle.output


AGENT = """
import json, pathlib, sys
assert "Experiment 1" in sys.stdin.read()
name, plan, text = sys.argv[1:]
path = pathlib.Path(name)
path.write_text(path.read_text() + text)
pathlib.Path("plan.toml").write_text(plan)
print(json.dumps({"total_cost_usd": 0.75}))
"""


@pytest.mark.usefixtures("fake_lab")
def test_a_command_works_in_its_sandbox(tmp_path: Path) -> None:
    try:
        sandbox.find(sandbox.Limits())
    except sandbox.NoSandbox as error:
        pytest.skip(str(error))
    python = [os.path.realpath(sys.executable), "-ISc", AGENT]
    line = shlex.join([*python, NAME, plan_text(), "# fake: us=0.5\n"])
    found = invoke(
        "agent", "--op", "gdn_prefill", "--device", "cpu", "--command", line, "--rounds", 1,
        "--read", sys.base_prefix, "--folder", tmp_path, "--json",
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    document = json.loads(found.stdout)
    assert document["decisions"] == {"promote_global": 1}
    assert document["spent_usd"] == 0.75


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--backend", "replay"], "--script"),
        (["--backend", "endpoint"], "--model"),
        ([], "--command"),
        (["--command", "a 'b"], "command"),
        (["--backend", "endpoint", "--model", "m"], "FASTKERNELS_AGENT_URL"),
    ],
)
def test_a_backend_that_is_not_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], words: str
) -> None:
    monkeypatch.delenv("FASTKERNELS_AGENT_URL", raising=False)
    found = invoke(
        "agent", "--op", "gdn_decode", "--device", "cpu", "--folder", tmp_path,
        "--unsafe-no-sandbox", *options,
    )  # fmt: skip
    assert found.exit_code == 2, found.output
    assert words in found.output
    assert not list(tmp_path.iterdir())


def test_without_a_sandbox_no_command_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(enter, "__file__", str(tmp_path / "no-such-script"))
    found = invoke(
        "agent", "--op", "gdn_decode", "--device", "cpu", "--folder", tmp_path, "--command", "true"
    )
    assert found.exit_code == 3, found.output
    assert "--unsafe-no-sandbox" in found.output


# ---- init ---------------------------------------------------------------------------------------


def test_init_makes_a_folder_once(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    made = invoke("init", folder, "--op", "gdn_decode", "--device", "cpu", "--json")
    assert made.exit_code == 0, made.output
    assert json.loads(made.stdout)["files"] == [
        "README.md", "policy.toml", "agent.toml", "script.json",
    ]  # fmt: skip
    assert "--backend replay" in (folder / "README.md").read_text()
    assert Script.model_validate_json((folder / "script.json").read_text()).turns
    again = invoke("init", folder, "--op", "gdn_decode", "--device", "cpu")
    assert again.exit_code == 2
    assert "already" in again.output


# ---- export-route -------------------------------------------------------------------------------


def promoted(tmp_path: Path, *turns: Scripted) -> tuple[str, str]:
    """The URL of a store with a campaign, and its id."""
    with opened(tmp_path) as store:
        campaign = begin(store, tmp_path)
        go_on(campaign, script(*turns), rounds=len(turns))
        return store.url, campaign.id


def test_a_promotion_becomes_a_patch_with_its_evidence(tmp_path: Path) -> None:
    turns = (edits("us=0.8"), edits("us=2.0"), edits("us=0.6", falsified_by="--- a\n+++ b"))
    url, _ = promoted(tmp_path, *turns)
    found = invoke("export-route", "--storage", url, "--folder", tmp_path, "--json")
    assert found.exit_code == 0, found.output
    document = json.loads(found.stdout)
    evidence: dict[str, Any] = json.loads(Path(document["evidence"]).read_text())
    assert [each["experiment"] for each in evidence["lineage"]] == [1, 3]
    assert [each["choice"] for each in evidence["attempts"]] == [
        "promote_global", "archive", "promote_global",
    ]  # fmt: skip
    checkout = tmp_path / "checkout"
    (checkout / NAME).parent.mkdir(parents=True)
    (checkout / NAME).write_text(sources.editable(*_route())[NAME])
    applied = subprocess.run(
        ["git", "apply", "--verbose", document["patch"]], cwd=checkout, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert applied.returncode == 0, applied.stderr
    assert (checkout / NAME).read_text() == kernel("us=0.6")


def _route() -> Any:
    operator = catalog.operator("gdn_prefill")
    return operator, operator.safe_route


def test_what_changed_since_or_never_won_is_not_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, number = promoted(tmp_path, edits("us=1.5"), edits("us=0.5"))
    with Store.open(url) as store:
        campaign = Campaign(store, number, tmp_path / number)
        monkeypatch.setattr(sources, "editable", lambda *_: {NAME: "another\n"})
        with pytest.raises(EvidenceError, match="changed since"):
            export.write(campaign, tmp_path / "x.patch")
        other = store.create(campaign.spec)
        with pytest.raises(NotPromoted, match="no campaign of agents"):
            export.write(Campaign(store, other, tmp_path / other), tmp_path / "x.patch")
    assert not (tmp_path / "x.patch").exists()
