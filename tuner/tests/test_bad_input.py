"""What a person or a machine can get wrong, row by row: the exit status, and that nothing began.

Rows about candidates (sources, shapes, non-finite references) are in test_gates.py and
test_judge.py, those about sweep files in test_emit.py.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fastkernels import catalog
from fastkernels.core.device import named_device
from fastkernels_tuner import plan, policy
from fastkernels_tuner.cli import main
from fastkernels_tuner.errors import SourceError


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def tune(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def refused(result: Result, status: int, *words: str) -> None:
    assert result.exit_code == status, result.output
    for word in words:
        assert word in result.output
    assert "Traceback" not in result.output


def test_an_unknown_operator_names_the_known_ones() -> None:
    refused(tune("--op", "gemm", "--device", "cpu"), 2, "gemm", "gdn_decode")
    assert not list(Path("tuning").glob("*-*"))


def test_no_operator_shows_the_help() -> None:
    refused(tune(), 2, "Usage")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--op", "gdn_decode", "--device", "tpu"), ("tpu", "expected cpu")),
        (("--op", "gdn_decode", "--device", "cpu", "--trials", "0"), ("trials",)),
        (("--op", "gdn_decode", "--device", "cpu", "--peer", "x"), ("name=module:function",)),
        (("--op", "gdn_decode", "--device", "cpu", "--policy", "nowhere.toml"), ("nowhere.toml",)),
        (("--op", "gdn_decode", "status"), ("--op before",)),
        (("eval", "--op", "gdn_decode", "warp", "--device", "cpu"), ("warp", "torch_recurrent")),
        (("eval", "--op", "gdn_prefill", "torch_chunked:chunk=3", "--device", "cpu"),
         ("chunk=3", "chunk_size")),
        (("eval", "--op", "gdn_prefill", "torch_chunked:chunk_size=-3", "--device", "cpu"),
         ("chunk_size",)),
        (("eval", "--op", "gdn_prefill", "0123456789abcdef", "--device", "cpu"),
         ("no campaign", "0123456789abcdef")),
        (("eval", "--op", "gdn_decode", "torch_recurrent", "--mode", "fast", "--device", "cpu"),
         ("fast", "functional")),
        (("status", "nothing"), ("nothing",)),
        (("resume",), ("no campaign",)),
        (("resume", "nothing"), ("nothing",)),
        (("promote", "nothing"), ("nothing",)),
        (("export", "nothing", "file"), ("nothing",)),
        (("prebuild", "--op", "gdn_decode", "--device", "h900", "--out", "x"), ("h900",)),
    ],
)  # fmt: skip
def test_usage(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    refused(tune(*arguments), 2, *words)


def test_errors_are_json_where_json_is_asked_for() -> None:
    result = tune("--op", "gemm", "--device", "cpu", "--json")
    document = json.loads(result.stdout)
    assert document["exit_code"] == result.exit_code == 2
    assert "gemm" in document["error"]


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    refused(tune("--op", "gdn_decode", "--device", "cuda:3"), 3, "cuda:3")
    arguments = ("--op", "gdn_decode", "--device", "cpu", "--confirm-on", "cuda:3")
    refused(tune(*arguments), 3, "cuda:3")
    assert not Path("tuning").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name = ", "not TOML"),
        ('name = "x"', "timer"),
        ('name = "x"\ntimer = "sundial"\nis_promotable = true', "timer"),
        ('name = "x"\ntimer = "wall"\nis_promotable = true\nlucky = 3', "lucky"),
    ],
)
def test_a_policy_that_is_none(text: str, words: str) -> None:
    Path("own.toml").write_text(text)
    with pytest.raises(SourceError, match=r"own\.toml") as raised:
        policy.read(Path("own.toml"))
    assert words in str(raised.value)
    refused(tune("--op", "gdn_decode", "--device", "cpu", "--policy", "own.toml"), 2, words)


def test_a_workload_outside_the_operators_constraints(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused by name, and nothing begins."""
    inputs = catalog.module("gdn_decode", "inputs")
    bad: Any = dataclasses.replace(inputs.CONTEST[0], name="odd-heads", num_q_heads=3)
    monkeypatch.setattr(inputs, "CONTEST", (*inputs.CONTEST, bad))
    operator = plan.operator_of("gdn_decode")
    with pytest.raises(SourceError, match=r"contest:odd-heads.*num_v_heads"):
        list(plan.to_search(operator, named_device("cpu"), policy.default("cpu")))
    refused(tune("--op", "gdn_decode", "--device", "cpu"), 2, "odd-heads")


def test_a_folder_that_cannot_be_made() -> None:
    Path("file").write_text("")
    refused(tune("status", "--folder", "file/tuning"), 3, "file/tuning")


def test_a_store_that_is_none() -> None:
    Path("tuning").mkdir()
    Path("tuning/store.db").write_bytes(b"no database" * 1000)
    refused(tune("status"), 7, "store.db")


def test_a_bundle_that_is_none() -> None:
    Path("bundle").write_bytes(b"no archive")
    result = tune("import", "bundle")
    assert result.exit_code in (2, 7)
    assert "bundle" in result.output
