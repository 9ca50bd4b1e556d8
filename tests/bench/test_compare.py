"""Two result files: what counts as slower, what is refused, what is said and the exit status."""

from __future__ import annotations

import copy
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench import compare, files
from bench.compare import Incomparable

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "bench" / "results" / "h200" / "gdn_decode.json"


def row(name: str, median: float, p10: float, p90: float, **more: Any) -> dict[str, Any]:
    return {
        "list": "contest", "id": name, "axes": {"batch_size": 4}, "mode": "functional",
        "route": "warp_rows", "config": {}, "us": {"median": median, "p10": p10, "p90": p90},
        "failures": 0, **more,
    }  # fmt: skip


def result(*rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "op": "gdn_decode",
        "device": {"product": "NVIDIA H200", "arch": "sm90", "num_sms": 132, "driver": "580.1"},
        "code": {"commit": "0123456789abcdef", "dirty": False},
        "versions": {"torch": "2.11.0", "peers": {"fla-core": "0.6.0"}},
        "protocol": {"timer": "cupti", "iterations": 60},
        "created": "2026-12-01T10:00:00Z",
        "rows": list(rows),
        **more,
    }


REF = row("x", 10.0, 9.5, 10.4)


@pytest.mark.parametrize(
    ("new", "verdict"),
    [
        ((10.9, 10.41, 11.0), "slower"),
        ((10.9, 10.40, 11.0), ""),  # as far as both spreads together allow
        ((20.0, 10.39, 30.0), ""),
        ((9.4, 9.0, 9.49), "faster"),
        ((9.4, 9.0, 9.50), ""),
        ((10.0, 9.5, 10.4), ""),
    ],
)
def test_a_time_differs_where_the_spreads_do_not_meet(
    new: tuple[float, float, float], verdict: str
) -> None:
    found = compare.compare(result(row("x", *new)), result(REF))
    assert [len(found.slower), len(found.faster)] == [verdict == "slower", verdict == "faster"]
    assert found.is_worse == (verdict == "slower")
    assert found.means()["contest", "functional"] == pytest.approx((new[0] / 10.0, 1))


def test_the_rule_is_the_one_that_is_written() -> None:
    """new.p10 > ref.p90 says the same as the sum of the spreads."""
    for median in (9.0, 10.3, 10.5, 12.0):
        for p10 in (8.9, 10.39, 10.41):
            new, ref = row("x", median, min(p10, median), median + 1), REF
            found = compare.compare(result(new), result(ref))
            moved = new["us"]["median"] - ref["us"]["median"]
            allowed = (ref["us"]["p90"] - 10.0) + (new["us"]["median"] - new["us"]["p10"])
            assert found.is_worse == (moved > allowed + 1e-9)


def test_rows_are_matched_by_all_that_names_them() -> None:
    others = [
        REF | {"list": "serving"}, REF | {"id": "y"}, REF | {"mode": "pool"},
        REF | {"axes": {"batch_size": 8}},
    ]  # fmt: skip
    slow = row("x", 20.0, 19.0, 21.0)
    found = compare.compare(result(slow, *others), result(REF, others[0]))
    assert [str(pair.key) for pair in found.pairs] == [
        "contest x batch_size=4 functional", "serving x batch_size=4 functional",
    ]  # fmt: skip
    assert [pair.key.listed for pair in found.slower] == ["contest"]
    assert [key.mode for key in found.only_new] == ["functional", "pool", "functional"]
    back = compare.compare(result(REF), result(slow, *others))
    assert len(back.only_ref) == 4
    assert "only in the reference: contest y batch_size=4 functional" in str(back)


def test_other_routes_are_compared_beside_ours() -> None:
    def with_routes(served: str, **routes: float) -> dict[str, Any]:
        us = {name: {"median": t, "p10": t - 0.1, "p90": t + 0.1} for name, t in routes.items()}
        entries = {name: {"us": each, "failures": 0} for name, each in us.items()}
        entries["judged_alone"] = {"failures": 0}
        return REF | {"route": served, "us": us[served], "variants": entries}

    new, ref = with_routes("a", a=10.0, b=30.0, c=5.0), with_routes("a", a=10.0, b=20.0)
    found = compare.compare(result(new), result(ref))
    assert [pair.variant for pair in found.pairs] == ["ours", "b"]  # a once, as ours
    assert [pair.variant for pair in found.slower] == ["b"]
    assert found.variants_only == {"new": {"c": 1}, "in the reference": {}}
    ((mean, times),) = found.means().values()
    assert (mean, times) == (1.0, 1)  # of ours alone
    changed = compare.compare(result(with_routes("b", a=10.0, b=30.0)), result(ref))
    assert "b instead of a" in str(changed)
    assert [(p.variant, p.ratio) for p in changed.pairs] == [("ours", 3.0), ("a", 1.0), ("b", 1.5)]


def test_sweeps_are_compared_by_config() -> None:
    def sweep(*times: float) -> dict[str, Any]:
        rows = [REF | {"config": {"warps": i}, "us": {"median": t, "p10": t, "p90": t}}
                for i, t in enumerate(times)]  # fmt: skip
        return result(*rows, kind="sweep")

    found = compare.compare(sweep(1.0, 3.0), sweep(1.0, 2.0, 7.0))
    assert [pair.variant for pair in found.slower] == ['warp_rows {"warps": 1}']
    assert sum(found.variants_only["in the reference"].values()) == 1
    assert found.means()["contest", "functional"] == pytest.approx((1.5**0.5, 2))
    with pytest.raises(Incomparable, match="kind: sweep and None"):
        compare.compare(sweep(1.0), result(REF))


def test_what_is_wrong_or_failed_is_worse_and_not_compared() -> None:
    wrong = row("x", 1.0, 1.0, 1.0, failures=2)
    found = compare.compare(result(wrong), result(REF))
    assert found.is_worse
    assert not found.faster
    assert "WRONG: contest x batch_size=4 functional, ours" in str(found)
    assert "0 within the spread; 1 wrong" in str(found)
    # A config that is no choice, and was none before, is no news.
    sweeps = result(wrong, kind="sweep"), result(wrong, kind="sweep")
    assert not compare.compare(*sweeps).is_worse
    assert compare.compare(sweeps[0], result(REF, kind="sweep")).is_worse
    gone = {key: REF[key] for key in ("list", "id", "axes", "mode")} | {"why": "no kernel image"}
    failed = compare.compare(result(missing=[gone]), result(REF))
    assert failed.is_worse
    assert not failed.only_ref
    assert "FAILED: contest x batch_size=4 functional: no kernel image" in str(failed)


def test_what_else_differs_stands_at_the_top() -> None:
    new = result(REF, protocol={"timer": "cupti", "iterations": 10}, spec_digest="a")
    new["versions"] = {"torch": "2.12.0", "peers": {"fla-core": "0.7.0"}}
    new["device"] = new["device"] | {"driver": "590.2"}
    found = compare.compare(new, result(REF))
    assert found.differences == {
        "device driver": ("590.2", "580.1"), "protocol iterations": (10, 60),
        "version of torch": ("2.12.0", "2.11.0"), "version of fla-core": ("0.7.0", "0.6.0"),
        "spec_digest": ("a", None),
    }  # fmt: skip
    assert "  other device driver: 590.2 instead of 580.1" in str(found).splitlines()[2:]


def test_two_devices_are_refused() -> None:
    for name, value in (("product", "NVIDIA B200"), ("num_sms", 16), ("threads", 2)):
        other = result(REF)
        other["device"] = other["device"] | {name: value}
        with pytest.raises(Incomparable, match=f"two devices: {name}"):
            compare.compare(other, result(REF))
        assert compare.compare(other, result(REF), across_devices=True).pairs


def test_what_cannot_be_compared() -> None:
    with pytest.raises(Incomparable, match="op: gdn_prefill and gdn_decode"):
        compare.compare(result(REF) | {"op": "gdn_prefill"}, result(REF))
    with pytest.raises(Incomparable, match="ours of contest x batch_size=4 functional stands"):
        compare.compare(result(REF, REF), result(REF))
    with pytest.raises(Incomparable, match="no row is in both"):
        compare.compare(result(REF | {"id": "y"}), result(REF))


def test_drift_is_of_the_floor_and_of_the_same_peers() -> None:
    def with_peer(floor: float, us: float) -> dict[str, Any]:
        return REF | {"floor_us": floor, "peers": {"fla": {"sum_us": us}, "bad": {"left_out": "x"}}}

    new, ref = result(with_peer(2.0, 4.4)), result(with_peer(1.0, 4.0))
    drift = compare.compare(new, ref).drift
    assert list(drift) == ["fla", "the floor"]
    assert drift["the floor"] == pytest.approx((2.0, 1))
    assert drift["fla"] == pytest.approx((1.1, 1))
    new["versions"] = {"peers": {"fla-core": "0.7.0"}}
    assert set(compare.compare(new, ref).drift) == {"the floor"}


# ---- the command --------------------------------------------------------------------------------


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(compare.main, [str(each) for each in arguments])


def test_the_published_file_against_itself_and_a_slower_one(tmp_path: Path) -> None:
    published = json.loads(PUBLISHED.read_text())
    same = invoke(PUBLISHED, PUBLISHED)
    assert same.exit_code == 0, same.output
    assert f"0 slower, 0 faster, {len(published['rows'])} within the spread" in same.output
    slower = copy.deepcopy(published)
    spoilt = slower["rows"][7]
    spoilt["us"] = {name: 1.3 * us for name, us in spoilt["us"].items()}
    path = tmp_path / "slower.json"
    path.write_text(json.dumps(slower))
    done = invoke(path, PUBLISHED)
    assert done.exit_code == 1
    assert f"SLOWER: contest {spoilt['id']}" in done.output
    assert done.output.count("SLOWER") == 1
    as_json = invoke(path, PUBLISHED, "--json")
    assert as_json.exit_code == 1
    (pair,) = json.loads(as_json.output)["slower"]
    assert (pair["id"], pair["ratio"], pair["variant"]) == (spoilt["id"], 1.3, "ours")
    assert invoke(PUBLISHED, path).exit_code == 0


def test_errors_have_a_status_of_their_own(tmp_path: Path) -> None:
    cpu = ROOT / "bench" / "results" / "cpu" / "gdn_decode.json"
    refused = invoke(PUBLISHED, cpu)
    assert refused.exit_code == 2
    assert "two devices: product NVIDIA H200 and CPU" in refused.output
    assert invoke(PUBLISHED, cpu, "--across-devices").exit_code == 0
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "b.json").write_text("[]")
    for name, why in (
        (tmp_path / "a.json", "not JSON"),
        (tmp_path / "b.json", "no result file"),
        (tmp_path / "c.json", "no such file"),
        ("nothere:bench/results/h200/gdn_decode.json", "nothere"),
    ):
        done = invoke(name, PUBLISHED)
        assert done.exit_code == 2
        assert why in done.output


def test_a_file_of_history(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`git show` runs at the root, whatever the folder is; here with a history of its own."""

    def git(*arguments: str) -> None:
        names = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        subprocess.run(["git", *names, *arguments], cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "r.json").write_text(json.dumps(result(REF)))
    git("init")
    git("add", "r.json")
    git("commit", "-m", "x")
    (tmp_path / "r.json").unlink()
    monkeypatch.setattr(files, "ROOT", tmp_path)
    assert files.read("HEAD:r.json") == result(REF)
    with pytest.raises(files.NotAResult, match=r"neither a file nor one of commit HEAD"):
        files.read("HEAD:other.json")
