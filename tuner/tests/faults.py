"""Routes of gdn_decode that do what a kernel must not: loaded by candidate processes of the tests.

Each computes the right result by the safe route and then, or instead, does something else.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fastkernels import catalog
from fastkernels.core.route import ANY_DEVICE, Decline, Route

SAFE = catalog.operator("gdn_decode").safe_route
_calls = 0
_memo: dict[int, tuple[torch.Tensor, ...]] = {}


@dataclass(frozen=True)
class Config:
    """No knobs."""


def honest(inputs: Any, outputs: Any) -> None:
    SAFE.launch(inputs, outputs, None, SAFE.default_config)


def wrong(inputs: Any, outputs: Any) -> None:
    honest(inputs, outputs)
    outputs[0].mul_(1.05)


def later_wrong(inputs: Any, outputs: Any) -> None:
    """Right until its ninth call."""
    global _calls
    _calls += 1
    honest(inputs, outputs)
    if _calls > 8:
        outputs[0].mul_(1.05)


def by_way_of_scratch(inputs: Any, outputs: Any) -> None:
    scratch = torch.empty_like(outputs[1])
    honest(inputs, outputs)
    scratch.copy_(outputs[1])
    outputs[1].copy_(scratch)


def forgets_its_scratch(inputs: Any, outputs: Any) -> None:
    scratch = torch.empty_like(outputs[1])
    honest(inputs, outputs)
    outputs[1].copy_(scratch)


def nonfinite(inputs: Any, outputs: Any) -> None:
    honest(inputs, outputs)
    outputs[1][0, 1, 2, 3] = float("inf")


def drops_an_element(inputs: Any, outputs: Any) -> None:
    left = outputs[0][0, 0, 1, 7].clone()
    honest(inputs, outputs)
    outputs[0][0, 0, 1, 7] = left


def idles(inputs: Any, outputs: Any) -> None:
    pass


def mutates(inputs: Any, outputs: Any) -> None:
    honest(inputs, outputs)
    inputs.v[0, 0, 0, 5] += 1


def _spoil_beside(tensor: torch.Tensor, shift: int) -> None:
    element = tensor.as_strided((1,), (1,), tensor.storage_offset() + shift)
    element.view(torch.int16).bitwise_not_()


def overruns(inputs: Any, outputs: Any) -> None:
    honest(inputs, outputs)
    _spoil_beside(outputs[0], outputs[0].numel() + 3)


def underruns(inputs: Any, outputs: Any) -> None:
    honest(inputs, outputs)
    _spoil_beside(inputs.q, -1)


def reshapes(inputs: Any, outputs: Any) -> None:
    honest(inputs, outputs)
    outputs[0].resize_(outputs[0].numel())


def retypes(inputs: Any, outputs: Any) -> None:
    honest(inputs, outputs)
    outputs[0].data = outputs[0].float()


def raises(inputs: Any, outputs: Any) -> None:
    raise RuntimeError("this route does not feel like it")


def out_of_memory(inputs: Any, outputs: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 EiB")


def hangs(inputs: Any, outputs: Any) -> None:
    """With a child, which has to go as well."""
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"])
    print(f"child {child.pid}", flush=True)
    while True:
        time.sleep(0.05)


def crashes(inputs: Any, outputs: Any) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def leaves(inputs: Any, outputs: Any) -> None:
    honest(inputs, outputs)
    os._exit(0)


def forges(inputs: Any, outputs: Any) -> None:
    """An answer of its own making, on every socket there is."""
    text = b'{"nonce":"0","message":{"kind":"done","returned":[],"problem":null}}'
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                socket.socket(fileno=os.dup(fd)).sendall(len(text).to_bytes(4, "big") + text)
        except OSError:
            continue  # the one that listed the folder
    honest(inputs, outputs)


def prints(inputs: Any, outputs: Any) -> None:
    honest(inputs, outputs)
    for fd in (1, 2):
        os.write(fd, b'\x00\x00\x00\x04{"a"' * 100)


def dawdles(inputs: Any, outputs: Any) -> None:
    honest(inputs, outputs)
    time.sleep(0.05)


def remembers(inputs: Any, outputs: Any) -> None:
    """The result of the first call on the same address."""
    key = inputs.q.data_ptr()
    if key not in _memo:
        honest(inputs, outputs)
        _memo[key] = tuple(x.clone() for x in outputs)
    for output, kept in zip(outputs, _memo[key], strict=True):
        output.copy_(kept)


def stops_the_clock(inputs: Any, outputs: Any) -> None:
    time.perf_counter = lambda: 0.0
    honest(inputs, outputs)


# ---- on a GPU -----------------------------------------------------------------------------------


def asserts(inputs: Any, outputs: Any) -> None:
    """Loses the CUDA context."""
    honest(inputs, outputs)
    outputs[0].view(-1)[torch.full((1,), 1 << 40, device=outputs[0].device)].add_(1)


def sleeps(inputs: Any, outputs: Any) -> None:
    """Hours, on the device."""
    torch.cuda._sleep(1 << 44)


def asks_for_too_much(inputs: Any, outputs: Any) -> None:
    torch.empty(1 << 50, dtype=torch.uint8, device=outputs[0].device)


def lingers(inputs: Any, outputs: Any) -> None:
    """Goes on beside the call, and after it."""
    honest(inputs, outputs)

    def work() -> None:
        x = torch.zeros(1000, device=outputs[0].device)
        until = time.monotonic() + 0.02
        while time.monotonic() < until:
            x.add_(1)

    threading.Thread(target=work).start()


def route(call: Callable[[Any, Any], None], name: str = "", **options: Any) -> Route:
    def launch(inputs: Any, outputs: Any, workspace: Any, config: Any) -> None:
        call(inputs, outputs)

    return Route(name or call.__name__, "torch", ANY_DEVICE, Config(), launch, **options)


def _right_but(turns: dict[int, Callable[[Any, Any], None]]) -> Callable[[Any, Any], None]:
    """Honest, but for some calls of a process, counted from 1."""
    calls = 0

    def call(inputs: Any, outputs: Any) -> None:
        nonlocal calls
        calls += 1
        turns.get(calls, honest)(inputs, outputs)

    return call


def _drops_the_third() -> Callable[[Any, Any], None]:
    """Drops an element of a process's third call, and of each on the same inputs: which call
    repeats it, to tell a drop from a wrong number, depends on how many are judged together."""
    seen: list[torch.Tensor] = []

    def call(inputs: Any, outputs: Any) -> None:
        seen.append(inputs.q.clone())
        is_third = len(seen) >= 3 and torch.equal(inputs.q, seen[2])
        (drops_an_element if is_third else honest)(inputs, outputs)

    return call


def _prepare(key: Any, config: Any) -> None:
    raise RuntimeError("nvcc: error: expected a ';'")


def _crash(key: Any, config: Any) -> None:
    os.kill(os.getpid(), signal.SIGABRT)


ROUTES = {
    "gdn_decode": (
        *(
            route(call)
            for call in (
                honest, by_way_of_scratch, forgets_its_scratch, wrong, later_wrong,
                nonfinite, drops_an_element, idles, mutates, overruns,
                underruns, reshapes, retypes, raises, out_of_memory, hangs, crashes, leaves, forges,
                prints, dawdles, remembers, stops_the_clock, asserts, sleeps, asks_for_too_much,
                lingers,
            )
        ),
        route(_right_but({3: wrong}), "third_is_wrong"),
        route(_drops_the_third(), "third_drops"),
        route(_right_but({3: raises}), "third_raises"),
        route(_right_but({3: raises, 4: crashes}), "third_raises_fourth_crashes"),
        route(_right_but({3: crashes}), "third_crashes"),
        route(_right_but({3: asserts}), "third_asserts"),
        route(_right_but({3: hangs}), "third_hangs"),
        route(_right_but({2: wrong, 3: crashes}), "second_is_wrong_third_crashes"),
        route(honest, "does_not_compile", prepare=_prepare),
        route(honest, "crashes_the_compiler", prepare=_crash),
        route(honest, "declines", supports=lambda *_: Decline("serves nobody")),
    )
}  # fmt: skip


class Peer:
    """`bench/peers` in small: a call bound to inputs."""

    def __init__(self, inputs: Any, spoil: float) -> None:
        self.result: Any = None
        self.inputs, self.spoil = inputs, spoil

    def run(self) -> None:
        state = self.inputs.state.clone()
        given = self.inputs._replace(state=state)
        output, new_state = catalog.operator("gdn_decode").function(**given._asdict())
        self.result = (output * self.spoil).float(), new_state

    def outputs(self) -> Any:
        return self.result


def other(inputs: Any, mode: str) -> Peer:
    return Peer(inputs, 1.005)  # off by more than our limit, by less than a peer's


def wrong_other(inputs: Any, mode: str) -> Peer:
    return Peer(inputs, 1.5)


class SlowPeer(Peer):
    def run(self) -> None:
        super().run()
        time.sleep(0.02)


def slow_other(inputs: Any, mode: str) -> Peer:
    return SlowPeer(inputs, 1.005)
