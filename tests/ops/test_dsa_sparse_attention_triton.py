"""Triton kernels of dsa_sparse_attention without a GPU: the interpreter against the oracle, and
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
from fastkernels.ops.dsa_sparse_attention import kernels as declared
from fastkernels.ops.dsa_sparse_attention.adversarial import STRATA, Stratum
from fastkernels.ops.dsa_sparse_attention.inputs import CORNER, CORRECTNESS, INT32, Case
from fastkernels.ops.dsa_sparse_attention.kernels import (
    ALIGNMENT,
    HEADS,
    KERNELS,
    TritonSplit,
    head_blocks,
    splits_of,
    workspace_bytes,
)
from fastkernels.ops.dsa_sparse_attention.problem import Inputs
from fastkernels.ops.dsa_sparse_attention.reference import reference
from tests.triton_interpreter import mend_interpreter

ROOT = Path(__file__).parents[2]
KERNEL = next(kernel for kernel in KERNELS if kernel.name == "triton_split")

# The interpreter takes milliseconds an operation, whatever its size: large tiles, few heads.
FEW = 3
SPLIT, WHOLE = TritonSplit(64, 8, 2, 16), TritonSplit(64, 8, 1, 1)
SMALL_TILES = (TritonSplit(32, 4, 2, 4), TritonSplit(16, 4, 3, 8))
BOTH = (SPLIT, WHOLE)
# So that few tokens have fewer splits than the config says, and some only one.
PARTS = 24


@dataclass(frozen=True)
class Trial:
    """One drawing of inputs, for each of `configs`. Evenly spaced rows are taken as one page,
    unless `by_pages`."""

    name: str
    stratum: Stratum
    configs: tuple[TritonSplit, ...]
    by_pages: bool = False


# ---- changes of inputs --------------------------------------------------------------------------


def with_rows(inputs: Inputs, *rows: list[int]) -> Inputs:
    """The tokens' indices, the last of each row's repeated."""
    indices = inputs.sparse_indices.clone()
    for token, row in enumerate(rows):
        given = torch.tensor(row, dtype=torch.int32)
        indices[token] = given[-1]
        indices[token, : len(row)] = given
    return inputs._replace(sparse_indices=indices)


def extremes(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """Valid rows at the cache's ends, beside the nearest that are not, and the int32 numbers
    farthest out; row 0, which padding must not stand for, and its neighbours are NaN."""
    num_rows = inputs.ckv_cache.shape[0] * inputs.ckv_cache.shape[1]
    last = num_rows - 1
    for cache in (inputs.ckv_cache, inputs.kpe_cache):
        cache.view(num_rows, -1)[: num_rows // 2] = math.nan
    return with_rows(
        inputs,
        [INT32.min, -1, num_rows, INT32.max, last, num_rows, -2, last - 7, INT32.max],
        [INT32.max, INT32.min],
        [num_rows, last, -1],
    )


def late(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """Valid indices only behind whole tiles of padding."""
    indices = torch.full_like(inputs.sparse_indices, -1)
    indices[:, -1] = inputs.sparse_indices[:, 0]
    indices[0, 1024:1030] = inputs.sparse_indices[0, 1:7]
    return inputs._replace(sparse_indices=indices)


def same(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """One index, as often as there are columns, and next to another one."""
    return with_rows(inputs, [3], [5, 3, 3, 3, -1])


def far_pages(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """Pages more than 2^31 elements apart; what lies between them is never touched."""
    pitch = 2**31 + 8
    caches = []
    for cache in (inputs.ckv_cache, inputs.kpe_cache):
        shape = cache.shape
        far = torch.empty(pitch + shape[1] * shape[2], dtype=torch.bfloat16)
        view = far.as_strided(shape, (pitch, shape[2], 1))
        caches.append(view.copy_(cache))
    return inputs._replace(ckv_cache=caches[0], kpe_cache=caches[1])


def many_pages(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """One page under 33 million numbers: indices near 2^31."""
    pages = 33_000_000
    size = inputs.ckv_cache.shape[1]
    far = inputs._replace(
        ckv_cache=inputs.ckv_cache.expand(pages, -1, -1),
        kpe_cache=inputs.kpe_cache.expand(pages, -1, -1),
    )
    return with_rows(far, [size * 9 + 5, size * pages - 1, size * 40_000, size * pages, -1])


def large_scale(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """Logits in the thousands by the scale, of either sign; rounding q to it would show."""
    return inputs._replace(sm_scale=-37.3)


Change = Callable[[Inputs, torch.Generator], Inputs]


def drawn(
    name: str,
    num_tokens: int,
    *,
    configs: tuple[TritonSplit, ...] = BOTH,
    change: Change | None = None,
    by_pages: bool = False,
    **fields: Any,
) -> Trial:
    case = Case(name, num_tokens, **({"num_qo_heads": FEW, "num_pages": 40} | fields))
    return Trial(name, Stratum(case, change), configs, by_pages)


def listed(name: str, *configs: TritonSplit, **fields: Any) -> Trial:
    """A case of the lists in `inputs`, or else an adversarial stratum."""
    strata = {case.name: Stratum(case) for case in (*CORRECTNESS, *CORNER)} | STRATA
    case = replace(strata[name].case, **({"num_qo_heads": FEW} | fields))
    return Trial(name, replace(strata[name], case=case), configs or BOTH)


TRIALS = (
    listed("t2-contest", *BOTH, *SMALL_TILES, num_qo_heads=16),
    listed("t8-contest", SPLIT),
    listed("tail"),
    listed("k64-page16", WHOLE, num_tokens=9),
    listed("one-index"),
    listed("topk-1", *BOTH, SMALL_TILES[1]),
    listed("all-invalid"),
    listed("first-invalid"),
    listed("scattered", SPLIT),
    listed("outside"),
    listed("repeated", *SMALL_TILES),
    listed("huge"),
    listed("identical", SPLIT),
    listed("poisoned"),
    listed("strided-packed"),
    listed("strided-padded"),
    listed("no-pages"),
    listed("one-page"),
    listed("natural-lse"),
    listed("interleaved", WHOLE),
    listed("empty_tiles", SMALL_TILES[0]),
    listed("around_tiles", SPLIT),
    listed("all_logits_negative", SPLIT),
    listed("ascending_logits"),
    listed("one_dominates", SPLIT),
    listed("cancelling", WHOLE),
    drawn("heads-1", 2, seed=61, num_qo_heads=1, topk=63, valid=(63, 0)),
    drawn("heads-8", 3, seed=62, num_qo_heads=8, topk=64, valid=(64, 20, 1)),
    drawn("heads-32", 1, seed=63, num_qo_heads=32, topk=130, configs=(WHOLE, SMALL_TILES[1])),
    drawn("heads-40", 3, seed=64, num_qo_heads=40, topk=200, valid=(200, 0, 65), lse_base="e"),
    drawn(
        "heads-40-padded", 2, seed=65, num_qo_heads=40, topk=100, valid=(100, 3), layout="padded",
        padding="scattered", configs=(SPLIT,),
    ),
    drawn("page-1", 2, seed=66, page_size=1, num_pages=700, topk=300, by_pages=True),
    drawn("page-7", 2, seed=67, page_size=7, topk=300, valid=(270, 77), by_pages=True),
    drawn("page-7-packed", 2, seed=68, page_size=7, topk=250, layout="packed"),
    drawn("page-7-padded", 2, seed=69, page_size=7, topk=250, layout="padded"),
    drawn("page-64-packed", 2, seed=70, topk=128, layout="packed", by_pages=True),
    drawn("page-64-padded", 2, seed=71, topk=129, layout="padded", padding="outside",
          valid=(100, 0)),
    drawn("extremes", 3, seed=72, num_pages=2, topk=64, change=extremes),
    drawn("late", 2, seed=73, change=late),
    drawn("same", 2, seed=74, topk=150, change=same),
    drawn("far-pages", 2, seed=75, num_pages=2, page_size=3, topk=9, valid=(6, 2),
          change=far_pages, configs=(WHOLE,)),
    drawn("far-rows", 2, seed=76, num_pages=2, page_size=1, topk=9, valid=(2, 1),
          change=far_pages, configs=(WHOLE,)),
    drawn("many-pages", 1, seed=77, num_pages=1, topk=5, change=many_pages, by_pages=True),
    drawn("large-scale", 2, seed=78, topk=300, change=large_scale),
)  # fmt: skip


# ---- the interpreter's side ---------------------------------------------------------------------


def launch(
    module: Any, inputs: Inputs, output: Any, lse: Any, config: TritonSplit, by_pages: bool
) -> list[str]:
    """The launcher's arguments and grids; what is wrong with the workspace, which is full of NaN
    before and as small as promised."""
    x = inputs
    num_tokens, num_heads, _ = x.q_nope.shape
    num_pages, page_size, _ = x.ckv_cache.shape
    caches = (x.ckv_cache, x.kpe_cache)
    is_even = all(cache.stride(0) == page_size * cache.stride(1) for cache in caches)
    axes = {
        "num_tokens": num_tokens, "num_qo_heads": num_heads, "topk": x.sparse_indices.shape[1],
        "num_pages": num_pages,
    }  # fmt: skip
    size = workspace_bytes(axes, config) // 4
    workspace = torch.full((size + 1024,), math.nan).view(torch.int32)
    splits = splits_of(num_tokens, num_heads, config)
    grids = {
        "compact": num_tokens,
        "attend": num_tokens * splits * head_blocks(num_heads),
        "merge": num_tokens * num_heads * (splits > 1),
    }
    for stage, blocks in grids.items():
        if blocks == 0:
            continue
        module.dsa_sparse_attention_split[(blocks,)](
            *(x.q_nope, x.q_pe, *caches, x.sparse_indices, output, lse, workspace),
            *x.q_nope.stride()[:2], *x.q_pe.stride()[:2],
            *(stride for cache in caches for stride in cache.stride()[:2]),
            x.sparse_indices.stride(0), *output.stride()[:2], lse.stride(0),
            *(num_tokens, num_heads, x.sparse_indices.shape[1]),
            INT32.max if is_even and not by_pages else page_size,
            num_pages * page_size,
            x.sm_scale * math.log2(math.e),
            1.0 if x.lse_base == 2 else math.log(2.0),
            **(module.constants(config, stage) | {"PDL": 0}),
        )  # fmt: skip
    is_clean = workspace[size:].view(torch.float32).isnan().all()
    return [] if is_clean else ["wrote beyond the workspace"]


def interpret(
    module: Any, inputs: Inputs, config: TritonSplit, by_pages: bool = False
) -> tuple[Any, Any, list[str]]:
    """Outputs, and what is wrong beside them: they are slices of larger buffers full of NaN."""
    num_tokens, num_heads, width = inputs.q_nope.shape
    outputs = torch.full((num_tokens, num_heads + 1, width + 8), math.nan).bfloat16()
    lses = torch.full((num_tokens, num_heads + 1), math.nan)
    output, lse = outputs[:, :num_heads, :width], lses[:, :num_heads]
    wrong = launch(module, inputs, output, lse, config, by_pages)
    beside = (outputs[:, num_heads:], outputs[..., width:], lses[:, num_heads:])
    if not all(values.isnan().all() for values in beside):
        wrong.append("wrote beside the outputs")
    return output, lse, wrong


def judge(module: Any, trial: Trial) -> dict[str, list[str]]:
    inputs, _ = trial.stratum.draw(trial.stratum.case.seed)
    want = reference(inputs)
    verdicts = {}
    for config in trial.configs:
        output, lse, wrong = interpret(module, inputs, config, trial.by_pages)
        wrong += [str(error) for error in want.judge((output, lse)) if not error.ok]
        if output[want.lse == -math.inf].any():
            wrong.append("a token without a valid index has an output")
        verdicts[str(config)] = wrong
    return verdicts


def spoil(module: Any, config: TritonSplit, name: str) -> list[str]:
    """A NaN in a row that token 1 names shows in all its heads, and in no other token."""
    case = Case("spoiled", 3, seed=79, num_pages=40, topk=200, valid=(200, 150, 7))
    inputs, _ = Stratum(case).draw(case.seed)
    named = inputs.sparse_indices[1, 140].item()
    others = inputs.sparse_indices[[0, 2]]
    inputs.sparse_indices[[0, 2]] = torch.where(others == named, -1, others)
    cache = getattr(inputs, name)
    cache[named // case.page_size, named % case.page_size, 3] = math.nan
    want = reference(inputs)
    output, lse, wrong = interpret(module, inputs, config)
    if not (output[1].isnan().all() and lse[1].isnan().all()):
        wrong.append("a NaN that is named does not show")
    output[1], lse[1] = want.output[1], want.lse[1]
    return wrong + [str(error) for error in want.judge((output, lse)) if not error.ok]


SPOILERS = ("ckv_cache", "kpe_cache")


def main() -> None:
    torch.set_num_threads(1)
    mend_interpreter()
    import triton.language as tl

    from fastkernels.ops.dsa_sparse_attention.kernels import triton_split

    declared.PARTS = PARTS
    triton_split.PARTS = tl.constexpr(PARTS)
    for trial in TRIALS:
        print(json.dumps([trial.name, judge(triton_split, trial)]), flush=True)
    for name in SPOILERS:
        wrong = {str(config): spoil(triton_split, config, name) for config in BOTH}
        print(json.dumps([f"spoiled-{name}", wrong]), flush=True)


# ---- pytest's side ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def interpreted() -> dict[str, list[str]]:
    """Verdicts by name. Triton decides at import whether it interprets: hence another process."""
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-m", "tests.ops.test_dsa_sparse_attention_triton"],
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


NAMES = (*(trial.name for trial in TRIALS), *(f"spoiled-{name}" for name in SPOILERS))


@pytest.mark.toolchain
@pytest.mark.parametrize("name", NAMES)
def test_triton_interpreted(name: str, interpreted: dict[str, list[str]]) -> None:
    assert not interpreted[name], "\n".join(interpreted[name])


PARAMETERS = ["u64"] * 20 + ["u32"] * 5 + ["f32"] * 2
QUERY_BYTES = 2 * HEADS * (declared.CKV + declared.KPE)
KEY_BYTES = 2 * (declared.CKV + declared.KPE)


def legal(**knobs: Any) -> TritonSplit | None:
    try:
        return TritonSplit(**knobs)
    except ValueError:
        return None


def extreme_configs() -> list[TritonSplit]:
    """Of all candidates' combinations, those with the most stages and splits."""
    values = itertools.product(*KERNEL.candidates.values())
    found = [legal(**dict(zip(KERNEL.candidates, each, strict=True))) for each in values]
    last = {(config.keys, config.warps): config for config in found if config is not None}
    return list(last.values())


def machine_code(config: TritonSplit, arch: str, stage: str, folder: Path) -> tuple[Any, str]:
    """What Triton built, and its PTX; checks what holds for every stage."""
    triton = pytest.importorskip("triton")
    module = importlib.import_module(KERNEL.module)
    built = module.build(config, arch, stage)
    cubin, ptx, name = built.asm["cubin"], built.asm["ptx"], built.metadata.name
    threads = 32 * module.constants(config, stage)["WARPS"]
    assert f".text.{name}\0".encode() in cubin
    assert name == f"dsa_sparse_attention_{stage}"
    assert f".target {arch.replace('sm', 'sm_')}a" in ptx
    assert f".reqntid {threads}" in ptx or f".maxntid {threads}" in ptx
    extra = ["u64", "u64"]  # scratch of Triton's, null here
    assert re.findall(r"^\s*\.param \.(\w+)", ptx, re.MULTILINE) == PARAMETERS + extra
    assert ("griddepcontrol.launch_dependents" in ptx) == (stage != "merge")
    assert ("griddepcontrol.wait" in ptx) == (stage != "compact")

    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    tool = triton.knobs.nvidia.cuobjdump.path
    usage = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True)
    assert " STACK:0 " in usage.stdout, usage.stdout
    return built, ptx


@pytest.mark.toolchain
@pytest.mark.parametrize("arch", ["sm90", "sm100"])
@pytest.mark.parametrize("config", extreme_configs(), ids=str)
def test_attend_machine_code(config: TritonSplit, arch: str, tmp_path: Path) -> None:
    """`attend_any` differs by promises alone, and spills; tests/build has it."""
    built, ptx = machine_code(config, arch, "attend", tmp_path)
    tiles = config.stages * config.keys * KEY_BYTES
    rest = 4096  # weights, and indices of the tiles ahead
    assert 0 <= built.metadata.shared - tiles - QUERY_BYTES <= rest
    assert "mma.sync" in ptx
    copies = config.keys * KEY_BYTES // 16 / (32 * config.warps)  # of a tile, in each thread
    # Tiles of fewer chunks than threads are copied by some twice.
    assert (config.stages + 1) * math.floor(copies) <= ptx.count("cp.async.cg")
    early, _, late = ptx.partition("griddepcontrol.wait")
    assert "cp.async" not in early
    assert "ld.global.v4" in early  # the queries, which no launch of the route writes
    assert "ld.global.v4" not in late


@pytest.mark.toolchain
@pytest.mark.parametrize("arch", ["sm90", "sm100"])
@pytest.mark.parametrize("stage", ["compact", "merge"])
def test_machine_code(stage: str, arch: str, tmp_path: Path) -> None:
    _, ptx = machine_code(KERNEL.config, arch, stage, tmp_path)
    if stage == "merge":
        early, _, late = ptx.partition("griddepcontrol.wait")
        assert "ld.global" not in early
        # A thread reads 4 columns of each split, and sums them alone.
        assert late.count("ld.global.v4") == KERNEL.config.splits


@pytest.mark.toolchain
def test_parameters_are_the_fields_of_the_struct() -> None:
    pytest.importorskip("triton")
    module = importlib.import_module(KERNEL.module)
    text = (csrc_folder() / "dsa_sparse_attention" / "params.h").read_text()
    body = re.sub(r"//.*", "", text.partition("struct Params {")[2].partition("};")[0])
    fields = re.findall(r"(\w+)\s*[,;]", body)
    assert module.dsa_sparse_attention_split.arg_names[: len(fields)] == fields
    assert len(fields) == len(PARAMETERS)


# ---- data ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("splits", [1, 2, 16])
def test_the_workspace_holds_every_call_and_never_shrinks(splits: int) -> None:
    config = replace(KERNEL.config, splits=splits)
    names = ("num_tokens", "num_qo_heads", "topk", "num_pages")
    ladders = ((0, 1, 2, 7, 32, 33, 64, 65, 511, 512, 513, 1025, 4096), (1, 16, 17, 40, 128),
               (1, 63, 2048), (0, 9))  # fmt: skip
    found: dict[tuple[int, ...], int] = {
        axes: workspace_bytes(dict(zip(names, axes, strict=True)), config)
        for axes in itertools.product(*ladders)
    }
    for axes, size in found.items():
        num_tokens, num_heads, topk, _ = axes
        if num_tokens:
            blocks = num_tokens * head_blocks(num_heads)
            parts = blocks * splits_of(num_tokens, num_heads, config)
            assert parts <= max(declared.PARTS, blocks)
            needed = 4 * num_tokens * (topk + 1)
            needed += (parts > blocks) * parts * (declared.PART_BYTES + declared.STATISTICS_BYTES)
            assert size >= needed
        assert size % ALIGNMENT == 0
        assert size <= 4 * num_tokens * (topk + 1) + 34 * 2**20
        for i, ladder in enumerate(ladders):
            lower = ladder[max(ladder.index(axes[i]) - 1, 0)]
            smaller = (*axes[:i], lower, *axes[i + 1 :])
            assert found[smaller] <= size


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"keys": 128}, "knob 'keys' is 128"),
        ({"warps": 2}, "knob 'warps' is 2"),
        ({"keys": 64, "warps": 4}, "expected 8 where 'keys' is 64"),
        ({"keys": 64, "warps": 8, "stages": 3}, "knob 'stages' is 3"),
        ({"stages": 0}, "knob 'stages' is 0"),
        ({"splits": 3}, "knob 'splits' is 3"),
    ],
)
def test_configs_that_nothing_serves(changes: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(KERNEL.config, **changes)


if __name__ == "__main__":
    main()
