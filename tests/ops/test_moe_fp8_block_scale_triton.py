"""Triton kernels of moe_fp8_block_scale without a GPU: the interpreter against the oracle, and
machine code for every architecture. Run as a program, this file is the interpreter's side."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fastkernels.core.kernels import csrc_folder
from fastkernels.ops.moe_fp8_block_scale import kernels as declared
from fastkernels.ops.moe_fp8_block_scale.adversarial import STRATA, Stratum
from fastkernels.ops.moe_fp8_block_scale.inputs import CORNER, CORRECTNESS, ROUTED, SMALL, Case
from fastkernels.ops.moe_fp8_block_scale.kernels import (
    ALIGNMENT,
    KERNELS,
    TritonGrouped,
    WgmmaGrouped,
    regions,
    rounded,
    tiles_bound,
    workspace_bytes,
)
from fastkernels.ops.moe_fp8_block_scale.problem import Inputs
from fastkernels.ops.moe_fp8_block_scale.reference import reference
from fastkernels.ops.moe_fp8_block_scale.routing import route_tokens
from tests.triton_interpreter import mend_interpreter

ROOT = Path(__file__).parents[2]
KERNEL = next(kernel for kernel in KERNELS if kernel.name == "triton_grouped")

# The interpreter takes milliseconds an operation, whatever its size: large tiles, few of them.
WIDE, MIDDLE = TritonGrouped(128, 32, 128, 8, 4, 1), TritonGrouped(64, 16, 128, 4, 4, 1)
NARROW = TritonGrouped(32, 16, 64, 4, 4, 1)
FEW: dict[str, Any] = {"num_local_experts": 8}
BLOCKS = 5  # of the persistent stages, so that each takes several tiles


@dataclass(frozen=True)
class Trial:
    """One drawing of inputs, for each of `configs`; `chunk`: tokens of a pass at most; `is_half`:
    partial outputs are made bfloat16 before they are combined."""

    name: str
    stratum: Stratum
    configs: tuple[TritonGrouped, ...]
    chunk: int = declared.CHUNK
    is_half: bool = False


# ---- changes of inputs --------------------------------------------------------------------------


def one_sided(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """Token 0 has no local expert, the last one 8 of them, in a group of its own."""
    assert inputs.routing_logits is not None
    logits = inputs.routing_logits.clone()
    first, num_local = inputs.local_expert_offset, inputs.gemm1_weights.shape[0]
    logits[0, first : first + num_local] -= 50.0
    logits[-1, first : first + num_local] += 50.0
    return inputs._replace(routing_logits=logits)


def negative_bias(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """C61: every biased score is negative, those of groups that are not kept included."""
    assert inputs.routing_bias is not None
    return inputs._replace(routing_bias=torch.full_like(inputs.routing_bias, -3.0))


def wide_ids(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """int64 ids whose low words are local experts, and whose high ones say otherwise."""
    assert inputs.topk_ids is not None
    ids = inputs.topk_ids.clone()
    ids[0, 0], ids[1, 1], ids[2, 2] = 2**32 + 1, -(2**32) + 1, 2**63 - 1
    ids[3, 3], ids[4, 0] = -(2**63), 2**31
    return inputs._replace(topk_ids=ids)


def large_intermediates(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """C of 1e12 in one row and 1e-12 in another, columns of a row 1e4 apart."""
    powers = torch.tensor([6.0, -6.0, 0.0])[torch.arange(inputs.hidden_states.shape[0]) % 3]
    scale = inputs.gemm1_weights_scale.clone()
    scale[:, ::2] *= 100.0
    return inputs._replace(
        hidden_states_scale=inputs.hidden_states_scale * 10.0**powers, gemm1_weights_scale=scale
    )


Change = Callable[[Inputs, torch.Generator], Inputs]


def drawn(
    name: str,
    seq_len: int,
    *configs: TritonGrouped,
    change: Change | None = None,
    chunk: int = declared.CHUNK,
    is_half: bool = False,
    **fields: Any,
) -> Trial:
    case = Case(name, seq_len, **fields)
    return Trial(name, Stratum(case, change), configs or (WIDE,), chunk, is_half)


def listed(name: str, *configs: TritonGrouped, **fields: Any) -> Trial:
    """A case of the lists in `inputs`, or else an adversarial stratum."""
    strata = {case.name: Stratum(case) for case in (*CORRECTNESS, *CORNER)} | STRATA
    stratum = strata[name]
    return Trial(name, replace(stratum, case=replace(stratum.case, **fields)), configs or (WIDE,))


TRIALS = (
    listed("small-t1", WIDE, MIDDLE, NARROW),
    listed("small-t5", MIDDLE),
    listed("small-t17"),
    listed("routed-t7", MIDDLE),
    listed("wide", WIDE, MIDDLE, NARROW, seq_len=3),
    listed("offset", seq_len=9, **FEW),
    listed("precomputed", NARROW, seq_len=5),
    listed("precomputed-int64", seq_len=9, **FEW),
    listed("one-group"),
    listed("single-expert-groups", seq_len=5),
    listed("strided", seq_len=7),
    listed("strided-precomputed", MIDDLE, seq_len=5),
    listed("none-local", seq_len=3),
    listed("negative", seq_len=5, **FEW),
    listed("vanishing", seq_len=6, **FEW),
    listed("ties", seq_len=13, **FEW),
    listed("large-bias", seq_len=3),
    listed("nonfinite", seq_len=7, **FEW),
    listed("one-expert", MIDDLE, seq_len=35),
    listed("all-local", seq_len=9, **FEW),
    listed("repeated", seq_len=18),
    listed("tiny-scales"),
    listed("hostile-ids", MIDDLE, seq_len=7),
    listed("straddling", seq_len=7, **FEW),
    listed("before-the-first", seq_len=9),
    listed("past-the-last", seq_len=9),
    listed("far-away"),
    listed("nan_tokens", seq_len=9, **FEW),
    listed("equal_groups", seq_len=5, **FEW),
    listed("two_groups_decide", seq_len=3),
    drawn("one-sided", 6, seed=31, change=one_sided, **ROUTED),
    drawn("negative-bias", 4, seed=40, change=negative_bias, **(ROUTED | FEW)),
    drawn("negative-bias-odd", 4, seed=41, change=negative_bias, **SMALL),
    drawn("wide-ids", 9, seed=32, mode="precomputed", ids="int64", change=wide_ids, **SMALL),
    drawn("large-intermediates", 3, WIDE, MIDDLE, NARROW, seed=33, change=large_intermediates,
          **{**SMALL, "intermediate_size": 256}),
    drawn("topk-1", 9, seed=34, **{**SMALL, "topk": 1}),
    drawn("topk-16", 4, seed=35, **{**SMALL, "topk": 16}),
    drawn("many-groups", 5, seed=36, **{**SMALL, "num_groups": 16, "topk_groups": 9}),
    drawn("odd-groups", 5, seed=37, **{**SMALL, "num_experts": 33, "num_groups": 3,
          "topk_groups": 2}),
    drawn("chunks", 11, seed=38, chunk=4, **SMALL),
    drawn("half", 5, seed=42, is_half=True, logits="all_local", **SMALL),
    drawn("half-odd", 3, seed=43, is_half=True, **{**SMALL, "hidden_size": 640}),
    drawn("chunks-precomputed", 7, seed=39, chunk=4, mode="precomputed", layout="strided",
          **SMALL),
)  # fmt: skip


# ---- the interpreter's side ---------------------------------------------------------------------


def mend_codes() -> None:
    """Conversions of e4m3 as a GPU makes them: Triton 3.6's interpreter does not round to even,
    loses carries, wraps around instead of saturating and takes NaN for 480."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def mended(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        kinds = {tl.float16: torch.float16, tl.float32: torch.float32}
        if source == tl.float8e4nv and target in kinds:
            codes = torch.from_numpy(np.ascontiguousarray(values)).view(torch.float8_e4m3fn)
            wide = codes.to(kinds[target]).numpy()
            return wide.view(np.uint16 if target == tl.float16 else np.uint32)
        if source == tl.float32 and target == tl.float8e4nv:
            numbers = torch.from_numpy(np.ascontiguousarray(values).view(np.float32))
            codes = numbers.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
            return codes.view(torch.uint8).numpy()
        return convert(values, source, target, rounding)

    interpreter._convert_float = mended


def launch(
    module: Any,
    inputs: Inputs,
    output: Any,
    config: TritonGrouped,
    workspace: Any,
    slots: int,
    is_half: bool,
) -> None:
    """The launcher's arguments and grids, for one chunk."""
    x = inputs
    num_tokens, hidden_size = x.hidden_states.shape
    num_local, _, intermediate_size = x.gemm2_weights.shape
    nothing = torch.empty(0, dtype=torch.int32)
    logits, bias, ids, weights = (
        nothing if t is None else t
        for t in (x.routing_logits, x.routing_bias, x.topk_ids, x.topk_weights)
    )
    words = 0 if x.topk_ids is None else x.topk_ids.element_size() // 4
    ids_strides = [stride * words for stride in ids.stride()] if words else [0, 0]
    weight_strides = weights.stride() if words else (0, 0)
    if words == 2:  # int32 words of the same memory
        ids = ids.as_strided((1,), (1,)).view(torch.int32)
    tiles = tiles_bound(num_tokens * x.topk, num_local, config.tokens)
    is_even = words or (logits.shape[1], x.num_groups) == (declared.MAX_EXPERTS, declared.GROUPS)
    grids = {
        "route" if is_even else "route_any": num_tokens,
        "list": num_local,
        "gemm1": min(tiles * (intermediate_size // config.rows), BLOCKS),
        "gemm2": min(tiles * (hidden_size // config.outs), BLOCKS),
        "combine_half" if is_half else "combine": num_tokens * -(-hidden_size // declared.COLUMNS),
    }
    for variant, blocks in grids.items():
        if variant == "combine_half":
            size = slots * hidden_size
            at = sum(map(rounded, list(regions(axes_of(x)).values())[:-1])) // 4
            partials = workspace[at : at + size].view(torch.float32)
            halves = partials.bfloat16()
            partials.fill_(math.nan)
            partials.view(torch.bfloat16)[:size] = halves
        module.moe_fp8_block_scale_grouped[(blocks,)](
            *(logits, bias, ids, weights, x.hidden_states, x.hidden_states_scale),
            *(x.gemm1_weights, x.gemm1_weights_scale, x.gemm2_weights, x.gemm2_weights_scale),
            *(output, workspace, 0 if words else logits.stride(0), *ids_strides, *weight_strides),
            *(x.hidden_states.stride(0), *x.hidden_states_scale.stride()),
            *x.gemm1_weights.stride()[:2], *x.gemm1_weights_scale.stride()[:2],
            *x.gemm2_weights.stride()[:2], *x.gemm2_weights_scale.stride()[:2],
            output.stride(0),
            *(num_tokens, slots, 0 if words else logits.shape[1], num_local, hidden_size),
            *(intermediate_size, x.topk, x.num_groups, x.topk_groups, x.local_expert_offset, words),
            float(x.routed_scaling_factor),
            **(module.constants(config, variant) | {"PDL": 0}),
        )  # fmt: skip


def axes_of(inputs: Inputs) -> dict[str, int]:
    """What the workspace follows from."""
    num_tokens, hidden_size = inputs.hidden_states.shape
    return {
        "seq_len": num_tokens, "topk": inputs.topk, "hidden_size": hidden_size,
        "intermediate_size": inputs.gemm2_weights.shape[2],
    }  # fmt: skip


def part_of(inputs: Inputs, tokens: slice) -> Inputs:
    cut: dict[str, Any] = {
        name: None if value is None else value[tokens]
        for name in ("routing_logits", "topk_ids", "topk_weights", "hidden_states")
        for value in [getattr(inputs, name)]
    }
    return inputs._replace(hidden_states_scale=inputs.hidden_states_scale[:, tokens], **cut)


def interpret(
    module: Any, inputs: Inputs, config: TritonGrouped, chunk: int, is_half: bool
) -> tuple[torch.Tensor, list[str]]:
    """The output, a slice of a buffer full of NaN, and what is wrong beside it. The workspace is
    full of NaN before, and as small as promised."""
    num_tokens, hidden_size = inputs.hidden_states.shape
    axes = axes_of(inputs) | {"seq_len": min(num_tokens, chunk)}
    size = workspace_bytes(axes)
    workspace = torch.full((size // 4 + 1024,), math.nan).view(torch.int32)
    rows = torch.full((num_tokens, hidden_size + 8), math.nan).bfloat16()
    output = rows[:, :hidden_size]
    wrong = []
    for first in range(0, num_tokens, chunk):
        part = part_of(inputs, slice(first, first + chunk))
        launch(
            module, part, output[first : first + chunk], config, workspace,
            axes["seq_len"] * inputs.topk, is_half,
        )  # fmt: skip
        wrong += misrouted(part, workspace, axes)
    if not workspace[size // 4 :].view(torch.float32).isnan().all():
        wrong.append("wrote beyond the workspace")
    if not rows[:, hidden_size:].isnan().all():
        wrong.append("wrote beside the output")
    return output, wrong


def misrouted(inputs: Inputs, workspace: torch.Tensor, axes: dict[str, int]) -> list[str]:
    """What the first two stages left, against the torch route's ids."""
    x = inputs
    if x.topk_ids is None:
        assert x.routing_logits is not None
        assert x.routing_bias is not None
        ids, weights = route_tokens(
            x.routing_logits, x.routing_bias, topk=x.topk, num_groups=x.num_groups,
            topk_groups=x.topk_groups, routed_scaling_factor=x.routed_scaling_factor,
        )  # fmt: skip
    else:
        assert x.topk_weights is not None
        ids, weights = x.topk_ids.long(), x.topk_weights
    num_local = x.gemm1_weights.shape[0]
    is_local = (ids >= 0) & (ids >= x.local_expert_offset)
    is_local &= ids < x.local_expert_offset + num_local
    expert = torch.where(is_local, ids - x.local_expert_offset, -1).flatten()
    found, at = {}, 0
    for name, size in regions(axes).items():
        found[name] = workspace[at // 4 : (at + size) // 4]
        at += rounded(size)
    wrong = []
    if not torch.equal(found["slot_expert"][: expert.numel()].long(), expert):
        wrong.append("other experts than the torch route")
    got = found["slot_weight"].view(torch.float32)[: expert.numel()]
    if not torch.allclose(got, weights.flatten(), rtol=1e-6, atol=0, equal_nan=True):
        wrong.append("other weights than the torch route")
    order = expert.argsort(stable=True)[int((expert < 0).sum()) :]
    if not torch.equal(found["row_slot"][: order.numel()].long(), order):
        wrong.append("rows are not ordered by expert and token")
    if not torch.equal(found["slot_row"][order].long(), torch.arange(order.numel())):
        wrong.append("slots do not name their rows")
    return wrong


def judge(module: Any, trial: Trial) -> dict[str, list[str]]:
    inputs, _ = trial.stratum.draw(trial.stratum.case.seed)
    want = reference(inputs)
    verdicts = {}
    for config in trial.configs:
        output, wrong = interpret(module, inputs, config, trial.chunk, trial.is_half)
        errors = want.judge((output,))
        wrong += [str(error) for error in errors if not error.ok]
        if output[(want.output == 0).all(1)].any():
            wrong.append("a token without a local expert has an output")
        verdicts[str(config)] = wrong
    return verdicts


def main() -> None:
    torch.set_num_threads(1)
    mend_interpreter()
    mend_codes()
    from fastkernels.ops.moe_fp8_block_scale.kernels import triton_grouped

    for trial in TRIALS:
        print(json.dumps([trial.name, judge(triton_grouped, trial)]), flush=True)


# ---- pytest's side ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def interpreted() -> dict[str, list[str]]:
    """Verdicts by name. Triton decides at import whether it interprets: hence another process."""
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-m", "tests.ops.test_moe_fp8_block_scale_triton"],
        cwd=ROOT,
        # NumPy's products are small: a second thread would wait for others, and for a busy core.
        env={**os.environ, "TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1"},
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


@pytest.mark.toolchain
@pytest.mark.parametrize("name", [trial.name for trial in TRIALS])
def test_triton_interpreted(name: str, interpreted: dict[str, list[str]]) -> None:
    assert not interpreted[name], "\n".join(interpreted[name])


PARAMETERS = ["u64"] * 29 + ["u32"] * 11 + ["f64"]
WIDEST = TritonGrouped(128, 64, 128, 8, 4, 1)
# Of WIDEST sm100 spills: sums pass through registers on their way from tensor memory.
COMPILED = (
    *itertools.product((KERNEL.config, TritonGrouped(32, 16, 64, 4, 8, 2)), declared.ARCHS),
    (WIDEST, "sm90"),
)


def machine_code(config: TritonGrouped, arch: str, variant: str, folder: Path) -> tuple[Any, str]:
    """What Triton built, and its PTX; checks what holds for every stage."""
    triton = pytest.importorskip("triton")
    module = importlib.import_module(KERNEL.module)
    built = module.build(config, arch, variant)
    cubin, ptx, name = built.asm["cubin"], built.asm["ptx"], built.metadata.name
    threads = 32 * module.constants(config, variant)["WARPS"]
    assert f".text.{name}\0".encode() in cubin
    assert name == f"moe_fp8_block_scale_{variant.partition('_')[0]}"
    assert f".target {arch.replace('sm', 'sm_')}a" in ptx
    assert f".reqntid {threads}" in ptx or f".maxntid {threads}" in ptx
    extra = ["u64", "u64"]  # scratch of Triton's, null here
    assert re.findall(r"^\s*\.param \.(\w+)", ptx, re.MULTILINE) == PARAMETERS + extra
    early, wait, late = ptx.partition("griddepcontrol.wait")
    assert wait
    assert "griddepcontrol.launch_dependents" in late
    assert "ld.global" not in early
    assert "st.global" not in early
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    tool = triton.knobs.nvidia.cuobjdump.path
    usage = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True)
    assert " STACK:0 " in usage.stdout, usage.stdout
    return built, ptx


@pytest.mark.toolchain
@pytest.mark.parametrize(("config", "arch"), COMPILED, ids=str)
def test_machine_code_of_products(config: TritonGrouped, arch: str, tmp_path: Path) -> None:
    """e4m3 operands straight from shared memory, `stages` steps of them, and sums that are taken
    out of the tensor core after each step."""
    for variant, rows in (("gemm1", 2 * config.rows), ("gemm2", config.outs)):
        built, ptx = machine_code(config, arch, variant, tmp_path)
        assert built.metadata.shared <= config.shared_bytes + 2048
        assert "cp.async.cg" in ptx
        assert "mma.sync" not in ptx
        if arch == "sm90":
            per_group = rows * 4 // config.warps  # rows of a warp group
            shape = f"m64n{config.tokens}k32.f32.e4m3.e4m3"
            steps = 128 // 32 if variant == "gemm1" else 2 * config.rows // 32
            assert ptx.count(f"wgmma.mma_async.sync.aligned.{shape}") == steps * per_group // 64
        else:
            assert "tcgen05.mma.cta_group::1.kind::f8f6f4" in ptx


@pytest.mark.toolchain
@pytest.mark.parametrize("arch", ["sm90", "sm100"])
@pytest.mark.parametrize("stage", ["route", "route_any", "list", "combine", "combine_half"])
def test_machine_code(stage: str, arch: str, tmp_path: Path) -> None:
    _, ptx = machine_code(KERNEL.config, arch, stage, tmp_path)
    if stage.startswith("combine"):
        assert "ld.global.v4" in ptx or "ld.global.L1::evict_last.v4" in ptx


@pytest.mark.toolchain
def test_parameters_are_the_fields_of_the_struct() -> None:
    pytest.importorskip("triton")
    module = importlib.import_module(KERNEL.module)
    text = (csrc_folder() / "moe_fp8_block_scale" / "params.h").read_text()
    body = re.sub(r"//.*", "", text.partition("struct Params {")[2].partition("};")[0])
    fields = re.findall(r"(\w+)\s*[,;]", body)
    assert module.moe_fp8_block_scale_grouped.arg_names[: len(fields)] == fields
    assert len(fields) == len(PARAMETERS)
    binding = (csrc_folder() / "moe_fp8_block_scale" / "binding.cc").read_text()
    handed = binding.partition("void* arguments[] = {")[2].partition("};")[0]
    assert re.findall(r"&p->(\w+)", handed) == fields


@pytest.mark.toolchain
def test_variants_are_in_the_launchers_order() -> None:
    binding = (csrc_folder() / "moe_fp8_block_scale" / "binding.cc").read_text()
    numbers = re.findall(r"\bk(\w+) = (\d)", binding.partition("enum : int {")[2].partition("}")[0])
    assert [KERNEL.variants[int(at)] for _, at in numbers] == [name.lower() for name, _ in numbers]
    for name, at in numbers:
        following = KERNEL.variants[int(at) + 1 : int(at) + 2]
        has_second = following == (f"{name.lower()}_any",)
        assert (f"k{name} + !" in binding) == has_second
    for kernel in KERNELS:
        assert [v.replace("_half", "") for v in kernel.variants[:9]] == list(KERNEL.variants[:9])


# ---- data ---------------------------------------------------------------------------------------


def test_constants_are_those_of_the_launcher() -> None:
    folder = csrc_folder() / "moe_fp8_block_scale"
    text = (folder / "params.h").read_text() + (folder / "binding.cc").read_text()
    for name, value in (
        ("kMaxExperts", declared.MAX_EXPERTS), ("kMaxLocal", declared.MAX_LOCAL),
        ("kMaxTopk", declared.MAX_TOPK), ("kGroups", declared.GROUPS),
        ("kColumns", declared.COLUMNS), ("kScaled", declared.SCALED),
    ):  # fmt: skip
        assert re.search(rf"\b{name} = {value}\b", text), name


def test_tiles_are_never_more_than_the_bound() -> None:
    """All ways to deal few slots to few experts."""
    for slots, num_local, tokens in itertools.product(range(9), (1, 2, 3), (1, 2, 4)):
        most = 0
        for counts in itertools.product(range(slots + 1), repeat=num_local):
            if sum(counts) <= slots:
                most = max(most, sum(-(-count // tokens) for count in counts))
        assert most <= tiles_bound(slots, num_local, tokens) <= most + num_local


def test_the_workspace_never_shrinks_and_is_bounded() -> None:
    ladders = ((0, 1, 2, 31, 4096, 8191, 8192, 8193, 100_000), (1, 8, 16), (128, 7168), (128, 2048))
    names = ("seq_len", "topk", "hidden_size", "intermediate_size")
    found: dict[tuple[int, ...], int] = {
        axes: workspace_bytes(dict(zip(names, axes, strict=True)))
        for axes in itertools.product(*ladders)
    }
    for axes, size in found.items():
        assert size % ALIGNMENT == 0
        for i, ladder in enumerate(ladders):
            lower = ladder[max(ladder.index(axes[i]) - 1, 0)]
            smaller = (*axes[:i], lower, *axes[i + 1 :])
            assert found[smaller] <= size
    assert found[100_000, 8, 7168, 2048] == found[8192, 8, 7168, 2048] < 2.2e9
    largest = dict(zip(names, (100_000, 8, 7168, 2048), strict=True))
    assert workspace_bytes(largest, declared.LONG_CHUNK, 2) < 2.5e9


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": 32}, "knob 'tokens' is 32, expected one of"),
        ({"cluster": 4}, "knob 'cluster' is 4, expected one of"),
        ({"codes": 3}, "knob 'codes' is 3, expected one of"),
    ],
)
def test_wgmma_configs_that_nothing_serves(changes: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(WgmmaGrouped(128, 2, 2), **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rows": 16}, "knob 'rows' is 16"),
        ({"tokens": 8}, "knob 'tokens' is 8"),
        ({"outs": 256}, "knob 'outs' is 256"),
        ({"warps": 2}, "knob 'warps' is 2"),
        ({"stages": 1}, "knob 'stages' is 1"),
        ({"blocks": 5}, "knob 'blocks' is 5"),
        ({"tokens": 64, "blocks": 3, "stages": 2}, "knob 'tokens' is 64, expected fewer: 64 sums"),
        ({"rows": 32, "warps": 8}, "knob 'warps' is 8, expected 4"),
        ({"stages": 8}, "knob 'stages' is 8, expected as many"),
    ],
)
def test_configs_that_nothing_serves(changes: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(KERNEL.config, **changes)


if __name__ == "__main__":
    main()
