"""The Optuna studies of a campaign, which lie in the store's database; their names begin with the
campaign's id."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import make_url

from fastkernels_tuner.store.database import BUSY_S
from fastkernels_tuner.store.errors import StoreCorrupt, StoreVersionError

if TYPE_CHECKING:
    from optuna.storages import RDBStorage
    from optuna.trial import FrozenTrial


def study_storage(url: str, **options: Any) -> RDBStorage:
    """Optuna's storage in the store of that URL, which `Store.open` has prepared.

    `options` are RDBStorage's. Waits for locks as long as the store does, and survives a server
    that closed idle connections. Raises StoreVersionError if the tables are of another Optuna.
    """
    from optuna.storages import RDBStorage  # a third of a second that few commands need

    engine: dict[str, Any] = {"pool_pre_ping": True}
    if make_url(url).get_backend_name() == "sqlite":
        engine = {"connect_args": {"timeout": BUSY_S, "factory": _Connection}}
    # Optuna formats the URL, in which braces stand for themselves.
    escaped = url.replace("{", "{{").replace("}", "}}")
    try:
        return RDBStorage(escaped, engine_kwargs=engine, **options)
    except RuntimeError as error:
        raise StoreVersionError(str(error)) from error


class _Connection(sqlite3.Connection):
    """A trial is a dozen transactions, too many to wait for the disk each time: a process that dies
    loses none, and a machine that does loses the last ones, which cost a measurement."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.execute("PRAGMA synchronous = NORMAL")


@contextmanager
def opened(url: str) -> Iterator[RDBStorage]:
    """The same, closed at the end."""
    storage = study_storage(url)
    try:
        yield storage
    finally:
        storage.remove_session()
        storage.engine.dispose()


def dump(storage: RDBStorage, campaign: str) -> list[dict[str, Any]]:
    """The campaign's studies by name, as JSON: trials in order, numbers that may not be finite and
    attributes as text."""
    studies = [s for s in storage.get_all_studies() if s.study_name.startswith(campaign)]
    return [
        {
            "name": study.study_name,
            "directions": [direction.name for direction in study.directions],
            "user_attrs": _dump_attrs(study.user_attrs),
            "system_attrs": _dump_attrs(study.system_attrs),
            "trials": [
                _dump_trial(trial)
                for trial in sorted(
                    storage.get_all_trials(study._study_id, deepcopy=False), key=lambda t: t.number
                )
            ],
        }
        for study in sorted(studies, key=lambda s: s.study_name)
    ]


def load(storage: RDBStorage, campaign: str, studies: Iterable[dict[str, Any]]) -> None:
    """Puts these studies in the place of the campaign's."""
    from optuna.study import StudyDirection

    parsed = [(study, [_load_trial(trial) for trial in study["trials"]]) for study in studies]
    for old in storage.get_all_studies():
        if old.study_name.startswith(campaign):
            storage.delete_study(old._study_id)
    for study, trials in parsed:
        number = storage.create_new_study(
            [StudyDirection[name] for name in study["directions"]], study["name"]
        )
        for key, value in _load_attrs(study["user_attrs"]).items():
            storage.set_study_user_attr(number, key, value)
        for key, value in _load_attrs(study["system_attrs"]).items():
            storage.set_study_system_attr(number, key, value)
        for trial in trials:
            storage.create_new_trial(number, trial)


def verify(campaign: str, studies: Iterable[dict[str, Any]]) -> None:
    """Raises StoreCorrupt unless `load` can read them and they are the campaign's."""
    from optuna.study import StudyDirection

    try:
        for study in studies:
            if not study["name"].startswith(campaign):
                raise ValueError(f"study {study['name']} is not of campaign {campaign}")
            _ = [StudyDirection[name] for name in study["directions"]]
            _ = _load_attrs(study["user_attrs"]), _load_attrs(study["system_attrs"])
            for number, trial in enumerate(study["trials"]):
                if _load_trial(trial).number != number:
                    raise ValueError(f"trial {trial['number']} where {number} was expected")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise StoreCorrupt(f"{campaign}: a study is malformed: {error!r}") from error


def _dump_trial(trial: FrozenTrial) -> dict[str, Any]:
    from optuna.distributions import distribution_to_json

    return {
        "number": trial.number,
        "state": trial.state.name,
        "values": None if trial.values is None else [repr(value) for value in trial.values],
        "started": _dump_time(trial.datetime_start),
        "completed": _dump_time(trial.datetime_complete),
        # A list: samplers meet parameters in the order in which they were suggested.
        "params": [
            [name, distribution_to_json(trial.distributions[name]), json.dumps(value)]
            for name, value in trial.params.items()
        ],
        "user_attrs": _dump_attrs(trial.user_attrs),
        "system_attrs": _dump_attrs(trial.system_attrs),
        "intermediate": {str(step): repr(v) for step, v in trial.intermediate_values.items()},
    }


def _load_trial(data: dict[str, Any]) -> FrozenTrial:
    from optuna.distributions import json_to_distribution
    from optuna.trial import FrozenTrial, TrialState

    values = data["values"]
    return FrozenTrial(
        number=data["number"],
        state=TrialState[data["state"]],
        value=None,
        values=None if values is None else [float(value) for value in values],
        datetime_start=_load_time(data["started"]),
        datetime_complete=_load_time(data["completed"]),
        params={name: json.loads(value) for name, _, value in data["params"]},
        distributions={name: json_to_distribution(space) for name, space, _ in data["params"]},
        user_attrs=_load_attrs(data["user_attrs"]),
        system_attrs=_load_attrs(data["system_attrs"]),
        intermediate_values={int(s): float(v) for s, v in data["intermediate"].items()},
        trial_id=-1,
    )


def _dump_attrs(attrs: dict[str, Any]) -> dict[str, str]:
    return {key: json.dumps(value, sort_keys=True) for key, value in attrs.items()}


def _load_attrs(attrs: dict[str, str]) -> dict[str, Any]:
    return {key: json.loads(value) for key, value in attrs.items()}


def _dump_time(time: datetime | None) -> str | None:
    return None if time is None else time.isoformat()


def _load_time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)
