"""Sessions of `ab` on file: a calibration goes on where it stopped, and takes no other sessions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fastkernels_tuner import policy
from fastkernels_tuner.cli import main
from fastkernels_tuner.errors import SourceError
from fastkernels_tuner.model import Environment, Policy
from fastkernels_tuner.sessions import Session, Sessions
from fastkernels_tuner.stats import PairedTest, Ratio, calibrate

POLICY = Policy(name="test", timer="wall", is_promotable=False, looks=(2, 3))
HERE = Environment(
    device="cpu", arch="x86_64", uuid="host", driver="", versions={}, code="0", timer="wall"
)
PAIRS = [{"w0": Ratio(0.001 * i, 2.0), "w1": Ratio(-0.001 * i, 3.0)} for i in range(3)]


def sessions(path: Path | None, **changes: Any) -> Sessions:
    of = {"first": "a", "second": "a", "policy": POLICY.id, "workloads": ("w0", "w1"), **changes}
    return Sessions(path, **of)


def test_what_was_finished_is_there_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "aa.jsonl"
    verdict = PairedTest(POLICY, ("w0", "w1")).verdict()
    kept = sessions(path)
    for _ in range(2):
        kept.add(verdict, PAIRS, HERE)
    again = sessions(path)
    assert len(again) == 2
    assert again.pairs == kept.pairs == [tuple(PAIRS)] * 2
    assert again.verdicts == [verdict] * 2
    again.add(verdict, PAIRS, HERE)
    numbers = [json.loads(line)["number"] for line in path.read_text().splitlines()]
    assert numbers == [0, 1, 2]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"first": "b"}, "first is 'a', this comparison's 'b'"),
        ({"second": "b"}, "second is 'a'"),
        ({"policy": "other"}, "this comparison's 'other'"),
        ({"workloads": ("w0",)}, r"workloads \['w0', 'w1'\], this comparison's are \['w0'\]"),
    ],
)
def test_another_comparison_is_refused(tmp_path: Path, changes: Any, words: str) -> None:
    path = tmp_path / "aa.jsonl"
    sessions(path).add(PairedTest(POLICY, ("w0", "w1")).verdict(), PAIRS, HERE)
    with pytest.raises(SourceError, match=rf"aa\.jsonl:1: .*{words}"):
        sessions(path, **changes)


def test_a_line_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "aa.jsonl"
    path.write_text('{"first": "a"}\n')
    with pytest.raises(SourceError, match=r"aa\.jsonl:1: expected a session as JSON, second"):
        sessions(path)


def test_the_gpus_constants_hold_on_sixty_sessions_of_an_h200() -> None:
    """One configuration of gdn_decode against itself, as measured."""
    path = Path(__file__).parents[2] / "bench" / "results" / "h200" / "gdn_decode.ab.jsonl"
    measured = [Session.model_validate_json(line) for line in path.read_text().splitlines()]
    assert len({session.number for session in measured}) == len(measured) >= 60
    assert {session.first for session in measured} == {session.second for session in measured}
    assert {session.environment.device for session in measured} == {"NVIDIA H200"}
    rules = policy.default("cuda")
    found = calibrate(rules, [session.pairs for session in measured])
    assert found.state == "hold"
    assert found.promoted <= 3
    assert found.confirmed == 0
    assert found.session_sd <= rules.session_sd


def test_a_calibration_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("policy.toml").write_text(
        'name = "test"\ntimer = "wall"\nis_promotable = false\nlooks = [2, 3]\niterations = 2\n'
        "max_workloads = 1\nmax_discarded = 0.9\n"
    )

    def ab(repeats: int, *more: str) -> Result:
        return CliRunner().invoke(
            main,
            [
                "ab", "--op", "gdn_decode", "torch_recurrent", "torch_recurrent", "--device", "cpu",
                "--limit", "1", "--repeats", str(repeats), "--sessions", "aa.jsonl", "--policy",
                "policy.toml", "--json", *more,
            ],
        )  # fmt: skip

    first = ab(1)
    assert first.exit_code in (0, 5), first.output
    second = ab(2)
    assert "session 0" not in second.stderr
    assert "session 1" in second.stderr
    found = json.loads(second.stdout)
    assert found["calibration"]["repeats"] == 2
    assert found["verdicts"][0] == json.loads(first.stdout)["verdicts"][0]
    assert len(Path("aa.jsonl").read_text().splitlines()) == 2
