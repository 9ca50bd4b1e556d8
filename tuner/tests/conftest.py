from __future__ import annotations

from collections.abc import Iterator

import pytest

from fastkernels import catalog
from fastkernels.core import dispatch
from tuner.tests.toy import OPERATOR


@pytest.fixture(scope="session", autouse=True)
def _no_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Neither tables nor variables of the machine; kernels that it has compiled are welcome. And
    one thread for each process that tests start: two that wait for each other on busy cores cost
    10 times one, and some tests compare times."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TABLES", "CHECK", "STRICT", "LOG"):
            patch.delenv(f"FASTKERNELS_{name}", raising=False)
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.getbasetemp() / "no-user-data"))
        dispatch.reload_tables()
        yield
    dispatch.reload_tables()


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalog knows the toy operator alone."""
    monkeypatch.setattr(catalog, "OPERATORS", (OPERATOR,))
