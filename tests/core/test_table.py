"""Reading, looking up and linting dispatch tables; no GPU, no routes but toys."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastkernels.core import dispatch, table
from fastkernels.errors import TableError
from tests.core.toy import OPERATOR, SPEC, TABLE


def parse(text: str = TABLE) -> table.Table:
    return table.parse(text, SPEC)


def axes(rows: int, cols: int = 8, heads: int = 4) -> dict[str, int]:
    return {"rows": rows, "cols": cols, "heads": heads}


def test_lookup_finds_the_regime_and_else_a_fallback() -> None:
    found = parse()
    cases = [
        (axes(1), "plain", "small"),
        (axes(8), "plain", "small"),
        (axes(9), "plain", "tiled"),
        (axes(100, 1000), "plain", "tiled"),
        (axes(101), "plain", "safe"),  # beyond [limits]
        (axes(0), "plain", "safe"),
        (axes(8), "fancy", "safe"),  # a mode without regimes
        (axes(8, heads=2), "plain", "small"),  # other constants: the fallback that names them
        (axes(8, heads=3), "plain", "safe"),
    ]
    for sizes, mode, route in cases:
        hit = found.lookup(sizes, mode)
        assert hit is not None, (sizes, mode)
        assert hit.entry.route == route, (sizes, mode)


@given(
    st.integers(0, 10**7), st.integers(0, 10**7), st.integers(1, 64), st.sampled_from(SPEC.modes)
)
def test_every_problem_has_an_entry(rows: int, cols: int, heads: int, mode: str) -> None:
    """C82, C83: sizes beyond, between and at the edges of regimes map to an entry, and a regime
    only to problems inside its box."""
    hit = parse().lookup(axes(rows, cols, heads), mode)
    assert hit is not None
    inside = 1 <= rows <= 100 and 1 <= cols <= 1000 and heads == 4 and mode == "plain"
    assert hit.is_fallback != inside
    if inside:
        assert hit.entry.route == ("small" if rows <= 8 else "tiled")


def test_gap_values_surround_every_boundary() -> None:
    assert table.gap_values(parse(), "rows") == [0, 1, 2, 7, 8, 9, 10, 99, 100, 101]
    assert table.gap_values(parse(), "rows", at_least=1)[0] == 1
    assert table.gap_values(None, "rows") == []


def test_the_good_table_is_clean() -> None:
    assert dispatch.lint_table(OPERATOR, parse()) == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("schema = 1", "schema = 2", "schema is 2, expected 1"),
        ('op = "toy"', 'op = "other"', "op is 'other', expected 'toy'"),
        ('"measured"', '"guessed"', "status is 'guessed'"),
        (SPEC.digest, "sha256:0", "the table was made for another version of the operator"),
        ("rows = [9, 100]", "rows = [9]", "expected [low, high]"),
        ("rows = [9, 100]", "rows = [100, 9]", "expected [low, high]"),
        ("rows = [9, 100]", "rows = [9.0, 100]", "expected [low, high]"),
        ("rows = [9, 100]", "lines = [9, 100]", "unknown entry 'lines'"),
        ('mode = "plain"', 'mode = "odd"', "has mode 'odd'"),
        ('mode = "plain"\nrows = [1, 8]', "rows = [1, 8]", "names no mode"),
        ("num_sms = 132", 'num_sms = "132"', "num_sms = '132', expected int"),
        ('reason = "few heads"', "", "reason = None, expected str"),
        ("[limits]", "[limits", "not TOML"),
        ("[device]", "[devices]", "unknown entry 'devices'"),
    ],
)
def test_malformed_tables_are_refused(old: str, new: str, message: str) -> None:
    assert old in TABLE
    with pytest.raises(TableError) as caught:
        parse(TABLE.replace(old, new))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rows = [9, 100]", "rows = [8, 100]", "regimes 1 and 2 overlap"),
        ("rows = [9, 100]", "rows = [10, 100]", "gap"),
        ("rows = [9, 100]", "rows = [9, 99]", "gap"),
        ("rows = [9, 100]", "rows = [9, 101]", "regime 2 leaves [limits] on rows"),
        ("rows = [1, 100]\n", "", "expected ['cols']"),
        ('route = "tiled"', 'route = "gone"', "regime 2 names the unknown route 'gone'"),
        ("tile = 32", "tile = 3.5", "knob 'tile' of route 'tiled' is 3.5, expected int"),
        ("tile = 32, ", "", "needs a value for knob 'tile'"),
        ("tile = 32", "tile = 32, depth = 1", "has no knob 'depth'"),
        ('route = "small"\nconfig', 'route = "tiled"\nconfig', "route 'tiled' declines"),
        ("margin = 0.07", "margin = 0.01", "expected more than the spread"),
        ("failures = 0", "failures = 3", "3 failures, expected 0"),
        (", trials = 9", "", "no evidence of trials"),
        ('evidence_sha256 = "0"', "", "no evidence_sha256"),
        ('[[fallback]]\nroute = "safe"\nreason = "outside measured range"\n', "", "narrowed"),
    ],
)
def test_lint_says_what_is_wrong(old: str, new: str, message: str) -> None:
    assert old in TABLE
    problems = dispatch.lint_table(OPERATOR, parse(TABLE.replace(old, new, 1)))
    assert any(message in problem for problem in problems), problems


def test_lint_wants_regimes_in_order() -> None:
    head, first, second = TABLE.partition("[[regime]]")[0], *TABLE.split("[[regime]]")[1:]
    second, fallbacks = second.split("[[fallback]]", 1)
    swapped = f"{head}[[regime]]{second}[[regime]]{first}[[fallback]]{fallbacks}"
    assert any("not sorted" in problem for problem in dispatch.lint_table(OPERATOR, parse(swapped)))


def test_constants_in_regimes_do_not_collide_with_the_definitions() -> None:
    """A regime for heads = 8 beside those of the definition's 4 is neither overlap nor gap."""
    extra = TABLE.replace(
        "[[fallback]]",
        '[[regime]]\nmode = "plain"\nrows = [1, 100]\ncols = [1, 1000]\nheads = [8, 8]\n'
        'route = "safe"\nconfig = {}\n'
        "evidence = { cases = 1, worst_us = 1.0, spread_us = 0.1, margin = 0.0, trials = 1, "
        "failures = 0 }\n[[fallback]]",
        1,
    )
    found = parse(extra)
    assert dispatch.lint_table(OPERATOR, found) == []
    hit = found.lookup(axes(8, heads=8), "plain")
    assert hit is not None
    assert hit.entry.route == "safe"
    assert not hit.is_fallback


def test_file_names(tmp_path: Path) -> None:
    assert table.file_name("sm90", "NVIDIA H200") == "sm90-h200.toml"
    assert table.file_name("cpu", "CPU") == "cpu.toml"
    path = tmp_path / "sm90-h100.toml"
    path.write_text(TABLE)
    assert any("expected sm90-h200.toml" in p for p in table.lint(table.read(path, SPEC)))
    with pytest.raises(TableError, match="cannot be read"):
        table.read(tmp_path / "absent.toml", SPEC)


def test_table_module_needs_no_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys, types; package = types.ModuleType('fastkernels'); "
        f"package.__path__ = [{str(Path(table.__file__).parents[1])!r}]; "
        "sys.modules['fastkernels'] = package; import fastkernels.core.table; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


FANCY = '[[fallback]]\nmode = "fancy"\nroute = "small"\nreason = "fancy ones"\n'


def test_a_fallback_may_be_narrowed_by_mode_but_not_the_last() -> None:
    narrowed = parse(TABLE.replace("[[fallback]]", FANCY + "[[fallback]]", 1))
    assert dispatch.lint_table(OPERATOR, narrowed) == []
    for mode, route in (("fancy", "small"), ("plain", "safe")):
        hit = narrowed.lookup(axes(1000), mode)
        assert hit is not None
        assert hit.entry.route == route
    head = TABLE.split("[[fallback]]")[0]
    assert any("narrowed" in p for p in dispatch.lint_table(OPERATOR, parse(head + FANCY)))
    assert any("no [[fallback]]" in p for p in dispatch.lint_table(OPERATOR, parse(head)))


def test_modes_are_covered_apart() -> None:
    """The same box under two modes is no overlap; each mode has gaps of its own."""
    head, first, second = TABLE.partition("[[regime]]")[0], *TABLE.split("[[regime]]")[1:]
    second, fallbacks = second.split("[[fallback]]", 1)
    fancy = [part.replace('"plain"', '"fancy"') for part in (first, second)]
    both = "".join(f"[[regime]]{part}" for part in (*fancy, first, second))
    assert dispatch.lint_table(OPERATOR, parse(f"{head}{both}[[fallback]]{fallbacks}")) == []
    half = "".join(f"[[regime]]{part}" for part in (fancy[0], first, second))
    problems = dispatch.lint_table(OPERATOR, parse(f"{head}{half}[[fallback]]{fallbacks}"))
    assert any("gap: mode fancy" in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rows = [1, 8]\ncols = [1, 1000]", "rows = [0, 8]\ncols = [1, 1000]", "leaves [limits]"),
        ("[limits]\nrows = [1, 100]\ncols = [1, 1000]\n", "", "[limits] is missing"),
        ("rows = [9, 100]\ncols = [1, 1000]", "rows = [9, 100]\ncols = [1, 999]", "gap"),
        ("rows = [1, 8]\ncols = [1, 1000]", "rows = [1, 9]\ncols = [1, 1000]", "overlap"),
        ("spread_us = 0.1, margin = 0.07", "spread_us = 0.5, margin = 0.0555", "than the spread"),
        (
            "worst_us = 9.0, spread_us = 0.1, margin = 0.07",
            "worst_us = 8.0, spread_us = 1.0, margin = 0.125",
            "than the spread",
        ),
        ("rows = [9, 100]", "rows = [-9, 100]", "expected [low, high]"),
        ("rows = [9, 100]", "rows = [true, 100]", "expected [low, high]"),
        ('route = "small"\nconfig', 'route = "tiled"\nconfig', "declines {'rows': 1,"),
        ('route = "tiled"\nconfig', 'route = "small"\nconfig', "declines {'rows': 100,"),
        ("tile = 32", "tile = true", "knob 'tile' of route 'tiled' is True, expected int"),
    ],
)  # fmt: skip
def test_lint_at_the_edges(old: str, new: str, message: str) -> None:
    assert old in TABLE
    try:
        problems = dispatch.lint_table(OPERATOR, parse(TABLE.replace(old, new)))
    except TableError as error:
        problems = [str(error)]
    assert any(message in problem for problem in problems), problems
