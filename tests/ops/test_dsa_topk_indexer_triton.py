"""Triton kernels of dsa_topk_indexer without a GPU: the interpreter against the oracle, and machine
code for every architecture. Run as a program, this file is the interpreter's side."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from fastkernels.core.kernels import csrc_folder
from fastkernels.ops.dsa_topk_indexer.adversarial import STRATA, Stratum
from fastkernels.ops.dsa_topk_indexer.inputs import CORNER, Case
from fastkernels.ops.dsa_topk_indexer.problem import Inputs
from fastkernels.ops.dsa_topk_indexer.reference import reference
from fastkernels.ops.dsa_topk_indexer.spec import PAGE_BYTES, PAGE_SIZE
from tests.triton_interpreter import mend_interpreter

ROOT = Path(__file__).parents[2]
MODULE = "fastkernels.ops.dsa_topk_indexer.kernels.triton_tiled"


class Config(NamedTuple):
    """The knobs of `triton_tiled`."""

    pages: int = 1
    steps: int = 4
    warps: int = 4
    stages: int = 2
    slots: int = 8192
    select_warps: int = 16


# The interpreter takes milliseconds an operation, whatever its size: large tiles. In FEW_SLOTS rows
# of more than 4096 positions are narrowed first.
FEW_SLOTS, MANY_SLOTS = Config(pages=8, steps=3, slots=4096), Config(pages=16, slots=16384)


@dataclass(frozen=True)
class Trial:
    """One drawing of inputs, for each of `configs`; by variant `score_any` whatever the heads are,
    if `by_any`."""

    name: str
    stratum: Stratum
    configs: tuple[Config, ...] = (FEW_SLOTS,)
    by_any: bool = False


# ---- changes of inputs --------------------------------------------------------------------------


def uneven_pages(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """Pages at odd addresses, and queries and weights of wider tensors."""
    cache = inputs.k_index_cache_fp8.view(torch.uint8)
    num_pages, pitch = cache.shape[0], PAGE_BYTES + 3
    wide = torch.full((num_pages * pitch + 1,), 0x7F, dtype=torch.uint8)
    pages = wide[1:].as_strided(cache.shape, (pitch, *cache.stride()[1:]))
    pages.copy_(cache)
    q = inputs.q_index_fp8.view(torch.uint8)
    q = torch.nn.functional.pad(q, (1, 2), value=0x7F)[..., 1:-2].view(torch.float8_e4m3fn)
    weights = torch.nn.functional.pad(inputs.weights, (0, 3), value=float("nan"))[:, :-3]
    return inputs._replace(k_index_cache_fp8=pages.view(torch.int8), q_index_fp8=q, weights=weights)


def zero_scales(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """Scores of -0.0 and +0.0 beside each other: the sum over heads has a sign, a scale of 0 has
    not; 100 positions are better or worse."""
    scales = inputs.k_index_cache_fp8.view(-1, PAGE_BYTES)[:, PAGE_SIZE * 128 :]
    scales.view(torch.float32)[:, 2:] = 0.0
    return inputs


def far_pages(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """Pages more than 2^31 bytes apart; what lies between them is never touched."""
    cache = inputs.k_index_cache_fp8
    pitch = 2**31 + 16
    far = torch.empty(pitch * (cache.shape[0] - 1) + PAGE_BYTES, dtype=torch.int8)
    pages = far.as_strided(cache.shape, (pitch, *cache.stride()[1:]))
    return inputs._replace(k_index_cache_fp8=pages.copy_(cache))


def many_pages(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """One page under 2^25 - 1 numbers: indices up to 2^31 - 65."""
    pages = 2**25 - 1
    cache = inputs.k_index_cache_fp8[:1].expand(pages, -1, -1, -1)
    table = inputs.block_table.clone()
    table[0, :4] = torch.tensor([pages - 1, pages, 0, pages // 2], dtype=torch.int32)
    return inputs._replace(k_index_cache_fp8=cache, block_table=table)


def no_heads(inputs: Inputs, rng: torch.Generator) -> Inputs:
    return inputs._replace(
        q_index_fp8=inputs.q_index_fp8[:, :0], weights=inputs.weights[:, :0].contiguous()
    )


def listed(name: str, *configs: Config, **fields: Any) -> Trial:
    stratum = STRATA[name]
    return Trial(name, replace(stratum, case=replace(stratum.case, seed=71, **fields)), configs)


def drawn(
    name: str,
    lengths: tuple[int, ...],
    columns: int,
    configs: tuple[Config, ...] = (FEW_SLOTS,),
    change: Callable[[Inputs, torch.Generator], Inputs] | None = None,
    by_any: bool = False,
    num_pages: int = 128,
    **fields: Any,
) -> Trial:
    case = Case(name, lengths, columns, num_pages, seed=73, **fields)
    return Trial(name, Stratum(case, change), configs, by_any)


BOTH = (FEW_SLOTS, MANY_SLOTS)
TILES = (Config(pages=1, steps=1), Config(pages=2, steps=3, slots=1024))
STRIDED = replace(
    next(case for case in CORNER if case.name == "strided"), seq_lens=(2500, 2200, 65)
)
TRIALS = (
    listed("around_topk", FEW_SLOTS),
    listed("page_edges", FEW_SLOTS, num_index_heads=32),
    listed("no_positions", FEW_SLOTS),
    listed("no_pages", FEW_SLOTS),
    listed("impossible_lengths", FEW_SLOTS),
    listed("stale_tails", FEW_SLOTS),
    listed("invalid_pages", FEW_SLOTS, seq_lens=(4096, 4160, 2048, 30), max_num_pages=65),
    listed("repeated_pages", FEW_SLOTS),
    listed("all_equal", Config(pages=8, slots=2048)),
    listed("all_zero", Config(pages=8, slots=2048)),
    listed("no_weight", Config(pages=8, slots=2048)),
    listed("zero_plateau", *BOTH),
    listed("few_winners", *BOTH),
    listed("negative_weights", FEW_SLOTS),
    listed("zero_weights", FEW_SLOTS),
    listed("negative_scales", FEW_SLOTS),
    listed("crowded", *BOTH),
    listed("one_bin", *BOTH),
    listed("near_ties", FEW_SLOTS, num_index_heads=32),
    listed("winners_together", FEW_SLOTS, num_index_heads=32),
    listed("lone_winner", FEW_SLOTS, num_index_heads=32),
    listed("scale_extremes", FEW_SLOTS),
    listed("wide_scores", FEW_SLOTS),
    listed("nonfinite", FEW_SLOTS),
    Trial("strided", Stratum(STRIDED), (FEW_SLOTS,)),
    drawn("tiles", (1500, 40, 1025, 0, 2112), 33, TILES, topk=512),
    drawn("only-short", (2048, 1, 0, 700), 32),
    drawn("topk-beyond", (129, 192), 3),
    drawn("topk-1", (700, 1, 0, 4200), 66, topk=1, num_index_heads=32),
    drawn("topk-3000", (4000, 3001, 2999), 63, (Config(pages=8, slots=2048),), topk=3000),
    drawn("heads-5", (1200, 90), 20, topk=512, num_index_heads=5, keys="nonfinite"),
    drawn("heads-96", (1200, 90), 20, topk=512, num_index_heads=96),
    drawn("heads-64-any", (2300, 2100), 36, by_any=True, keys="nonfinite"),
    drawn("uneven-pages", (2300, 2200), 36, change=uneven_pages, by_any=True, keys="crowded"),
    drawn("zero-scales", (2300, 2200), 36, change=zero_scales),
    drawn("far-pages", (130, 70), 4, num_pages=3, topk=64, change=far_pages),
    drawn("many-pages", (250, 70), 4, num_pages=1, topk=64, change=many_pages),
    drawn("no-heads", (200, 70), 4, topk=64, change=no_heads),
    drawn("long", (65600, 100), 1025, num_index_heads=2),
)  # fmt: skip


# ---- the interpreter's side ---------------------------------------------------------------------


class Guard:
    """Memory that kernels may touch, as `(first, end)` addresses; complains of any other."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []

    def allow(self, *tensors: Any) -> None:
        self.ranges = [(t.data_ptr(), t.data_ptr() + _extent(t)) for t in tensors if t.numel() > 0]

    def check(self, pointers: Any, mask: Any, bytes_each: int) -> None:
        import numpy as np

        used = np.broadcast_to(pointers, np.broadcast_shapes(pointers.shape, mask.shape))
        used = used[np.broadcast_to(mask, used.shape).astype(bool)]
        allowed = np.zeros(used.shape, bool)
        for first, end in self.ranges:
            allowed |= (used >= first) & (used <= end - bytes_each)
        if not allowed.all():
            raise RuntimeError("a kernel touches memory that is not its own")

    def install(self) -> None:
        from triton.runtime.interpreter import InterpreterBuilder

        load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

        def guarded_load(builder: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
            self.check(pointers.data, mask.data, pointers.get_element_ty().primitive_bitwidth // 8)
            return load(builder, pointers, mask, *rest)

        def guarded_store(builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self.check(pointers.data, mask.data, pointers.get_element_ty().primitive_bitwidth // 8)
            return store(builder, pointers, value, mask, *rest)

        InterpreterBuilder.create_masked_load = guarded_load
        InterpreterBuilder.create_masked_store = guarded_store


def _extent(tensor: Any) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return int((span + 1) * tensor.element_size())


GUARD = Guard()


def mend_e4m3() -> None:
    """The interpreter takes the NaN of e4m3 for 480."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    table = every.to(torch.float16).numpy()
    convert = InterpreterBuilder.create_fp_to_fp

    def mended(builder: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source.dtype.scalar, target.scalar) == (tl.float8e4nv, tl.float16):
            return TensorHandle(table[np.asarray(source.data)], tl.float16)
        return convert(builder, source, target, rounding)

    InterpreterBuilder.create_fp_to_fp = mended


def workspace_words(rows: int, columns: int, config: Config) -> int:
    """Keys of `columns` positions a row; where they are more than `slots`, as many keys and
    positions to put aside."""
    aside = 2 * config.slots if columns > config.slots else 0
    return rows * (columns + aside)


def arguments(x: Inputs, output: Any, workspace: Any) -> tuple[Any, ...]:
    """In the order of the kernel's parameters."""
    return (
        x.q_index_fp8.view(torch.uint8), x.k_index_cache_fp8.view(torch.uint8), x.weights,
        x.seq_lens, x.block_table, output, workspace,
        *x.q_index_fp8.stride()[:2], x.k_index_cache_fp8.stride(0), x.weights.stride(0),
        x.seq_lens.stride(0), *x.block_table.stride(), output.stride(0),
        x.q_index_fp8.shape[0], x.q_index_fp8.shape[1], x.topk, x.block_table.shape[1],
        x.k_index_cache_fp8.shape[0],
    )  # fmt: skip


def launch(module: Any, x: Inputs, output: Any, config: Config, by_any: bool) -> list[str]:
    """The launcher's stages and grids; what is wrong with the workspace, which is full of the
    largest key before and as small as promised."""
    rows, num_heads = x.q_index_fp8.shape[:2]
    width = x.block_table.shape[1]
    size = workspace_words(rows, width * PAGE_SIZE, config)
    workspace = torch.full((size + 1024,), -1, dtype=torch.int32).view(torch.uint32)
    GUARD.allow(
        x.q_index_fp8, x.k_index_cache_fp8, x.weights, x.seq_lens, x.block_table, output,
        workspace[:size],
    )  # fmt: skip
    tiles = -(-width // (config.pages * config.steps))
    heads = "any" if by_any or num_heads not in (32, 64) else str(num_heads)
    for variant, blocks in ((f"score_{heads}", rows * tiles), ("select", rows)):
        if blocks:
            module.dsa_topk_indexer_tiled[(blocks,)](
                *arguments(x, output, workspace), **(module.constants(config, variant) | {"PDL": 0})
            )
    is_clean = (workspace[size:].view(torch.int32) == -1).all()
    return [] if is_clean else ["wrote beyond the workspace"]


def interpret(
    module: Any, inputs: Inputs, config: Config, by_any: bool = False
) -> tuple[Any, list[str]]:
    """The output, and what is wrong beside it: it is a slice of a larger buffer."""
    rows, topk = inputs.q_index_fp8.shape[0], inputs.topk
    whole = torch.full((rows, topk + 5), 123, dtype=torch.int32)
    output = whole[:, :topk]
    wrong = launch(module, inputs, output, config, by_any)
    if not (whole[:, topk:] == 123).all():
        wrong.append("wrote beside the output")
    return output, wrong


def judge(module: Any, trial: Trial) -> list[str]:
    inputs, _ = trial.stratum.draw(trial.stratum.case.seed)
    want = reference(inputs)
    wrong = []
    for config in trial.configs:
        output, found = interpret(module, inputs, config, trial.by_any)
        found += [str(error) for error in want.judge((output,)) if not error.ok]
        for i, row in enumerate(want.rows):
            ranked, position = row.indices.sort()
            if row.indices.numel() and (ranked.diff() > 0).all():
                given = output[i, : min(inputs.topk, row.indices.numel())].long()
                place = torch.searchsorted(ranked, given).clamp(max=ranked.numel() - 1)
                if (position[place].diff() <= 0).any():
                    found.append(f"row {i} is not in order of position")
        wrong += [f"{config}: {text}" for text in found]
    return wrong


# ---- selection alone: exact, for keys of any kind -----------------------------------------------

KEYS = 2**32


def key_kinds(length: int, rng: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    """Keys (int64) that scores have: above 0, in any arrangement."""

    def random(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (length,), generator=rng)

    yield "any", random(1, KEYS)
    yield "smallest", torch.full((length,), 1)
    yield "largest", torch.full((length,), KEYS - 1)
    yield "two values", random(0, 2) * (2**31) + 5
    yield "neighbours", random(0, 3) + 2**31 - 1
    yield "low bits", (0xC1230000 + random(0, 2**16))
    yield "high bits", random(1, 2**16) * 2**16
    yield "increasing", torch.arange(length) * 7 + 11
    yield "decreasing", (length - torch.arange(length)) * 7 + 11
    yield "ends", torch.where(random(0, 2) == 0, 1, KEYS - 1)
    plateau = random(1, KEYS)
    yield "plateau", torch.where(random(0, 3) < 2, 0x90000000, plateau)
    # What a sample of evenly spread pieces of 32 keys takes for the whole row, and is not.
    yield "pieces", torch.where(torch.arange(length) // 32 % 8 == 0, random(1, 2**20), plateau)
    yield "late", torch.where(torch.arange(length) < length - 400, random(1, 2**10), plateau)
    holes = plateau.clone()
    holes.view(-1, PAGE_SIZE)[::3] = 0  # pages outside the cache
    yield "holes", holes
    mostly = torch.zeros(length, dtype=torch.int64)
    mostly[70:140] = plateau[70:140]
    yield "mostly holes", mostly
    # The last row: what it wrote beyond its part of the workspace would not be the workspace's.
    yield "equal", torch.full((length,), 2**31)


def expected(keys: torch.Tensor, topk: int) -> torch.Tensor:
    """Positions in order: the largest keys, the lowest positions among equals, none of key 0."""
    order = torch.sort(keys, descending=True, stable=True).indices
    best = order[keys[order] > 0][:topk].sort().values
    return torch.nn.functional.pad(best, (0, topk - best.numel()), value=-1)


# Rows of 1280 positions: 1024 slots hold topk with much room, with little, not at all; 2048 hold a
# whole row, up to just below which topk may be.
LENGTH = 20 * PAGE_SIZE
SELECTIONS = ((1024, 1), (1024, 150), (1024, 1023), (1024, 1025), (2048, 150), (2048, LENGTH - 1))


def select(module: Any, slots: int, topk: int) -> list[str]:
    """`select` alone, over keys that are put into the workspace, a kind a row; pages are numbered
    in reverse, so that an index tells which position it came from."""
    config = Config(slots=slots)
    names, rows = zip(*key_kinds(LENGTH, torch.Generator().manual_seed(topk)), strict=True)
    keys = torch.stack(rows)
    width = LENGTH // PAGE_SIZE
    workspace = torch.full((workspace_words(len(names), LENGTH, config),), -1, dtype=torch.int32)
    workspace[: keys.numel()] = torch.where(keys < 2**31, keys, keys - KEYS).int().flatten()
    x = Inputs(
        torch.zeros(len(names), 1, 128).to(torch.float8_e4m3fn),
        torch.zeros(width, PAGE_SIZE, 1, 132, dtype=torch.int8),
        torch.zeros(len(names), 1),
        torch.full((len(names),), LENGTH, dtype=torch.int32),
        torch.arange(width, dtype=torch.int32).flip(0).repeat(len(names), 1),
        topk,
    )
    output = torch.full((len(names), topk), 123, dtype=torch.int32)
    GUARD.allow(x.seq_lens, x.block_table, output, workspace)
    module.dsa_topk_indexer_tiled[(len(names),)](
        *arguments(x, output, workspace.view(torch.uint32)),
        **(module.constants(config, "select") | {"PDL": 0}),
    )
    wrong = []
    for name, row, given in zip(names, keys, output, strict=True):
        best = expected(row, topk)
        index = (width - 1 - best // PAGE_SIZE) * PAGE_SIZE + best % PAGE_SIZE
        if not torch.equal(given.long(), torch.where(best < 0, -1, index)):
            wrong.append(f"keys of kind {name!r}")
    return wrong


def main() -> None:
    torch.set_num_threads(1)
    mend_interpreter()
    mend_e4m3()
    GUARD.install()
    module = importlib.import_module(MODULE)
    for trial in TRIALS:
        print(json.dumps([trial.name, judge(module, trial)]), flush=True)
    for slots, topk in SELECTIONS:
        print(json.dumps([f"select-{slots}-{topk}", select(module, slots, topk)]), flush=True)


# ---- pytest's side ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def interpreted() -> dict[str, list[str]]:
    """Verdicts by name. Triton decides at import whether it interprets: hence another process."""
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-m", "tests.ops.test_dsa_topk_indexer_triton"],
        cwd=ROOT,
        # NumPy's products are small: a second thread would wait for others, and for a busy core.
        env={**os.environ, "TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return dict(json.loads(line) for line in run.stdout.splitlines())


NAMES = (
    *(trial.name for trial in TRIALS),
    *(f"select-{slots}-{topk}" for slots, topk in SELECTIONS),
)


@pytest.mark.toolchain
@pytest.mark.parametrize("name", NAMES)
def test_triton_interpreted(name: str, interpreted: dict[str, list[str]]) -> None:
    assert not interpreted[name], "\n".join(interpreted[name])


PARAMETERS = ["u64"] * 15 + ["u32"] * 5
# Bytes a thread keeps in local memory, at most.
SPILLS = {"score": 0, "select": 16}


@pytest.mark.toolchain
@pytest.mark.parametrize("arch", ["sm90", "sm100"])
@pytest.mark.parametrize("variant", ["score_64", "score_32", "score_any", "select"])
def test_machine_code(variant: str, arch: str, tmp_path: Path) -> None:
    triton = pytest.importorskip("triton")
    module = importlib.import_module(MODULE)
    config = Config()
    built = module.build(config, arch, variant)
    cubin, ptx, name = built.asm["cubin"], built.asm["ptx"], built.metadata.name
    stage = variant.partition("_")[0]
    threads = 32 * (config.warps if stage == "score" else config.select_warps)
    assert f".text.{name}\0".encode() in cubin
    assert name == f"dsa_topk_indexer_{stage}"
    assert f".target {arch.replace('sm', 'sm_')}a" in ptx
    assert f".reqntid {threads}" in ptx or f".maxntid {threads}" in ptx
    extra = ["u64", "u64"]  # scratch of Triton's, null here
    assert re.findall(r"^\s*\.param \.(\w+)", ptx, re.MULTILINE) == PARAMETERS + extra

    early, _, late = ptx.partition("griddepcontrol.wait")
    assert "griddepcontrol.launch_dependents" in early
    assert "st.global" not in early
    assert "st.global" in late
    if stage == "score":
        product = "wgmma.mma_async" if arch == "sm90" else "tcgen05.mma"
        assert product in ptx
        assert "f16.f16" in ptx or arch == "sm100"
        assert "cvt.rn.f16x2.e4m3x2" in ptx
        assert ("cp.async" in ptx) == (variant != "score_any")
        assert "max.NaN.f32" in ptx
    else:
        # Keys come four at a time: of a sample, of what was put aside, of the row itself.
        four = config.slots // threads // 4
        assert ptx.count("ld.global.v4.b32") == 3 * four
        assert ptx.count("cp.async.cg") == 3 * four
        assert built.metadata.shared <= 8 * config.slots + 2048

    file = tmp_path / "kernel.cubin"
    file.write_bytes(cubin)
    tool = triton.knobs.nvidia.cuobjdump.path
    usage = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True)
    stack = re.search(r" STACK:(\d+) ", usage.stdout)
    assert stack is not None, usage.stdout
    assert int(stack[1]) <= SPILLS[stage], usage.stdout


@pytest.mark.toolchain
def test_parameters_are_the_fields_of_the_struct() -> None:
    pytest.importorskip("triton")
    module = importlib.import_module(MODULE)
    text = (csrc_folder() / "dsa_topk_indexer" / "params.h").read_text()
    body = re.sub(r"//.*", "", text.partition("struct Params {")[2].partition("};")[0])
    fields = re.findall(r"(\w+)\s*[,;]", body)
    assert module.dsa_topk_indexer_tiled.arg_names[: len(fields)] == fields
    assert len(fields) == len(PARAMETERS)


if __name__ == "__main__":
    main()
