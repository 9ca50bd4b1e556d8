"""One operator for one architecture as a contest package: files, made of what its table names."""

from __future__ import annotations

import base64
import importlib
import json
import re
import shlex
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastkernels import catalog
from fastkernels.contest import standalone
from fastkernels.contest.definition import contest_axes, fix_up
from fastkernels.contest.flatten import FlattenError, copy_modules, flatten
from fastkernels.core import archs, dispatch, extension, toolchain
from fastkernels.core.device import DeviceInfo, named_device
from fastkernels.core.kernels import Kernel, csrc_folder, knobs
from fastkernels.core.problem import key_from_axes
from fastkernels.core.route import ANY_DEVICE, Operator, Route, no_workspace
from fastkernels.core.spec import TensorSpec
from fastkernels.core.table import Box, Table
from fastkernels.errors import ArgumentError, FastkernelsError
from fastkernels.version import __version__

LANGUAGE = "triton"
"""What the contest's packer takes a Python entry as; it refuses `python`."""

ENTRY_FILE, ENTRY = "main.py", "run"
_WIDTH = 100


class PackError(FastkernelsError):
    """A package cannot be made: what the table names, or a compiler, stands in the way."""


@dataclass(frozen=True)
class Package:
    """A solution as files and as one JSON document, and what is to be said about it."""

    op: str
    arch: str
    files: Mapping[str, str]  # by path below the package's folder
    notes: tuple[str, ...]

    @property
    def solution(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.files["solution.json"])
        return document

    def write(self, folder: Path) -> None:
        """Into a folder that is new or empty: the contest's packer would take strays along."""
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise PackError(f"{folder} is there and not an empty folder, expected a new one")
        for name, text in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class Serving:
    """A line of the package's table: problems inside `box` are served by a route and config."""

    box: Box
    route: Route
    config: Any


def pack(op: str, arch: str, author: str, name: str, embed: bool = False) -> Package:
    """The package of an operator for an architecture (`sm90`, `sm100`).

    embed: machine code instead of CUDA, Triton and CuTe DSL sources; compiled here.
    Raises ArgumentError, PackError.
    """
    operator = catalog.operator(op)
    for what, value in (("author", author), ("name", name)):
        if not re.fullmatch(r"[A-Za-z0-9][\w .+-]*", value):
            raise ArgumentError(
                f"pack: {what} {value!r}, expected letters, digits, '_', '.', '+', '-' and spaces"
            )
    device = _device(arch)
    table, notes = dispatch.find_table(operator, device)
    if table is None:
        raise PackError("; ".join((f"{op}: no table for {device.product}", *notes)))
    servings = _servings(operator, device, table)
    try:
        text = _entry_text(operator, device, table, servings, embed)
    except FlattenError as error:
        raise PackError(f"{op}: sources cannot be put into one text: {error}") from error
    solution = {
        "name": name,
        "definition": operator.spec.definition,
        "author": author,
        "description": f"{op} of fastkernels {__version__} for {device.product}",
        "spec": {
            "language": LANGUAGE,
            "target_hardware": ["cuda"],
            "entry_point": f"{ENTRY_FILE}::{ENTRY}",
            "dependencies": [],
            "destination_passing_style": True,
            "binding": None,
        },
        "sources": [{"path": ENTRY_FILE, "content": text}],
    }
    files = {
        "config.toml": _config_toml(solution),
        f"solution/{LANGUAGE}/{ENTRY_FILE}": text,
        "solution.json": json.dumps(solution, indent=2, ensure_ascii=False) + "\n",
    }
    return Package(op, arch, files, (f"table {table.path} ({table.status})", *notes))


def _device(arch: str) -> DeviceInfo:
    for slug, product in archs.PRODUCTS.items():
        if product.arch == arch and arch in archs.ARCHS:
            return named_device(slug)
    raise ArgumentError(f"pack: arch {arch!r}, expected one of {', '.join(archs.ARCHS)}")


def _config_toml(solution: Mapping[str, Any]) -> str:
    spec = solution["spec"]
    quoted = {key: json.dumps(solution[key]) for key in ("name", "definition", "author")}
    return "\n".join([
        "[solution]",
        *(f"{key} = {value}" for key, value in quoted.items()),
        "",
        "[build]",
        f"language = {json.dumps(spec['language'])}",
        f"entry_point = {json.dumps(spec['entry_point'])}",
        "destination_passing_style = true",
        "",
    ])  # fmt: skip


# ---- what serves --------------------------------------------------------------------------------


def _servings(operator: Operator, device: DeviceInfo, table: Table) -> list[Serving]:
    """The table's entries for the definition's constants and first mode, in the order of lookup."""
    spec, mode = operator.spec, operator.spec.modes[0]
    lines: list[tuple[Box, str, Mapping[str, Any] | None]] = []
    for regime in table.regimes:
        corner = {name: low for name, (low, _) in regime.axes.items()}
        if regime.contains(corner | spec.constants, mode, table.constants):
            lines.append((regime.axes, regime.route, regime.config))
    beyond = {name: high + 1 for name, (_, high) in table.limits.items()}
    outside = dict.fromkeys(spec.variable_axes, 0) | beyond | spec.constants
    hit = table.lookup(outside, mode)
    if hit is not None and hit.is_fallback:
        lines.append(({}, hit.entry.route, hit.entry.config))
    servings = []
    for box, name, config in lines:
        route = operator.route(name)
        if route is None:
            raise PackError(f"{table.path}: route {name!r} is unknown")
        try:
            servings.append(Serving(box, route, route.make_config(config)))
        except ValueError as error:
            raise PackError(f"{table.path}: {error}") from error
    _check_contest(operator, device, table, servings)
    return servings


def _check_contest(
    operator: Operator, device: DeviceInfo, table: Table, servings: Sequence[Serving]
) -> None:
    """Every workload of the contest is served, by a route that does not decline it."""
    for axes in contest_axes(operator.name):
        sizes = {name: axes[name] for name in operator.spec.variable_axes}
        serving = next((s for s in servings if _holds(s.box, sizes)), None)
        if serving is None:
            raise PackError(f"{table.path}: nothing serves the contest's {sizes}")
        decline = serving.route.unsuited(
            key_from_axes(operator.spec, sizes, device), serving.config
        )
        if decline is not None:
            raise PackError(
                f"{table.path}: route {serving.route.name!r} declines the contest's {sizes}: "
                f"{decline.reason}"
            )


def _holds(box: Box, sizes: Mapping[str, int]) -> bool:
    return all(low <= sizes[name] <= high for name, (low, high) in box.items())


# ---- the entry ----------------------------------------------------------------------------------


def _entry_text(
    operator: Operator,
    device: DeviceInfo,
    table: Table,
    servings: Sequence[Serving],
    embed: bool,
) -> str:
    own = standalone.__name__
    roots: dict[str, list[str]] = {own: ["serve", *fix_up(operator.name).names]}
    roots[f"fastkernels.ops.{operator.name}.problem"] = ["Inputs"]
    plans = [s for s in _distinct(servings) if s.route.archs != ANY_DEVICE]
    if len(plans) < len(_distinct(servings)):
        route = operator.safe_route
        assert route.workspace_bytes is no_workspace
        config = type(route.default_config)
        roots[own] += ["launch_torch"]
        roots.setdefault(route.launch.__module__, []).append(route.launch.__name__)
        roots.setdefault(config.__module__, []).append(config.__name__)
    if plans:
        roots[own] += ["Kernels", "unpack_package" if embed else "compile_package"]
        roots[f"fastkernels.ops.{operator.name}.routes.library"] = ["call"]
    parts = [_heading(operator, device, table, embed, bool(plans)), flatten(roots)]
    if plans:
        parts.append(_kernels_text(operator, device, plans, embed))
    parts += [_table_text(operator, servings, plans), _run_text(operator)]
    return "\n\n".join(part.rstrip("\n") + "\n" for part in parts)


def _heading(
    operator: Operator, device: DeviceInfo, table: Table, embed: bool, is_compiled: bool
) -> str:
    lines = [
        f'"""{operator.spec.definition} for {device.product} ({device.arch}).',
        "",
        f"Made by `fastkernels pack` of fastkernels {__version__} from its own sources and the "
        f"{table.status} table",
        f"{Path(table.path).parent.name}/{Path(table.path).name}. Stands alone: needs torch"
        + (", TVM-FFI" if is_compiled else "")
        + (", nvcc and a C++ compiler." if is_compiled and not embed else "."),
        '"""',
    ]
    return "\n".join(lines)


def _distinct(servings: Sequence[Serving]) -> list[Serving]:
    """One serving for each route and config, in the order of the table."""
    found: dict[tuple[str, Any], Serving] = {}
    for serving in servings:
        found.setdefault((serving.route.name, serving.config), serving)
    return list(found.values())


def _table_text(operator: Operator, servings: Sequence[Serving], plans: Sequence[Serving]) -> str:
    index = {(s.route.name, s.config): i for i, s in enumerate(plans)}
    lines = ["# ---- the table: sizes, and what serves them", "", "TABLE = ("]
    for s in servings:
        number = index.get((s.route.name, s.config))
        if number is None:
            served = f"launch_torch, {s.route.launch.__name__}, {s.config!r}"
        else:
            served = f"KERNELS.launch, {number}, call"
        lines.append(f"    ({s.box!r}, ({served})),  # {s.route.name}")
    return "\n".join([*lines, ")"])


def _run_text(operator: Operator) -> str:
    spec = operator.spec
    arguments = [argument.name for argument in spec.inputs]
    outputs = [output.name for output in spec.outputs]
    sizes = [f'"{name}": {_where(operator, name)}' for name in spec.variable_axes]
    comma = "," if len(outputs) == 1 else ""
    lines = [
        f"def {ENTRY}({', '.join(arguments + outputs)}):",
        '    """Fills the outputs, which come uninitialised."""',
        f"    sizes = {{{', '.join(sizes)}}}",
        f"    inputs = Inputs({', '.join(arguments)})",
        f"    serve(TABLE, sizes, inputs, ({', '.join(outputs)}{comma}))",
        *(f"    {line}" for line in fix_up(operator.name).after_launch),
    ]
    return "\n".join(lines)


def _where(operator: Operator, axis: str) -> str:
    """An expression for the size of a variable axis, from an argument that every call has."""
    spec = operator.spec
    for argument in spec.inputs:
        if not isinstance(argument, TensorSpec) or argument.optional:
            continue
        for position, name in enumerate(argument.shape):
            derived = spec.axis[name].derived
            if name == axis:
                return f"{argument.name}.shape[{position}]"
            if derived is not None and derived.axis == axis and derived.mul == derived.div:
                return f"{argument.name}.shape[{position}] - {derived.add}"
    raise PackError(f"{operator.name}: no argument has the axis {axis!r}")


# ---- compiled routes ----------------------------------------------------------------------------


def _kernels_text(
    operator: Operator, device: DeviceInfo, plans: Sequence[Serving], embed: bool
) -> str:
    kernels = {
        kernel.name: kernel
        for kernel in importlib.import_module(f"fastkernels.ops.{operator.name}.kernels").KERNELS
    }
    capability = archs.ARCHS[device.arch].capability
    chosen = [(kernels[s.route.name], s.config) for s in plans]
    if embed:
        parts, made = _embedded(operator.name, device.arch, chosen)
    else:
        texts, made = package_sources(operator.name, device.arch, chosen)
        parts = [f"SOURCES = {{\n{''.join(_source_entries(texts))}}}"]
    kernel_plans = [
        {
            "label": f"{operator.name}: route {kernel.name!r} with {config}",
            "tile": kernel.tile(config),
            "arguments": tuple(
                extension._ARGUMENTS[kernel.maker(config, v)[0].language] for v in kernel.variants
            ),
            "variants": variants,
        }
        for (kernel, config), variants in zip(chosen, made, strict=True)
    ]
    unpacked = "unpack_package(LIBRARY, CUBINS, PLANS)"
    compiled = f"compile_package(SOURCES, PLANS, {device.arch!r})"
    return "\n\n".join([
        "# ---- kernels",
        *parts,
        f"PLANS = {_literal(kernel_plans)}",
        f"KERNELS = Kernels({operator.name!r}, {capability}, PLANS, "
        f"{unpacked if embed else compiled})",
    ])  # fmt: skip


def _literal(value: Any, indent: int = 0) -> str:
    """Python's spelling of plain data, one entry a line."""
    inner = "    " * (indent + 1)
    flat = repr(value)
    if len(inner) + len(flat) < _WIDTH or not isinstance(value, (dict, list, tuple)):
        return flat
    if isinstance(value, dict):
        lines = [f"{inner}{key!r}: {_literal(each, indent + 1)}," for key, each in value.items()]
        return "\n".join(["{", *lines, "    " * indent + "}"])
    opening, closing = "[]" if isinstance(value, list) else "()"
    lines = [f"{inner}{_literal(each, indent + 1)}," for each in value]
    return "\n".join([opening, *lines, "    " * indent + closing])


def package_sources(
    op: str, arch: str, chosen: Sequence[tuple[Kernel, Any]]
) -> tuple[dict[str, str], list[list[Any]]]:
    """Texts by path, and per kernel and config what is to be compiled of them."""
    texts = host_sources(op)
    made: list[list[Any]] = []
    for kernel, config in chosen:
        made.append([])
        for variant in kernel.variants:
            maker, its = kernel.maker(config, variant)
            if maker.language == "cuda":
                texts |= _device_sources(maker)
                assert maker.launch_shape is not None
                threads, shared_bytes = maker.launch_shape(its, variant)
                made[-1].append({
                    "source": maker.source,
                    "flags": _nvcc_flags(maker, its, arch, variant),
                    "symbol": f"{maker.op}_{maker.name}",
                    "threads": threads,
                    "shared_bytes": shared_bytes,
                })  # fmt: skip
            else:
                # A name that no other package in an evaluator's process has.
                root = f"packed_{op}_{maker.digest()[:12]}"
                config_type = type(its)
                for module in (maker.module, config_type.__module__):
                    texts |= copy_modules(module, root)
                made[-1].append({
                    "module": maker.module.replace("fastkernels", root, 1),
                    "config_module": config_type.__module__.replace("fastkernels", root, 1),
                    "config": config_type.__name__,
                    "knobs": knobs(its),
                    "variant": variant,
                })  # fmt: skip
    return texts, made


def _nvcc_flags(kernel: Kernel, config: Any, arch: str, variant: str) -> str:
    """Ours, except that a newer compiler's new warnings must not be errors."""
    flags = toolchain._nvcc_flags(kernel, config, arch, variant)
    at = flags.index("--Werror")
    return shlex.join([*flags[:at], *flags[at + 2 :]])


def _source_entries(texts: Mapping[str, str]) -> Iterator[str]:
    for name, text in sorted(texts.items()):
        is_plain = "'''" not in text and not text.endswith(("\\", "'"))
        yield f"    {name!r}: " + (f"r'''{text}'''" if is_plain else repr(text)) + ",\n"


def host_sources(op: str) -> dict[str, str]:
    """The launchers' C++ by path below csrc/: what all operators share, and the operator's own."""
    folder = csrc_folder()
    paths = [
        path
        for name in ("common", op)
        for path in sorted((folder / name).iterdir())
        if path.suffix in (".cc", ".h")
    ]
    if not any(path.suffix == ".cc" for path in paths):
        raise PackError(f"{folder} has no launchers (.cc): pack compiled routes in a checkout")
    return {path.relative_to(folder).as_posix(): path.read_text("utf-8") for path in paths}


def _device_sources(kernel: Kernel) -> dict[str, str]:
    folder = csrc_folder()
    paths = [path for path in kernel.sources() if path.suffix in (".cu", ".cuh", ".h")]
    return {path.relative_to(folder).as_posix(): path.read_text("utf-8") for path in paths}


def _embedded(
    op: str, arch: str, chosen: Sequence[tuple[Kernel, Any]]
) -> tuple[list[str], list[list[Any]]]:
    """The compiled library and machine code as text, and per plan which code its variants are."""
    jobs = {
        (maker.name, its, variant): (maker, its)
        for kernel, config in chosen
        for variant in kernel.variants
        for maker, its in [kernel.maker(config, variant)]
    }

    def compile_one(key: tuple[str, Any, str]) -> Any:
        return toolchain.compile_kernel(*jobs[key], arch, key[2])

    try:
        # Triton and CuTe DSL compile in this process, one after the other.
        is_cuda = {key: maker.language == "cuda" for key, (maker, _) in jobs.items()}
        with ThreadPoolExecutor() as pool:
            keys = [key for key in jobs if is_cuda[key]]
            binaries = dict(zip(keys, pool.map(compile_one, keys), strict=True))
        binaries |= {key: compile_one(key) for key in jobs if not is_cuda[key]}
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for path, text in host_sources(op).items():
                (folder / "sources" / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / "sources" / path).write_text(text, encoding="utf-8")
            standalone.compile_library(folder / "sources", folder / "library.so")
            library = (folder / "library.so").read_bytes()
    except (toolchain.ToolchainError, RuntimeError) as error:
        raise PackError(str(error)) from error
    cubins = list(dict.fromkeys(binary.cubin for binary in binaries.values()))
    made: list[list[Any]] = []
    for kernel, config in chosen:
        made.append([])
        for variant in kernel.variants:
            maker, its = kernel.maker(config, variant)
            binary = binaries[maker.name, its, variant]
            made[-1].append((cubins.index(binary.cubin), *binary[1:]))
    return [
        f"LIBRARY = '''\n{encode(library)}'''",
        "CUBINS = (\n" + "".join(f"    '''\n{encode(cubin)}''',\n" for cubin in cubins) + ")",
    ], made


def encode(data: bytes) -> str:
    """Lines of base 85 of zlib; `standalone.decode` gives the data back."""
    text = base64.b85encode(zlib.compress(data, 9)).decode()
    return "".join(text[i : i + 99] + "\n" for i in range(0, len(text), 99))
