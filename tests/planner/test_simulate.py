"""The simulator catches plans that are wrong: it is only a proof if it can fail."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_cases import COLLECTIVES, scenes, topologies

from polyccl.planner import Options, Request, Topology, plan
from polyccl.planner.plan import FORMAT_VERSION, Factor, Lane, Plan, SectionBuilder, Slice, Step, Verb, overlaps
from polyccl.planner.simulate import Deadlock, Mismatch, SimulationError, simulate
from polyccl.planner.verify import WrongResult, check, make_case
from polyccl.spec import Kind, Reduction

PAIR = Topology.singletons(2)


def gather_plans(write: Callable[[SectionBuilder, int], None], unit: int = 1) -> Callable[[int], Plan]:
    """Plans of an all_gather between two ranks, written by ``write(builder, rank)``."""

    def planned(rank: int) -> Plan:
        b = SectionBuilder(Kind.ALL_GATHER, rank, unit=unit)
        b.copy([(b.input(), b.output(rank))], Lane.CROSS)
        write(b, rank)
        return Plan("test", Kind.ALL_GATHER, Reduction.NONE, b.build())

    return planned


def run(planner: Callable[[int], Plan], topology: Topology = PAIR, kind: Kind = Kind.ALL_GATHER, count: int = 6) -> None:
    """Run and verify plans from elsewhere."""
    reduction = Reduction.SUM if kind is Kind.ALL_REDUCE else Reduction.NONE
    check(make_case(Request(kind, "float32", reduction), topology, count, planner=planner), topology)


def test_plans_from_elsewhere_are_run() -> None:
    def write(b: SectionBuilder, rank: int) -> None:
        b.send(b.input(), 1 - rank)
        b.recv(b.output(1 - rank), 1 - rank)

    run(gather_plans(write))


def test_two_that_send_before_they_receive_are_a_deadlock() -> None:
    """Each copies what it sends to scratch that what it receives overwrites, so the receives wait for the sends."""

    def write(b: SectionBuilder, rank: int) -> None:
        place = b.new_scratch(1)
        b.copy([(b.input(), place)], Lane.CROSS)
        b.send(place, 1 - rank)
        b.recv(place, 1 - rank)
        b.copy([(place, b.output(1 - rank))], Lane.CROSS)

    with pytest.raises(Deadlock, match=r"rank 0: operation 0 .*SEND peer 1 in lane cross waits for rank 1 to post"):
        run(gather_plans(write))


def test_a_message_that_no_one_takes_is_a_deadlock() -> None:
    def write(b: SectionBuilder, rank: int) -> None:
        if rank == 0:
            b.send(b.input(), 1)

    with pytest.raises(Deadlock, match="waits for rank 1"):
        run(gather_plans(write))


def test_ends_of_unequal_size_are_caught() -> None:
    def write(b: SectionBuilder, rank: int) -> None:
        b.send(b.input() if rank else b.input().part(0, Fraction(1, 2)), 1 - rank)
        b.recv(b.output(1 - rank), 1 - rank)

    with pytest.raises(Mismatch, match=r"sends 3 elements; .* receives 6 elements"):
        run(gather_plans(write, unit=2))


def test_overwritten_blocks_are_caught() -> None:
    def write(b: SectionBuilder, rank: int) -> None:
        b.send(b.input(), 1 - rank)
        b.recv(b.output(1 - rank), 1 - rank)
        b.copy([(b.output(rank), b.output(1 - rank))], Lane.CROSS)

    with pytest.raises(WrongResult, match="all_gather: block"):
        run(gather_plans(write))


def test_reading_scratch_that_no_one_wrote_is_caught() -> None:
    def write(b: SectionBuilder, rank: int) -> None:
        b.copy([(b.new_scratch(1), b.output(1 - rank))], Lane.CROSS)

    with pytest.raises(WrongResult, match="nan"):
        run(gather_plans(write))


def test_a_missing_dependency_is_caught_by_some_schedule() -> None:
    request = Request(Kind.ALL_REDUCE, "float32", Reduction.SUM)
    topology = Topology.of_labels("AAB")

    def careless(rank: int) -> Plan:
        good = plan(request, topology, rank)
        steps = tuple(replace(step, deps=()) if step.verb is Verb.REDUCE else step for step in good.main.steps)
        return replace(good, main=replace(good.main, steps=steps))

    def try_schedules() -> None:
        for seed in range(20):
            check(make_case(request, topology, 96, planner=careless), topology, seed=seed)

    with pytest.raises(WrongResult):
        try_schedules()


def test_unlike_local_steps_are_caught() -> None:
    topology = Topology.of_labels("AAB")

    def unlike(rank: int) -> Plan:
        b = SectionBuilder(Kind.ALL_REDUCE, rank)
        if rank < 2:
            b.local(Kind.ALL_REDUCE if rank else Kind.REDUCE, b.input(), b.output(), root=-1 if rank else 0)
        return Plan("unlike", Kind.ALL_REDUCE, Reduction.SUM, b.build())

    with pytest.raises(Mismatch, match="different local steps"):
        run(unlike, topology, Kind.ALL_REDUCE)


def test_a_rank_that_skips_a_local_step_is_a_deadlock() -> None:
    topology = Topology.of_labels("AAB")

    def skips(rank: int) -> Plan:
        b = SectionBuilder(Kind.ALL_REDUCE, rank)
        if rank == 0:
            b.local(Kind.ALL_REDUCE, b.input(), b.output())
        return Plan("skips", Kind.ALL_REDUCE, Reduction.SUM, b.build())

    with pytest.raises(Deadlock, match=r"waits for ranks \[1\]"):
        run(skips, topology, Kind.ALL_REDUCE)


def test_steps_only_wait_upstream() -> None:
    bad = Step(Verb.COPY, Lane.CROSS, deps=(1,))
    section = replace(SectionBuilder(Kind.ALL_GATHER, 0).build(), steps=(bad, bad))
    with pytest.raises(SimulationError, match="later"):
        run(lambda rank: Plan("bad", Kind.ALL_GATHER, Reduction.NONE, section))
    b = SectionBuilder(Kind.ALL_REDUCE, 0)
    b.local(Kind.ALL_REDUCE, b.input(), b.output(), lane=Lane.POST)
    with pytest.raises(ValueError, match="would wait for lane POST"):
        b.send(b.output(), 1)


def test_no_rank_leaves_a_barrier_before_all_have_come() -> None:
    """Tokens are sent after an island has met, and the second meeting waits for the tokens of the other islands."""
    topology = Topology.of_labels("AABB")
    for rank in range(4):
        written = plan(Request(Kind.BARRIER), topology, rank)
        steps = written.main.steps
        reached: set[int] = {len(steps) - 1}
        for position in reversed(range(len(steps))):
            if position in reached:
                reached |= set(steps[position].deps)
        received = {position for position, step in enumerate(steps) if step.verb is Verb.RECV}
        assert steps[-1].kind == steps[0].kind == Kind.BARRIER
        assert received <= reached
        assert len(received) == (1 if rank in (0, 2) else 0)
        assert all(0 in step.deps for step in steps if step.verb is Verb.SEND)


@given(data=st.data())
def test_ranks_of_an_island_have_the_same_local_steps(data: st.DataObject) -> None:
    topology = data.draw(topologies(most=8))
    scene = data.draw(scenes(topology, COLLECTIVES))
    for island in topology.islands:
        sequences = set()
        for rank in island:
            written = plan(scene.request, topology, rank, scene.options)
            local = [step for section in written.sections() for step in section.steps if step.verb is Verb.LOCAL]
            sequences.add(tuple((step.lane, step.kind, step.root) for step in local))
        assert len(sequences) == 1
        assert len(island) > 1 or sequences == {()}


@given(data=st.data())
def test_an_encoded_plan_reads_back_the_same(data: st.DataObject) -> None:
    topology = data.draw(topologies(most=8))
    scene = data.draw(scenes(topology, COLLECTIVES))
    written = plan(scene.request, topology, data.draw(st.integers(0, topology.size - 1)), scene.options)
    assert decode(written.encode(), written.name) == written


def decode(data: bytes, name: str) -> Plan:
    """The inverse of `Plan.encode`, which has no names."""
    words = iter(array("q", data))

    def slices() -> tuple[Slice, ...]:
        return tuple(
            Slice(next(words), next(words), Fraction(next(words), next(words)), Fraction(next(words), next(words)))
            for _ in range(next(words))
        )

    def step() -> Step:
        verb, lane, kind, root, peer, factor, ordinal = (next(words) for _ in range(7))
        src, dst = slices(), slices()
        deps = tuple(next(words) for _ in range(next(words)))
        return Step(Verb(verb), Lane(lane), src, dst, kind, root, peer, Factor(factor), ordinal, deps)

    assert next(words) == FORMAT_VERSION
    kind, reduction, count = Kind(next(words)), Reduction(next(words)), next(words)
    sections = []
    for _ in range(count):
        b = SectionBuilder(kind, 0, next(words), next(words), bool(next(words)))
        for number in range(next(words)):
            b.scratch.append(Fraction(next(words), next(words)))
            b.on_device |= {number} if next(words) else set()
        b.steps = [step() for _ in range(next(words))]
        sections.append(b.build())
    assert next(words, None) is None
    return Plan(name, kind, reduction, sections[0], sections[1] if count > 1 else None)


def test_uneven_partitions_meet_in_the_least_number_of_segments() -> None:
    assert len(overlaps(6, 2)) == 6
    assert len(overlaps(8, 3)) == 10
    assert [(i, j) for i, j, _, _ in overlaps(3, 2)] == [(0, 0), (1, 0), (1, 1), (2, 1)]


def test_an_iteration_waits_for_the_window() -> None:
    """With a window of one, nothing overlaps, and still all ends."""
    topology = Topology.of_labels("AABBC")
    request = Request(Kind.ALL_REDUCE, "int32", Reduction.SUM)
    cases = [make_case(request, topology, 500, Options(chunk_bytes=128), seed=seed) for seed in range(3)]
    simulate([case.call for case in cases], topology, window=1)
    for case in cases:
        case.verify()
