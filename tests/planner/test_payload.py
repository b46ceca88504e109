"""Plans for bandwidth reach the bounds on bytes over the link, and keep to their bounds on scratch."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_cases import BOUNDED, LAYOUTS, options, scenes, topologies

from polyccl.planner import Options, Request, Topology, plan, small
from polyccl.planner.payload import Counts, bound, describe, payload, traffic
from polyccl.planner.verify import check, make_case
from polyccl.spec import BY_KIND, Kind, Reduction

KIB = 1024


def request_of(kind: Kind, root: int) -> Request:
    """A bandwidth request of float32."""
    row = BY_KIND[kind]
    return Request(kind, "float32", Reduction.SUM if row.reduces else Reduction.NONE, root if row.rooted else -1)


def even_counts(kind: Kind, size: int, count: int) -> Counts:
    """``count`` elements in every block."""
    if kind is Kind.ALL_TO_ALL_V:
        return [[count] * size for _ in range(size)]
    return [count] * size if BY_KIND[kind].ragged else count


@pytest.mark.parametrize("kind", BOUNDED, ids=lambda kind: kind.name.lower())
@given(data=st.data())
def test_payload_equals_the_bound(kind: Kind, data: st.DataObject) -> None:
    topology = data.draw(topologies(most=14))
    request = request_of(kind, data.draw(st.integers(0, topology.size - 1)))
    chosen = data.draw(options(topology.size, deterministic=False))
    unit = plan(request, topology, 0, chosen).main.unit
    counts = even_counts(kind, topology.size, unit * data.draw(st.integers(0, 9)))
    assert traffic(topology, payload(topology, request, counts, chosen)) == bound(topology, request, counts)


@given(data=st.data())
def test_ragged_payload_equals_the_bound(data: st.DataObject) -> None:
    topology = data.draw(topologies())
    scene = data.draw(scenes(topology, [Kind.ALL_GATHER_V, Kind.REDUCE_SCATTER_V, Kind.ALL_TO_ALL_V]))
    chosen = data.draw(options(topology.size, deterministic=False))
    counted = traffic(topology, payload(topology, scene.request, scene.counts, chosen))
    assert counted == bound(topology, scene.request, scene.counts)


@pytest.mark.parametrize("labels", LAYOUTS)
@pytest.mark.parametrize("kind", BOUNDED, ids=lambda kind: kind.name.lower())
def test_payload_of_any_count_is_within_two_percent(labels: str, kind: Kind) -> None:
    topology = Topology.of_labels(labels)
    request = request_of(kind, 1)
    counts = even_counts(kind, topology.size, 256 * KIB * len(topology.islands) // 4 + 13)
    counted = traffic(topology, payload(topology, request, counts))
    for island, least in zip(counted, bound(topology, request, counts), strict=True):
        assert island.leave <= least.leave * Fraction(102, 100)
        assert island.enter <= least.enter * Fraction(102, 100)


def test_the_bounds_of_well_known_cases() -> None:
    size = 4800
    uneven = Topology.of_labels("AAAAAABB")
    gathered = bound(uneven, Request(Kind.ALL_GATHER, "uint8"), size // 8)
    assert [(t.leave, t.enter) for t in gathered] == [(size * 3 // 4, size // 4), (size // 4, size * 3 // 4)]
    scattered = bound(uneven, Request(Kind.REDUCE_SCATTER, "uint8", Reduction.SUM), size // 8)
    assert [(t.leave, t.enter) for t in scattered] == [(size // 4, size * 3 // 4), (size * 3 // 4, size // 4)]
    for labels in ("ABC", "AABBC", "AAAABCCDDE"):
        topology = Topology.of_labels(labels)
        islands = len(topology.islands)
        request = Request(Kind.ALL_REDUCE, "uint8", Reduction.SUM)
        counted = traffic(topology, payload(topology, request, size))
        assert max(t.leave for t in counted) == Fraction(2 * (islands - 1) * size, islands)
    with pytest.raises(ValueError, match="no bound"):
        bound(uneven, Request(Kind.BARRIER), 0)
    with pytest.raises(ValueError, match="not a collective"):
        payload(uneven, Request(Kind.SEND, "uint8", root=0), 1)


def test_all_ranks_of_two_islands_share_the_link() -> None:
    """6 + 2 ranks: six segments, each between a pair of its own."""
    topology = Topology.of_labels("AAAAAABB")
    plans = [plan(Request(Kind.ALL_REDUCE, "float32", Reduction.SUM), topology, rank) for rank in range(8)]
    assert {written.name for written in plans} == {"all_reduce.rails"}
    assert [len({step.peer for step in written.main.steps if step.peer >= 0}) for written in plans] == [1] * 6 + [3] * 2


def test_islands_without_a_common_length_meet_by_leaders_or_blocks() -> None:
    topology = Topology.of_labels("A" * 5 + "B" * 7 + "C" * 9)
    few = Options(chunk_bytes=256)
    names = {kind: plan(request_of(kind, 0), topology, 3, few).name for kind in BOUNDED}
    assert names[Kind.ALL_REDUCE] == "all_reduce.leaders"
    assert names[Kind.BROADCAST] == "broadcast.leader_chain"
    assert names[Kind.REDUCE] == "reduce.leader_chain"
    assert names[Kind.ALL_GATHER] == "all_gather.by_block"
    assert names[Kind.REDUCE_SCATTER] == "reduce_scatter.by_block"
    for kind in (Kind.ALL_REDUCE, Kind.REDUCE, Kind.BROADCAST, Kind.ALL_GATHER, Kind.REDUCE_SCATTER):
        check(make_case(request_of(kind, 20), topology, 100, few), topology)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("labels", LAYOUTS)
def test_scratch_keeps_to_its_bound_whatever_the_count(labels: str, strict: bool) -> None:
    topology = Topology.of_labels(labels)
    bounded = Options(scratch_bytes=16 * KIB, deterministic=strict)
    for kind in BOUNDED:
        for count in (4000, 16000):
            case = make_case(request_of(kind, 0), topology, even_counts(kind, topology.size, count), bounded)
            assert check(case, topology).scratch_bytes <= 16 * KIB


@given(data=st.data())
def test_all_ranks_agree_on_unit_chunk_and_algorithm(data: st.DataObject) -> None:
    topology = data.draw(topologies())
    scene = data.draw(scenes(topology, BOUNDED))
    plans = [plan(scene.request, topology, rank, scene.options) for rank in range(topology.size)]
    assert len({(p.name, *((s.unit, s.chunk, s.ragged) for s in p.sections())) for p in plans}) == 1
    assert plans[0].main.chunk % plans[0].main.unit == 0


def test_few_bytes_take_the_plan_with_one_crossing() -> None:
    default = Options()
    assert small(Kind.ALL_REDUCE, 16 * KIB, default)
    assert not small(Kind.ALL_REDUCE, 16 * KIB + 1, default)
    assert not small(Kind.ALL_TO_ALL, 1, default)
    written = plan(Request(Kind.ALL_REDUCE, "float32", Reduction.SUM, small=True), Topology.of_labels("AABB"), 0)
    assert (written.name, written.main.chunk, written.main.unit, written.tail) == ("all_reduce.latency", 0, 1, None)


def test_a_plan_can_be_read() -> None:
    text = describe(plan(Request(Kind.ALL_REDUCE, "float32", Reduction.AVG), Topology.of_labels("AAB"), 0))
    assert text.startswith("all_reduce.rails (SUM)\n  main: chunks of ")
    assert "cross send   scratch0 to rank 2" in text.replace("scratch0[0:1/2]", "scratch0")
    assert "times average" in text
    assert "post  local  all_gather output[0:1/2] -> output" in text
