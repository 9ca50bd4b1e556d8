"""Selection, memo, forcing, strictness, warm-up, workspaces; with the toy operator."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from fastkernels import envs
from fastkernels.core import dispatch
from fastkernels.core.archs import PRODUCTS
from fastkernels.core.device import DeviceInfo, device_info, named_device, override_device
from fastkernels.core.problem import ProblemKey, key_from_axes
from fastkernels.core.route import Decline, Operator
from fastkernels.errors import (
    ArgumentError,
    FallbackError,
    LaunchError,
    NotWarmedUp,
    UnsupportedProblem,
)
from tests.core import toy
from tests.core.toy import OPERATOR, SPEC, TABLE

H200 = named_device("h200")


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A FASTKERNELS_TABLES folder that holds the toy's H200 table."""
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "sm90-h200.toml").write_text(TABLE)
    monkeypatch.setenv(envs.TABLES, str(tmp_path))
    dispatch.reload_tables()
    return tmp_path


def key(rows: int, device: DeviceInfo = H200, mode: str = "plain", **more: int) -> ProblemKey:
    return key_from_axes(SPEC, {"rows": rows, "cols": 8, **more}, device, mode)


def test_a_table_regime_decides(tables: Path) -> None:
    selection = dispatch.choose(OPERATOR, key(8))
    assert selection.route is toy.SMALL
    assert not selection.is_fallback
    selection = dispatch.choose(OPERATOR, key(10))
    assert selection.route is toy.TILED
    assert selection.config == toy.Knobs(tile=32, fast=True)


def test_a_selection_holds_for_its_regime(tables: Path) -> None:
    """What is remembered beyond the sizes of a call: the box of the table, if the route serves both
    ends of it; the sizes alone where no regime decided."""

    def ranges(problem: ProblemKey) -> Any:
        return dispatch._ranges(problem, dispatch.choose(OPERATOR, problem))

    assert ranges(key(3)) == {"rows": (1, 8), "cols": (1, 1000)}
    assert ranges(key(10)) == {"rows": (9, 100), "cols": (1, 1000)}
    assert ranges(key(101)) == {}  # beyond the table
    assert ranges(key(3, heads=2)) == {}  # a fallback that it names
    assert ranges(key(11)) == {}  # the safe route, since the regime's declines
    assert ranges(key(3, named_device("b200"))) == {}  # no table
    forced = dispatch.Selection(toy.SMALL, toy.Knobs(), "forced by force_route")
    assert dispatch._ranges(key(3), forced) == {}


def test_a_selection_holds_for_its_sizes_alone_where_an_end_is_declined(tables: Path) -> None:
    path = tables / "toy" / "sm90-h200.toml"
    path.write_text(TABLE.replace("rows = [9, 100]", "rows = [9, 91]"))
    dispatch.reload_tables()
    selection = dispatch.choose(OPERATOR, key(10))
    assert selection.route is toy.TILED
    assert dispatch._ranges(key(10), selection) == {}


def test_a_declining_route_is_replaced_with_a_reason(tables: Path, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "fastkernels"):
        selection = dispatch.select(OPERATOR, key(11))
        dispatch.reload_tables()
        dispatch.select(OPERATOR, key(11))
    assert selection.route is toy.SAFE
    assert selection.is_fallback
    assert "needs rows not ending in 1, got 11" in selection.reason
    assert sum("needs rows not ending in 1, got 11" in r.message for r in caplog.records) == 1


def test_strict_turns_fallbacks_into_errors(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.STRICT, "1")
    assert dispatch.select(OPERATOR, key(8)).route is toy.SMALL
    for problem in (key(11), key(1000), key(8, heads=2), key(8, named_device("b200"))):
        with pytest.raises(FallbackError, match=envs.STRICT):
            dispatch.select(OPERATOR, problem)
    assert dispatch.select(OPERATOR, key(8, named_device("cpu"))).route is toy.SAFE


def test_no_table_of_another_architecture(tables: Path) -> None:
    selection = dispatch.choose(OPERATOR, key(8, named_device("b200")))
    assert selection.route is toy.SAFE
    assert selection.table is None


def test_same_architecture_is_borrowed_and_said(tables: Path) -> None:
    selection = dispatch.choose(OPERATOR, key(8, DeviceInfo("sm90", "NVIDIA GH200", 132)))
    assert selection.route is toy.SMALL
    assert any("another product of sm90" in note for note in selection.notes)


def test_exact_product_comes_before_a_sibling(tables: Path) -> None:
    sibling = TABLE.replace("NVIDIA H200", "NVIDIA A-first").replace(
        "rows = [1, 8]", "rows = [1, 9]"
    )
    (tables / "toy" / "sm90-a-first.toml").write_text(
        sibling.replace("rows = [9, 100]", "rows = [10, 100]")
    )
    assert dispatch.choose(OPERATOR, key(9)).route is toy.TILED
    other = DeviceInfo("sm90", "NVIDIA A-first", 132)
    assert dispatch.choose(OPERATOR, key(9, other)).is_fallback  # small serves rows <= 8 only


@pytest.mark.parametrize(
    ("old", "new", "note"),
    [
        (SPEC.digest, "sha256:0", "another version of the operator"),
        ('arch = "sm90"', 'arch = "sm100"', "made for sm100, this device is sm90"),
        ("[limits]", "[limits", "not TOML"),
    ],
)
def test_rejected_tables_leave_the_safe_route_and_a_note(
    tables: Path, old: str, new: str, note: str
) -> None:
    (tables / "toy" / "sm90-h200.toml").write_text(TABLE.replace(old, new))
    selection = dispatch.choose(OPERATOR, key(8))
    assert selection.route is toy.SAFE
    assert selection.is_fallback
    assert any(note in text for text in selection.notes), selection.notes


def test_a_missing_tables_folder_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.TABLES, str(tmp_path / "typo"))
    dispatch.reload_tables()
    selection = dispatch.choose(OPERATOR, key(8, named_device("cpu")))
    assert any("typo, which is no folder" in note for note in selection.notes)
    assert selection.is_fallback


def test_unknown_route_falls_back_by_name(tables: Path) -> None:
    """C86: entries are matched by stable name, whatever the order of routes."""
    reordered = Operator(SPEC, (toy.SMALL, toy.TILED, toy.SAFE), toy.toy)
    assert dispatch.choose(reordered, key(10)).route is toy.TILED
    without = Operator(SPEC, (toy.SMALL, toy.SAFE), toy.toy)
    selection = dispatch.choose(without, key(10))
    assert selection.route is toy.SAFE
    assert "unknown route 'tiled'" in selection.reason


def test_drift_is_noted(tables: Path) -> None:
    text = TABLE.replace(f'torch = "{torch.__version__}"', 'torch = "1.0"')
    (tables / "toy" / "sm90-h200.toml").write_text(text.replace('"measured"', '"unmeasured"'))
    notes = dispatch.choose(OPERATOR, key(8))._replace(route=toy.SAFE).notes
    assert any("measured with torch 1.0" in note for note in notes)
    assert any("is unmeasured" in note for note in notes)
    few = DeviceInfo("sm90", "NVIDIA H200", 66)
    assert any("this device has 66" in n for n in dispatch.choose(OPERATOR, key(8, few)).notes)


def test_user_tables_come_before_shipped_and_after_the_variable(
    tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = tmp_path / "data" / "fastkernels" / "tables" / "toy"
    user.mkdir(parents=True)
    (user / "sm90-h200.toml").write_text(TABLE.replace("tile = 32", "tile = 64"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    dispatch.reload_tables()
    assert dispatch.choose(OPERATOR, key(10)).config.tile == 32
    monkeypatch.delenv(envs.TABLES)
    dispatch.reload_tables()
    assert dispatch.choose(OPERATOR, key(10)).config.tile == 64
    folders = [str(folder) for folder in dispatch.table_folders()]
    assert folders[0] == str(user.parent)
    assert folders[1] == str(dispatch.shipped_tables())


@pytest.mark.parametrize(
    ("capability", "served"),
    [
        ((8, 9), False),
        ((9, 0), True),
        ((10, 0), True),
        ((10, 3), False),
        ((11, 0), False),
        ((12, 0), False),
        ((12, 1), False),
    ],
)
def test_architectures_match_exactly(capability: tuple[int, int], served: bool) -> None:
    """C89: 10.3 is not 10.0, 12.1 is not 12.0; the reason lists what is supported."""
    from fastkernels.core.archs import arch_name

    device = DeviceInfo(arch_name(capability), "Some GPU", 100)
    decline = toy.TILED.declines(key(8, device), toy.TILED.default_config)
    assert (decline is None) == served
    if decline is not None:
        assert "sm90 or sm100" in decline.reason
        assert device.arch in decline.reason


def test_selection_is_memoised(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C85: a warm lookup reads no file and decides nothing again."""
    first = dispatch.select(OPERATOR, key(8))
    monkeypatch.setattr(dispatch, "choose", lambda *_: pytest.fail("decided twice"))
    monkeypatch.setattr("pathlib.Path.read_text", lambda *_: pytest.fail("read a file"))
    for _ in range(1000):
        assert dispatch.select(OPERATOR, key(8)) is first


def test_the_memo_is_bounded(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_MEMO_LIMIT", 16)
    for rows in range(100):
        dispatch.select(OPERATOR, key(rows))
    assert len(dispatch._memo) <= 16


def test_the_call_runs_and_is_attested() -> None:
    x = torch.randn(3, 8, 4)
    with dispatch.attest() as served:
        y = toy.toy(x, factor=2.0)
    assert torch.equal(y, 2 * x)
    ((seen, selection),) = served
    assert selection.route is toy.SAFE
    assert dict(seen.axes) == {"rows": 3, "cols": 8, "heads": 4}


def test_forced_routes() -> None:
    x = torch.randn(2, 8, 4)
    with dispatch.force_route(OPERATOR, "safe"), dispatch.attest() as served:
        toy.toy(x)
    assert served[0][1].reason == "forced by force_route"
    with dispatch.force_route(OPERATOR, "tiled"):
        with pytest.raises(UnsupportedProblem, match="needs sm90 or sm100, this device is cpu"):
            toy.toy(x)
        with override_device("h200"):
            assert torch.equal(toy.toy(x), x)
            assert dispatch.explain(OPERATOR, key(8)).reason == "forced by force_route"
    with dispatch.force_route(OPERATOR, "tiled", {"tile": 64}), override_device("h200"):
        assert dispatch.select(OPERATOR, key(8)).config == toy.Knobs(tile=64, fast=False)
    with pytest.raises(
        ArgumentError, match="route 'fast' is unknown, expected one of tiled, small"
    ):
        dispatch.force_route(OPERATOR, "fast").__enter__()
    with pytest.raises(ArgumentError, match="no knob 'size'"):
        dispatch.force_route(OPERATOR, "tiled", {"size": 1}).__enter__()
    with pytest.raises(ArgumentError, match="'config' is NoKnobs"):
        dispatch.force_route(OPERATOR, "tiled", toy.NoKnobs()).__enter__()


def test_a_failing_launch_is_not_retried() -> None:
    with dispatch.force_route(OPERATOR, "crashing"), pytest.raises(LaunchError) as caught:
        toy.toy(torch.randn(2, 8, 4))
    for part in ("toy", "'crashing'", "NoKnobs()", "rows=2", "illegal instruction"):
        assert part in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)


def test_unsupported_lists_every_route() -> None:
    picky = dataclasses.replace(toy.SAFE, supports=toy.no_rows_ending_in_1)
    operator = Operator(SPEC, (toy.TILED, toy.SMALL, picky), toy.toy)
    with pytest.raises(UnsupportedProblem) as caught:
        dispatch.choose(operator, key(21, named_device("b200")))
    lines = str(caught.value).splitlines()
    assert lines[0] == "toy on sm100 with rows=21, cols=8, heads=4: no route serves this."
    assert lines[1:] == [
        "  tiled: needs rows not ending in 1, got 21",
        "  small: needs sm90, this device is sm100",
        "  safe: needs rows not ending in 1, got 21",
    ]


def test_not_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[ProblemKey] = []
    loading = dataclasses.replace(toy.TILED, prepare=lambda k, config: loaded.append(k))
    operator = Operator(SPEC, (loading, toy.SAFE), toy.toy)
    monkeypatch.setattr(dispatch, "_prepared", set())
    with dispatch.force_route(operator, "tiled"):
        monkeypatch.setattr(dispatch, "_is_capturing", lambda index: True)
        with pytest.raises(NotWarmedUp) as caught:
            dispatch.select(operator, key(8))
        message = (
            "fastkernels.warmup('toy', mode='plain', rows=8, cols=8, heads=4) before capturing"
        )
        assert message in str(caught.value)
        assert not loaded
        monkeypatch.setattr(dispatch, "_is_capturing", lambda index: False)
        dispatch.warmup(operator, key(8))
        assert len(loaded) == 1
        monkeypatch.setattr(dispatch, "_is_capturing", lambda index: True)
        dispatch.select(operator, key(8))  # loaded already
        dispatch.select(operator, key(10))  # the same config serves other sizes
        assert len(loaded) == 1


def test_workspace_size_is_the_maximum_and_never_decreases(tables: Path) -> None:
    sizes = [dispatch.workspace_size(OPERATOR, key(rows)) for rows in range(1100)]
    assert sizes[8] == 8000  # small: 1000 bytes a row, up to 8 rows
    assert sizes == sorted(sizes)
    assert (
        dispatch.workspace_size(OPERATOR, key(1000)) == 32_000
    )  # tiled with the table's tile = 32
    assert dispatch.workspace_size(OPERATOR, key(8, named_device("cpu"))) == 0


def test_workspaces_are_checked_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 8, 4)
    seen: list[Any] = []

    def record(inputs: Any, outputs: Any, workspace: Any, config: Any) -> None:
        seen.append(workspace)
        toy.scale(inputs, outputs, workspace, config)

    operator = Operator(SPEC, (dataclasses.replace(toy.TILED, launch=record), toy.SAFE), toy.toy)
    monkeypatch.setattr(toy, "OPERATOR", operator)
    buffer = torch.empty(4096, dtype=torch.uint8)
    buffer = buffer[-buffer.data_ptr() % 256 :]
    with override_device("h200"), dispatch.force_route(operator, "tiled"):
        toy.toy(x, workspace=buffer)
        assert seen[-1].data_ptr() == buffer.data_ptr()
        assert seen[-1].numel() == 32
        toy.toy(x)
        assert seen[-1].numel() == 32
        with pytest.raises(ArgumentError, match="has 31 bytes, expected at least 32"):
            toy.toy(x, workspace=buffer[:31])
        wrong = [
            (buffer[1:], "is at address"),
            (buffer.view(torch.int8), "is int8, expected a uint8 tensor"),
            (b"scratch", "is bytes, expected a uint8 tensor"),
            (buffer[:128].view(2, 64), "expected one contiguous axis"),
            (buffer[:128:2], "expected one contiguous axis"),
        ]
        for workspace, message in wrong:
            with pytest.raises(ArgumentError, match=message):
                toy.toy(x, workspace=workspace)
        y = buffer[:256].view(torch.float32).view(2, 8, 4)
        with pytest.raises(ArgumentError, match="'workspace' overlaps 'y'"):
            toy.toy(x, out=y, workspace=buffer)
        with pytest.raises(ArgumentError, match="'workspace' overlaps 'x'"):
            toy.toy(y, workspace=buffer)


def test_explain_names_everything(tables: Path) -> None:
    explanation = dispatch.explain(OPERATOR, key(8))
    assert explanation.route == "small"
    assert explanation.table == str(tables / "toy" / "sm90-h200.toml")
    assert explanation.regime is not None
    assert "rows 1..8" in explanation.regime
    assert explanation.provenance["created"] == "2026-12-01"
    assert set(explanation.others) == {"tiled", "crashing", "safe"}
    assert explanation.workspace_bytes == 8000
    for part in ("toy", "NVIDIA H200", "small", "measured", "not taken", "worst_us"):
        assert part in str(explanation)
    declined = dispatch.explain(OPERATOR, key(11))
    assert declined.route == "safe"
    assert declined.others["tiled"] == "needs rows not ending in 1, got 11"
    assert declined.others["small"] == "serves rows <= 8, got 11"


def test_devices_by_name() -> None:
    assert named_device("H200") == DeviceInfo("sm90", "NVIDIA H200", 132)
    assert named_device("b200").arch == "sm100"
    assert named_device("cpu") == device_info(torch.device("cpu"))
    with pytest.raises(ArgumentError, match="expected one of " + ", ".join(PRODUCTS)):
        named_device("h300")
    if not torch.cuda.is_available():
        with pytest.raises(ArgumentError, match="is not present"):
            named_device("cuda")
    with override_device("b200"):
        assert device_info(torch.device("cpu")).arch == "sm100"
        assert named_device(None).arch == "sm100"


def test_log_level_is_one_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    log = logging.getLogger("fastkernels")
    monkeypatch.setattr(envs, "_logger", None)
    monkeypatch.setattr(log, "level", logging.NOTSET)
    monkeypatch.setenv(envs.LOG, "debug")
    assert envs.logger().level == logging.DEBUG
    monkeypatch.setattr(envs, "_logger", None)
    monkeypatch.setenv(envs.LOG, "LOUD")
    with pytest.raises(ValueError, match="expected a level"):
        envs.logger()
    monkeypatch.setenv(envs.CHECK, "everything")
    with pytest.raises(ValueError, match="expected 'values'"):
        envs.check_values()


def with_launch(launch: Any) -> Operator:
    return Operator(SPEC, (dataclasses.replace(toy.SAFE, launch=launch),), toy.toy)


@pytest.mark.parametrize("error", [ArgumentError("toy: no"), torch.OutOfMemoryError("full")])
def test_errors_that_callers_handle_are_not_wrapped(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(toy, "OPERATOR", with_launch(fail))
    with pytest.raises(type(error)) as caught:
        toy.toy(torch.randn(2, 8, 4))
    assert caught.value is error


def test_contexts_nest_and_end() -> None:
    other = Operator(dataclasses.replace(SPEC, name="other"), OPERATOR.routes, toy.toy)
    with dispatch.force_route(OPERATOR, "tiled", {"tile": 16}), override_device("h200"):
        with dispatch.force_route(other, "small"):
            assert dispatch.select(OPERATOR, key(8)).route is toy.TILED
            with dispatch.force_route(OPERATOR, "safe"):
                assert dispatch.select(OPERATOR, key(8)).route is toy.SAFE
            assert dispatch.select(OPERATOR, key(8)).config.tile == 16
            with override_device("cpu"):
                assert device_info(torch.device("cpu")).arch == "cpu"
            assert device_info(torch.device("cpu")).arch == "sm90"
        with pytest.raises(RuntimeError), dispatch.force_route(OPERATOR, "safe"):
            raise RuntimeError
        assert dispatch.select(OPERATOR, key(8)).route is toy.TILED
    assert device_info(torch.device("cpu")).arch == "cpu"
    x = torch.randn(2, 8, 4)
    with dispatch.attest() as outer:
        toy.toy(x)
        with dispatch.attest() as inner:
            toy.toy(x)
        toy.toy(x)
    toy.toy(x)
    assert (len(outer), len(inner)) == (3, 1)


def test_what_is_loaded_depends_on_route_config_and_device(
    tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One load per (route, config, device), for forced routes and for those of a table."""
    loaded: list[tuple[str, Any]] = []

    def prepare(k: ProblemKey, config: Any) -> None:
        loaded.append((k.device.product, config))

    routes = tuple(dataclasses.replace(route, prepare=prepare) for route in (toy.TILED, toy.SMALL))
    operator = Operator(SPEC, (*routes, toy.SAFE), toy.toy)
    monkeypatch.setattr(dispatch, "_prepared", set())
    monkeypatch.setattr(dispatch, "_is_capturing", lambda index: False)  # cuda:1 may be absent
    sibling = DeviceInfo("sm90", "NVIDIA GH200", 132)
    second_gpu = key(10)._replace(device_index=1)
    for problem in (key(10), key(20), key(8), key(10, sibling), key(30, sibling), second_gpu):
        dispatch.warmup(operator, problem)
    assert len(loaded) == 4
    for knobs in ({"tile": 16}, {"tile": 64}, {"tile": 16}):
        with dispatch.force_route(operator, "tiled", knobs):
            dispatch.warmup(operator, key(10))
    assert len(loaded) == 6


def test_a_table_is_read_again_for_another_spec(tables: Path) -> None:
    """Two versions of an operator in one process do not share a table."""
    assert dispatch.choose(OPERATOR, key(8)).route is toy.SMALL
    changed = Operator(dataclasses.replace(SPEC, revision=2), OPERATOR.routes, toy.toy)
    selection = dispatch.choose(changed, key(8))
    assert selection.route is toy.SAFE
    assert any("another version" in note for note in selection.notes)


def test_workspace_size_covers_every_mode() -> None:
    only_fancy = dataclasses.replace(
        toy.TILED,
        supports=lambda k, device, config: None if k.mode == "fancy" else Decline("needs fancy"),
    )
    operator = Operator(SPEC, (only_fancy, toy.SAFE), toy.toy)
    assert dispatch.workspace_size(operator, key(10)) == 160


def test_warmup_without_a_mode_warms_every_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    import fastkernels

    seen: list[str] = []
    monkeypatch.setattr(dispatch, "warmup", lambda operator, k: seen.append(k.mode))
    fastkernels.warmup("gdn_decode", device="h200", batch_size=3)
    assert seen == ["functional", "inplace", "pool"]
    fastkernels.warmup("gdn_decode", device="h200", mode="pool", batch_size=3)
    assert seen[3:] == ["pool"]


def test_devices_are_asked_by_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuda:1 is not cuda:0, and plain cuda is the current one; each is asked once."""
    from types import SimpleNamespace

    from fastkernels.core import device

    asked: list[int] = []

    def properties(index: int) -> SimpleNamespace:
        asked.append(index)
        return SimpleNamespace(major=9, minor=0, name=f"GPU {index}", multi_processor_count=132)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    device._query_cuda.cache_clear()
    try:
        names = [
            device_info(torch.device(d)).product for d in ("cuda:0", "cuda:1", "cuda", "cuda:0")
        ]
    finally:
        device._query_cuda.cache_clear()
    assert names == ["GPU 0", "GPU 1", "GPU 1", "GPU 0"]
    assert asked == [0, 1]


MALFORMED = [
    "regime = 5",
    "regime = [1]",
    "regime = [[]]",
    'regime = "abc"',
    "fallback = [3]",
    "fallback = 5",
    "limits = 5",
    'limits = ""',
    "schema = true",
    f"schema = {'9' * 5000}",
    "schema = " + "[" * 5000,
    "\x00",
    "provenance = 1",
]


@pytest.mark.parametrize("text", MALFORMED, ids=lambda text: text[:12])
def test_malformed_tables_never_reach_the_caller(tables: Path, text: str) -> None:
    """Whatever a file holds, a call is served by the safe route with a note."""
    path = tables / "toy" / "sm90-h200.toml"
    name = text.split(" ")[0]
    rest = "\n".join(
        line for line in TABLE.splitlines() if not line.startswith(name) and f"[{name}" not in line
    )
    for content in (text, text + "\n" + rest):
        path.write_text(content)
        dispatch.reload_tables()
        selection = dispatch.choose(OPERATOR, key(8))
        assert selection.route is toy.SAFE
        assert any("table rejected" in note for note in selection.notes)
        assert dispatch.workspace_size(OPERATOR, key(8)) >= 0
        dispatch.explain(OPERATOR, key(8))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (f'versions = {{ torch = "{torch.__version__}" }}', "versions = 5"),
        ("evidence = {", "evidence = 5 # {"),
        ("config = { tile = 16, fast = false }", "config = 5"),
        ('reason = "few heads"', 'reason = "few heads"\nconfig = 3'),
    ],
)
def test_malformed_entries_reject_the_table(tables: Path, old: str, new: str) -> None:
    assert old in TABLE
    (tables / "toy" / "sm90-h200.toml").write_text(TABLE.replace(old, new))
    dispatch.reload_tables()
    assert any("table rejected" in note for note in dispatch.choose(OPERATOR, key(8)).notes)


def test_dates_anywhere_become_text(tables: Path) -> None:
    import json

    text = TABLE.replace("trials = 9", "trials = 9, seen = 2026-12-01, at = 07:32:00")
    text = text.replace(
        "created = 2026-12-01", "created = 2026-12-01T10:00:00Z\nmore = [2026-12-01]"
    )
    (tables / "toy" / "sm90-h200.toml").write_text(text)
    document = json.loads(json.dumps(dispatch.explain(OPERATOR, key(8)).to_dict()))
    assert document["evidence"]["at"] == "07:32:00"
    assert document["provenance"]["more"] == ["2026-12-01"]


@pytest.mark.parametrize("value", ["~nosuchuser/x", "x" * 5000, "a\nb"])
def test_a_tables_folder_that_cannot_be_read_is_a_note(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(envs.TABLES, value)
    dispatch.reload_tables()
    selection = dispatch.choose(OPERATOR, key(8, named_device("cpu")))
    assert selection.route is toy.SAFE
    assert any("no folder with tables" in note for note in selection.notes)


def test_folders_that_may_not_be_entered_are_skipped(
    tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C112, C119: a container's user often may not read the home it was given."""

    def refuse(path: Any) -> list[str]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.listdir", refuse)
    assert dispatch.choose(OPERATOR, key(8)).route is toy.SAFE


def test_strict_may_be_set_late(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch.select(OPERATOR, key(11))
    dispatch.select(OPERATOR, key(8))
    monkeypatch.setenv(envs.STRICT, "1")
    dispatch.select(OPERATOR, key(8))
    with pytest.raises(FallbackError):
        dispatch.select(OPERATOR, key(11))
    monkeypatch.setenv(envs.STRICT, "false")
    with pytest.raises(ArgumentError, match="expected '0' or '1'"):
        dispatch.select(OPERATOR, key(11))


def test_strict_names_rejected_tables_and_refuses_borrowed_ones(
    tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(envs.STRICT, "1")
    with pytest.raises(FallbackError, match="another product of sm90"):
        dispatch.select(OPERATOR, key(8, DeviceInfo("sm90", "NVIDIA GH200", 132)))
    (tables / "toy" / "sm90-h200.toml").write_text("schema = 7")
    dispatch.reload_tables()
    with pytest.raises(FallbackError, match="schema is 7"):
        dispatch.select(OPERATOR, key(8))


def test_a_declining_route_warns_once_for_all_sizes(tables: Path, caplog: Any) -> None:
    """C88 without a flood: serving meets thousands of sizes."""
    with caplog.at_level(logging.WARNING, "fastkernels"):
        for rows in (21, 31, 41, 51):
            dispatch.select(OPERATOR, key(rows, DeviceInfo("sm90", "NVIDIA H200", 131)))
    assert sum("not ending in 1" in record.message for record in caplog.records) == 1


def test_lint_wants_the_safe_route_last_and_nothing_behind_a_catch_all() -> None:
    from fastkernels.core import table

    wrong = TABLE.replace('route = "safe"\nreason', 'route = "small"\nreason')
    problems = dispatch.lint_table(OPERATOR, table.parse(wrong, SPEC))
    assert any("is not the safe route 'safe'" in problem for problem in problems)
    early = TABLE.replace(
        "[[fallback]]", '[[fallback]]\nroute = "safe"\nreason = "all"\n[[fallback]]', 1
    )
    problems = dispatch.lint_table(OPERATOR, table.parse(early, SPEC))
    assert any("fallback 1 is a catch-all" in problem for problem in problems)
    explicit = TABLE.replace('mode = "plain"', 'mode = "plain"\nheads = [4, 4]', 1)
    assert dispatch.lint_table(OPERATOR, table.parse(explicit, SPEC)) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("margin = 0.07", "margin = nan"),
        ("worst_us = 9.0", "worst_us = inf"),
        ("spread_us = 0.1", "spread_us = -5.0"),
        ("cases = 4", "cases = 0"),
        ("trials = 9", "trials = 0"),
        ("margin = 0.07", "margin = true"),
        ("margin = 0.07", 'margin = "x"'),
    ],
)
def test_lint_wants_evidence_that_is_evidence(old: str, new: str) -> None:
    from fastkernels.core import table

    problems = dispatch.lint_table(OPERATOR, table.parse(TABLE.replace(old, new, 1), SPEC))
    assert any("expected a number" in problem for problem in problems), problems


def test_a_route_that_cannot_be_loaded_says_which() -> None:
    def prepare(*_: Any) -> None:
        raise ImportError("no module named triton")

    operator = Operator(SPEC, (dataclasses.replace(toy.TILED, prepare=prepare), toy.SAFE), toy.toy)
    with (
        dispatch.force_route(operator, "tiled"),
        pytest.raises(LaunchError, match=r"route 'tiled' with Knobs.* could not be loaded"),
    ):
        dispatch.select(operator, key(8))


def test_traits_can_be_warmed_up_and_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call with a trait first seen in a capture is told the warm-up that names the trait."""
    needs_trait = dataclasses.replace(
        toy.TILED,
        supports=lambda k, d, c: None if "special" in k.traits else Decline("needs special"),
        prepare=lambda k, c: None,
    )
    operator = Operator(SPEC, (needs_trait, toy.SAFE), toy.toy)
    axes = {"rows": 8, "cols": 8}
    special = dispatch.key_for(operator, "h200", None, axes, ("special",))
    monkeypatch.setattr(dispatch, "_prepared", set())
    monkeypatch.setattr(dispatch, "_is_capturing", lambda index: True)
    with dispatch.force_route(operator, "tiled"):
        with pytest.raises(NotWarmedUp, match=r"mode='plain', traits=\('special',\), rows=8"):
            dispatch.select(operator, special)
        with pytest.raises(UnsupportedProblem, match="needs special"):
            dispatch.select(operator, dispatch.key_for(operator, "h200", None, axes))
