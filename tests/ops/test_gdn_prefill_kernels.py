"""Kernels of gdn_prefill without a GPU: Triton's interpreter and the arithmetic of the CuTe DSL
chain against the oracle, and machine code of both for every architecture. Run as a program, this
file is the interpreter's side."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from fastkernels.core import toolchain
from fastkernels.ops._shared.gdn import gates, resolve_scale
from fastkernels.ops.gdn_prefill.adversarial import STRATA, Stratum
from fastkernels.ops.gdn_prefill.inputs import CORNER, CORRECTNESS, Case, make_inputs
from fastkernels.ops.gdn_prefill.kernels import (
    CHUNK,
    HEAD_SIZE,
    KERNELS,
    ChunkParallel,
    ChunkPipeline,
    ChunkWarp,
    CuteSplit,
    TritonFused,
    TritonSplit,
    chunk_bound,
)
from fastkernels.ops.gdn_prefill.problem import Inputs
from fastkernels.ops.gdn_prefill.reference import clean_offsets, reference
from fastkernels.testing.compare import clone
from tests.triton_interpreter import mend_interpreter

pytestmark = pytest.mark.toolchain

ROOT = Path(__file__).parents[2]
KERNEL = {kernel.name: kernel for kernel in KERNELS}
# The interpreter takes milliseconds an operation, whatever its size: few heads, large slabs.
FUSED, SPLIT = TritonFused(128, 8, 2), TritonSplit(128, 4, 8, 2)
SMALL_SLABS = (TritonFused(64, 8, 1), TritonSplit(32, 8, 4, 3))


@dataclass(frozen=True)
class Trial:
    """One drawing of inputs, for each of `configs`."""

    stratum: Stratum
    configs: tuple[Any, ...]

    @property
    def name(self) -> str:
        return str(self.stratum.case.name)


# ---- changes of inputs --------------------------------------------------------------------------


def set_nan(inputs: Inputs, tokens: Any, names: str = "qkvab") -> None:
    for name in names:
        getattr(inputs, name)[tokens] = math.nan


def neighbours_nan(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """Sequences 1, 3, .. and stray tokens hold NaN: in pool form these are padding, and in every
    form they are the other sequences' neighbours within 64 tokens."""
    offsets = inputs.cu_seqlens.tolist()
    inputs.read_indices[1::2] = -1  # type: ignore[index]
    for begin, end in list(pairwise(offsets))[1::2]:
        set_nan(inputs, slice(begin, end))
    set_nan(inputs, slice(offsets[-1], None))
    return inputs


def far_indices(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """Legal slots in the lower word, outside the pool all the same; padding tokens hold NaN."""
    slots = inputs.state.shape[0]  # type: ignore[union-attr]
    assert inputs.read_indices is not None
    assert inputs.write_indices is not None
    for indices in (inputs.read_indices, inputs.write_indices):
        indices[indices == 10**6] = 2**32 + 1
    for i, (begin, end) in enumerate(pairwise(inputs.cu_seqlens.tolist())):
        if not 0 <= int(inputs.read_indices[i]) < slots:
            set_nan(inputs, slice(begin, end))
    return inputs


def enormous_gate(inputs: Inputs, rng: torch.Generator) -> Inputs:
    inputs.a[10] = 1e20
    return inputs


def offsets(*values: int) -> Callable[[Inputs, torch.Generator], Inputs]:
    def change(inputs: Inputs, rng: torch.Generator) -> Inputs:
        dtype = inputs.cu_seqlens.dtype
        strided = torch.full((2 * len(values),), 10**6, dtype=dtype)[::2]
        strided.copy_(torch.tensor(values, dtype=dtype))
        outside = torch.ones(inputs.v.shape[0], dtype=torch.bool)
        for begin, end in pairwise(clean_offsets(values, len(outside))):
            outside[begin:end] = False
        set_nan(inputs, outside)
        return inputs._replace(cu_seqlens=strided)

    return change


BOTH = (FUSED, SPLIT)
Change = Callable[[Inputs, torch.Generator], Inputs]


def case(name: str, *lengths: int, **fields: Any) -> Case:
    heads = {"num_q_heads": 1, "num_v_heads": 1}
    return Case(name, lengths, **(heads | fields))


def drawn(
    name: str, *lengths: int, change: Change | None = None, configs: Any = BOTH, **fields: Any
) -> Trial:
    return Trial(Stratum(case(name, *lengths, **fields), change), configs)


def listed(name: str, *configs: Any, **fields: Any) -> Trial:
    """A case of the lists in `inputs`, or else an adversarial stratum, on one head."""
    few = {"num_q_heads": 1, "num_v_heads": 1, "head_size": HEAD_SIZE} | fields
    strata = STRATA | {case.name: Stratum(case) for case in (*CORRECTNESS, *CORNER)}
    case = replace(strata[name].case, **few)
    return Trial(replace(strata[name], case=case), configs or BOTH)


TRIALS = (
    drawn("lengths", 1, 15, 16, 0, 17, 63, 64, 65, seed=51),
    drawn("heads-1-2", 130, 20, num_v_heads=2, seed=52, configs=(*BOTH, *SMALL_SLABS)),
    drawn("heads-2-4", 20, 3, num_q_heads=2, num_v_heads=4, seed=53),
    drawn("slow-200", 200, gates="slow", seed=54),
    listed("no-state"),
    listed("inplace"),
    listed("pool", lengths=(30, 4, 65, 7, 1)),
    drawn(
        "pool-far", 17, 0, 5, 2, 9, mode="pool", indices="int64", offsets="int32", seed=55,
        change=far_indices,
    ),
    drawn("nan-neighbours", 20, 30, 70, 3, stray=9, mode="pool", seed=56, change=neighbours_nan),
    listed("strided-pool", num_v_heads=2),
    listed("strided-inplace", SPLIT, num_v_heads=2),
    listed("empty-around"),
    listed("empty-no-state"),
    listed("only-stray-tokens"),
    listed("all-invalid"),
    drawn(
        "offsets-32", 20, 13, 9, 30, 5, offsets="int32", seed=57,
        change=offsets(-7, 13, 40, 33, 2**31 - 1, -(2**31)),
    ),
    drawn(
        "offsets-64", 20, 13, 9, 30, 5, seed=58,
        change=offsets(-(2**32) + 5, 3, 30, -(2**31), 2**31 + 1, 2**32 + 40),
    ),
    drawn("offsets-inside", 20, 13, 9, 30, 5, seed=59, change=offsets(6, 40, 21, 20, 50, 7)),
    listed("scale"),
    listed("keep", lengths=(100, 7)),
    listed("forget"),
    listed("extreme", FUSED, lengths=(80, 7)),
    listed("steep_decay", SPLIT),
    listed("late_forget", FUSED),
    drawn("one-enormous-gate", 40, seed=60, change=enormous_gate),
    listed("beta_0"),
    listed("beta_1"),
    listed("mixed_states", SPLIT),
    listed("parallel", FUSED),
    listed("parallel-keep"),
    listed("long-keys", SPLIT),
    listed("raw-keys", FUSED),
)  # fmt: skip


# ---- the interpreter's side ---------------------------------------------------------------------


def words(values: torch.Tensor | None) -> torch.Tensor:
    """Integers from the first one on, as the launcher points to them: int32 words."""
    pointer = torch.empty(0, dtype=torch.int32)
    if values is None:
        return pointer  # its address is null
    offset = values.storage_offset() * values.element_size() // 4
    return pointer.set_(values.untyped_storage(), offset, (1,), (1,))


def launch(module: Any, inputs: Inputs, output: Any, new_state: Any, config: Any) -> None:
    """The launcher's arguments and grids; the workspace is full of NaN before and unread after."""
    x = inputs
    num_tokens, num_v_heads, head_size = x.v.shape
    num_seqs = x.cu_seqlens.shape[0] - 1
    kernel = KERNEL["triton_fused" if isinstance(config, TritonFused) else "triton_split"]
    rows, entry_bytes = kernel.tile(config)
    state = torch.empty(0) if x.state is None else x.state
    read, write = x.read_indices, x.read_indices if x.write_indices is None else x.write_indices
    chunks = chunk_bound(num_tokens, num_seqs) * num_v_heads
    workspace = torch.full((chunks * entry_bytes // 2,), math.nan, dtype=torch.bfloat16)
    strides = (
        *(stride for t in (x.q, x.k, x.v) for stride in t.stride()[:2]),
        *((0, 0) if x.state is None else state.stride()[:2]),
        *(t.stride(0) for t in (x.a, x.b, x.cu_seqlens)),
        *(0 if t is None else t.stride(0) for t in (read, write)),
        *output.stride()[:2],
        *new_state.stride()[:2],
    )
    blocks = num_v_heads * (head_size // rows) * max(num_seqs, 1)
    for variant in kernel.variants[::2]:
        constants = module.constants(config, variant) | {"PDL": 0}
        grid = chunks if variant == "prepare" else blocks
        if grid == 0 or (num_tokens == 0 and num_seqs == 0):
            continue
        module.gdn_prefill_chunks[(grid,)](
            *(x.q, x.k, x.v, state, x.A_log, x.a, x.dt_bias, x.b, words(x.cu_seqlens)),
            *(words(read), words(write), output, new_state, workspace),
            *strides,
            *(num_tokens, num_seqs, x.q.shape[1], num_v_heads, new_state.shape[0]),
            *(int(x.state is not None), x.cu_seqlens.element_size() // 4),
            0 if read is None else read.element_size() // 4,
            resolve_scale(x.scale, head_size),
            **constants,
        )


def interpret(module: Any, inputs: Inputs, config: Any) -> tuple[Any, Any, list[str]]:
    """Outputs, and what is wrong beside them: they are slices of larger buffers full of NaN."""
    num_tokens, num_v_heads, head_size = inputs.v.shape
    num_seqs = inputs.cu_seqlens.shape[0] - 1
    outputs = torch.full((num_tokens, num_v_heads, head_size + 8), math.nan).bfloat16()
    states = torch.full((num_seqs, num_v_heads + 1, head_size, head_size), math.nan)
    in_place = inputs.inplace or inputs.read_indices is not None
    output = outputs[..., :head_size]
    new_state = inputs.state if in_place else states[:, :num_v_heads]
    launch(module, inputs, output, new_state, config)
    clean = outputs[..., head_size:].isnan().all() and states[:, num_v_heads:].isnan().all()
    return output, new_state, [] if clean else ["wrote beside the outputs"]


def judge(module: Any, trial: Trial) -> dict[str, list[str]]:
    wrong = {}
    for config in trial.configs:
        inputs, _ = trial.stratum.draw(trial.stratum.case.seed)
        pristine = clone(inputs)
        output, new_state, found = interpret(module, inputs, config)
        errors = reference(pristine).judge((output, new_state))
        wrong[str(config)] = found + [str(error) for error in errors if not error.ok]
    return wrong


Run = Callable[[Inputs], tuple[torch.Tensor, torch.Tensor, list[str]]]
# A token that is not finite, in the middle of a chunk: what it makes of its sequence.
SPOILERS = ("q", "k", "v", "a", "b")
SPOILED = 21


def spoil(run: Run, name: str) -> list[str]:
    """Earlier tokens are as if it were not there, later ones of what it touches are not finite."""
    inputs = make_inputs(case("spoiled", 100, 5, num_v_heads=2, seed=61))
    want = reference(inputs)
    value = math.inf if name in "kv" else math.nan
    tensor = getattr(inputs, name)
    tensor[(SPOILED, 0, 3)[: tensor.dim()]] = value
    output, new_state, wrong = run(inputs)
    heads = slice(0, 2) if name in "qk" else slice(0, 1)
    column = 3 if name == "v" else slice(None)
    end = SPOILED + 1 if name == "q" else 100
    touched = torch.zeros(output.shape, dtype=torch.bool)
    touched[SPOILED:end, heads, column] = True
    if output[touched].isfinite().any():
        wrong.append("finite where it must not be")
    if not output[~touched].isfinite().all():
        wrong.append(f"not finite at {(~output.isfinite() & ~touched).nonzero()[0].tolist()}")
    else:
        difference = torch.where(touched, 0.0, output.double() - want.output)
        if not difference.norm() <= 8e-3 * want.output.norm():
            wrong.append("other tokens changed")
    touched_state = torch.zeros(new_state.shape, dtype=torch.bool)
    if name != "q":
        touched_state[0, heads, column] = True
    if not torch.equal(new_state.isfinite(), ~touched_state):
        wrong.append("states are not finite elsewhere")
    return wrong


def main() -> None:
    torch.set_num_threads(1)
    mend_interpreter()
    import triton.language as tl

    from fastkernels.ops.gdn_prefill.kernels import triton_chunks

    # So that a search takes several rounds.
    triton_chunks.OFFSETS = tl.constexpr(4)
    for trial in TRIALS:
        print(json.dumps([trial.name, judge(triton_chunks, trial)]), flush=True)
    for name in SPOILERS:
        wrong = {
            str(config): spoil(partial(interpret, triton_chunks, config=config), name)
            for config in (FUSED, SPLIT)
        }
        print(json.dumps([f"spoiled-{name}", wrong]), flush=True)


# ---- the arithmetic of cute_chain.py ------------------------------------------------------------


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def take_out(x: torch.Tensor, first_bad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros where an operand would not be finite, and the first such token of each row."""
    bad = ~rounded(x).isfinite()
    tokens = torch.where(bad, torch.arange(x.shape[1]), CHUNK).amin(1)
    return torch.where(bad, 0.0, x), torch.minimum(first_bad, tokens)


def cute_chunk(
    S: torch.Tensor, q: Any, k: Any, v: Any, log_g: Any, beta: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new state, and the output [V, tokens] without scale, by the steps of the kernel; T, P and
    gates as `prepare` leaves them."""
    total = log_g.cumsum(0)
    decays = (total[:, None] - total).tril().exp().tril()
    A = (beta[:, None] * decays * (k @ k.T)).tril(-1)
    bad_rows = (~A.isfinite()).any(1).nonzero()
    first_bad = torch.full((HEAD_SIZE,), int(bad_rows[0]) if len(bad_rows) else CHUNK)
    one = torch.eye(len(A))
    system = one + torch.where(A.isfinite(), A, 0.0)
    T = rounded(torch.linalg.solve_triangular(system, one, upper=False) - one)
    P = rounded((decays * (q @ k.T)).tril())
    d, rest = total.exp(), (total[-1] - total).exp()

    left_S = rounded(S)
    Y = beta * v.T - beta * d * (left_S @ k.T)
    Y, first_bad = take_out(Y, first_bad)
    U = Y + rounded(Y) @ T.T
    S = torch.where(first_bad[:, None] < CHUNK, math.nan, d[-1] * S)
    S = S + rounded(rest * U) @ k
    U, first_bad = take_out(U, first_bad)
    output = d * (left_S @ q.T) + rounded(U) @ P.T
    is_bad = torch.arange(len(A)) >= first_bad[:, None]
    return S, torch.where(is_bad, math.nan, output)


def cute_split(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Packed form alone."""
    x = inputs
    num_tokens, num_v_heads, head_size = x.v.shape
    log_g, beta = (t.float() for t in gates(x.A_log, x.a, x.dt_bias, x.b))
    output = torch.zeros(num_tokens, num_v_heads, head_size)
    offsets = clean_offsets(x.cu_seqlens.tolist(), num_tokens)
    states = torch.zeros(len(offsets) - 1, num_v_heads, head_size, head_size)
    for i, (begin, end) in enumerate(pairwise(offsets)):
        for head in range(num_v_heads):
            key_head = head // (num_v_heads // x.q.shape[1])
            S = states[i, head] if x.state is None else x.state[i, head]
            for first in range(begin, end, CHUNK):
                part = slice(first, min(first + CHUNK, end))
                q, k = (t[part, key_head].float() for t in (x.q, x.k))
                v, g, b = (t[part, head].float() for t in (x.v, log_g, beta))
                S, made = cute_chunk(S, q, k, v, g, b)
                output[part, head] = resolve_scale(x.scale, head_size) * made.T
            states[i, head] = S
    return output.bfloat16(), states, []


# ---- pytest's side ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def interpreted() -> dict[str, list[str]]:
    """Verdicts by name. Triton decides at import whether it interprets: hence another process."""
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-m", "tests.ops.test_gdn_prefill_kernels"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    return {
        name: [f"{config}: {text}" for config, texts in wrong.items() for text in texts]
        for name, wrong in lines
    }


NAMES = (*(trial.name for trial in TRIALS), *(f"spoiled-{name}" for name in SPOILERS))


@pytest.mark.parametrize("name", NAMES)
def test_triton_interpreted(name: str, interpreted: dict[str, list[str]]) -> None:
    assert not interpreted[name], "\n".join(interpreted[name])


MODELLED = (
    "lengths",
    "heads-1-2",
    "heads-2-4",
    "slow-200",
    "no-state",
    "keep",
    "forget",
    "parallel",
)


@pytest.mark.parametrize("name", MODELLED)
def test_cute_arithmetic(name: str) -> None:
    (trial,) = (trial for trial in TRIALS if trial.name == name)
    inputs, _ = trial.stratum.draw(trial.stratum.case.seed)
    output, new_state, _ = cute_split(inputs)
    errors = reference(inputs).judge((output, new_state))
    assert all(error.ok for error in errors), [str(error) for error in errors]


@pytest.mark.parametrize("name", SPOILERS)
def test_cute_arithmetic_not_finite(name: str) -> None:
    assert not spoil(cute_split, name)


PARAMETERS = ["u64"] * 31 + ["u32"] * 8 + ["f32"]  # csrc/gdn_prefill/params.h
STAGES = [
    (kernel, variant)
    for kernel in KERNELS
    if kernel.language == "triton"
    for variant in kernel.variants
    # Those for any alignment differ by promises alone, and take as long; tests/build has them all.
    if "any" not in variant
]
# Bytes a thread keeps in local memory, at most.
SPILLS = {"aligned": 256, "prepare": 0, "chain": 48}


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
@pytest.mark.parametrize(("kernel", "variant"), STAGES, ids=lambda x: getattr(x, "name", x))
def test_machine_code(kernel: Any, variant: str, arch: str, tmp_path: Path) -> None:
    triton = pytest.importorskip("triton")
    module = importlib.import_module(kernel.module)
    built = module.build(kernel.config, arch, variant)
    cubin, ptx, name = built.asm["cubin"], built.asm["ptx"], built.metadata.name
    warps = module.constants(kernel.config, variant)["WARPS"]

    assert cubin.startswith(b"\x7fELF")
    assert f".text.{name}\0".encode() in cubin
    assert name == f"gdn_prefill_{'fused' if variant == 'aligned' else variant}"
    assert f".target {arch.replace('sm', 'sm_')}a" in ptx
    assert f".reqntid {32 * warps}" in ptx or f".maxntid {32 * warps}" in ptx
    extra = ["u64", "u64"]  # scratch of Triton's, null here
    assert re.findall(r"^\s*\.param \.(\w+)", ptx, re.MULTILINE) == PARAMETERS + extra
    assert built.metadata.shared <= (113 if variant == "aligned" else 100) * 1024

    assert ("wgmma" if arch == "sm90" else "tcgen05.mma") in ptx
    assert ("cp.async.cg" in ptx) == (variant != "prepare")
    assert ("griddepcontrol.launch_dependents" in ptx) == (variant == "prepare")
    assert ("griddepcontrol.wait" in ptx) == (variant == "chain")

    file = tmp_path / "kernel.cubin"
    file.write_bytes(cubin)
    tool = triton.knobs.nvidia.cuobjdump.path
    usage = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True)
    stack = re.search(r" STACK:(\d+) ", usage.stdout)
    assert stack is not None, usage.stdout
    assert int(stack[1]) <= SPILLS[variant], usage.stdout


PARALLEL = KERNEL["chunk_parallel"]
# Blocks an SM that are to fit.
RESIDENT = {"transfer": 2, "transfer_any": 2, "scan": 1, "chain": 1, "chain_any": 1, "mend": 1,
            "mend_any": 1}  # fmt: skip


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
@pytest.mark.parametrize("variant", RESIDENT)
def test_parallel_machine_code(variant: str, arch: str, tmp_path: Path) -> None:
    """Nothing is kept in local memory, as many blocks as planned fit, and launches overlap: all
    wait (in machine code ACQBULK), all but the last let the next one start (PREEXIT)."""
    knobs = pytest.importorskip("triton").knobs
    for rows in (16, 32, 64):
        binary = toolchain.compile_kernel(PARALLEL, ChunkParallel(rows, 16), arch, variant)
        file = tmp_path / f"{rows}.cubin"
        file.write_bytes(binary.cubin)

        def run(option: str, file: Path = file) -> str:
            command = [knobs.nvidia.cuobjdump.path, option, file]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        usage, code = run("-res-usage"), run("-sass")
        found = re.search(r"REG:(\d+) STACK:0 .* LOCAL:0 ", usage)
        assert found is not None, usage
        registers = -(-int(found[1]) // 8) * 8  # a warp's are given in units of 256
        assert registers * binary.threads * RESIDENT[variant] <= 65536
        assert (binary.shared_bytes + 1024) * RESIDENT[variant] <= 228 * 1024
        assert "ACQBULK" in code
        assert ("PREEXIT" in code) == ("mend" not in variant)


WARP = KERNEL["chunk_warp"]


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
@pytest.mark.parametrize("variant", ["chain", "chain_any"])
@pytest.mark.parametrize("config", [ChunkWarp(16, 3), ChunkWarp(64, 3)], ids=str)
def test_warp_machine_code(config: Any, variant: str, arch: str, tmp_path: Path) -> None:
    """A state warp's 64 registers of state and all else stay in registers; in its loop stand the
    148 matrix instructions of a chunk, one wait, one arrival, and no barrier of several warps."""
    knobs = pytest.importorskip("triton").knobs
    binary = toolchain.compile_kernel(WARP, config, arch, variant)
    file = tmp_path / "kernel.cubin"
    file.write_bytes(binary.cubin)

    def run(option: str) -> str:
        command = [knobs.nvidia.cuobjdump.path, option, file]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    usage = run("-res-usage")
    found = re.search(r"REG:(\d+) STACK:0 .* LOCAL:0 ", usage)
    assert found is not None, usage
    assert -(-int(found[1]) // 8) * 8 * binary.threads <= 65536
    lines = re.findall(r"^\s+/\*([0-9a-f]+)\*/\s+(.*?);", run("-sass"), re.MULTILINE)
    assert any("ACQBULK" in code for _, code in lines)
    at = {int(address, 16): i for i, (address, _) in enumerate(lines)}
    loops = []
    for i, (_, code) in enumerate(lines):
        jump = re.search(r"BRA .*?0x([0-9a-f]+)", code)
        if jump and at[int(jump[1], 16)] < i:
            loops.append([code for _, code in lines[at[int(jump[1], 16)] : i]])
    chain = min((x for x in loops if sum("HMMA" in code for code in x) == 148), key=len)
    for word, count in {"TRYWAIT": 1, "SYNCS.ARRIVE": 1, "BAR.": 0, "LDSM": 78, "STS": 12}.items():
        assert sum(word in code for code in chain) == count, word


PIPELINE = KERNEL["chunk_pipeline"]


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
@pytest.mark.parametrize("variant", ["pipeline", "pipeline_any"])
@pytest.mark.parametrize("rows", [16, 32])
def test_pipeline_machine_code(rows: int, variant: str, arch: str, tmp_path: Path) -> None:
    """A thread starts with the 128 registers that `WyChain` counts on: with fewer, state warps
    would wait for ever for those that nobody has. Their loop has two products and two barriers."""
    knobs = pytest.importorskip("triton").knobs
    binary = toolchain.compile_kernel(PIPELINE, ChunkPipeline(rows), arch, variant)
    file = tmp_path / "kernel.cubin"
    file.write_bytes(binary.cubin)

    def run(option: str) -> str:
        command = [knobs.nvidia.cuobjdump.path, option, file]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert re.search(r"REG:128 ", run("-res-usage"))
    lines = re.findall(r"^\s+/\*([0-9a-f]+)\*/\s+(.*?);", run("-sass"), re.MULTILINE)
    assert any("ACQBULK" in code for _, code in lines)
    first, last = (
        next(i for i, (_, code) in enumerate(lines) if word in code and number in code)
        for word, number in (
            ("USETMAXREG.TRY_ALLOC", "0x88" if rows == 16 else "0x90"),
            ("USETMAXREG.DEALLOC", "0x80"),
        )
    )
    chain = [code for _, code in lines[first:last]]
    for word, count in {
        "HMMA": 2 * rows,
        "BAR.SYNC": 3,
        "ATOM": 0,
        "LDG.E.128": 16 + rows // 8,
    }.items():
        assert sum(word in code for code in chain) == count, word


CUTE = KERNEL["cute_split"]


@pytest.mark.parametrize("config", [CuteSplit(3, 32), CuteSplit(2, 64)], ids=str)
@pytest.mark.parametrize("variant", ["chain", "chain_any"])
@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_cute_machine_code(config: Any, variant: str, arch: str, tmp_path: Path) -> None:
    pytest.importorskip("cutlass")
    tools = Path(pytest.importorskip("triton").knobs.nvidia.cuobjdump.path).parent
    module = importlib.import_module(CUTE.module)
    binary = module.compile(config, arch, variant)
    ptx = module.build(config, arch, variant).__ptx__

    assert f".text.{binary.symbol}\0".encode() in binary.cubin
    assert f".target {arch.replace('sm', 'sm_')}a" in ptx
    assert f".reqntid {binary.threads}" in ptx
    assert re.findall(r"^\s*\.param \.(\w+)", ptx, re.MULTILINE) == PARAMETERS
    assert "griddepcontrol.wait" in ptx
    assert ("wgmma" in ptx) == (arch == "sm90")
    assert ("mma.sync" in ptx) == (arch == "sm100")
    # Of a full stage: q, k and v, unless of any alignment; T and P; gates.
    copies = (8 + 8 + 4) * (variant == "chain") + 4 + 4 + 1
    assert len(re.findall(r"cp\.async\.cg", ptx)) == copies

    file = tmp_path / "kernel.cubin"
    file.write_bytes(binary.cubin)

    def run(name: str, *options: Any) -> str:
        return subprocess.run([tools / name, *options], capture_output=True, text=True).stdout

    usage = run("cuobjdump", "-res-usage", file)
    assert " STACK:0 " in usage, usage
    if arch == "sm90":
        code = run("nvdisasm", "-c", file)
        # One more wait than written: the compiler has made the products wait for one another.
        assert code.count("WARPGROUP.DEPBAR") == ptx.count("wgmma.wait_group") == 5
        assert code.count("HGMMA") == ptx.count("wgmma.mma_async")


BORROWERS = [(CUTE, CuteSplit(2, 64)), (PARALLEL, ChunkParallel(32, 8)), (WARP, ChunkWarp(32, 3))]


@pytest.mark.parametrize(("kernel", "config"), BORROWERS, ids=lambda x: getattr(x, "name", ""))
def test_prepare_is_that_of_chunk_split(kernel: Any, config: Any) -> None:
    """It depends on no knob: the same machine code whatever the chain's config is."""
    lender = KERNEL["chunk_split"]
    for variant in ("prepare", "prepare_any"):
        assert kernel.maker(config, variant) == (lender, lender.config)
        assert toolchain.recipe(kernel, config, "sm90", variant) == toolchain.recipe(
            lender, lender.config, "sm90", variant
        )
    assert kernel.maker(config, "chain") == (kernel, config)
    assert kernel.tile(config)[1] == lender.tile(lender.config)[1]


if __name__ == "__main__":
    main()
