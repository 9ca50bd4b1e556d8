"""What an agent can read up on, generated: the operator's contract from its spec, the device from
the package's tables and the gates' ceilings, a language's checklist. Nothing here can go stale by
itself, since nothing is written down twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fastkernels import catalog
from fastkernels.core import archs
from fastkernels.core.device import DeviceInfo
from fastkernels.core.kernels import knobs
from fastkernels.core.route import Operator, Route
from fastkernels.core.spec import TensorSpec
from fastkernels_tuner import gates
from fastkernels_tuner.model import Policy, Workload

TECHNIQUES: dict[str, tuple[str, ...]] = {
    "gdn_decode": (
        "one pass over the state", "vector loads of 16 bytes", "rows of a state over warps",
        "persistent blocks", "loads ahead of use", "programmatic dependent launch",
    ),
    "gdn_prefill": (
        "chunked scan", "tensor cores for the chunk products", "triangular solve by blocks",
        "state kept on chip", "heads of a group together", "persistent blocks",
    ),
    "dsa_sparse_attention": (
        "online softmax", "split over keys with a merge", "gather by asynchronous copies",
        "tensor cores", "heads of a token together", "rows shared by tokens",
    ),
    "dsa_topk_indexer": (
        "radix select", "early exit where every position is an answer", "scores by tensor cores",
        "histogram in shared memory", "one pass over the keys", "fused score and select",
    ),
    "moe_fp8_block_scale": (
        "grouped GEMM", "tokens sorted by expert", "fused activation", "persistent tiles",
        "asynchronous copies of weights", "split over the inner axis for few tokens",
    ),
}  # fmt: skip
"""Fundamental techniques of each operator: what no experiment has tried is worth a look."""

CHECKLISTS: dict[str, tuple[str, ...]] = {
    "torch": (
        "fewer operations on large tensors: each one reads and writes memory",
        "no copies: views, in-place forms, out=",
        "matrix products instead of sums over broadcasts",
        "the dtype of every intermediate is a choice",
    ),
    "triton": (
        "block shapes, num_warps and num_stages belong in the config, not in the code",
        "mask only the ragged block",
        "loads of whole 128-byte lines; contiguous along the last axis",
        "tl.dot for anything that is a product; accumulate in float32",
    ),
    "cute": (
        "layouts first: a copy atom per direction, swizzles that match it",
        "asynchronous copies with as many stages as shared memory holds",
        "tensor cores by the architecture's own atoms",
        "a persistent loop where there are fewer tiles than slots",
    ),
    "cuda": (
        "bytes in flight hide latency: 16-byte loads, several outstanding",
        "registers decide occupancy; spills cost more than they save",
        "one wave: grid and tile so that no SM waits for a tail",
        "synchronise warps, not blocks, where one warp is all that matters",
    ),
}


def skills(
    operator: Operator,
    route: Route,
    device: DeviceInfo,
    workloads: Sequence[Workload],
    policy: Policy,
) -> dict[str, str]:
    """Texts by name: `skills/<name>/SKILL.md`."""
    made = {
        "operator": (
            f"The contract of {operator.name}: what it takes, gives, and how right it has to be.",
            _contract(operator, route),
        ),
        "device": (
            f"{device.product}: what it has, and what no kernel on it can beat.",
            _device(device, workloads, policy),
        ),
        route.language: (
            f"Kernels in {route.language}: what to look at first.",
            _bullets(CHECKLISTS[route.language]),
        ),
    }
    return {
        f"skills/{name}/SKILL.md": f"---\nname: {name}\ndescription: {what}\n---\n\n{text}"
        for name, (what, text) in made.items()
    }


def context(op: str) -> dict[str, str]:
    """The reference and the operator's README, to be read."""
    folder = Path(str(catalog.__file__)).parent / "ops" / op
    names = ("README.md", "reference.py", "problem.py", "spec.py")
    return {
        f"context/{name}": (folder / name).read_text(encoding="utf-8")
        for name in names
        if (folder / name).exists()
    }


def _contract(operator: Operator, route: Route) -> str:
    spec = operator.spec
    parts = [f"# {spec.name}", "", "## Axes", ""]
    for axis in spec.axes:
        value = "derived" if axis.derived else "variable" if axis.is_variable else f"{axis.value}"
        takes = "" if axis.derived else f", takes {axis.accepted()}"
        parts.append(f"- `{axis.name}`: {axis.doc or 'a size'}; {value}{takes}")
    parts += ["", "## Arguments, in order", ""]
    for each in (*spec.inputs, *spec.options):
        if isinstance(each, TensorSpec):
            parts.append(f"- {_tensor(each)}{', optional' if each.optional else ''}")
        else:
            parts.append(f"- `{each.name}`: {each.kind}{f'; {each.doc}' if each.doc else ''}")
    parts += ["", "## Results", "", *(f"- {_tensor(each)}" for each in spec.outputs)]
    parts += ["", "## How right", ""]
    for limit in spec.tolerances:
        parts.append(f"- `{limit.output}`: {limit.metric} at most {limit.limit:g}, row by row")
    parts += [
        "- every output element is written, padding included; inputs are left as they are",
        "- equal inputs give equal bits" if spec.name != "moe_fp8_block_scale" else
        "- equal inputs give equal bits where `deterministic` is asked for",
        "", f"Modes: {', '.join(spec.modes)}.", "", f"## Route `{route.name}`", "",
        f"Written in {route.language}, for {', '.join(route.archs)}.",
        f"Its config: `{knobs(route.default_config)}`.",
        f"Values that are searched: `{dict(route.candidates)}`.",
        "", "## Techniques that this operator is known for", "",
        _bullets(TECHNIQUES.get(spec.name, ())),
    ]  # fmt: skip
    return "\n".join(parts)


def _tensor(each: TensorSpec) -> str:
    text = f"`{each.name}`: [{', '.join(each.shape)}] {' or '.join(each.dtypes)}"
    return f"{text}; {each.doc}" if each.doc else text


def _device(device: DeviceInfo, workloads: Sequence[Workload], policy: Policy) -> str:
    parts = [f"# {device.product}", "", f"Architecture {device.arch}, {device.num_sms} SMs."]
    arch = archs.ARCHS.get(device.arch)
    if arch is not None:
        features = ", ".join(sorted(arch.features))
        parts.append(f"Shared memory {arch.max_shared_bytes} bytes a block; {features}.")
    facts = gates.FACTS.get(device.product)
    if facts is None:
        parts += ["", "No ceilings are known for it."]
        return "\n".join(parts) + "\n"
    parts += [
        f"Memory {facts.bandwidth / 1e12:g} TB/s, L2 {facts.l2_bytes >> 20} MiB.",
        "",
        "## Floors",
        "",
        "A time below is impossible on a cold L2 and counts as a cheat.",
        "",
        "| workload | bytes read | bytes written | floor, us |",
        "|---|---|---|---|",
    ]
    for workload in workloads:
        read, written = gates.traffic(workload)
        floor = gates.floor_us(workload, facts)
        parts.append(f"| {workload} | {read} | {written} | {floor:.3f} |")
    parts += ["", f"Times are by {policy.timer}, cold L2, median of {policy.iterations} calls."]
    return "\n".join(parts) + "\n"


def profile(
    workloads: Iterable[Workload], medians: Mapping[str, float], floors: Mapping[str, float]
) -> str:
    """profile.md: how far the present best is from what memory allows, the furthest first."""
    rows = [(w, medians[w.id], floors.get(w.id, 0.0)) for w in workloads if w.id in medians]
    rows.sort(key=lambda row: row[2] - row[1])
    parts = ["# Where the time goes", ""]
    if not rows:
        return "\n".join([*parts, "Nothing has been measured yet."]) + "\n"
    total = sum(us for _, us, _ in rows)
    parts += ["| workload | best, us | share | floor, us | headroom |", "|---|---|---|---|---|"]
    for workload, us, floor in rows:
        headroom = f"{1 - floor / us:.0%}" if floor else "unknown"
        parts.append(f"| {workload} | {us:.3f} | {us / total:.0%} | {floor:.3f} | {headroom} |")
    return "\n".join(parts) + "\n"


def workload_profile(workloads: Sequence[Workload]) -> str:
    """workload_profile.md: sizes and modes, as they are."""
    parts = ["# Workloads", "", "| workload | mode | sizes |", "|---|---|---|"]
    for workload in workloads:
        case = workload.build()
        sizes = ", ".join(f"{name}={size}" for name, size in case.axes.items())
        parts.append(f"| {workload} | {case.mode} | {sizes} |")
    return "\n".join(parts) + "\n"


def _bullets(lines: Iterable[str]) -> str:
    return "".join(f"- {line}\n" for line in lines)
