"""Triton and CuTe DSL kernels of gdn_decode without a GPU: Triton's interpreter against the oracle,
and machine code for every architecture. Run as a program, this file is the interpreter's side."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from fastkernels.ops._shared.gdn import resolve_scale
from fastkernels.ops.gdn_decode.inputs import CORNER, CORRECTNESS, Case, make_inputs
from fastkernels.ops.gdn_decode.kernels import KERNELS, TritonRows
from fastkernels.ops.gdn_decode.problem import Inputs
from fastkernels.ops.gdn_decode.reference import reference
from fastkernels.testing.compare import clone

pytestmark = pytest.mark.toolchain

# Few heads, since the interpreter takes milliseconds a block. Left out: what only differs in size.
NAMED = {case.name: case for case in (*CORRECTNESS, *CORNER)}
NAMES = (
    *("definition-b1", "definition-b3", "no-state", "inplace", "pool", "pool-int64", "extreme"),
    *("one-pool", "all-invalid", "strided", "strided-inplace", "strided-pool"),
)
BRIEF = ("scale", "keep", "forget", "slow", "raw-keys")
CASES = (
    *(replace(NAMED[name], num_q_heads=1, num_v_heads=2) for name in NAMES),
    *(replace(NAMED[name], batch_size=1, num_q_heads=1, num_v_heads=2) for name in BRIEF),
    replace(NAMED["heads-2-8"], batch_size=1, num_v_heads=4),
    Case("balanced", 1, seed=91, num_v_heads=12),
    Case("unbalanced", 1, seed=92, num_v_heads=12),
)
CONFIGS = (TritonRows(32, 8, 4), TritonRows(64, 16, 4), TritonRows(64, 32, 8))


# ---- the interpreter's side ---------------------------------------------------------------------


def draw(case: Case) -> Inputs:
    inputs = make_inputs(case)
    if case.name in ("balanced", "unbalanced"):
        # exp(A_log) and softplus far apart: log_g stays near -1, or one of them decides.
        A_log = torch.linspace(-30.0, 80.0, case.num_v_heads)
        step = torch.exp(-A_log.double())
        x = torch.where(step > 20, step, torch.log(torch.expm1(step)))
        if case.name == "unbalanced":
            A_log, x = 2 * A_log, x.flip(0)
        a = x.float().bfloat16().expand_as(inputs.a).clone()
        inputs = inputs._replace(A_log=A_log, a=a, dt_bias=(x - a[0, 0].double()).float())
    if inputs.read_indices is not None:
        slots = inputs.state.shape[0]  # type: ignore[union-attr]
        padding = (inputs.read_indices < 0) | (inputs.read_indices >= slots)
        for tensor in (inputs.q, inputs.k, inputs.v, inputs.a, inputs.b):
            tensor[padding] = math.nan
        if inputs.read_indices.dtype == torch.int64:
            # A legal slot in the lower word, outside the pool all the same.
            for indices in (inputs.read_indices, inputs.write_indices):
                assert indices is not None
                indices[indices == 10**6] = 2**32 + 1
    return inputs


def words(indices: torch.Tensor | None) -> torch.Tensor:
    """The indices from their first one on, as the launcher points to them: int32 words."""
    pointer = torch.empty(0, dtype=torch.int32)
    if indices is None:
        return pointer  # its address is null
    offset = indices.storage_offset() * indices.element_size() // 4
    return pointer.set_(indices.untyped_storage(), offset, (1,), (1,))


def launch(function: Any, inputs: Inputs, output: Any, new_state: Any, config: TritonRows) -> None:
    """The launcher's arguments, with a grid that makes blocks stride over the batch."""
    x = inputs
    batch_size, _, num_v_heads, head_size = x.v.shape
    state = torch.empty(0) if x.state is None else x.state
    read, write = x.read_indices, x.read_indices if x.write_indices is None else x.write_indices
    strides = (
        *(stride for t in (x.q, x.k, x.v) for stride in (t.stride(0), t.stride(2))),
        *((0, 0) if x.state is None else state.stride()[:2]),
        *(x.a.stride(0), x.b.stride(0)),
        *(0 if t is None else t.stride(0) for t in (read, write)),
        *(output.stride(0), output.stride(2)),
        *new_state.stride()[:2],
    )
    grid = (num_v_heads * head_size // config.rows_per_block, min(batch_size, 2))
    function[grid](
        *(x.q, x.k, x.v, state, x.A_log, x.a, x.dt_bias, x.b),
        *(words(read), words(write), output, new_state),
        *strides,
        *(batch_size, x.q.shape[2], num_v_heads, new_state.shape[0]),
        *(int(x.state is not None), 0 if read is None else read.element_size() // 4),
        resolve_scale(x.scale, head_size),
        *(head_size, config.rows_per_block, config.lanes_per_row),
    )


def interpret(function: Any, case: Case, config: TritonRows) -> list[str]:
    """What is wrong with a case's outputs; they are slices of larger buffers full of NaN."""
    inputs = draw(case)
    pristine = clone(inputs)
    batch_size, _, num_v_heads, head_size = inputs.v.shape
    outputs = torch.full((batch_size, 1, num_v_heads, head_size + 8), math.nan).bfloat16()
    states = torch.full((batch_size, num_v_heads + 1, head_size, head_size), math.nan)
    in_place = inputs.inplace or inputs.read_indices is not None
    output = outputs[..., :head_size]
    new_state = inputs.state if in_place else states[:, :num_v_heads]
    launch(function, inputs, output, new_state, config)
    assert new_state is not None
    errors = reference(pristine).judge((output, new_state))
    wrong = [str(error) for error in errors if not error.ok]
    if not (outputs[..., head_size:].isnan().all() and states[:, num_v_heads:].isnan().all()):
        wrong.append("wrote beside the outputs")
    return wrong


def main() -> None:
    torch.set_num_threads(1)
    from fastkernels.ops.gdn_decode.kernels import triton_rows

    for i, case in enumerate(CASES):
        config = CONFIGS[i % len(CONFIGS)]
        wrong = interpret(triton_rows.gdn_decode_rows, case, config)
        print(json.dumps([case.name, str(config), wrong]), flush=True)


# ---- pytest's side ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def interpreted() -> dict[str, list[str]]:
    """Verdicts by case. Triton decides at import whether it interprets: hence another process."""
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    return {name: [f"{config}: {text}" for text in wrong] for name, config, wrong in lines}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_triton_interpreted(case: Case, interpreted: dict[str, list[str]]) -> None:
    assert not interpreted[case.name], "\n".join(interpreted[case.name])


PARAMETERS = ["u64"] * 28 + ["u32"] * 6 + ["f32"]  # csrc/gdn_decode/params.h
MODULES = [kernel for kernel in KERNELS if kernel.language != "cuda"]


@pytest.mark.parametrize("variant", ["aligned", "any"])
@pytest.mark.parametrize("arch", ["sm90", "sm100"])
@pytest.mark.parametrize("kernel", MODULES, ids=lambda kernel: kernel.name)
def test_machine_code(kernel: Any, arch: str, variant: str) -> None:
    pytest.importorskip({"triton": "triton", "cute": "cutlass"}[kernel.language])
    module = importlib.import_module(kernel.module)

    binary = module.compile(kernel.config, arch, variant)
    assert binary.cubin.startswith(b"\x7fELF")
    assert f".text.{binary.symbol}\0".encode() in binary.cubin
    assert binary.threads == 32 * kernel.config.warps
    assert binary.shared_bytes <= 1024

    built = module.build(kernel.config, arch, variant)
    ptx = built.asm["ptx"] if kernel.language == "triton" else built.__ptx__
    assert f".target {arch.replace('sm', 'sm_')}a" in ptx
    assert f".reqntid {binary.threads}" in ptx or f".maxntid {binary.threads}" in ptx
    extra = ["u64", "u64"] if kernel.language == "triton" else []
    assert re.findall(r"^\s*\.param \.(\w+)", ptx, re.MULTILINE) == PARAMETERS + extra
    assert "local" not in ptx, "spills or arrays in local memory"
    elements = kernel.config.rows_per_block * 128 // binary.threads
    wide = {op: len(re.findall(rf"\b{op}\.global\.v(?:4\.b32|2\.b64)", ptx)) for op in ("ld", "st")}
    assert wide["ld"] == wide["st"] == (elements // 4 if variant == "aligned" else 0)


if __name__ == "__main__":
    main()
