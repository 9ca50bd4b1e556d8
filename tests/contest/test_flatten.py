"""Parts of the package as one text."""

from __future__ import annotations

import dataclasses
import re

import pytest

from fastkernels.contest.flatten import FlattenError, _read, flatten

GDN = "fastkernels.ops._shared.gdn"
MOE = "fastkernels.ops.moe_fp8_block_scale"


def names(text: str) -> list[tuple[str, str]]:
    return re.findall(r"^(?:def|class) (\w+)|^(\w+) = ", text, re.MULTILINE)


def test_only_what_is_needed_and_in_an_order_that_runs() -> None:
    text = flatten({"fastkernels.ops.gdn_decode.routes.torch_recurrent": ["launch", "Config"]})
    found = ["".join(pair) for pair in names(text)]
    # `problem` gives Inputs, `_shared.gdn` four of its functions, and neither any other name.
    assert found == [
        "Inputs", "gates", "resolve_scale", "load_rows", "store_rows", "Config", "launch",
    ]  # fmt: skip
    assert text.startswith("from __future__ import annotations\n\nfrom dataclasses import")
    namespace: dict[str, object] = {"__name__": "__main__"}
    exec(compile(text, "text", "exec"), namespace)
    assert callable(namespace["launch"])


def test_what_a_function_binds_itself_is_not_taken() -> None:
    """`workspace` is an argument of `call`, and a function of the same module."""
    text = flatten({"fastkernels.ops.dsa_topk_indexer.routes.library": ["call"]})
    assert [name for name, _ in names(text)] == ["Inputs", "call"]


def test_comments_above_a_statement_and_texts_below_it_stay() -> None:
    text = flatten({"fastkernels.ops.dsa_sparse_attention.reference": ["LOGIT_SLACK"]})
    assert 'LOGIT_SLACK = 2.0**-20\n"""Rounding of a logit' in text
    text = flatten({"fastkernels.core.toolchain": ["NVCC_WHEELS"]})
    assert "# nvcc of the package index, all of one release" in text


def test_methods_that_are_left_out_take_along_what_they_alone_need() -> None:
    roots = {"fastkernels.ops.gdn_decode.reference": ["Expected"]}
    assert "def judge" in flatten(roots)
    assert "SPEC" in flatten(roots)
    text = flatten(roots, without=("judge", "judge_official"))
    assert "judge" not in text
    assert "SPEC" not in text


def test_what_cannot_stand_in_one_text() -> None:
    with pytest.raises(FlattenError, match=r"gdn: nothing there is called 'gate'"):
        flatten({GDN: ["gate"]})
    with pytest.raises(FlattenError, match=r"'dequantise' is of '.*' and of '.*'"):
        flatten({f"{MOE}.reference": ["reference"], f"{MOE}.routes.torch_grouped": ["launch"]})
    with pytest.raises(FlattenError, match=r"core\.archs is a module, expected names"):
        flatten({"fastkernels.core.dispatch": ["short_way"]})
    with pytest.raises(FlattenError, match=r"fastkernels\.nothing: no such module"):
        flatten({"fastkernels.nothing": ["x"]})


def test_a_name_that_is_bound_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one of the statements would go in."""
    module = _read("fastkernels.core.archs", frozenset())
    twice = dataclasses.replace(module, rebound=frozenset({"ARCHS"}))
    monkeypatch.setattr("fastkernels.contest.flatten._read", lambda *_: twice)
    with pytest.raises(FlattenError, match="several statements bind 'ARCHS'"):
        flatten({"fastkernels.core.archs": ["ARCHS"]})
