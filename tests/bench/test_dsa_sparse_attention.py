"""Peers of dsa_sparse_attention as they document themselves, its targets, its report."""

from __future__ import annotations

import json
import math
import sys
import types
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from bench import peers, report, targets
from bench.gpu import Bench, Options
from bench.peers.dsa_sparse_attention import FA3, FLASHMLA, PEERS
from bench.sets import Sets
from fastkernels import catalog
from fastkernels.core.device import named_device
from fastkernels.ops.dsa_sparse_attention.inputs import SERVING, Case, make_inputs
from fastkernels.ops.dsa_sparse_attention.reference import reference
from fastkernels.testing.compare import same_bits
from fastkernels.testing.workloads import dsa_sparse_attention as work

OPERATOR = catalog.operator("dsa_sparse_attention")
CPU = torch.device("cpu")
NAMES = [peer.name for peer in PEERS]

# ---- peers --------------------------------------------------------------------------------------


def attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token, q [H, D], over keys [n, D] and values [n, V]: output, natural lse."""
    logits = scale * q.double() @ keys.double().T
    lse = logits.logsumexp(dim=1)
    return (logits - lse[:, None]).exp() @ values.double(), lse


def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, max_seqlen_q: int,
    cu_seqlens_q: torch.Tensor, max_seqlen_k: int, seqused_k: torch.Tensor, q_v: torch.Tensor,
    softmax_scale: float, causal: bool, block_table: torch.Tensor, return_softmax_lse: bool,
    out: torch.Tensor, fa_version: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """FlashAttention-3, paged, with `q_v`: logits are `q . k + q_v . v`; lse is [H, total_q]."""
    assert (fa_version, causal, return_softmax_lse, max_seqlen_q) == (3, False, True, 1)
    num_tokens, num_heads, _ = q.shape
    assert q.shape == (num_tokens, num_heads, 64)
    assert q_v.shape == (num_tokens, num_heads, 512)
    page_size = k.shape[1]
    assert k.shape == (k.shape[0], page_size, 1, 64)
    assert v.shape == (k.shape[0], page_size, 1, 512)
    assert {t.dtype for t in (cu_seqlens_q, seqused_k, block_table)} == {torch.int32}
    assert cu_seqlens_q.tolist() == list(range(num_tokens + 1))
    assert seqused_k.shape == (num_tokens,)
    assert block_table.shape == (num_tokens, max_seqlen_k // page_size)
    assert int(seqused_k.max()) <= max_seqlen_k
    assert 0 <= int(block_table.min()) <= int(block_table.max()) < k.shape[0]
    lse = torch.empty(num_heads, num_tokens)
    for token in range(num_tokens):
        named = block_table[token].long()
        keys, values = k[named].flatten(0, 2), v[named].flatten(0, 2)
        length = int(seqused_k[token])
        joint = torch.cat([values, keys], dim=1)[:length]
        query = torch.cat([q_v[token], q[token]], dim=1)
        found, lse[:, token] = attend(query, joint, values[:length], softmax_scale)
        out[token] = found
    return out, lse


def flash_mla_sparse_fwd(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, sm_scale: float, d_v: int = 512,
    attn_sink: Any = None, topk_length: torch.Tensor | None = None, out: Any = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """FlashMLA's sparse prefill; max logits and lse are [s_q, h_q]."""
    s_q, h_q, d_qk = q.shape
    if h_q not in (8, 16, 32, 64, 128):
        raise RuntimeError(f"Unsupported h_q: {h_q}")
    assert (d_qk, d_v, attn_sink) == (576, 512, None)
    assert kv.shape == (kv.shape[0], 1, d_qk)
    assert indices.shape == (s_q, 1, indices.shape[2])
    assert indices.dtype == torch.int32
    assert q.is_contiguous()
    lse, largest = torch.empty(2, s_q, h_q)
    for token, (row,) in enumerate(indices.long()):
        if topk_length is not None:
            assert topk_length.dtype == torch.int32
            row = row[: int(topk_length[token])]
        named = kv[row[(row >= 0) & (row < kv.shape[0])], 0]
        out[token], lse[token] = attend(q[token], named, named[:, :d_v], sm_scale)
        largest[token] = math.nan  # for nobody
    return out, largest, lse


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules without a version, as a bundle unpacks them, and the distribution's metadata."""
    for name, function in ((FA3, flash_attn_varlen_func), (FLASHMLA, flash_mla_sparse_fwd)):
        module = types.SimpleNamespace(**{function.__name__: function})
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(metadata, "version", {"vllm": "0.33.0"}.__getitem__)


SMALL = Case("small", 3, seed=3, num_qo_heads=8, num_pages=4, topk=128, valid=(128, 1, 77))
CALLS = {
    "prefix": SMALL,
    "scattered": replace(SMALL, padding="scattered"),
    "outside": replace(SMALL, padding="outside"),
    "repeated": replace(SMALL, law="repeated"),
    "contest": replace(SMALL, law="contest"),
    "packed": replace(SMALL, layout="packed"),
    "natural": replace(SMALL, lse_base="e"),
    "flat": replace(SMALL, num_pages=300, page_size=1),
}


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_peers_are_called_as_they_document_it(peer: peers.Peer, name: str) -> None:
    """From adapted inputs and from ours, of which no bit changes."""
    inputs = make_inputs(CALLS[name])
    pristine = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
    expected = reference(inputs)
    call = peer.bind(inputs, "default")
    assert peer.modes.keys() == {"default"}
    assert peer.adapted != "none"
    assert call.adapt_and_run is not None
    for run in (call.run, call.run, call.adapt_and_run):
        call.restore()
        run()
        output, lse = call.outputs()
        errors = expected.judge((output, lse))
        assert all(error.ok for error in errors), [str(error) for error in errors]
        output.fill_(math.nan)
    for now, before in zip(inputs, pristine, strict=True):
        if isinstance(now, torch.Tensor):
            assert isinstance(before, torch.Tensor)
            assert same_bits(now, before)


def judged(case: Case, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], dict[str, str]]:
    """A row's peers, and why others are left out, as a run finds them."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *a: None)
    found = peers.load("dsa_sparse_attention", NAMES)
    said: list[str] = []
    bench = Bench(OPERATOR, work, found, Options(CPU), said.append)
    ready, left_out = bench._peers(case, Sets(work, case, [make_inputs(case)]))
    assert len(said) == len(left_out)
    return ready, left_out


@pytest.mark.usefixtures("packages")
def test_what_a_peer_cannot_serve_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    ready, left_out = judged(SMALL, monkeypatch)
    assert list(ready) == NAMES
    assert not left_out
    assert all(each.adapted is not None and not each.verdict.failures for each in ready.values())
    ready, left_out = judged(replace(SMALL, valid=(5, 0, 7)), monkeypatch)
    assert not ready
    assert left_out == dict.fromkeys(NAMES, "ValueError: token 1 has no valid index")
    ready, left_out = judged(replace(SMALL, num_qo_heads=4), monkeypatch)
    assert list(ready) == ["fa3"]
    assert set(left_out.values()) == {"RuntimeError: Unsupported h_q: 4"}
    ready, left_out = judged(replace(SMALL, layout="padded"), monkeypatch)
    assert not ready  # no view of such caches as rows
    assert all(why.startswith("RuntimeError: view size") for why in left_out.values())
    no_pages = replace(SMALL, num_pages=0, valid=())
    assert set(judged(no_pages, monkeypatch)[1]) == set(NAMES)


@pytest.mark.usefixtures("packages")
def test_a_peers_lse_of_another_base_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should the base not be what it documents, the row says so."""

    def binary(*arguments: Any, **options: Any) -> Any:
        out, largest, lse = flash_mla_sparse_fwd(*arguments, **options)
        return out, largest, lse / math.log(2.0)

    module = types.SimpleNamespace(flash_mla_sparse_fwd=binary)
    monkeypatch.setitem(sys.modules, FLASHMLA, module)
    ready, _ = judged(SMALL, monkeypatch)
    assert [bool(each.verdict.failures) for each in ready.values()] == [False, True, True]


@pytest.mark.usefixtures("packages")
def test_peers_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the distribution's metadata, where the module does not say its version."""
    assert peers.load("dsa_sparse_attention", NAMES).versions == {"vllm": "0.33.0"}
    monkeypatch.setattr(metadata, "version", lambda package: "0.32.0")
    left_out = peers.load("dsa_sparse_attention", NAMES).left_out
    assert left_out == dict.fromkeys(NAMES, "vllm is 0.32.0: pip install vllm==0.33.0")

    def absent(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", absent)
    found = peers.load("dsa_sparse_attention", ["fa3"])
    assert not found.peers
    assert "vllm" in found.left_out["fa3"]


def test_inputs_of_every_row_suit_the_peers() -> None:
    """No row of the lists has a token without a valid index."""
    rows = work.rows(OPERATOR, named_device("h200"), OPERATOR.spec.modes)
    assert all(min(case.num_valid) > 0 for _, case in rows)


# ---- targets ------------------------------------------------------------------------------------


def row(tokens: int, us: float, law: str = "", **fields: Any) -> dict[str, Any]:
    """Of the contest list, or of the serving list where there is a law."""
    return {
        "list": "serving" if law else "contest", "mode": "default", "failures": 0,
        "id": f"serving-{law}-t{tokens}" if law else f"{tokens:032x}",
        "axes": {"num_tokens": tokens}, "work": {"valid": 2048 * tokens, "longest": 2048},
        "us": {"median": us}, "span_us": us, "host_us": 12.0,
        "peers": {"fa3": {"sum_us": 3 * us, "span_us": 9 * us},
                  "flashmla": {"sum_us": 40 * us, "span_us": 40 * us}}, **fields,
    }  # fmt: skip


def missed(*rows: dict[str, Any]) -> list[str]:
    data = {"op": "dsa_sparse_attention", "rows": rows, "missing": []}
    return [target.name for target in targets.targets(data) if not target.is_met]


@pytest.mark.parametrize(
    ("tokens", "law", "limit"),
    [
        (1, "", 3.8), (2, "", 3.8), (6, "", 5.5), (8, "", 5.5), (9, "", None),
        (8, "local", 9.0), (8, "uniform", 9.0), (16, "local", None), (32, "uniform", 26.0),
        (128, "local", 80.0), (512, "local", 230.0), (512, "uniform", 300.0),
        (4096, "local", 1600.0), (4096, "uniform", 2150.0),
    ],
)  # fmt: skip
def test_what_a_row_may_take(tokens: int, law: str, limit: float | None) -> None:
    assert targets.attention_us(row(tokens, 1.0, law)) == limit
    if limit is not None:
        assert missed(row(tokens, limit, law)) == []
        assert len(missed(row(tokens, limit + 0.1, law))) == 1
    assert targets.attention_us(row(tokens, 1.0) | {"list": "gap"}) is None


def test_every_full_row_that_has_a_target_is_measured() -> None:
    ids = {case.name for case in SERVING}
    for law, limits in targets.FULL_US.items():
        assert {f"serving-{law}-t{tokens}" for tokens in limits} <= ids


def test_targets_against_peers() -> None:
    def peer(**us: float) -> dict[str, Any]:
        return {name: {"sum_us": each, "span_us": each} for name, each in us.items()}

    close = row(1, 1.0, peers=peer(fa3=2.6, flashmla=19.0))
    assert missed(close) == [
        "contest, mean of ratios to the best", "contest, mean of ratios to flashmla",
    ]  # fmt: skip
    fast, slow = row(1, 1.0, peers=peer(fa3=9.0)), row(2, 1.0, peers=peer(fa3=0.99))
    assert missed(fast, slow) == ["contest, worst ratio"]
    assert missed(row(16, 1.0, "local", peers=peer(fa3=1.04, flashmla=9.0))) == [
        "serving, worst ratio to the best"
    ]
    assert missed(row(16, 1.0, "local", peers=peer(fa3=1.05))) == []
    left_out = row(1, 1.0, peers={"fa3": {"left_out": "wrong"}})
    assert missed(left_out) == []
    assert missed(row(16, 1.0, "local", failures=1)) == ["wrong calls"]


# ---- report -------------------------------------------------------------------------------------


def test_rows_of_one_size_are_reported_apart(tmp_path: Path) -> None:
    """Few valid indices, and all of them under two laws: a median over them would say nothing."""
    data = {
        "op": "dsa_sparse_attention", "device": {"product": "NVIDIA H200"},
        "code": {"commit": "abc"}, "versions": {"torch": "2"},
        "protocol": {"timer": "cupti", "l2": "cold", "order": "x", "statistic": "median",
                     "iterations": 30},
        "summary": {}, "rows": [
            {**each, "route": "some"}
            for each in (row(8, 4.0), row(8, 8.0, "local"), row(8, 9.0, "uniform"))
        ],
    }  # fmt: skip
    path = tmp_path / "result.json"
    path.write_text(json.dumps(data))
    for only, us in (("contest", "4"), ("serving-local", "8"), ("serving-uniform", "9"), ("", "8")):
        done = CliRunner().invoke(report.main, [str(path), "--only", only])
        assert done.exit_code == 0, done.output
        assert f"| 8 | some | {us} |" in done.output
    done = CliRunner().invoke(report.main, [str(path), "--only", "nothing"])
    assert done.exit_code == 2
    assert "no row of" in done.output
