"""The constitution of an agent: data that the harness enforces and that the agent is shown.

What is enforced on a patch is here (`breaches`); ENFORCERS says who sees to the rest.
"""

from __future__ import annotations

import ast
import difflib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field, ValidationError

from fastkernels_tuner import gates
from fastkernels_tuner.agent.proposal import EXAMPLE
from fastkernels_tuner.agent.workspace import PLAN, SCRATCH, Patch, Permit
from fastkernels_tuner.errors import SourceError
from fastkernels_tuner.model import Model

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENFORCERS: dict[str, str] = {
    "plan": "proposal.parse: no patch is looked at without a plan",
    "size": "policy.breaches: files and lines of one change are counted",
    "languages": "policy.breaches: suffixes and imports are those of the languages",
    "memory": "policy.breaches: state in modules, caches, pointers; the broker's fresh inputs",
    "static": "gates.banned: every file of a candidate is scanned",
    "workspace": "workspace.collect: any other difference is refused by name",
    "sandbox": "sandbox.find: no network, no device nodes, else nothing starts",
    "gates": "gates.decide: every gate in order, on everything that was found out",
    "paired_test": "stats.PairedTest: ratios of microseconds, twice, at a level that is budgeted",
    "account": "backends.Account: money and idle turns are counted before a turn",
    "ledger": "memory: every step is an event of the store's hash chain",
}
"""What can enforce a rule, and where that is done."""


class Rule(Model):
    name: str
    text: str
    enforced_by: str


class Constitution(Model):
    """`agent.toml`; its digest is in every event of an experiment, and a verdict under another one
    promotes nothing. `{op}` in `may_add` is the operator."""

    name: str
    languages: tuple[str, ...]
    may_add: tuple[str, ...] = ()
    max_files: int = Field(default=6, ge=1)
    max_bytes: int = Field(default=1 << 20, ge=1)
    max_changed_lines: int = Field(default=600, ge=1)
    turn_timeout_s: float = Field(default=1800.0, gt=0)
    turn_usd: float = Field(default=2.0, ge=0)
    turn_bytes: int = Field(default=16 << 20, ge=1)
    network: bool = False
    max_gpu_s: float = Field(default=1800.0, gt=0)
    stride_rows: int = Field(default=6, ge=1)
    max_regime_loss: float = Field(default=0.02, ge=0)
    window: int = Field(default=5, ge=2)
    plateau_gain: float = Field(default=0.01, gt=0)
    wall: int = Field(default=3, ge=2)
    min_gain_per_hour: float = Field(default=0.0, ge=0)
    rule: tuple[Rule, ...] = ()

    def permit(self, op: str, files: Mapping[str, str]) -> Permit:
        return Permit(
            files=tuple(files),
            added=tuple(pattern.format(op=op) for pattern in self.may_add),
            max_files=self.max_files,
            max_bytes=self.max_bytes,
        )


def default() -> Constitution:
    found = resources.files("fastkernels_tuner").joinpath("policies").joinpath("agent.toml")
    return parse(found.read_text(encoding="utf-8"), "policies/agent.toml")


def read(path: Path) -> Constitution:
    """Raises SourceError."""
    try:
        return parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{path}: cannot be read: {error}") from error


def parse(text: str, where: str) -> Constitution:
    """Raises SourceError, also over a rule that nothing enforces."""
    try:
        found = Constitution(**tomllib.loads(text))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise SourceError(f"{where}: {place}: {first['msg']}") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise SourceError(f"{where}: not TOML: {error}") from error
    for rule in found.rule:
        if rule.enforced_by not in ENFORCERS:
            known = ", ".join(ENFORCERS)
            raise SourceError(
                f"{where}: rule {rule.name!r} is enforced by {rule.enforced_by!r}, "
                f"expected one of {known}"
            )
    return found


# ---- what an agent is told ----------------------------------------------------------------------


def render(constitution: Constitution, op: str, route: str, files: Mapping[str, str]) -> str:
    """AGENTS.md, which is CLAUDE.md, too."""
    lines = [
        f"# One kernel: {op}, route `{route}`",
        "",
        "You make this kernel faster, one measured experiment at a time. TASK.md is your task.",
        "",
        "You may change:",
        *(f"- `{name}`" for name in files),
        *(f"- new files `{each.format(op=op)}`" for each in constitution.may_add),
        "",
        f"`{SCRATCH}/` is yours; nobody looks there.",
        f"Languages: {', '.join(constitution.languages)}.",
        f"A change takes at most {constitution.max_files} files, "
        f"{constitution.max_changed_lines} lines.",
        "",
        "## Rules",
        "",
        *(f"{n}. {rule.text}" for n, rule in enumerate(constitution.rule, start=1)),
        "",
        "Breaking one ends the experiment, with the reason in its record.",
        "",
        f"## {PLAN}",
        "",
        "```toml",
        EXAMPLE.rstrip(),
        "```",
        "",
        "## What there is to read",
        "",
        "- `skills/*/SKILL.md`: the operator's contract, the device and its ceilings, the language",
        "- `profile.md`, `workload_profile.md`: where the time goes, and what the workloads are",
        "- `summary.md`, `experiments/`, `LESSONS.md`: what was tried, and what came of it",
        "- `context/`: the reference, the operator's README",
    ]
    return "\n".join(lines) + "\n"


# ---- what is enforced on a patch ----------------------------------------------------------------


class Breach(NamedTuple):
    """`by`: of ENFORCERS."""

    by: str
    message: str

    def __str__(self) -> str:
        return self.message


_SUFFIXES = {".py": "torch", ".cu": "cuda", ".cuh": "cuda", ".h": "cuda", ".cc": "cuda"}
_PACKAGES = {"triton": "triton", "cutlass": "cute"}


def breaches(constitution: Constitution, patch: Patch, base: Mapping[str, str]) -> list[Breach]:
    """Where a patch breaks the constitution. What the files had before is nobody's breach."""
    after = patch.apply(base)
    return [
        *_size(constitution, patch, base),
        *_new("languages", _languages(constitution, after), _languages(constitution, base)),
        *_new("memory", _memory(after), _memory(base)),
        *_new("static", _static(after), _static(base)),
    ]


def _size(constitution: Constitution, patch: Patch, base: Mapping[str, str]) -> Iterator[Breach]:
    lines = 0
    for name, text in patch.files.items():
        before, after = (each.splitlines() for each in (base.get(name) or "", text or ""))
        lines += sum(
            line.startswith(("+", "-")) and not line.startswith(("+++", "---"))
            for line in difflib.unified_diff(before, after, n=0)
        )
    if lines > constitution.max_changed_lines:
        limit = constitution.max_changed_lines
        yield Breach("size", f"{lines} changed lines, one optimisation takes at most {limit}")


def _new(by: str, found: Counter[str], before: Counter[str]) -> Iterator[Breach]:
    for message in found - before:
        yield Breach(by, message)


def _languages(constitution: Constitution, files: Mapping[str, str]) -> Counter[str]:
    found: Counter[str] = Counter()
    for name, text in files.items():
        language = _SUFFIXES.get(Path(name).suffix)
        used = {language} if language else set()
        if language == "torch":
            used |= {_PACKAGES[each] for each in _imported(text) if each in _PACKAGES}
        if not used:
            found[f"{name}: a file of no language that is known"] += 1
        for each in used - {*constitution.languages}:
            # Python drives every language, whatever kernels are written in.
            if each != "torch":
                found[f"{name}: is written in {each}"] += 1
    return found


def _imported(text: str) -> set[str]:
    tree = _tree(text)
    names: set[str] = set()
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


def _static(files: Mapping[str, str]) -> Counter[str]:
    """Without line numbers, which move."""
    found: Counter[str] = Counter()
    for message in gates.banned(files):
        name, _, what = message.split(":", 2)
        found[f"{name}:{what}"] += 1
    return found


_CONTAINERS = ("dict", "list", "set", "defaultdict", "OrderedDict", "Counter", "deque")
_CACHES = ("cache", "lru_cache", "cached_property", "WeakKeyDictionary", "WeakValueDictionary")
_IDENTITIES = ("data_ptr", "_version", "untyped_storage")
_REFLECTION = ("setattr", "globals", "vars", "exec", "eval", "compile", "__dict__", "__class__")
_STREAMS = ("Stream", "ExternalStream", "wait_stream", "record_stream")
_FILES = ("open", "fromfile", "from_file", "memmap", "save")


def _memory(files: Mapping[str, str]) -> Counter[str]:
    """What lets something outlive a call, or tells one call's arguments from another's."""
    found: Counter[str] = Counter()
    for name, text in files.items():
        tree = _tree(text) if name.endswith(".py") else None
        if tree is None:
            continue
        for statement in tree.body:
            value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
            if _is_container(value):
                found[f"{name}: a mutable container in the module"] += 1
        for node in ast.walk(tree):
            found.update(f"{name}: {what}" for what in _suspects(node))
    return found


def _suspects(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Global | ast.Nonlocal):
        yield f"{type(node).__name__.lower()} {', '.join(node.names)}"
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        defaults = [*node.args.defaults, *node.args.kw_defaults]
        if any(_is_container(value) for value in defaults):
            yield "a mutable default"
    elif isinstance(node, ast.Attribute | ast.Name):
        word = node.attr if isinstance(node, ast.Attribute) else node.id
        if word in _CACHES:
            yield f"a cache ({word})"
        elif word in _IDENTITIES:
            yield f"asks for a tensor's identity ({word})"
        elif word in _REFLECTION:
            yield f"changes what code is ({word})"
        elif word in _STREAMS:
            yield f"works beside the call ({word})"
        elif word in _FILES or (word == "load" and ast.unparse(node) == "torch.load"):
            yield f"keeps files ({word})"


def _is_container(node: ast.AST | None) -> bool:
    """Whether it makes something that can be added to."""
    if isinstance(node, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp):
        return True
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in _CONTAINERS


def _tree(text: str) -> Any:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):  # `gates.banned` says so
        return None
