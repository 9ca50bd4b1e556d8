"""CUDA kernels of gdn_prefill on a CPU (tests/emulator), against the oracle."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastkernels.core.kernels import Kernel
from fastkernels.ops._shared.gdn import resolve_scale
from fastkernels.ops.gdn_prefill.adversarial import STRATA
from fastkernels.ops.gdn_prefill.inputs import CORNER, CORRECTNESS, Case, make_inputs
from fastkernels.ops.gdn_prefill.kernels import (
    CUT_BYTES,
    HEAD_SIZE,
    KERNELS,
    ChunkCluster,
    ChunkFused,
    ChunkParallel,
    ChunkPipeline,
    ChunkSplit,
    ChunkStates,
    ChunkWarp,
    Recurrent,
    chunk_bound,
    cut_bound,
)
from fastkernels.ops.gdn_prefill.problem import Inputs
from fastkernels.ops.gdn_prefill.reference import reference
from fastkernels.ops.gdn_prefill.routes.library import workspace_bytes
from fastkernels.testing.compare import clone
from tests.emulator import Emulator, is_aligned, params_of, shared_folder

pytestmark = pytest.mark.toolchain

KERNEL = {kernel.name: kernel for kernel in KERNELS}
# Each kernel with few and with many rows a block.
CONFIGS: dict[str, tuple[str, Any]] = {
    "recurrent-8-lanes": ("recurrent", Recurrent(8, 1, 4)),
    "recurrent-4-lanes": ("recurrent", Recurrent(4, 2, 2)),
    "recurrent-4-rows": ("recurrent", Recurrent(8, 4, 4)),
    "fused-16": ("chunk_fused", ChunkFused(16)),
    "fused-64": ("chunk_fused", ChunkFused(64)),
    "split-16": ("chunk_split", ChunkSplit(16, 3)),
    "split-32": ("chunk_split", ChunkSplit(32, 3)),
    "split-32-2": ("chunk_split", ChunkSplit(32, 2)),
    "split-64": ("chunk_split", ChunkSplit(64, 2)),
    "warp-16": ("chunk_warp", ChunkWarp(16, 4)),
    "warp-32": ("chunk_warp", ChunkWarp(32, 3)),
    "warp-64": ("chunk_warp", ChunkWarp(64, 3)),
    "states-16": ("chunk_states", ChunkStates(16, 3)),
    "states-32": ("chunk_states", ChunkStates(32, 3)),
    "states-64": ("chunk_states", ChunkStates(64, 4)),
    "pipeline-16": ("chunk_pipeline", ChunkPipeline(16)),
    "pipeline-32": ("chunk_pipeline", ChunkPipeline(32)),
    "cluster-8": ("chunk_cluster", ChunkCluster(8)),
    "cluster-4": ("chunk_cluster", ChunkCluster(4)),
    "parallel-32": ("chunk_parallel", ChunkParallel(32, 2)),
    "parallel-64": ("chunk_parallel", ChunkParallel(64, 4)),
}
# One of each route.
EACH = [
    "recurrent-8-lanes", "fused-64", "split-32", "warp-32", "states-32", "pipeline-32", "cluster-8",
    "parallel-32",
]  # fmt: skip
# Segments of the sweep, which take longer.
LONG: dict[str, tuple[str, Any]] = {
    "parallel-64-16": ("chunk_parallel", ChunkParallel(64, 16)),
    "parallel-64-32": ("chunk_parallel", ChunkParallel(64, 32)),
}
# Tokens of a segment.
SEGMENT = {name: 64 * CONFIGS[name][1].segment_chunks for name in ("parallel-32", "parallel-64")}
TOGETHER = 4
"""Blocks of chunk_pipeline that run side by side, since they wait for each other."""
Emulate = Callable[..., tuple[Tensor, Tensor]]


def values_of(inputs: Inputs, output: Tensor, new_state: Tensor, workspace: Tensor) -> Any:
    """The fields of csrc/gdn_prefill/params.h, as binding.cc fills them."""
    q, k, v, read = inputs.q, inputs.k, inputs.v, inputs.read_indices
    write = read if inputs.write_indices is None else inputs.write_indices
    state = new_state if inputs.state is None else inputs.state
    words = {torch.int32: 1, torch.int64: 2}
    return params_of("gdn_prefill", {
        "q": q, "k": k, "v": v, "state": inputs.state, "A_log": inputs.A_log, "a": inputs.a,
        "dt_bias": inputs.dt_bias, "b": inputs.b, "cu_seqlens": inputs.cu_seqlens,
        "read_indices": read, "write_indices": write, "output": output, "new_state": new_state,
        "workspace": workspace,
        "q_stride_t": q.stride(0), "q_stride_h": q.stride(1),
        "k_stride_t": k.stride(0), "k_stride_h": k.stride(1),
        "v_stride_t": v.stride(0), "v_stride_h": v.stride(1),
        "state_stride_slot": state.stride(0), "state_stride_h": state.stride(1),
        "a_stride_t": inputs.a.stride(0), "b_stride_t": inputs.b.stride(0),
        "cu_stride": inputs.cu_seqlens.stride(0),
        "read_stride": 0 if read is None else read.stride(0),
        "write_stride": 0 if write is None else write.stride(0),
        "output_stride_t": output.stride(0), "output_stride_h": output.stride(1),
        "new_state_stride_slot": new_state.stride(0), "new_state_stride_h": new_state.stride(1),
        "num_tokens": q.shape[0], "num_seqs": inputs.cu_seqlens.shape[0] - 1,
        "num_q_heads": q.shape[1], "num_v_heads": v.shape[1], "num_slots": new_state.shape[0],
        "has_state": inputs.state is not None, "offset_words": words[inputs.cu_seqlens.dtype],
        "index_words": 0 if read is None else words[read.dtype],
        "scale": resolve_scale(inputs.scale, HEAD_SIZE),
    })  # fmt: skip


def variant_of(kernel: Kernel, stage: str, aligned: bool) -> str | None:
    """Of one of a route's launches; the only one of a route counts as its chain."""
    if len(kernel.variants) == 2:
        return kernel.variants[0 if aligned else 1] if stage == "chain" else None
    name = stage if aligned or stage in ("scan", "clear") else f"{stage}_any"
    return name if name in kernel.variants else None


@pytest.fixture(scope="module")
def emulate(tmp_path_factory: pytest.TempPathFactory) -> Emulate:
    emulator = Emulator(shared_folder(tmp_path_factory))

    def run(
        name: str, inputs: Inputs, seed: int = 0, left: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Outputs of a config of CONFIGS or LONG, over NaN. `left`: the workspace, after each
        launch."""
        route, config = (CONFIGS | LONG)[name]
        kernel = KERNEL[route]
        num_tokens, num_v_heads = inputs.v.shape[:2]
        num_seqs = inputs.cu_seqlens.shape[0] - 1
        output = torch.full(inputs.v.shape, math.nan, dtype=torch.bfloat16)
        if inputs.inplace or inputs.read_indices is not None:
            assert inputs.state is not None
            new_state = inputs.state
        else:
            new_state = torch.full((num_seqs, num_v_heads, HEAD_SIZE, HEAD_SIZE), math.nan)
        axes = {
            "total_seq_len": num_tokens, "num_seqs": num_seqs,
            "num_q_heads": inputs.q.shape[1], "num_v_heads": num_v_heads,
        }  # fmt: skip
        slabs = HEAD_SIZE // kernel.tile(config)[0]
        chunks = chunk_bound(num_tokens, num_seqs)
        cuts = getattr(config, "segment_chunks", 0) and cut_bound(num_tokens, config.segment_chunks)
        size = workspace_bytes(kernel, axes, config)
        memory = torch.full((size + 512,), 255, dtype=torch.uint8)
        workspace = memory[-memory.data_ptr() % 256 :]
        params = values_of(inputs, output, new_state, workspace)
        state = new_state if inputs.state is None else inputs.state
        used = (inputs.q, inputs.k, inputs.v, output, state, new_state)
        blocks = {
            "prepare": chunks, "transfer": 2 * slabs * cuts, "scan": 8 * min(cuts, num_seqs),
            "chain": slabs * max(num_seqs + cuts, 1), "output": chunks,
            "mend": slabs * min(cuts, num_seqs), "clear": chunks, "pipeline": TOGETHER,
        }  # fmt: skip
        for stage, count in blocks.items():
            variant = variant_of(kernel, stage, is_aligned(used))
            if variant is not None and count > 0:
                maker, its = kernel.maker(config, variant)
                together = TOGETHER if stage == "pipeline" else 1
                emulator.launch(
                    maker, its, variant, params, num_v_heads * count, seed, together=together
                )
                if left is not None:
                    left[stage] = workspace[:size].clone()
        assert bool((workspace[size:] == 255).all()), "wrote beyond the workspace"
        return output, new_state

    return run


def assert_judged(inputs: Inputs, outputs: tuple[Tensor, Tensor]) -> None:
    errors = reference(inputs).judge(outputs)
    assert all(error.ok for error in errors), "; ".join(map(str, errors))


def small(case: Case) -> Case:
    """The case on few heads of the size that kernels serve."""
    few: dict[str, Any] = {"num_q_heads": 1, "num_v_heads": 2} if case.num_v_heads == 8 else {}
    return dataclasses.replace(case, head_size=HEAD_SIZE, **few)


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("case", [*CORRECTNESS, *CORNER], ids=lambda case: case.name)
def test_cases(emulate: Emulate, case: Case, name: str) -> None:
    inputs = make_inputs(small(case))
    given = clone(inputs)
    assert_judged(given, emulate(name, inputs))


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("stratum", STRATA)
def test_strata(emulate: Emulate, stratum: str, name: str) -> None:
    """Inputs that are made to hurt (ops/gdn_prefill/adversarial.py), on few heads."""
    few: dict[str, Any] = {"num_q_heads": 1, "num_v_heads": 2}
    if STRATA[stratum].case.num_v_heads != 8:
        few = {}
    inputs, _ = STRATA[stratum].draw(1, head_size=HEAD_SIZE, **few)
    given = clone(inputs)
    assert_judged(given, emulate(name, inputs))


@pytest.mark.parametrize("name", CONFIGS)
def test_schedules(emulate: Emulate, name: str) -> None:
    """Whatever order blocks and warps run in: the same bits."""
    inputs = make_inputs(Case("order", (70, 0, 200), num_q_heads=1, num_v_heads=1, seed=7))
    first = emulate(name, inputs)
    for seed in range(1, 6):
        again = emulate(name, inputs, seed)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(
    "name",
    [
        "recurrent-8-lanes",
        "fused-64",
        "split-32",
        "warp-16",
        "states-16",
        "pipeline-16",
        "cluster-8",
        "parallel-64",
    ],
)
def test_more_sequences_than_threads(emulate: Emulate, name: str) -> None:
    """Sequences are found in tiles of as many as a block has threads; those that a chunk's number
    may belong to, for which there must be a chunk of tokens for each thread, are more than one tile
    here. Two offsets are wrong: 100 sequences become empty, another one starts late."""
    lengths = tuple(int(i % 50 == 7) for i in range(300)) + (130, 0, 5)
    case = Case("many", lengths, num_q_heads=1, num_v_heads=1, seed=3, stray=17000)
    inputs = make_inputs(case)
    inputs.cu_seqlens[40] = inputs.cu_seqlens[140]
    inputs.cu_seqlens[299] += 50
    assert_judged(clone(inputs), emulate(name, inputs))


OFFSETS = {
    "decreasing": [0, 70, 20, 90, 100],
    "negative": [-5, 30, 30, -(2**40), 100],
    "beyond": [0, 30, 2**40 + 3, 40, 100],
    "late start": [10, 30, 31, 40, 90],
}


@pytest.mark.parametrize(
    "name", ["recurrent-8-lanes", "fused-16", "split-32", "warp-64", "cluster-4", "parallel-32"]
)
@pytest.mark.parametrize("offsets", OFFSETS.values(), ids=OFFSETS.keys())
def test_offsets_are_not_trusted(emulate: Emulate, offsets: list[int], name: str) -> None:
    inputs = make_inputs(Case("o", (25, 25, 25, 25), num_q_heads=1, num_v_heads=1, seed=4))
    inputs = inputs._replace(cu_seqlens=torch.tensor(offsets))
    assert_judged(clone(inputs), emulate(name, inputs))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("indices", [None, [1], [-1]])
@pytest.mark.parametrize("offsets", [[0, 600], [70, 600], [0, 580], [-9, 2**40], [5, 5], [9, 3]])
def test_only_sequence(
    emulate: Emulate, offsets: list[int], indices: list[int] | None, name: str
) -> None:
    """What is loaded before offsets are there, as if they were 0 and all tokens, may be wrong."""
    inputs = make_inputs(Case("only", (600,), num_q_heads=1, num_v_heads=1, seed=13))
    assert inputs.state is not None
    if indices is not None:
        inputs = inputs._replace(
            state=torch.cat((inputs.state, 2 * inputs.state)), read_indices=torch.tensor(indices)
        )
    inputs = inputs._replace(cu_seqlens=torch.tensor(offsets))
    assert_judged(clone(inputs), emulate(name, inputs))


@pytest.mark.parametrize("name", CONFIGS)
def test_memory_that_is_not_aligned(emulate: Emulate, name: str) -> None:
    """Of several segments where there are some."""

    def shifted(t: Tensor) -> Tensor:
        return torch.cat((t.reshape(-1)[:1], t.reshape(-1)))[1:].view(t.shape)

    length = 70 + 2 * SEGMENT.get(name, 0)
    inputs = make_inputs(Case("shifted", (length, 1), num_q_heads=1, num_v_heads=1, seed=5))
    assert inputs.state is not None
    inputs = inputs._replace(
        q=shifted(inputs.q), k=shifted(inputs.k), v=shifted(inputs.v), state=shifted(inputs.state)
    )
    assert_judged(clone(inputs), emulate(name, inputs))


@pytest.mark.parametrize(
    "name",
    ["fused-64", "split-32", "warp-16", "states-16", "pipeline-16", "cluster-8", "parallel-64"],
)
@pytest.mark.parametrize("argument", ["q", "k", "v", "a", "b"])
@pytest.mark.parametrize("token", [0, 21, 63, 64, 99])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_behind(
    emulate: Emulate, name: str, argument: str, token: int, value: float
) -> None:
    """Earlier tokens and other sequences keep their bits; the token itself and, but for q, what
    follows and the state are not finite, where the recurrence has them so."""
    inputs = make_inputs(Case("nan", (100, 30), num_q_heads=1, num_v_heads=1, seed=6))
    clean = emulate(name, inputs)
    dirty = clone(inputs)
    getattr(dirty, argument)[token].fill_(value)
    output, new_state = emulate(name, dirty)
    assert torch.equal(output[:token], clean[0][:token])
    assert torch.equal(output[100:], clean[0][100:])
    assert torch.equal(new_state[1], clean[1][1])
    expected = reference(dirty)
    is_nan = ~expected.output.isfinite()
    assert not output[is_nan].isfinite().any()
    assert not new_state[~expected.new_state.isfinite()].isfinite().any()
    if argument == "q":
        assert torch.equal(new_state, clean[1])
        assert torch.equal(output[token + 1 :], clean[0][token + 1 :])


@pytest.mark.parametrize(
    "name",
    [
        "recurrent-8-lanes",
        "fused-64",
        "split-32",
        "warp-32",
        "states-32",
        "pipeline-32",
        "cluster-8",
        "parallel-64",
    ],
)
def test_what_overflows_stays_behind(emulate: Emulate, name: str) -> None:
    """Parallel keys ten times too long, nothing forgotten: each update is some 100 times the one
    before, until bfloat16 cannot hold it."""
    inputs = make_inputs(Case("over", (40,), num_q_heads=1, num_v_heads=1, seed=11))
    keys = 10 * inputs.k[:1].float() / inputs.k[0].float().norm()
    inputs = inputs._replace(
        k=keys.bfloat16().expand(inputs.k.shape).contiguous(),
        a=torch.full_like(inputs.a, -20.0), b=torch.full_like(inputs.b, 20.0),
        A_log=torch.zeros_like(inputs.A_log), dt_bias=torch.zeros_like(inputs.dt_bias),
    )  # fmt: skip
    expected = reference(clone(inputs)).output
    output, _ = emulate(name, inputs)
    held = int((expected.abs().amax((1, 2)) < 1e35).long().cumprod(0).sum())
    assert 10 < held < 30
    assert output[:held].isfinite().all()
    assert not output[held + 5 :].isfinite().all(-1).any()


@pytest.mark.parametrize("name", ["recurrent-8-lanes", "fused-16"])
@pytest.mark.parametrize(
    ("A_log", "a", "g"),
    [
        (math.inf, -math.inf, 1), (-math.inf, math.inf, 1), (-800, math.inf, 1),
        (-110, math.inf, 0), (-110, 1, 1), (math.inf, 1, 0), (90, -200, 1), (20, 100, 0),
    ],
)  # fmt: skip
def test_c10_gates_beyond_their_range(
    emulate: Emulate, name: str, A_log: float, a: float, g: int
) -> None:
    """Finite, and inf * 0 counts as 0."""
    inputs = make_inputs(Case("gates", (70,), num_q_heads=1, num_v_heads=1, seed=12))
    assert inputs.state is not None
    before = inputs.state.clone()
    inputs = inputs._replace(
        A_log=torch.full_like(inputs.A_log, A_log), a=torch.full_like(inputs.a, a),
        b=torch.full_like(inputs.b, -100.0),
    )  # fmt: skip
    outputs = emulate(name, inputs)
    assert_judged(clone(inputs), outputs)
    torch.testing.assert_close(outputs[1], g * before, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize(
    "name",
    [
        "recurrent-8-lanes",
        "fused-16",
        "split-32",
        "warp-16",
        "states-16",
        "pipeline-16",
        "cluster-4",
        "parallel-32",
    ],
)
def test_neighbours_hold_nan(emulate: Emulate, name: str) -> None:
    """Rows after a sequence's end belong to the next one and are not read as its own."""
    inputs = make_inputs(Case("n", (70, 30, 20), num_q_heads=1, num_v_heads=1, seed=8))
    clean = emulate(name, inputs)
    dirty = clone(inputs)
    for x in (dirty.q, dirty.k, dirty.v, dirty.a, dirty.b):
        x[70:100] = math.nan
    output, new_state = emulate(name, dirty)
    for got, want in ((output[:70], clean[0][:70]), (output[100:], clean[0][100:])):
        assert torch.equal(got, want)
    assert torch.equal(new_state[[0, 2]], clean[1][[0, 2]])


@pytest.mark.parametrize(
    "name", ["fused-16", "split-32", "warp-64", "pipeline-16", "cluster-8", "parallel-64"]
)
def test_long_slow_sequence(emulate: Emulate, name: str) -> None:
    """Errors of 40 chunks do not add up, where nearly nothing is forgotten."""
    inputs = make_inputs(Case("slow", (2560,), num_q_heads=1, num_v_heads=1, seed=9, gates="slow"))
    assert_judged(clone(inputs), emulate(name, inputs))


# ---- segments side by side ----------------------------------------------------------------------

SEGMENTED = pytest.mark.parametrize("name", SEGMENT)


def cut_entries(workspace: Tensor, length: int, segment: int) -> Tensor:
    """[cuts, CUT_BYTES] of one sequence and head."""
    cuts = cut_bound(length, segment // 64)
    return workspace[-cuts * CUT_BYTES :].view(cuts, CUT_BYTES)


def off_cuts(workspace: Tensor, length: int, name: str) -> list[int]:
    """Numbers of the cuts that `chain` found elsewhere, in some rows; words of no cut are -1."""
    config = (CONFIGS | LONG)[name][1]
    words = cut_entries(workspace, length, 64 * config.segment_chunks)[:, 8 * HEAD_SIZE**2 :]
    is_off = words.contiguous().view(torch.int32)[:, : HEAD_SIZE // config.rows_per_block]
    assert bool(((is_off >= -1) & (is_off <= 1)).all())
    return (is_off == 1).any(dim=1).nonzero().flatten().tolist()


@SEGMENTED
@pytest.mark.parametrize(
    "fields",
    [{}, {"state": "none"}, {"mode": "inplace"}, {"mode": "pool"}, {"mode": "pool", "stray": 300},
     {"layout": "fused", "mode": "pool", "indices": "int64", "offsets": "int32"}],
    ids=str,
)  # fmt: skip
def test_lengths_around_segments(emulate: Emulate, fields: dict[str, Any], name: str) -> None:
    """A pool has padding sequences of several segments, too."""
    step = SEGMENT[name]
    lengths = (step - 1, step, 2 * step, step + 1, 0, 2 * step + 1, 3 * step, 1, 3 * step + 70)
    case = Case("cuts", lengths, num_q_heads=1, num_v_heads=1, seed=21, **fields)
    inputs = make_inputs(case)
    assert_judged(clone(inputs), emulate(name, inputs))


@pytest.mark.parametrize(
    "stratum",
    ["no_state", "decay_1", "decay_0", "decays_and_betas_in_turn", "steep_decay", "late_forget",
     "beta_0", "beta_1", "huge_state", "tiny_state", "mixed_states", "parallel_keys", "long_keys"],
)  # fmt: skip
def test_strata_over_segments(emulate: Emulate, stratum: str) -> None:
    """Several in each sequence, so that transfer matrices are multiplied."""
    few: dict[str, Any] = {"num_q_heads": 1, "num_v_heads": 1, "head_size": HEAD_SIZE}
    inputs, _ = STRATA[stratum].draw(2, lengths=(530, 300, 140, 390), **few)
    assert_judged(clone(inputs), emulate("parallel-32", inputs))


@SEGMENTED
def test_in_place_whatever_runs_first(emulate: Emulate, name: str) -> None:
    """The last segment's state lies over the one that the first segment starts from."""
    case = Case("order", (4 * SEGMENT[name], 200), num_q_heads=1, num_v_heads=1, seed=22)
    inputs = make_inputs(case)
    want = emulate(name, clone(inputs))
    for seed in range(4):
        got = emulate(name, clone(inputs)._replace(inplace=True), seed)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@SEGMENTED
@pytest.mark.parametrize("lengths", [(1,) * 40 + (900,), (900, *(1,) * 40), (300, 0) * 3])
def test_more_sequences_than_cuts(emulate: Emulate, lengths: tuple[int, ...], name: str) -> None:
    inputs = make_inputs(Case("many", lengths, num_q_heads=1, num_v_heads=1, seed=23))
    assert_judged(clone(inputs), emulate(name, inputs))


@SEGMENTED
@pytest.mark.parametrize("argument", ["q", "k", "v", "a", "b"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_behind_over_segments(
    emulate: Emulate, argument: str, value: float, name: str
) -> None:
    """In the second of four segments: nothing else sees it but what follows, and where it is of v
    in one column, of that column alone."""
    step = SEGMENT[name]
    length = 4 * step
    inputs = make_inputs(Case("nan", (length, 30), num_q_heads=1, num_v_heads=1, seed=24))
    clean = emulate(name, inputs)
    dirty = clone(inputs)
    token = step + 70
    getattr(dirty, argument)[token, ..., 3 if argument in "qkv" else slice(None)] = value
    output, new_state = emulate(name, dirty)
    touched = torch.zeros(output.shape, dtype=torch.bool)
    end = token + 1 if argument == "q" else length
    touched[token:end, :, 3 if argument == "v" else slice(None)] = True
    assert torch.equal(output[~touched], clean[0][~touched])
    touched_state = torch.zeros(new_state.shape, dtype=torch.bool)
    if argument != "q":
        touched_state[0, :, 3 if argument == "v" else slice(None)] = True
    assert torch.equal(new_state[~touched_state], clean[1][~touched_state])
    expected = reference(dirty)
    assert not output[~expected.output.isfinite()].isfinite().any()
    assert not new_state[~expected.new_state.isfinite()].isfinite().any()
    if math.isnan(value):
        assert not expected.output[touched].isfinite().any()


@SEGMENTED
@pytest.mark.parametrize("gates", ["slow", "keep"])
@pytest.mark.parametrize("keys", ["unit", "parallel"])
def test_scan_is_exact(emulate: Emulate, keys: str, gates: str, name: str) -> None:
    """It adds next to nothing to what the matrices it is given are off by: float64 over the same
    ones differs by less than a hundredth of that."""
    left: dict[str, Tensor] = {}
    length = 6 * SEGMENT[name]
    case = Case("s", (length,), num_q_heads=1, num_v_heads=1, seed=25, keys=keys, gates=gates)
    emulate(name, make_inputs(case), left=left)

    def cuts(stage: str) -> Tensor:
        states = cut_entries(left[stage], length, SEGMENT[name])[:-1, : 8 * HEAD_SIZE**2]
        return states.view(torch.float32).view(-1, 2, HEAD_SIZE, HEAD_SIZE)

    given, found = cuts("transfer").double(), cuts("scan").double()
    assert torch.equal(found[0], given[0])
    S = given[0, 1]
    for (transfer, end), got in zip(given[1:], found[1:, 1], strict=True):
        S = S @ transfer + end
        assert (got - S).norm() <= 1e-5 * S.norm()


@SEGMENTED
def test_what_a_segment_erases_does_not_come_back(emulate: Emulate, name: str) -> None:
    """A state of 3e4 in one direction, which keys leave alone in the first segment and overwrite
    with g near 1 from then on: of its transfer little is left, and no later key would mend it."""
    segment, rng = SEGMENT[name], torch.Generator().manual_seed(27)
    length = 4 * segment + 70
    inputs = make_inputs(Case("e", (length,), num_q_heads=1, num_v_heads=1, seed=27))
    half = HEAD_SIZE // 2
    direction = torch.nn.functional.normalize(torch.randn(half, generator=rng), dim=0)
    k = torch.randn(length, 1, HEAD_SIZE, generator=rng)
    k[..., :half] = 0.0
    k = torch.nn.functional.normalize(k, dim=-1)
    k[segment::2] = torch.cat([direction, torch.zeros(half)])
    S = torch.zeros(1, 1, HEAD_SIZE, HEAD_SIZE)
    S[..., :half] = 3e4 * torch.randn(HEAD_SIZE, 1, generator=rng) * direction.bfloat16().float()
    inputs = inputs._replace(
        k=k.bfloat16(), state=S, A_log=torch.zeros_like(inputs.A_log),
        a=torch.full_like(inputs.a, -8.0), b=torch.full_like(inputs.b, 1.0),
    )  # fmt: skip
    pristine = clone(inputs)
    assert_judged(pristine, emulate(name, inputs))


def erased(factor: float = 1.0) -> Inputs:
    """Stratum `erased_state`, its numbers times a power of two."""
    inputs, _ = STRATA["erased_state"].draw(5)
    assert inputs.state is not None
    return inputs._replace(state=factor * inputs.state, v=factor * inputs.v)


@pytest.mark.parametrize(
    ("name", "factor"),
    [("parallel-64", 2.0**90), ("parallel-64", 2.0**-90), *((name, 1.0) for name in LONG)],
)
def test_erased_states_are_mended(emulate: Emulate, factor: float, name: str) -> None:
    """The cut behind the segment that erases is off, whatever size states have, and no other:
    matrices alone leave the state of the draw off by half of what it is there."""
    inputs = erased(factor)
    left: dict[str, Tensor] = {}
    length, segment = inputs.k.shape[0], 64 * (CONFIGS | LONG)[name][1].segment_chunks
    outputs = emulate(name, clone(inputs), left=left)
    assert_judged(inputs, outputs)
    assert off_cuts(left["chain"], length, name) == [4096 // segment - 1]
    said = cut_entries(left["scan"], length, segment)[-1, 4 * HEAD_SIZE**2 : 8 * HEAD_SIZE**2]
    mended = outputs[1].flatten().double()
    assert (said.view(torch.float32).double() - mended).norm() > 0.3 * mended.norm()


@SEGMENTED
@pytest.mark.parametrize("gates", ["contest", "slow", "keep", "extreme"])
def test_ordinary_states_are_not_mended(emulate: Emulate, gates: str, name: str) -> None:
    """Which would take the time that segments side by side save."""
    left: dict[str, Tensor] = {}
    length = 6 * SEGMENT[name] + 9
    case = Case("s", (length,), num_q_heads=1, num_v_heads=1, seed=26, gates=gates)
    emulate(name, make_inputs(case), left=left)
    assert off_cuts(left["chain"], length, name) == []


@pytest.mark.parametrize("mode", ["functional", "inplace", "pool"])
def test_mended_in_two_places(emulate: Emulate, mode: str) -> None:
    """Segments 2 and 5 of two sequences overwrite what is large; the second one's last segment is
    behind the latter, and has one chunk."""
    name, segment, rng = "parallel-64", SEGMENT["parallel-64"], torch.Generator().manual_seed(28)
    lengths = (7 * segment + 70, 40, 6 * segment + 1)
    case = Case("e", lengths, num_q_heads=1, num_v_heads=1, seed=28, mode=mode)
    inputs = make_inputs(case)
    direction = torch.zeros(HEAD_SIZE)
    direction[: HEAD_SIZE // 2] = 0.125
    keep, v = torch.full_like(inputs.a, -200.0), inputs.v.clone()
    k = torch.randn(inputs.k.shape, generator=rng)
    k[..., : HEAD_SIZE // 2] = 0.0
    k = torch.nn.functional.normalize(k, dim=-1)
    for begin in (0, 7 * segment + 110):
        for first in (begin + segment, begin + 4 * segment):
            # A large value for the direction, kept for a segment.
            k[first - 1] = direction
            v[first - 1] *= 2.0**14
            k[first + segment : first + 2 * segment : 2] = direction
    inputs = inputs._replace(k=k.bfloat16(), v=v, a=keep, A_log=torch.full_like(inputs.A_log, 20.0))
    pristine = clone(inputs)
    left: dict[str, Tensor] = {}
    assert_judged(pristine, emulate(name, inputs, left=left))
    begin = sum(lengths[:2]) // segment  # the number of the second one's first cut
    off = off_cuts(left["chain"], inputs.k.shape[0], name)
    assert off == [2, 5, begin + 2, begin + 5]


def test_shared_memory_fits(tmp_path: Path) -> None:
    """Every config that a tuner may try fits a block; those that do not are refused."""
    for kernel in KERNELS:
        if kernel.language == "cuda":
            assert kernel.launch_shape is not None
            for variant in kernel.variants:
                assert kernel.launch_shape(kernel.config, variant)[1] <= 227 * 1024
    for too_large in (lambda: ChunkSplit(64, 3), lambda: ChunkWarp(32, 4)):
        with pytest.raises(ValueError, match="stages"):
            too_large()
