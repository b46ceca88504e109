"""Staging: turns a rank's section for host memory into one for device memory.

A device's library works on device memory; the link and PolyCCL's arithmetic work on host memory. So where a step of the host names
device memory, it gets a *mirror* instead, a pinned stretch of the host's, and copies are put in between: from the device before
the host reads what only the device has, to the device before that reads what only the mirror has, and at the end for outputs.
Scratch that only the host uses needs no mirror: it is the host's altogether.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from fractions import Fraction

from ..spec import BY_KIND, Kind, Shape
from .plan import Buffer, Lane, Section, SectionBuilder, Slice, Step, Verb


class Memory(Enum):
    """Where a rank's input and output lie, and what carries its messages."""

    HOST = "host"
    DEVICE = "device"
    """On a device; messages of lane cross take the link."""
    DEVICE_MESSAGES = "device messages"
    """On a device, whose library has send and recv for the messages of lane cross: a plain communicator."""


def stage(section: Section, kind: Kind, rank: int, memory: Memory) -> Section:
    """The section of ``rank`` for input and output in ``memory``."""
    if memory is Memory.HOST:
        return section
    staged = _Staged(section, kind, rank, memory is Memory.DEVICE_MESSAGES)
    for step in section.steps:
        staged.take(step)
    staged.finish()
    return staged.out.build()


@dataclass
class _Staged:
    source: Section
    kind: Kind
    rank: int
    library_messages: bool
    out: SectionBuilder = field(init=False)
    _mirrors: dict[tuple[int, int], int] = field(default_factory=dict)
    _fresh: list[Slice] = field(default_factory=list)
    """Parts of device memory whose mirror is up to date."""
    _newer: list[Slice] = field(default_factory=list)
    """Parts of device memory that are out of date: their mirror has what the host wrote."""

    def __post_init__(self) -> None:
        source = self.source
        self.out = SectionBuilder(self.kind, self.rank, source.unit, source.chunk, source.ragged, scratch=list(source.scratch))
        for step in source.steps:
            if self._is_device_step(step):
                self.out.on_device |= {s.buffer - Buffer.SCRATCH for s in step.src + step.dst if s.buffer >= Buffer.SCRATCH}

    def take(self, step: Step) -> None:
        """Append a step, with the copies that it needs."""
        if step.verb is Verb.COPY:
            self._copy(step)
        elif self._is_device_step(step):
            self._bring(step.src + step.dst, step.lane)
            self.out.add(step)
            self._device_wrote(step.dst)
        else:
            self._host(step)

    def finish(self) -> None:
        """Bring to the device what the host wrote of the output."""
        outputs = tuple(s for s in self._newer if s.buffer == Buffer.OUTPUT)
        self._bring(outputs, Lane.CROSS if self.library_messages else Lane.POST)

    def _is_device_step(self, step: Step) -> bool:
        if step.verb in (Verb.SEND, Verb.RECV):
            return self.library_messages or step.lane is not Lane.CROSS
        return step.verb is Verb.LOCAL

    def _on_device(self, s: Slice) -> bool:
        return s.buffer < Buffer.SCRATCH or s.buffer - Buffer.SCRATCH in self.out.on_device

    def _copy(self, step: Step) -> None:
        """A copy is done wherever its ends are. Lane cross must not wait for a device: there it goes to lane pre where it can."""
        lane = step.lane
        if lane is Lane.CROSS and not self.library_messages and not self._touched(step):
            lane = Lane.PRE
        self._bring(step.src + step.dst, lane)
        self.out.add(replace(step, lane=lane))
        self._device_wrote(step.dst)

    def _bring(self, slices: tuple[Slice, ...], lane: Lane) -> None:
        """Copy to the device what it is about to read, where the mirror is newer."""
        late = [n for n in self._newer if any(self.out.overlap(n, s) for s in slices)]
        self._newer = [n for n in self._newer if n not in late]
        self.out.copy([(self._mirror(s), s) for s in late], lane)

    def _touched(self, step: Step) -> bool:
        """Whether a step of a later lane than pre has to do with what this one touches."""
        mine = step.src + step.dst
        return any(
            self.out.overlap(a, c) for other in self.out.steps if other.lane > Lane.PRE for a in other.src + other.dst for c in mine
        )

    def _host(self, step: Step) -> None:
        sources = tuple(self._read(s, step.lane) if self._on_device(s) else s for s in step.src)
        targets = tuple(self._mirror(s) if self._on_device(s) else s for s in step.dst)
        self.out.add(replace(step, src=sources, dst=targets))
        for s in step.dst:
            if self._on_device(s):
                self._newer = [n for n in self._newer if n != s]
                self._newer.append(s)
                self._fresh.append(s)

    def _read(self, s: Slice, lane: Lane) -> Slice:
        """The mirror of a part of device memory, up to date."""
        mirror = self._mirror(s)
        if not self._is_fresh(s):
            self._bring((s,), lane)
            writers = [other.lane for other in self.out.steps for d in other.dst if self.out.overlap(d, s)]
            first = lane if self.library_messages else Lane.PRE
            self.out.copy([(s, mirror)], max([first, *writers]))
            self._fresh.append(s)
        return mirror

    def _is_fresh(self, s: Slice) -> bool:
        """Whether parts whose mirror is up to date cover this one together."""
        reached = s.lo
        for f in sorted(self._fresh, key=lambda f: f.lo):
            if (f.buffer, f.block) == (s.buffer, s.block) and f.lo <= reached:
                reached = max(reached, f.hi)
        return reached >= s.hi

    def _mirror(self, s: Slice) -> Slice:
        place = (s.buffer, s.block if s.buffer < Buffer.SCRATCH else 0)
        if place not in self._mirrors:
            size = Fraction(1) if s.buffer < Buffer.SCRATCH else self.out.scratch[s.buffer - Buffer.SCRATCH]
            self._mirrors[place] = self.out.new_scratch(size).buffer
        return replace(s, buffer=self._mirrors[place], block=self._length_of(s))

    def _length_of(self, s: Slice) -> int:
        """In scratch of a ragged section, a block's number says whose length the slice has."""
        row = BY_KIND[self.kind]
        if not self.source.ragged or s.buffer >= Buffer.SCRATCH:
            return s.block
        if (row.input if s.buffer == Buffer.INPUT else row.output) is Shape.ONE:
            return self.rank
        both = row.input is Shape.BLOCKS and row.output is Shape.BLOCKS
        return ~s.block if both and s.buffer == Buffer.OUTPUT else s.block

    def _device_wrote(self, slices: tuple[Slice, ...]) -> None:
        """The device has new content there: mirrors have not."""
        self._fresh = [f for f in self._fresh if not any(self.out.overlap(f, s) for s in slices)]
        self._newer = [n for n in self._newer if not any(self.out.overlap(n, s) for s in slices)]


__all__ = ["Memory", "stage"]
