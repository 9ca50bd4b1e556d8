"""Commands about campaigns: run, resume, status, promote, report, worker."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import click
import torch

from fastkernels_tuner import candidates, plan, promote
from fastkernels_tuner.campaign import Campaign
from fastkernels_tuner.cli import agents
from fastkernels_tuner.cli.common import (
    command,
    confirm_option,
    device_of,
    device_option,
    folder_option,
    hold,
    json_option,
    last_campaign,
    opened,
    policy_of,
    policy_option,
    require_same,
    second_gpu,
    storage_option,
)
from fastkernels_tuner.controller import Controller, Worker
from fastkernels_tuner.measure import Bench
from fastkernels_tuner.measure.guards import uuid_of
from fastkernels_tuner.model import CampaignSpec, Policy
from fastkernels_tuner.stages import STAGES, name_of
from fastkernels_tuner.stages import promote as promote_stage
from fastkernels_tuner.stages import report as report_stage
from fastkernels_tuner.store import Store
from fastkernels_tuner.terminal import Terminal


@command
def tune(
    op: str,
    device: str | None,
    routes: Sequence[str],
    trials: int | None,
    wall: float | None,
    seed: int,
    peers: Sequence[str],
    dry_run: bool,
    confirm_on: str | None,
    policy_file: Path | None,
    folder: Path,
    storage: str | None,
    terminal: Terminal,
) -> int:
    found_peers = _peers(peers)
    where = device_of(device)
    second = second_gpu(where, confirm_on)
    policy = policy_of(where, policy_file, trials)
    with Bench(where, policy, seed=seed) as bench:
        spec = spec_of(op, where, policy, bench, routes, seed)
        if dry_run:
            terminal.result(spec.model_dump(mode="json"), _describe(spec))
            return 0
        with opened(folder, storage) as store:
            number = store.create(spec)
            terminal.say(f"campaign {number}")
            terminal.say(_describe(spec))
            return _drive(store, number, bench, folder, wall, found_peers, terminal, second)


@click.command()
@click.argument("campaign", required=False)
@click.option("--wall", type=click.FloatRange(1), help="Stop after so many seconds.")
@click.option("--peer", "peers", multiple=True, help="name=module:function; repeatable.")
@confirm_option
@device_option
@folder_option
@storage_option
@json_option
@command
def resume(
    campaign: str | None,
    wall: float | None,
    peers: Sequence[str],
    confirm_on: str | None,
    device: str | None,
    folder: Path,
    storage: str | None,
    terminal: Terminal,
) -> int:
    """Go on with a campaign (default: the last one) from where it stands."""
    found_peers = _peers(peers)
    with opened(folder, storage) as store:
        number = campaign or last_campaign(store)
        if agents.is_one(store, number):
            return agents.resume(store, number, folder, wall, terminal)
        spec = store.spec(number)
        where = device_of(device or spec.device)
        with Bench(where, spec.policy, seed=spec.seed) as bench:
            require_same(spec, bench.environment)
            second = second_gpu(where, confirm_on)
            return _drive(store, number, bench, folder, wall, found_peers, terminal, second)


def _drive(
    store: Store,
    number: str,
    bench: Bench,
    folder: Path,
    wall: float | None,
    peers: Mapping[str, str],
    terminal: Terminal,
    second: str | None,
) -> int:
    campaign = drive_to("report", store, number, bench, folder, wall, peers, terminal, second)
    emitted = campaign.require("emit")
    document = {
        "campaign": number,
        "folder": str(campaign.folder),
        "table": str(campaign.folder / emitted["table"]),
        "report": str(campaign.folder / "report.html"),
        "conclusions": {name_of(s): campaign.conclusion(name_of(s)) for s in STAGES},
        "device_s": campaign.device_s(),
        "exit_code": 0,
    }
    lines = [
        f"cost:   {_cost(campaign)}",
        f"table:  {document['table']}",
        f"report: {document['report']}",
        f"next:   fastkernels-tune promote {number}"
        if campaign.policy.is_promotable
        else f"the policy {campaign.policy.name!r} ships no tables",
    ]
    terminal.result(document, "\n".join(lines))
    return 0


def spec_of(
    op: str, device: str, policy: Policy, bench: Bench, routes: Sequence[str], seed: int
) -> CampaignSpec:
    return plan.make(op, device, policy, bench.environment, routes=routes, seed=seed)


def drive_to(
    last: str,
    store: Store,
    number: str,
    bench: Bench,
    folder: Path,
    wall: float | None,
    peers: Mapping[str, str],
    terminal: Terminal,
    second: str | None = None,
) -> Campaign:
    """A campaign to the end of the stage `last`; `second` is another GPU at hand."""
    here = bench.environment.uuid
    until = None if wall is None else time.monotonic() + wall
    campaign = Campaign(store, number, folder / number, terminal.say, peers, (here,), until)
    spec = campaign.spec
    worker = Worker(store, spec.device, _queue(spec), bench, folder, terminal.say, peers)
    with ExitStack() as stack:
        other = None
        if second is not None:
            uuid = uuid_of(torch.device(second))
            campaign.at_hand = (here, uuid)
            # Its processes start when it has something to do.
            other_bench = stack.enter_context(Bench(second, spec.policy, seed=spec.seed))
            other = Worker(store, second, uuid, other_bench, folder, terminal.say, peers)
        lease = stack.enter_context(hold(store, number, terminal))
        promote.repair(campaign, lease)
        Controller(campaign, worker, lease, other).run(last)
    return campaign


@click.command()
@click.argument("campaign", required=False)
@folder_option
@storage_option
@json_option
@command
def status(campaign: str | None, folder: Path, storage: str | None, terminal: Terminal) -> int:
    """List campaigns, or show one: its stages, jobs and candidates."""
    with opened(folder, storage) as store:
        if campaign is None:
            rows = [
                {"campaign": row.id, "op": row.op, "device": row.device, "owner": row.owner,
                 "created": row.created.isoformat(timespec="seconds"), "events": row.events}
                for row in store.campaigns()
            ]  # fmt: skip
            lines = [
                f"{r['campaign']}  {r['op']}  {r['device']}  {r['created']}  {r['owner']}".rstrip()
                for r in rows
            ]
            terminal.result({"campaigns": rows}, "\n".join(lines) or "no campaigns")
            return 0
        store.check(campaign)
        view = Campaign(store, campaign, folder / campaign)
        jobs = Counter((row.kind, row.status) for row in store.jobs(campaign))
        stages = {name_of(stage): view.conclusion(name_of(stage)) for stage in STAGES}
        tried, spent = candidates.of_campaign(store, campaign), view.device_s()
        document = {
            "campaign": campaign,
            "op": view.spec.op,
            "device": view.spec.device,
            "policy": {"name": view.policy.name, "digest": view.policy.id},
            "stages": stages,
            "device_s": spent,
            "jobs": [{"stage": k, "status": s, "count": n} for (k, s), n in sorted(jobs.items())],
            "candidates": {c.id: str(c) for c in tried},
        }
        lines = [f"{campaign}: {view.spec.op} on {view.spec.environment.device}"]
        for name, conclusion in stages.items():
            counts = ", ".join(f"{n} {s}" for (k, s), n in sorted(jobs.items()) if k == name)
            seconds = f"{spent[name]:.1f} s" if name in spent else ""
            state = "ended" if conclusion else "open"
            lines.append(f"  {name:8} {state:6} {seconds:>9}  {counts}".rstrip())
        lines.append(f"  {_cost(view)}")
        lines += [f"  {c.id}  {c}" for c in tried]
        terminal.result(document, "\n".join(lines))
    return 0


@click.command("promote")
@click.argument("campaign")
@click.option(
    "--checkout",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Write to dispatch_tables/ there; default: the user's folder of tables.",
)
@click.option("--dry-run", is_flag=True, help="Judge everything, write nothing.")
@policy_option
@device_option
@folder_option
@storage_option
@json_option
@command
def promote_command(
    campaign: str,
    checkout: Path | None,
    dry_run: bool,
    policy_file: Path | None,
    device: str | None,
    folder: Path,
    storage: str | None,
    terminal: Terminal,
) -> int:
    """Put a campaign's table into place, if every workload of every list is right."""
    with opened(folder, storage) as store:
        store.check(campaign)
        view = Campaign(store, campaign, folder / campaign, terminal.say)
        with hold(store, campaign, terminal) as lease:
            mended = promote.repair(view, lease)
            if mended:
                terminal.say(f"an interrupted promotion was {mended}")
            promote.require_promotable(view, promote.current_policy(view, policy_file))
            paths = promote.targets(view, checkout)
            where = device_of(device or view.spec.device)
            with Bench(where, view.policy, seed=view.spec.seed) as bench:
                require_same(view.spec, bench.environment)
                worker = Worker(store, where, _queue(view.spec), bench, folder, terminal.say)
                swept = Controller(view, worker, lease).sweep(promote_stage)
            promote.require_right(view, swept)
            terminal.say(f"{swept['judged']} of {swept['expected']} workloads are right")
            if dry_run:
                terminal.result({"campaign": campaign, **swept}, "nothing was written")
                return 0
            begun = promote.install(view, lease, paths)
    terminal.result(
        {"campaign": campaign, "promoted": begun["paths"], "exit_code": 0},
        "\n".join(f"{name}: {path}" for name, path in begun["paths"].items()),
    )
    return 0


@click.command("report")
@click.argument("campaign", required=False)
@folder_option
@storage_option
@json_option
@command
def report_command(
    campaign: str | None, folder: Path, storage: str | None, terminal: Terminal
) -> int:
    """Write the report of a campaign again, as far as it has come."""
    with opened(folder, storage) as store:
        number = campaign or last_campaign(store)
        found = report_stage.write(Campaign(store, number, folder / number, terminal.say))
    terminal.result(found, "\n".join(found.values()))
    return 0


@click.command()
@click.option("--once", is_flag=True, help="End when there is no job left.")
@policy_option
@device_option
@folder_option
@storage_option
@json_option
@command
def worker(
    once: bool,
    policy_file: Path | None,
    device: str | None,
    folder: Path,
    storage: str | None,
    terminal: Terminal,
) -> int:
    """Do jobs of the campaigns in a store, on this machine's GPU."""
    where = device_of(device)
    policy = policy_of(where, policy_file)
    done = 0
    with opened(folder, storage) as store, Bench(where, policy, seed=0) as bench:
        queue = bench.environment.device
        own = Worker(store, where, queue, bench, folder, terminal.say)
        while True:
            if own.once():
                done += 1
            elif once:
                break
            else:
                time.sleep(1)
    terminal.result({"jobs": done, "exit_code": 0}, f"{done} jobs")
    return 0


def _cost(campaign: Campaign) -> str:
    spent = campaign.device_s()
    parts = ", ".join(f"{kind} {seconds:.1f}" for kind, seconds in spent.items())
    return f"{sum(spent.values()):.1f} s on the device" + (f": {parts}" if parts else "")


def _queue(spec: CampaignSpec) -> str:
    return spec.environment.device


def _peers(given: Sequence[str]) -> dict[str, str]:
    found = {}
    for text in given:
        name, equals, target = text.partition("=")
        if not equals or ":" not in target:
            raise click.UsageError(f"--peer {text!r}: expected name=module:function")
        found[name] = target
    return found


def _describe(spec: CampaignSpec) -> str:
    return (
        f"{spec.op} on {spec.environment.device}: {len(spec.routes)} routes "
        f"({', '.join(spec.routes)}), {len(spec.regimes)} regimes, {len(spec.workloads)} workloads,"
        f" policy {spec.policy.name}"
    )
