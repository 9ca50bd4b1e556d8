"""Right and wrong outputs, judged by us and by flashinfer-bench: row by row the same verdict.

What each verdict should be stands here. That the official evaluator gives the same is tested where
it can be imported; release 0.1.2 has no evaluator of its own for the indexer.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastkernels import catalog
from fastkernels.contest.check import settings
from fastkernels.contest.definition import definition
from fastkernels.contest.verdict import DTYPE, NUMERICAL, PASSED, SHAPE, verdict
from fastkernels.core.problem import torch_dtype
from tests.contest.packages import arguments

Outputs = list[torch.Tensor]
Change = Callable[[Outputs, Any], Outputs | None]
"""Changes right outputs, and perhaps what the oracle says; returns others or None for the same."""

# The indexer's rows: fewer positions than top-k, more, as many.
LENGTHS = (61, 2900, 2048)


@cache
def _row(op: str) -> tuple[Any, Any]:
    """A workload like the contest's, of a size for a CPU: inputs and the oracle's answer."""
    module = catalog.module(op, "inputs")
    if op == "gdn_decode":
        case = module.Case("four", 4, seed=3)
    elif op == "gdn_prefill":
        case = module.Case("two", (9, 30), seed=3)
    elif op == "dsa_sparse_attention":
        case = dataclasses.replace(module.CONTEST[2], num_pages=64)
    elif op == "dsa_topk_indexer":
        case = module.Case("mixed", LENGTHS, 46, 256, seed=3, keys="lognormal")
    else:
        small = {"seq_len": 10, "hidden_size": 256, "intermediate_size": 128}
        case = dataclasses.replace(module.CONTEST[0], **small)
    inputs = module.make_inputs(case)
    return inputs, catalog.module(op, "reference").reference(inputs)


def answer(op: str, expected: Any) -> Outputs:
    """What a definition's reference returns."""
    spec = catalog.operator(op).spec
    return [
        getattr(expected, out.name).to(torch_dtype(out.dtypes[0]), copy=True)
        for out in spec.outputs
    ]


# ---- changes ------------------------------------------------------------------------------------


def right(outputs: Outputs, expected: Any) -> None:
    pass


def zeros(outputs: Outputs, expected: Any) -> None:
    for tensor in outputs:
        tensor.zero_()


def transposed(outputs: Outputs, expected: Any) -> Outputs:
    return [outputs[0].mT.contiguous(), *outputs[1:]]


def rows_exchanged(outputs: Outputs, expected: Any) -> Outputs:
    return [outputs[0].flip(0), *outputs[1:]]


def another_dtype(outputs: Outputs, expected: Any) -> Outputs:
    other = torch.float16 if outputs[-1].is_floating_point() else torch.int64
    return [*outputs[:-1], outputs[-1].to(other)]


def got(number: float, of: int) -> Change:
    """The last element of an output is this number."""

    def change(outputs: Outputs, expected: Any) -> None:
        outputs[of].view(-1)[-1] = number

    return change


def element(name: str, want: float, number: float) -> Change:
    """An element of the output of this name is `number`, and the oracle says `want`."""

    def change(outputs: Outputs, expected: Any) -> None:
        names = [out.name for out in catalog.operator(_operator_of(expected)).spec.outputs]
        getattr(expected, name).view(-1)[7] = want
        outputs[names.index(name)].view(-1)[7] = number

    return change


def _operator_of(expected: Any) -> str:
    return str(type(expected).__module__.split(".")[2])


def far_off(count: int) -> Change:
    """So many of 2560 elements."""

    def change(outputs: Outputs, expected: Any) -> None:
        assert outputs[0].numel() == 2560
        outputs[0].view(-1)[:count] += 100.0

    return change


def indices(edit: Callable[[torch.Tensor, Any], object]) -> Change:
    """An edit in place of the indices [3, 2048]."""

    def change(outputs: Outputs, expected: Any) -> None:
        edit(outputs[0], expected)

    return change


def _shuffle(x: torch.Tensor, _: Any) -> None:
    x.copy_(x[:, torch.randperm(2048, generator=torch.Generator().manual_seed(1))])


def _put(at: tuple[int, int], rank: int) -> Callable[[torch.Tensor, Any], object]:
    """The long row's position of a rank stands at a place."""

    def edit(x: torch.Tensor, expected: Any) -> None:
        long = expected.rows[1]
        x[at] = long.indices[long.order[rank]]

    return edit


def _beyond_its_length(x: torch.Tensor, _: Any) -> None:
    """The last offset of the page that row 0 uses 61 positions of."""
    x[0, 61] = x[0, 0] // 64 * 64 + 63


# ---- the corpus ---------------------------------------------------------------------------------

Corpus = dict[str, tuple[Change, str]]

ANY: Corpus = {
    "right": (right, PASSED),
    "inf": (got(math.inf, -1), NUMERICAL),
    "-inf": (got(-math.inf, -1), NUMERICAL),
    "nan": (got(math.nan, -1), NUMERICAL),
    "nan in the first": (got(math.nan, 0), NUMERICAL),
    "another dtype": (another_dtype, DTYPE),
    "transposed": (transposed, SHAPE),
}
# bfloat16 outputs: beside 16 the next values are 0.125 apart.
OUTPUT: Corpus = {
    "inside": (element("output", 16.0, 16.125), PASSED),
    "outside": (element("output", 16.0, 16.25), NUMERICAL),
    "small and inside": (element("output", 0.0, 0.0078125), PASSED),
    "small and outside": (element("output", 0.0, 0.015625), NUMERICAL),
    "rows exchanged": (rows_exchanged, NUMERICAL),
    "zeros": (zeros, NUMERICAL),
}


def tight(name: str) -> Corpus:
    """A float32 output, to the last digits of 1e-2 relative and absolute."""
    return {
        "relative, inside": (element(name, 50.0, 50.0 * 1.00999), PASSED),
        "relative, outside": (element(name, 50.0, 50.0 * 1.01001), NUMERICAL),
        "absolute, inside": (element(name, 0.001, 0.01099), PASSED),
        "absolute, outside": (element(name, 0.001, 0.01101), NUMERICAL),
        "of the other sign": (element(name, 50.0, -50.0), NUMERICAL),
    }


CORPUS: dict[str, Corpus] = {
    "gdn_decode": ANY | OUTPUT | tight("new_state"),
    "gdn_prefill": ANY | OUTPUT | tight("new_state"),
    "dsa_sparse_attention": ANY
    | OUTPUT
    | tight("lse")
    # Right by the definition, refused by the evaluator (C141).
    | {"-inf of a row without indices": (element("lse", -math.inf, -math.inf), NUMERICAL)},
    "moe_fp8_block_scale": ANY
    | {
        "a tenth wrong": (far_off(256), PASSED),
        "more than a tenth wrong": (far_off(257), NUMERICAL),
        # A tolerance of 1 is blind to results below 1 (C142); our own limits are not.
        "zeros": (zeros, PASSED),
    },
    "dsa_topk_indexer": {
        "right": (right, PASSED),
        "permuted": (indices(_shuffle), PASSED),
        "the next best instead of the last": (indices(_put((1, 2047), 2048)), PASSED),
        "the worst instead of the last": (indices(_put((1, 2047), -1)), NUMERICAL),
        "the worst instead of the best": (indices(_put((1, 0), -1)), NUMERICAL),
        "another negative number as padding": (
            indices(lambda x, _: x[0, 61:].fill_(-7)),
            PASSED,
        ),
        "duplicate": (indices(lambda x, _: x[1, 5].copy_(x[1, 9])), NUMERICAL),
        "duplicate, missing -1": (indices(lambda x, _: x[0, 61].copy_(x[0, 60])), NUMERICAL),
        "one left out": (indices(lambda x, _: x[1, 77].fill_(-1)), NUMERICAL),
        "another row's": (indices(lambda x, _: x[1, 3].copy_(x[2, 3])), NUMERICAL),
        "another row's, missing -1": (indices(lambda x, _: x[0, 61].copy_(x[2, 3])), NUMERICAL),
        "beyond its length": (indices(_beyond_its_length), NUMERICAL),
        "of the table's tail": (indices(lambda x, _: x[0, 61].fill_(1)), NUMERICAL),
        "beyond the cache": (indices(lambda x, _: x[2, 4].fill_(64 * 256)), NUMERICAL),
        "another dtype": (another_dtype, DTYPE),
        "too narrow": (lambda x, _: [x[0][:, :2047].contiguous()], SHAPE),
    },
}
ROWS = [pytest.param(op, name, id=f"{op}-{name}") for op in CORPUS for name in CORPUS[op]]


def changed(op: str, change: Change) -> tuple[Any, Outputs, Outputs]:
    """The oracle's answer, what the reference returns, and outputs to judge."""
    expected = copy.deepcopy(_row(op)[1])
    outputs = answer(op, expected)
    outputs = change(outputs, expected) or outputs
    return expected, answer(op, expected), outputs


@pytest.mark.parametrize(("op", "name"), ROWS)
def test_our_verdict(op: str, name: str) -> None:
    change, status = CORPUS[op][name]
    expected, _, outputs = changed(op, change)
    assert verdict(op, expected, tuple(outputs)) == status


@pytest.mark.parametrize(("op", "name"), ROWS)
def test_the_official_verdict(op: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, status = CORPUS[op][name]
    _, reference, outputs = changed(op, change)
    assert official(op, reference, outputs, monkeypatch) == status


def test_where_ours_is_stricter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finite value in the place of an infinity exceeds no relative tolerance (C141)."""
    op = "dsa_sparse_attention"
    expected, reference, outputs = changed(op, element("lse", -math.inf, 0.0))
    assert verdict(op, expected, tuple(outputs)) == NUMERICAL
    assert official(op, reference, outputs, monkeypatch) == PASSED


# ---- flashinfer-bench ---------------------------------------------------------------------------


def official(op: str, reference: Outputs, outputs: Outputs, monkeypatch: pytest.MonkeyPatch) -> str:
    """The status that the official evaluator's check of correctness gives, on a CPU."""
    try:
        data = import_module("flashinfer_bench.data")
        evaluators = import_module("flashinfer_bench.bench.evaluators")
        config = import_module("flashinfer_bench.bench.config")
    except ImportError as error:
        pytest.skip(f"flashinfer-bench cannot be imported: {error}")
    described = data.Definition(**definition(op))
    evaluator = evaluators.resolve_evaluator(described)
    if op == "dsa_topk_indexer" and evaluator is evaluators.DefaultEvaluator:
        pytest.skip("this flashinfer-bench has no evaluator for the indexer")
    # The repository's evaluators take what a BenchmarkConfig resolves to, those of 0.1.2 itself.
    kind = getattr(config, "ResolvedEvalConfig", config.BenchmarkConfig)
    runnable = _Runnable(outputs, SimpleNamespace(destination_passing_style=False))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    correctness, evaluation = evaluator.check_correctness(
        definition=described,
        sol_runnable=runnable,
        inputs=[arguments(op, _row(op)[0])],
        ref_outputs=[reference],
        cfg=kind(**settings(op)),
        log_path="",
        device="cpu",
    )
    if evaluation is None:
        assert correctness is not None
        return PASSED
    return str(evaluation.status.value)


@dataclasses.dataclass(frozen=True)
class _Runnable:
    """A solution that returns its outputs."""

    outputs: Outputs
    metadata: Any

    def __call__(self, *inputs: Any) -> Any:
        return tuple(self.outputs) if len(self.outputs) > 1 else self.outputs[0]
