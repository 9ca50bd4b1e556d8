from __future__ import annotations

import pytest

from fastkernels import catalog
from tuner.tests.toy import OPERATOR


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalog knows the toy operator alone."""
    monkeypatch.setattr(catalog, "OPERATORS", (OPERATOR,))
