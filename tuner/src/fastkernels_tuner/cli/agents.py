"""Commands about agents: agent, init, export-route."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from fastkernels.core.device import named_device
from fastkernels_tuner import plan
from fastkernels_tuner.agent import export, memory, sandbox, sources, starter
from fastkernels_tuner.agent import policy as constitutions
from fastkernels_tuner.agent.backends import (
    Backend,
    Command,
    Endpoint,
    GivenUp,
    Prices,
    Replay,
)
from fastkernels_tuner.agent.lab import Laboratory
from fastkernels_tuner.agent.loop import Loop
from fastkernels_tuner.agent.memory import Begun, History, Memory
from fastkernels_tuner.agent.policy import Constitution
from fastkernels_tuner.campaign import Campaign
from fastkernels_tuner.cli.common import (
    ANY_PATH,
    FILE,
    LEASE_S,
    command,
    device_of,
    device_option,
    folder_option,
    hold,
    json_option,
    last_campaign,
    op_option,
    opened,
    policy_of,
    policy_option,
    require_same,
    storage_option,
)
from fastkernels_tuner.controller import beating
from fastkernels_tuner.errors import OutOfBudget, SourceError
from fastkernels_tuner.store import Store
from fastkernels_tuner.terminal import Terminal

KINDS = ("command", "endpoint", "replay")


@click.command()
@op_option
@click.option("--route", help="Whose kernel is edited; default: what serves most workloads now.")
@click.option("--backend", type=click.Choice(KINDS), default="command", show_default=True)
@click.option("--command", "command_line", help="Of an agent, e.g. 'claude -p'; no shell reads it.")
@click.option("--model", help="Of the endpoint that FASTKERNELS_AGENT_URL and _KEY name.")
@click.option("--price", type=float, nargs=2, help="Dollars per million tokens read, written.")
@click.option("--script", type=FILE, help="Turns to replay (JSON).")
@click.option("--rounds", type=click.IntRange(1), default=20, show_default=True)
@click.option("--budget-usd", type=click.FloatRange(0), help="No turn begins that may exceed it.")
@click.option("--gpu-hours", type=click.FloatRange(0, min_open=True), help="On the device, in all.")
@click.option("--wall", type=click.FloatRange(1), help="Stop after so many seconds; resume later.")
@click.option("--constitution", type=FILE, help="Rules for the agent of your own (TOML).")
@click.option("--read", multiple=True, type=ANY_PATH, help="Let the agent see this path, too.")
@click.option("--pass-env", multiple=True, help="Let the agent have this variable.")
@click.option("--unsafe-no-sandbox", is_flag=True, help="Nothing is promoted then.")
@click.option("--seed", default=0, show_default=True)
@policy_option
@device_option
@folder_option
@storage_option
@json_option
@command
def agent(
    op: str,
    route: str | None,
    backend: str,
    command_line: str | None,
    model: str | None,
    price: tuple[float, float] | None,
    script: Path | None,
    rounds: int,
    budget_usd: float | None,
    gpu_hours: float | None,
    wall: float | None,
    constitution: Path | None,
    read: Sequence[Path],
    pass_env: Sequence[str],
    unsafe_no_sandbox: bool,
    seed: int,
    policy_file: Path | None,
    device: str | None,
    folder: Path,
    storage: str | None,
    terminal: Terminal,
) -> int:
    """Let a coding agent improve one route's kernel; the harness measures, judges and remembers.

    What is promoted waits as a patch: `fastkernels-tune export-route`.
    """
    where = device_of(device)
    policy = policy_of(where, policy_file)
    rules = constitutions.default() if constitution is None else constitutions.read(constitution)
    settings = {
        "backend": backend, "command": command_line, "model": model, "price": price,
        "script": None if script is None else str(script.absolute()), "rounds": rounds,
        "gpu_hours": gpu_hours, "read": [str(path.absolute()) for path in read],
        "pass_env": list(pass_env), "unsafe": unsafe_no_sandbox,
    }  # fmt: skip
    made, is_safe = _backend(settings, rules)
    with Laboratory(where, policy, _versions(folder), seed=seed) as lab:
        chosen = route or _serving(op, where)
        spec = plan.make(op, where, policy, lab.environment, routes=(chosen,), seed=seed)
        operator = plan.operator_of(op)
        found = operator.route(chosen)
        assert found is not None, chosen
        files = sources.editable(operator, found)
        with opened(folder, storage) as store:
            number = store.create(spec)
            terminal.say(f"campaign {number}: {op}, route {chosen}, {', '.join(files)}")
            with hold(store, number, terminal) as lease:
                ledger = Memory(store, number, lease)
                begun = Begun(
                    route=chosen,
                    files=ledger.keep(files),
                    constitution=rules.model_dump(mode="json"),
                    limit_usd=budget_usd,
                    planned=rounds,
                    is_safe=is_safe,
                    backend=settings,
                )
                ledger.add(memory.BEGUN, begun)
            return _drive(store, number, folder, wall, lab, made, rules, terminal)


def is_one(store: Store, campaign: str) -> bool:
    """Whether a campaign is in the hands of agents."""
    return bool(store.events(campaign, memory.BEGUN))


def resume(store: Store, number: str, folder: Path, wall: float | None, terminal: Terminal) -> int:
    """Goes on with one, with the backend that it was begun with."""
    spec, begun = store.spec(number), _begun(store, number)
    rules = Constitution(**begun.constitution)
    made, _ = _backend(begun.backend, rules)
    where = device_of(spec.device)
    with Laboratory(where, spec.policy, _versions(folder), seed=spec.seed) as lab:
        require_same(spec, lab.environment)
        return _drive(store, number, folder, wall, lab, made, rules, terminal)


def _drive(
    store: Store,
    number: str,
    folder: Path,
    wall: float | None,
    lab: Laboratory,
    backend: Backend,
    rules: Constitution,
    terminal: Terminal,
) -> int:
    campaign = Campaign(store, number, folder / number, terminal.say)
    settings = _begun(store, number).backend
    hours, status = settings.get("gpu_hours"), 0
    with hold(store, number, terminal) as lease, beating(lease.renew, LEASE_S):
        lab.lease = lease.token
        loop = Loop(
            campaign,
            Memory(store, number, lease),
            lab,
            rules,
            (backend,),
            backend,
            rounds=settings["rounds"],
            max_device_s=None if hours is None else 3600 * hours,
            until=None if wall is None else time.monotonic() + wall,
        )
        try:
            reason = loop.run()
        except GivenUp as error:
            reason = str(error)
        except OutOfBudget as error:
            reason, status = str(error), error.exit_code
        history = loop.memory.history
    counts = Counter(decided.choice for decided in history.decisions)
    best = history.best()
    status = status or (0 if best is not None else 1)
    document = {
        "campaign": number,
        "folder": str(campaign.folder),
        "ended": reason,
        "decisions": dict(sorted(counts.items())),
        "best": None if best is None else best.model_dump(mode="json"),
        "spent_usd": history.account.spent_usd,
        "device_s": history.device_s(),
        "exit_code": status,
    }
    told = ", ".join(f"{count} {choice}" for choice, count in sorted(counts.items()))
    lines = [
        f"ended:  {reason}",
        f"found:  {told or 'nothing'}",
        f"cost:   ${history.account.spent_usd:.2f}, {history.device_s():.1f} s on the device",
        f"record: {campaign.folder / 'summary.md'}",
    ]
    if best is not None:
        lines.append(f"next:   fastkernels-tune export-route {number}")
    terminal.result(document, "\n".join(lines))
    return status


def _backend(settings: Mapping[str, Any], rules: Constitution) -> tuple[Backend, bool]:
    """What the settings ask for, and whether it runs nothing outside a sandbox."""
    kind = settings["backend"]
    if kind == "replay":
        if settings["script"] is None:
            raise click.UsageError("--backend replay needs --script FILE")
        return Replay.read(Path(settings["script"])), True
    if kind == "endpoint":
        if settings["model"] is None:
            raise click.UsageError("--backend endpoint needs --model NAME")
        prices = None if settings["price"] is None else Prices(*settings["price"])
        made = Endpoint.of(
            os.environ, settings["model"], rules.turn_usd, prices=prices,
            timeout_s=rules.turn_timeout_s, max_bytes=rules.turn_bytes,
        )  # fmt: skip
        return made, True
    if settings["command"] is None:
        raise click.UsageError("--backend command needs --command 'PROGRAM ...'")
    limits = sandbox.Limits(
        read=tuple(settings["read"]), pass_on=tuple(settings["pass_env"]), network=rules.network
    )
    box = sandbox.find(limits, allow_none=settings["unsafe"])
    argv = Command.split(settings["command"])
    made_command = Command(
        argv, box, rules.turn_usd, timeout_s=rules.turn_timeout_s, max_bytes=rules.turn_bytes
    )
    return made_command, box.is_safe


def _serving(op: str, device: str) -> str:
    """The route that most workloads of the lists are served by now."""
    operator, info = plan.operator_of(op), named_device(device)
    rows = plan.to_search(operator, info, policy_of(device, None))
    counts = Counter(plan.served(operator, row, info).route for row in rows)
    if not counts:
        raise SourceError(f"{op}: no workload is served on {device}")
    return counts.most_common(1)[0][0]


def _versions(folder: Path) -> Path:
    """Copies of the package by their content, of all campaigns in a folder."""
    path = folder / "versions"
    path.mkdir(parents=True, exist_ok=True)
    return path


def _begun(store: Store, number: str) -> Begun:
    return Begun(**store.events(number, memory.BEGUN)[0].payload)


# ---- init ---------------------------------------------------------------------------------------


@click.command()
@click.argument("folder", type=ANY_PATH)
@op_option
@device_option
@json_option
@command
def init(folder: Path, op: str, device: str | None, terminal: Terminal) -> int:
    """Make a folder for campaigns: the rules to edit, a script to try it with, what to do next."""
    made = starter.make(folder, plan.operator_of(op), device_of(device))
    document = {"folder": str(folder), "files": [path.name for path in made], "exit_code": 0}
    terminal.result(document, "\n".join(f"made {path}" for path in made))
    return 0


# ---- export-route -------------------------------------------------------------------------------


@click.command("export-route")
@click.argument("campaign", required=False)
@click.option("--out", type=ANY_PATH, help="The patch; default: route.patch beside the records.")
@folder_option
@storage_option
@json_option
@command
def export_route(
    campaign: str | None, out: Path | None, folder: Path, storage: str | None, terminal: Terminal
) -> int:
    """Write what a campaign promoted as a patch to review, with its evidence beside it."""
    with opened(folder, storage) as store:
        number = campaign or last_campaign(store)
        store.check(number)
        path = out or folder / number / "route.patch"
        found = export.write(Campaign(store, number, folder / number), path)
        history = History.of(store.events(number))
    document = {"campaign": number, **{name: str(each) for name, each in found.items()}}
    promotions = sum(decided.is_promotion for decided in history.decisions)
    terminal.result(
        {**document, "exit_code": 0},
        f"{promotions} promotions: {found['patch']}\nevidence: {found['evidence']}\n"
        f"review it, then: git apply {found['patch']}",
    )
    return 0
