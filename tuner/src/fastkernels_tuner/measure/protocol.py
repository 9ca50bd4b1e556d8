"""What the broker and its processes say to each other: one reply to one request. Requests may be
sent before the replies to earlier ones have come; replies keep their order.

A frame is four bytes of length (big endian) and as many bytes of JSON: a message of a fixed schema
and a nonce, which the reply repeats. Nothing is ever unpickled. A candidate is told what to call
and where its tensors lie; neither seeds, nor expected results, nor which call is judged.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fastkernels_tuner.model import Cause, Failure, Knob, Workload

MAX_BYTES = 4 << 20
"""Of one frame; 10,000 timed calls take a tenth of that."""


class Message(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        ser_json_bytes="base64",
        val_json_bytes="base64",
    )


# ---- what is lent -------------------------------------------------------------------------------


class Lent(Message):
    """A tensor in a slot: `offset` and `nbytes` (first to last element) count bytes, `stride`
    elements."""

    name: str
    is_output: bool
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    nbytes: int


class Loan(Message):
    """Input sets of one problem, each in a slot of the slab. `results` names the tensors that a
    call returns, in order: outputs, or an input that it updates."""

    op: str
    mode: str
    slab: int
    slots: int
    slot_bytes: int
    tensors: tuple[Lent, ...]
    results: tuple[str, ...]
    scalars: dict[str, bool | int | float | str | None]


class FileBuffer(Message):
    """A slab on a CPU, as a file to map."""

    kind: Literal["file"] = "file"
    path: str
    nbytes: int


class CudaBuffer(Message):
    """A slab on a GPU: what torch's `UntypedStorage._share_cuda_` gives, for one process."""

    kind: Literal["cuda"] = "cuda"
    handle: bytes
    nbytes: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    is_synchronised: bool


Buffer = Annotated[FileBuffer | CudaBuffer, Field(discriminator="kind")]


# ---- to and from the nursery --------------------------------------------------------------------


class Spawn(Message):
    """Fork a process into a folder of its own. Its end of a socket follows, in a byte of its own.
    `limit_s` is how long it may take over one answer."""

    kind: Literal["spawn"] = "spawn"
    role: Literal["judge", "worker"]
    device: str
    folder: str
    limit_s: float


class Spawned(Message):
    kind: Literal["spawned"] = "spawned"
    pid: int


class Reap(Message):
    """Wait for a forked process to end."""

    kind: Literal["reap"] = "reap"
    pid: int
    timeout_s: float


class Reaped(Message):
    """How it ended, a signal as its negative number; None: it did not."""

    kind: Literal["reaped"] = "reaped"
    status: int | None


# ---- to and from a candidate --------------------------------------------------------------------


class Hello(Message):
    kind: Literal["hello"] = "hello"


class Ready(Message):
    kind: Literal["ready"] = "ready"
    timer: Literal["cupti", "wall", "none"]
    why: str = ""  # there is no timer


class Lane(Message):
    """What a step calls: a route with its config, or a peer by its `module:function`."""

    route: str = ""
    config: dict[str, Knob] = Field(default_factory=dict)
    peer: str = ""


class Open(Message):
    """Bind lanes to a loan and begin a series. `buffer` comes with a slab that the process has not
    mapped yet; `routes` names a module or file with further routes; `is_timed`: its steps are
    timed, which says nothing of what is judged."""

    kind: Literal["open"] = "open"
    loan: Loan
    buffer: Buffer | None
    lanes: tuple[Lane, ...]
    routes: str = ""
    is_timed: bool = True


class Problem(Message):
    """Why a lane or a call failed; after a fatal one the process is of no more use."""

    cause: Cause = Field(strict=False)
    message: str
    is_fatal: bool = False


class Opened(Message):
    """By lane why it cannot be called; `fault`: why the series could not begin, no lane's."""

    kind: Literal["opened"] = "opened"
    problems: tuple[Problem | None, ...]
    fault: str = ""


class Step(Message):
    """Call a lane on the contents of a slot. In a series that is timed every step is, whatever it
    is for."""

    kind: Literal["step"] = "step"
    lane: int
    slot: int


class Returned(Message):
    """What a call returned, by its metadata."""

    dtype: str
    shape: tuple[int, ...]


class Done(Message):
    kind: Literal["done"] = "done"
    returned: tuple[Returned, ...] = ()
    problem: Problem | None = None


class Collect(Message):
    kind: Literal["collect"] = "collect"


class Collected(Message):
    """Per step since the last `Open` or `Collect`: time (None where it failed or left no record),
    span and number of kernels, work on the device outside the timed call; functions that are not
    what they were when the process started."""

    kind: Literal["collected"] = "collected"
    us: tuple[float | None, ...]
    span_us: tuple[float | None, ...] = ()
    kernels: tuple[int, ...] = ()
    strays: tuple[int, ...] = ()
    tampered: tuple[str, ...] = ()


# ---- to and from the judge ----------------------------------------------------------------------


class Facts(Message):
    """Of device and installation, as `Environment` wants them."""

    kind: Literal["facts"] = "facts"
    device: str
    arch: str
    uuid: str
    driver: str
    versions: dict[str, str]
    timer: Literal["cupti", "wall", "none"]
    why: str = ""


class Lend(Message):
    kind: Literal["lend"] = "lend"
    workload: Workload = Field(strict=False)
    slots: int


class Lending(Message):
    kind: Literal["lending"] = "lending"
    loan: Loan


class Share(Message):
    """The slab, for one more process."""

    kind: Literal["share"] = "share"


class Shared(Message):
    kind: Literal["shared"] = "shared"
    buffer: Buffer


class Draw(Message):
    """A slot, and the seed whose inputs it gets."""

    slot: int
    seed: int


class Fill(Message):
    """Inputs and poisoned outputs into slots; `is_flipped`: with poison of which every element
    differs from that of the same seed otherwise."""

    kind: Literal["fill"] = "fill"
    draws: tuple[Draw, ...]
    is_flipped: bool = False


class Filled(Message):
    """`draw_s`: what a draw took that had the machine to itself, 0 where there was none."""

    kind: Literal["filled"] = "filled"
    draw_s: float


class Call(Message):
    """A call on a slot that came to its end."""

    slot: int
    returned: tuple[Returned, ...]


class Check(Message):
    """What calls did to slots that were filled together, and where `is_judged` whether their
    results are right. `allowance` widens the limits."""

    kind: Literal["check"] = "check"
    calls: tuple[Call, ...]
    is_judged: bool
    allowance: float


class Diagnose(Message):
    """After a flipped repetition of the call that was wrong: which elements nobody wrote."""

    kind: Literal["diagnose"] = "diagnose"
    slot: int
    allowance: float


class Digest(Message):
    """Of the results of the last call on a slot: what equal calls must give alike."""

    kind: Literal["digest"] = "digest"
    slot: int


class Digested(Message):
    kind: Literal["digested"] = "digested"
    digest: str


class Checked(Message):
    """Of one call. `worst`: the largest error in units of what is allowed."""

    kind: Literal["checked"] = "checked"
    failure: Failure | None = Field(default=None, strict=False)
    worst: float = 0.0


class Verdicts(Message):
    """Of calls in their order, up to the first that failed."""

    kind: Literal["verdicts"] = "verdicts"
    calls: tuple[Checked, ...]


class Ping(Message):
    """Is the device still there?"""

    kind: Literal["ping"] = "ping"


class Pong(Message):
    kind: Literal["pong"] = "pong"


class Fault(Message):
    """The judge could not do what it was asked."""

    kind: Literal["fault"] = "fault"
    cause: Cause = Field(strict=False)
    message: str


AnyMessage = Annotated[
    Spawn
    | Spawned
    | Reap
    | Reaped
    | Hello
    | Ready
    | Open
    | Opened
    | Step
    | Done
    | Collect
    | Collected
    | Facts
    | Lend
    | Lending
    | Share
    | Shared
    | Fill
    | Filled
    | Check
    | Diagnose
    | Digest
    | Digested
    | Checked
    | Verdicts
    | Ping
    | Pong
    | Fault,
    Field(discriminator="kind"),
]


class Envelope(Message):
    nonce: str
    message: AnyMessage


# ---- the channel --------------------------------------------------------------------------------


class Closed(Exception):
    """The other side is gone."""


class TimedOut(Exception):
    """Nothing came in time."""


class Malformed(Exception):
    """What came is no message of the protocol."""


class Channel:
    """One end of a stream socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def send(self, nonce: str, message: AnyMessage) -> None:
        """Raises Closed."""
        text = Envelope(nonce=nonce, message=message).model_dump_json().encode()
        if len(text) > MAX_BYTES:
            raise ValueError(f"a message of {len(text)} bytes, expected at most {MAX_BYTES}")
        try:
            self._socket.settimeout(None)
            self._socket.sendall(struct.pack(">I", len(text)) + text)
        except OSError as error:
            raise Closed(str(error)) from None

    def receive(self, timeout_s: float | None = None) -> Envelope:
        """Raises Closed, TimedOut, Malformed."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        (size,) = struct.unpack(">I", self._read(4, deadline))
        if size > MAX_BYTES:
            raise Malformed(f"a frame of {size} bytes, expected at most {MAX_BYTES}")
        try:
            return Envelope.model_validate_json(self._read(size, deadline))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise Malformed(f"{where}: {first['msg']}"[:200]) from None

    def send_fd(self, fd: int) -> None:
        """A file descriptor, after the message that announces it. Raises Closed."""
        try:
            socket.send_fds(self._socket, [b"."], [fd])
        except OSError as error:
            raise Closed(str(error)) from None

    def receive_fd(self) -> int:
        """Raises Closed."""
        try:
            self._socket.settimeout(None)
            _, fds, _, _ = socket.recv_fds(self._socket, 1, 1)
        except OSError as error:
            raise Closed(str(error)) from None
        if not fds:
            raise Closed("no file descriptor came")
        return fds[0]

    def close(self) -> None:
        self._socket.close()

    def _read(self, size: int, deadline: float | None) -> bytes:
        data = bytearray()
        while len(data) < size:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimedOut
            try:
                self._socket.settimeout(left)
                part = self._socket.recv(size - len(data))
            except TimeoutError:
                raise TimedOut from None
            except OSError as error:
                raise Closed(str(error)) from None
            if not part:
                raise Closed("the other side closed the connection")
            data += part
        return bytes(data)
