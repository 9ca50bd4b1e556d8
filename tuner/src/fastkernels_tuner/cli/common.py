"""Options and manners that the commands share."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click
import torch

from fastkernels.core.device import named_device
from fastkernels.errors import ArgumentError
from fastkernels_tuner import policy
from fastkernels_tuner.controller import identity, is_alive
from fastkernels_tuner.errors import TunerError, UnfitError
from fastkernels_tuner.model import CampaignSpec, Environment, Policy
from fastkernels_tuner.store import Lease, LeaseTaken, Store
from fastkernels_tuner.terminal import Terminal

F = TypeVar("F", bound=Callable[..., Any])
INTERRUPTED = 130
LEASE_S = 20.0
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
ANY_PATH = click.Path(path_type=Path)

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
op_option = click.option("--op", required=True, help="Operator, e.g. gdn_decode.")
device_option = click.option("--device", default=None, help="cpu, cuda, cuda:1; default: a GPU.")
confirm_option = click.option(
    "--confirm-on",
    metavar="DEVICE",
    default=None,
    help="GPU of second sessions; default: another one of the same product, if there is one."
    " The campaign's own: no other one.",
)
policy_option = click.option("--policy", "policy_file", type=FILE, help="Rules of your own (TOML).")
folder_option = click.option(
    "--folder",
    default="tuning",
    show_default=True,
    type=ANY_PATH,
    help="Of campaigns and, without --storage, of their database.",
)
storage_option = click.option(
    "--storage", default=None, help="Database URL, e.g. postgresql+psycopg://host/name."
)


def command(function: F) -> F:
    """Errors of ours as a line (or JSON) and their exit status; the function returns the status."""

    @wraps(function)
    def run(*args: Any, as_json: bool, **options: Any) -> None:
        terminal = Terminal(as_json)
        try:
            status = function(*args, terminal=terminal, **options)
        except TunerError as error:
            terminal.error(str(error), error.exit_code)
            sys.exit(error.exit_code)
        except ArgumentError as error:  # fastkernels' own words about a name or a size
            terminal.error(str(error), 2)
            sys.exit(2)
        except KeyboardInterrupt:
            terminal.error("interrupted; `fastkernels-tune resume` goes on", INTERRUPTED)
            sys.exit(INTERRUPTED)
        sys.exit(status or 0)

    return run  # type: ignore[return-value]


def device_of(name: str | None) -> str:
    """`cpu`, or `cuda:i`. Raises UnfitError where there is no such GPU."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise click.UsageError(f"--device {name!r}: expected cpu, cuda or cuda:N")
    if device.type == "cpu":
        return "cpu"
    index = device.index or 0
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        raise UnfitError(f"there is no cuda:{index}: torch sees {count} GPUs")
    return f"cuda:{index}"


def second_gpu(device: str, wanted: str | None) -> str | None:
    """What `--confirm-on` says for a campaign on `device`: another GPU, or None."""
    chosen = None if wanted is None else device_of(wanted)
    if device in ("cpu", chosen):
        return None
    own = named_device(device)
    if chosen is None:
        others = (f"cuda:{index}" for index in range(torch.cuda.device_count()))
        return next((o for o in others if o != device and named_device(o) == own), None)
    if named_device(chosen) != own:
        product = named_device(chosen).product
        raise click.UsageError(f"--confirm-on {wanted}: it is {product}, expected {own.product}")
    return chosen


def policy_of(device: str, path: Path | None, trials: int | None = None) -> Policy:
    found = policy.read(path) if path is not None else policy.default(device)
    return found if trials is None else found.model_copy(update={"max_trials": trials})


@contextmanager
def opened(folder: Path, storage: str | None) -> Iterator[Store]:
    if storage is None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UnfitError(f"{folder} cannot be made: {error}") from error
        storage = f"sqlite:///{(folder / 'store.db').resolve()}"
    with Store.open(storage) as store:
        yield store


def hold(store: Store, number: str, terminal: Terminal) -> Lease:
    """The campaign's lease. What a process of this host held that is dead runs out in a while."""
    while True:
        try:
            return store.hold(number, identity(), LEASE_S)
        except LeaseTaken as error:
            if is_alive(error.owner):
                raise
            terminal.say(f"waiting for the lease of {error.owner}, which is dead, to run out")
            time.sleep(2)


def last_campaign(store: Store) -> str:
    rows = store.campaigns()
    if not rows:
        raise click.UsageError("there is no campaign yet: fastkernels-tune --op OP begins one")
    return max(rows, key=lambda row: row.created).id


def require_same(spec: CampaignSpec, now: Environment) -> None:
    """Times of two kinds of machines are never compared."""
    then = spec.environment
    for name in ("device", "arch", "driver", "versions", "code", "timer"):
        if getattr(then, name) != getattr(now, name):
            raise UnfitError(
                f"the campaign began with {name} = {getattr(then, name)}, this is"
                f" {getattr(now, name)}: begin a new one"
            )
