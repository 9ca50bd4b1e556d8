"""The judge: draws inputs, lends memory, knows what a call must give, and says what it did.

Before every call the lent outputs hold random plausible values, not NaN, which a kernel could tell
from a result. After every call whatever it may not write must have kept its bits: inputs, and guard
bytes around every tensor. Results are compared with float64 ones that were computed from inputs of
the judge's own, which no other process can reach.

Slots may be filled together, called on one after the other and checked together. What a call writes
into another's slot shows there. Where an operator can join calls, one look at all results tells
whether all are right; where it does not, each is looked at by itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import platform
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Literal, NamedTuple

import torch

from fastkernels import catalog
from fastkernels.core.problem import dtype_name
from fastkernels.ops._shared.compare import Error
from fastkernels.testing import cupti, workloads
from fastkernels.testing.record import environment
from fastkernels_tuner.measure import buffers
from fastkernels_tuner.measure.buffers import CudaSlab, FileSlab
from fastkernels_tuner.measure.guards import uuid_of
from fastkernels_tuner.measure.protocol import (
    AnyMessage,
    Buffer,
    Call,
    Channel,
    Check,
    Checked,
    Closed,
    Diagnose,
    Digest,
    Digested,
    Draw,
    Facts,
    Fault,
    Fill,
    Filled,
    Hello,
    Lend,
    Lending,
    Loan,
    Ping,
    Pong,
    Share,
    Shared,
    Verdicts,
)
from fastkernels_tuner.model import Cause, Failure, Workload

# What stands for an error without end; infinities are not JSON.
ENDLESS = 1e30
# Of the free memory what the slots of one loan may take together with what judging them needs.
_SHARE = 0.5
# Copies of a set beside the lent one: as drawn, as before the call, and float64 results of a pool,
# with it as it was.
_COPIES = 6
_JOINED_COPIES = 4  # more, where calls are joined
_LEAST_SLAB = 16 << 20  # a problem that is a little larger needs no new one
# Slots that are judged by one look take no more than this together: float64 results, and what is
# made of them on the way, take several times as much. A larger slot costs more than its launches.
_JOINED_BYTES = 1 << 28


class JudgeFailed(Exception):
    """The judge's own fault, or the machine's; never the candidate's."""

    def __init__(self, cause: Cause, message: str) -> None:
        super().__init__(message)
        self.cause = cause


def closeness(error: Error) -> float:
    """An error in units of its limit: beyond 1 is wrong."""
    if math.isnan(error.value):
        return math.inf
    if error.limit == 0:
        return math.inf if error.value else 0.0
    return error.value / error.limit


def plausible(tensor: torch.Tensor, rng: torch.Generator) -> None:
    """Fill with random values such as a result might hold."""
    if tensor.is_floating_point():
        halvings = torch.randint(5, (), generator=rng, device=rng.device)
        drawn = torch.randn(tensor.shape, generator=rng, device=tensor.device)
        tensor.copy_(drawn.mul_(torch.pow(0.5, halvings)))
    else:
        highest = 2 if tensor.dtype == torch.bool else min(torch.iinfo(tensor.dtype).max, 4096)
        tensor.copy_(torch.randint(highest, tensor.shape, generator=rng, device=tensor.device))


def flip(tensor: torch.Tensor) -> None:
    """Other values in every element, still plausible."""
    bits = _bits(tensor)
    if tensor.is_floating_point():
        bits.bitwise_xor_(torch.iinfo(bits.dtype).min if bits.dtype != torch.uint8 else 0x80)
    else:
        bits.bitwise_xor_(1)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(sizes[tensor.element_size()])


# ---- the judge ----------------------------------------------------------------------------------


@dataclass
class Drawn:
    """What lies in a slot: the seed's inputs, and, once somebody asked, the results they give."""

    seed: int
    inputs: Any
    expected: Any = None
    has_nan: bool = False  # in these results: no yardstick


@dataclass
class OnLoan:
    """The workload whose input sets are lent; what draws them by seed, what says what they give."""

    workload: Workload
    case: Any
    draw: Callable[[int], Any]
    expect: Callable[[Sequence[Any]], Sequence[Any]]
    loan: Loan
    join: Callable[[Sequence[Any]], Any]
    writable: frozenset[str]
    before: torch.Tensor  # [slots, bytes]: what lay in them before their calls
    drawn: dict[int, Drawn] = field(default_factory=dict)
    laid: dict[int, Draw] = field(default_factory=dict)  # what `before` is of
    joined: dict[tuple[Draw, ...], Any] = field(default_factory=dict)  # results of these together


@dataclass(frozen=True)
class Suspect:
    """A wrong call: its failure, and per output the elements that still held their poison."""

    failure: Failure
    untouched: Mapping[str, torch.Tensor]


class Kept(NamedTuple):
    """Bytes of some slots, a row each, from `start` on: as they are and as they have to be."""

    start: int
    found: torch.Tensor
    wanted: torch.Tensor


class Judge:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._slab: FileSlab | CudaSlab | None = None
        self._number = 0
        self._current: OnLoan | None = None
        self._suspect: Suspect | None = None

    def close(self) -> None:
        self._current = None
        if self._slab is not None:
            self._slab.close()
            self._slab = None

    # ---- lending --------------------------------------------------------------------------------

    def lend(self, workload: Workload, slots: int) -> Loan:
        """Lay a workload's input sets out, in at most so many slots; fewer where memory is scarce.
        The loan before is over."""
        self._current = self._suspect = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # a candidate needs memory, too
        operator = catalog.operator(workload.op)
        case, draw, expect = self._source(workload)
        # Sizes are those of every seed. The case's own is drawn on the CPU: of gdn_decode at batch
        # 1024 that took 1 s, more than a trial of a search measures.
        inputs = draw(case.seed ^ 1)
        problem = catalog.module(workload.op, "problem").bind(inputs, None, None)
        given = {
            argument.name: getattr(inputs, argument.name)
            for argument in (*operator.spec.inputs, *operator.spec.options)
        }
        tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
        lent = [(name, tensor, False) for name, tensor in tensors.items()]
        results = []
        for spec, tensor in zip(operator.spec.outputs, problem.outputs, strict=True):
            updated = next((name for name, x in tensors.items() if x is tensor), None)
            results.append(spec.name if updated is None else updated)
            if updated is None:
                lent.append((spec.name, tensor, True))
        layout, slot_bytes = buffers.lay_out(lent)
        copies = _COPIES + (_JOINED_COPIES if 2 * slot_bytes <= _JOINED_BYTES else 0)
        fit = int(_SHARE * self._free_bytes() / (slot_bytes * (1 + copies)))
        slots = max(1, min(slots, fit))
        self._provide(slots * slot_bytes)
        loan = Loan(
            op=workload.op,
            mode=case.mode,
            slab=self._number,
            slots=slots,
            slot_bytes=slot_bytes,
            tensors=layout,
            results=tuple(results),
            scalars={n: x for n, x in given.items() if not isinstance(x, torch.Tensor)},
        )
        writable = frozenset({*results, *(each.name for each in layout if each.is_output)})
        before = torch.empty((slots, slot_bytes), dtype=torch.uint8, device=self.device)
        join = workloads.load(workload.op).join
        self._current = OnLoan(workload, case, draw, expect, loan, join, writable, before)
        return loan

    def _source(
        self, workload: Workload
    ) -> tuple[Any, Callable[[int], Any], Callable[[Sequence[Any]], Sequence[Any]]]:
        """The case, and how inputs and, of several, results come about: on the device where the
        operator has a way to, results of adversarial ones always by the oracle."""
        if workload.listed == "adversarial":
            from fastkernels_tuner import trials  # late: it brings SciPy

            return (
                trials.case_of(workload),
                lambda seed: trials.draw(workload, seed, self.device)[0],
                workloads.load(workload.op).expect_by_oracle,
            )
        case, work = workload.build(), workloads.load(workload.op)

        def draw(seed: int) -> Any:
            if seed == case.seed:
                return work.own_inputs(case, self.device)
            return work.fresh_inputs(case, seed, self.device)

        return case, draw, lambda many: [work.expect(inputs) for inputs in many]

    def _free_bytes(self) -> int:
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            reserved = torch.cuda.memory_reserved(self.device)
            return free + reserved - torch.cuda.memory_allocated(self.device)
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def _provide(self, nbytes: int) -> None:
        """A slab of at least so many bytes: the one there is, or a larger one."""
        if self._slab is not None and self._slab.nbytes >= nbytes:
            return
        if self._slab is not None:
            self._slab.close()
            self._slab = None
        nbytes = max(nbytes, _LEAST_SLAB)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            self._slab = CudaSlab(nbytes, self.device)
        else:
            try:
                self._slab = FileSlab(nbytes)
            except OSError as error:
                raise JudgeFailed(Cause.DISK_FULL, str(error)) from None
        self._slab.bytes.random_(0, 256)  # what guards a tensor is no known pattern
        self._number += 1

    def share(self) -> Buffer:
        assert self._slab is not None, "nothing is lent"
        return self._slab.share()

    def slot(self, which: int) -> torch.Tensor:
        """Its bytes."""
        return self._slots[which]

    @property
    def _slots(self) -> torch.Tensor:
        """[slots, bytes]."""
        assert self._slab is not None
        shape = (self._now.loan.slots, self._now.loan.slot_bytes)
        return self._slab.bytes[: math.prod(shape)].view(shape)

    @property
    def _now(self) -> OnLoan:
        assert self._current is not None, "nothing is lent"
        return self._current

    def fill(self, draws: Sequence[Draw], is_flipped: bool = False) -> float:
        """Inputs of seeds and poisoned outputs into slots; seconds of a draw that was made alone.

        Draws are made one after the other: eight threads took 17 ms for each of 8 MB that one
        makes in 3 to 6 (an H200's host at c08d61c)."""
        now, took = self._now, 0.0
        fresh = [draw for draw in draws if not self._holds(draw)]
        for draw in fresh:
            now.drawn.pop(draw.slot, None)  # its memory may be needed
        if fresh:
            now.joined.clear()
            start = time.perf_counter()
            for draw in fresh:
                now.drawn[draw.slot] = Drawn(draw.seed, now.draw(draw.seed))
            self.synchronize()
            took = time.perf_counter() - start if len(fresh) == 1 else 0.0
        for draw in draws:
            # The next candidate's is there: one copy instead of some sixty launches.
            if is_flipped or now.laid.get(draw.slot) != draw:
                now.laid.pop(draw.slot, None)
                self._lay(draw, is_flipped)
                if not is_flipped:
                    now.laid[draw.slot] = draw
            self.slot(draw.slot).copy_(now.before[draw.slot])
        self.synchronize()
        return took

    def _holds(self, draw: Draw) -> bool:
        """Whether the slot's inputs are drawn by that seed already."""
        drawn = self._now.drawn.get(draw.slot)
        return drawn is not None and drawn.seed == draw.seed

    def _lay(self, draw: Draw, is_flipped: bool) -> None:
        """Drawn inputs, and poison, into memory that nobody else can write."""
        now, before = self._now, self._now.before[draw.slot]
        before.copy_(self.slot(draw.slot))  # guard bytes
        inputs = now.drawn[draw.slot].inputs
        rng = torch.Generator(self.device).manual_seed(draw.seed ^ 0x5DEECE66D)
        for lent in now.loan.tensors:
            view = buffers.view(before, lent)
            if lent.is_output:
                plausible(view, rng)
                if is_flipped:
                    flip(view)
                continue
            tensor = getattr(inputs, lent.name)
            found = (dtype_name(tensor.dtype), tuple(tensor.shape), tensor.stride())
            if found != (lent.dtype, lent.shape, lent.stride):
                raise JudgeFailed(
                    Cause.HARNESS_BUG,
                    f"{now.workload}: {lent.name!r} of seed {draw.seed} is {found[0]}{found[1]},"
                    f" expected {lent.dtype}{lent.shape} as of every seed",
                )
            view.copy_(tensor)

    # ---- judging --------------------------------------------------------------------------------

    def check(
        self, calls: Sequence[Call], is_judged: bool, allowance: float
    ) -> tuple[Checked, ...]:
        """What calls did to their slots since these were filled, up to the first that failed."""
        self.synchronize()
        self._suspect = None
        slots = [call.slot for call in calls]
        changed = self._changed(slots)
        unfit = [x or self._misshapen(c) is not None for x, c in zip(changed, calls, strict=True)]
        said: Error | None = None  # the worst of all, where something is wrong
        if is_judged and not any(unfit):
            worst = self._worst_of_all(slots)
            if worst is not None and closeness(worst) <= allowance:
                share = closeness(worst) / allowance
                return tuple(Checked(failure=None, worst=share) for _ in calls)
            said = worst
        if is_judged:
            self._now.joined.clear()  # what follows needs memory
            with contextlib.suppress(Exception):  # one by one, then, and in order
                self._expect(slots[: unfit.index(True) if any(unfit) else None])
        found = []
        for call, is_changed in zip(calls, changed, strict=True):
            try:
                found.append(self._check(call, is_changed, is_judged, allowance))
            except Exception as error:
                if said is None:
                    raise
                found.append(self._wrong_among(calls, said, error))
            if found[-1].failure is not None:
                break
        return tuple(found)

    def _wrong_among(self, calls: Sequence[Call], said: Error, fault: Exception) -> Checked:
        """One look said that something is wrong, and what each call should have given cannot be
        had: nobody knows whose it is, and it is final all the same."""
        checked = self._wrong(calls[0].slot, said)
        seeds = [self._now.drawn[call.slot].seed for call in calls]
        message = f"{checked.message}; in one of the calls of seeds {seeds}, which could not be"
        failure = checked.model_copy(update={"message": f"{message} told apart: {fault}"})
        return Checked(failure=failure, worst=ENDLESS)

    def _worst_of_all(self, slots: Sequence[int]) -> Error | None:
        """The error nearest to its limit, or farthest beyond, of the results in some slots, found
        by looking at them together; None where that cannot be, or does not tell whether all are
        right."""
        size = max(1, _JOINED_BYTES // self._now.loan.slot_bytes)
        if size == 1 or len(slots) <= 1:
            return None
        groups = [self._key(slots[i : i + size]) for i in range(0, len(slots), size)]
        joined = self._now.joined
        self._now.joined = {key: joined[key] for key in groups if key in joined}
        found: list[Error] = []
        for key in groups:
            try:
                errors = self._joined_errors(key)
            except Exception:  # of memory, say: each by itself needs less
                return None
            if errors is None:
                return None
            found += errors
        return max(found, key=closeness, default=None)

    def _key(self, slots: Sequence[int]) -> tuple[Draw, ...]:
        return tuple(Draw(slot=which, seed=self._now.drawn[which].seed) for which in slots)

    def _joined_errors(self, key: tuple[Draw, ...]) -> list[Error] | None:
        now, slots = self._now, [draw.slot for draw in key]
        if key not in now.joined:
            inputs = now.join([now.drawn[which].inputs for which in slots])
            expected = None if inputs is None else now.expect([inputs])[0]
            now.joined[key] = None if _has_nan(expected) else expected
        expected = now.joined[key]
        if expected is None:
            return None
        by_name = {lent.name: lent for lent in now.loan.tensors}
        results = tuple(
            torch.cat([buffers.view(self.slot(which), by_name[name]) for which in slots])
            for name in now.loan.results
        )
        errors: list[Error] = expected.judge(results)
        if now.case.source:
            official = expected.judge_official(results)
            if any(error.value != 0 for error in official):
                return None  # a share of all of them: one call's may be beyond its limit
            errors = [*errors, *official]
        return errors

    def _check(self, call: Call, is_changed: bool, is_judged: bool, allowance: float) -> Checked:
        """`is_changed`: something in the slot that the call may not write."""
        which = call.slot
        failure = self._trespass(which) if is_changed else self._misshapen(call)
        if failure is not None or not is_judged:
            return Checked(failure=failure)
        errors = self._errors(which)
        worst = max((closeness(error) for error in errors), default=0.0)
        wrong = [error for error in errors if not closeness(error) <= allowance]
        if wrong:
            failure = self._wrong(which, max(wrong, key=closeness))
            self._suspect = Suspect(failure, self._untouched(which))
        return Checked(failure=failure, worst=min(worst / allowance, ENDLESS))

    def diagnose(self, which: int, allowance: float) -> Checked:
        """The failure of the last wrong call, once it was repeated on flipped poison: an element
        that held its poison both times was not written."""
        suspect = self._suspect
        assert suspect is not None, "nothing was wrong"
        self.synchronize()
        again = self._untouched(which)
        dropped = {name: mask & again[name] for name, mask in suspect.untouched.items()}
        failure = suspect.failure
        for name, mask in dropped.items():
            count = int(mask.sum())
            if count:
                place = tuple(int(i) for i in mask.nonzero()[0])
                return Checked(
                    failure=failure.model_copy(
                        update={
                            "cause": Cause.DROPPED_ELEMENT,
                            "message": f"{self._now.loan.op}: {name!r}: {count} of {mask.numel()}"
                            f" elements were not written, the first at {place}",
                            "detail": {"output": name, "dropped": count, "first": list(place)},
                        }
                    ),
                    worst=ENDLESS,
                )
        errors = self._errors(which)
        is_right = all(closeness(error) <= allowance for error in errors)
        detail = {**failure.detail, "again": "right" if is_right else "wrong"}
        return Checked(failure=failure.model_copy(update={"detail": detail}), worst=ENDLESS)

    def digest(self, which: int) -> str:
        """SHA-256 of the bits of the results; of the indexer with every row sorted, since the order
        within a row is free."""
        self.synchronize()
        slot, total = self.slot(which), hashlib.sha256()
        by_name = {lent.name: lent for lent in self._now.loan.tensors}
        for name in self._now.loan.results:
            result = buffers.view(slot, by_name[name])
            if self._now.loan.op == "dsa_topk_indexer":
                result = result.sort(dim=-1).values
            total.update(result.contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return total.hexdigest()

    def _changed(self, slots: Sequence[int]) -> list[bool]:
        """Per slot whether a byte changed that its call may not write. Asks the device once, and
        about all of them together: every answer of its own is a synchronisation."""
        if not slots:
            return []
        first, last = min(slots), max(slots)
        kept = self._kept(slice(first, last + 1))
        answers = torch.stack([_differ(each.found, each.wanted) for each in kept]).any(0).tolist()
        return [bool(answers[which - first]) for which in slots]

    def _kept(self, which: slice) -> Iterator[Kept]:
        """What calls may not write, by address: all between the tensors that they may write, and
        between elements of these."""
        now, slots, before = self._now, self._slots[which], self._now.before[which]
        end = 0
        for lent in now.loan.tensors:
            if lent.name not in now.writable:
                continue
            yield Kept(end, slots[:, end : lent.offset], before[:, end : lent.offset])
            end = lent.offset + lent.nbytes
            if not buffers.is_dense(lent):
                apart, wanted = slots[:, lent.offset : end].clone(), before[:, lent.offset : end]
                moved = lent.model_copy(update={"offset": 0})
                for one, like in zip(apart, wanted, strict=True):
                    buffers.view(one, moved).copy_(buffers.view(like, moved))
                yield Kept(lent.offset, apart, wanted)
        yield Kept(end, slots[:, end:], before[:, end:])

    def _trespass(self, which: int) -> Failure:
        """The first byte that changed and that the call may not write; also where work that goes on
        after the call has put it back since."""
        now = self._now
        places = (
            kept.start + int(place)
            for kept in self._kept(slice(which, which + 1))
            for place in (kept.found != kept.wanted)[0].nonzero()[:1]
        )
        place = next(places, None)
        if place is None:
            return self._failure(
                which, Cause.OUT_OF_BOUNDS, "changed what it may not write, and changed it back"
            )
        lents = [lent for lent in now.loan.tensors if lent.offset <= place]
        if not lents:
            first = now.loan.tensors[0]
            where = f"{first.offset - place} bytes before {first.name!r}"
            return self._failure(which, Cause.OUT_OF_BOUNDS, f"wrote outside its tensors, {where}")
        lent = lents[-1]
        where = f"{lent.name!r}, {place - lent.offset} bytes from its start"
        if place >= lent.offset + lent.nbytes:
            past = place - lent.offset - lent.nbytes + 1
            where = f"{past} bytes past the end of {lent.name!r}"
            return self._failure(which, Cause.OUT_OF_BOUNDS, f"wrote outside its tensors, {where}")
        if lent.name in now.writable:
            return self._failure(which, Cause.OUT_OF_BOUNDS, f"wrote between elements of {where}")
        return self._failure(which, Cause.MUTATED_INPUT, f"changed {where}")

    def _misshapen(self, call: Call) -> Failure | None:
        loan, which, returned = self._now.loan, call.slot, call.returned
        by_name = {lent.name: lent for lent in loan.tensors}
        wanted = [by_name[name] for name in loan.results]
        if len(returned) != len(wanted):
            return self._failure(
                which, Cause.SHAPE, f"returned {len(returned)} tensors, expected {len(wanted)}"
            )
        for got, want in zip(returned, wanted, strict=True):
            if got.shape != want.shape:
                return self._failure(
                    which,
                    Cause.SHAPE,
                    f"{want.name!r} has shape {got.shape}, expected {want.shape}",
                )
            if got.dtype != want.dtype:
                return self._failure(
                    which, Cause.DTYPE, f"{want.name!r} is {got.dtype}, expected {want.dtype}"
                )
        return None

    def _expect(self, slots: Sequence[int]) -> None:
        """What calls on some slots have to give; kept as long as their inputs: the next candidate
        gets the same."""
        now = self._now
        missing = [now.drawn[w] for w in slots if now.drawn[w].expected is None]
        if not missing:
            return
        found = now.expect([drawn.inputs for drawn in missing])
        for drawn, expected in zip(missing, found, strict=True):
            drawn.expected, drawn.has_nan = expected, _has_nan(expected)

    def _errors(self, which: int) -> list[Error]:
        now, slot = self._now, self.slot(which)
        drawn = now.drawn[which]
        self._expect([which])
        if drawn.has_nan:  # the workload is at fault
            raise JudgeFailed(
                Cause.HARNESS_BUG,
                f"{now.workload}: the expected output of seed {drawn.seed} has NaN",
            )
        by_name = {lent.name: lent for lent in now.loan.tensors}
        results = tuple(buffers.view(slot, by_name[name]) for name in now.loan.results)
        errors: list[Error] = drawn.expected.judge(results)
        if now.case.source:
            errors = [*errors, *drawn.expected.judge_official(results)]
        return errors

    def _wrong(self, which: int, error: Error) -> Failure:
        if error.metric == "shape":
            cause = Cause.SHAPE
        else:
            cause = Cause.NUMERIC if math.isfinite(error.value) else Cause.NONFINITE
        detail = {
            "output": error.output,
            "metric": error.metric,
            "value": min(error.value, ENDLESS) if error.value == error.value else ENDLESS,
            "limit": error.limit,
        }
        text = f"{error.output}: {error.metric} {error.value:.3g}, at most {error.limit:.3g}"
        if error.got:
            detail |= {"at": list(error.at), "got": error.got, "want": error.want}
            text += f"; first at {error.at}: {error.got}, expected {error.want}"
        return self._failure(which, cause, text, detail)

    def _untouched(self, which: int) -> dict[str, torch.Tensor]:
        slot, before = self.slot(which), self._now.before[which]
        return {
            lent.name: _bits(buffers.view(slot, lent)) == _bits(buffers.view(before, lent))
            for lent in self._now.loan.tensors
            if lent.is_output
        }

    def _failure(
        self, which: int, cause: Cause, what: str, detail: dict[str, Any] | None = None
    ) -> Failure:
        now = self._now
        return Failure(
            cause=cause,
            message=f"{now.loan.op}: {what}",
            workload=now.workload.id,
            seed=now.drawn[which].seed,
            detail=detail or {},
        )

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def ping(self) -> None:
        """Raises where the device does not compute."""
        assert int(torch.ones(1000, device=self.device).sum()) == 1000


def _differ(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Per row whether any byte differs; by eight bytes at once where these are whole."""
    places = (*found.stride()[:-1], *wanted.stride()[:-1], found.shape[1])
    places += (int(found.storage_offset()), int(wanted.storage_offset()))
    if all(place % 8 == 0 for place in places):
        found, wanted = found.view(torch.int64), wanted.view(torch.int64)
    return (found != wanted).any(1)


def _has_nan(expected: Any) -> bool:
    output = getattr(expected, "output", None)
    return isinstance(output, torch.Tensor) and bool(output.isnan().any())


# ---- facts --------------------------------------------------------------------------------------


def facts(device: torch.device) -> Facts:
    found = environment(str(device))
    timer: Literal["cupti", "wall", "none"] = "wall"
    uuid, driver, why = platform.node(), "", ""
    if device.type == "cuda":
        uuid = uuid_of(device)
        driver = _driver(uuid)
        timer = "cupti"
        try:
            cupti.load()
        except cupti.CuptiMissing as error:
            timer, why = "none", str(error)
    versions = {name: str(found[name]) for name in ("fastkernels", "python", "torch", "cuda")}
    for package in ("triton", "apache-tvm-ffi", "nvidia-cutlass-dsl", "cupti-python"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return Facts(
        device="cpu" if device.type == "cpu" else found["device"],
        arch=found["arch"],
        uuid=uuid,
        driver=driver,
        versions=versions,
        timer=timer,
        why=why,
    )


def _driver(uuid: str) -> str:
    command = ["nvidia-smi", f"--id={uuid}", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"


# ---- the process --------------------------------------------------------------------------------


def answer(judge: Judge, message: AnyMessage) -> AnyMessage:
    """The reply to a request; what goes wrong here is never the candidate's fault."""
    try:
        return _answer(judge, message)
    except JudgeFailed as error:
        return Fault(cause=error.cause, message=str(error))
    except Exception as error:
        try:
            judge.synchronize()
        except Exception as lost:
            return Fault(cause=Cause.GPU_LOST, message=cupti.describe(lost))
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{cupti.describe(error)} ({where.filename}:{where.lineno})"
        return Fault(cause=Cause.HARNESS_BUG, message=text)


def _answer(judge: Judge, message: AnyMessage) -> AnyMessage:
    if isinstance(message, Fill):
        return Filled(draw_s=judge.fill(message.draws, message.is_flipped))
    if isinstance(message, Check):
        return Verdicts(calls=judge.check(message.calls, message.is_judged, message.allowance))
    if isinstance(message, Diagnose):
        return judge.diagnose(message.slot, message.allowance)
    if isinstance(message, Digest):
        return Digested(digest=judge.digest(message.slot))
    if isinstance(message, Lend):
        return Lending(loan=judge.lend(message.workload, message.slots))
    if isinstance(message, Share):
        return Shared(buffer=judge.share())
    if isinstance(message, Ping):
        judge.ping()
        return Pong()
    assert isinstance(message, Hello), message.kind
    return facts(judge.device)


def run(channel: Channel, device: torch.device) -> None:
    """Serve until the broker closes the connection."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    judge = Judge(device)
    try:
        while True:
            envelope = channel.receive()
            channel.send(envelope.nonce, answer(judge, envelope.message))
    except Closed:
        return
    finally:
        judge.close()
