"""GPU selection, and poison in every tensor that the package allocates without writing it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fastkernels.core import dispatch

# Small products lose more to a second thread than they gain, above all beside other processes
# (attention cases on two busy cores: 34 s with two threads, 4 s with one).
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU tests are skipped, with a reason, where the GPU they need is absent."""
    count = torch.cuda.device_count()
    capability = torch.cuda.get_device_capability() if count else None
    needs = {
        "gpu": (count >= 1, "needs a GPU"),
        "multigpu": (count >= 2, "needs two GPUs"),
        "sm90": (capability == (9, 0), "needs compute capability 9.0"),
        "sm100": (capability == (10, 0), "needs compute capability 10.0"),
    }
    for item in items:
        for marker, (present, reason) in needs.items():
            if item.get_closest_marker(marker) and not present:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` gives NaN (123 for integers), so that an element nobody writes shows."""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(tensor: torch.Tensor) -> torch.Tensor:
        # requires_grad: Inductor of torch 2.10 allocates such ones while it traces.
        if tensor.requires_grad or tensor.device.type == "meta" or torch.compiler.is_compiling():
            return tensor
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 123)

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))


@pytest.fixture(autouse=True)
def fresh_dispatch(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """No test sees another's tables, selections or variables, nor the machine's."""
    for name in (
        "FASTKERNELS_TABLES",
        "FASTKERNELS_CHECK",
        "FASTKERNELS_STRICT",
        "FASTKERNELS_LOG",
        "FASTKERNELS_JIT",
        "FASTKERNELS_CACHE",
    ):
        monkeypatch.delenv(name, raising=False)
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path_factory.getbasetemp() / "no-user-data"))
    dispatch.reload_tables()
    yield
    dispatch.reload_tables()
