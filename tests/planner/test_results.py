"""Simulated plans give what the operation promises, for any shape, count, chunk and schedule."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_cases import COLLECTIVES, LAYOUTS, REDUCING, scenes, topologies

from polyccl.planner import Options, Request, Topology, plan
from polyccl.planner.payload import payload
from polyccl.planner.simulate import simulate
from polyccl.planner.verify import check, make_case
from polyccl.spec import BY_KIND, Kind, Reduction


@pytest.mark.parametrize("kind", COLLECTIVES, ids=lambda kind: kind.name.lower())
@given(data=st.data())
def test_every_collective_is_right_on_any_islands(kind: Kind, data: st.DataObject) -> None:
    topology = data.draw(topologies())
    scene = data.draw(scenes(topology, [kind]))
    seed = data.draw(st.integers(0, 1000))
    case = make_case(scene.request, topology, scene.counts, scene.options, seed=seed, in_place=scene.in_place)
    report = check(case, topology, window=data.draw(st.integers(1, 5)), seed=seed)
    counted = payload(topology, scene.request, scene.counts, scene.options)
    assert report.payload == {pair: size for pair, size in counted.items() if size}


@given(data=st.data())
def test_operations_in_flight_together_are_right(data: st.DataObject) -> None:
    topology = data.draw(topologies(most=8))
    chosen = data.draw(st.lists(scenes(topology, COLLECTIVES), min_size=2, max_size=4))
    cases = [
        make_case(scene.request, topology, scene.counts, scene.options, seed=index, in_place=scene.in_place)
        for index, scene in enumerate(chosen)
    ]
    window, seed = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 1000))
    simulate([case.call for case in cases], topology, window=window, seed=seed)
    for case in cases:
        case.verify()


@given(data=st.data())
def test_all_reduce_gives_all_ranks_the_same_bits(data: st.DataObject) -> None:
    topology = data.draw(topologies())
    scene = data.draw(scenes(topology, [Kind.ALL_REDUCE]))
    case = make_case(scene.request, topology, scene.counts, scene.options, in_place=scene.in_place)
    check(case, topology, seed=data.draw(st.integers(0, 1000)))
    assert len({output[0].tobytes() for output in case.call.outputs}) == 1


@pytest.mark.parametrize("kind", REDUCING, ids=lambda kind: kind.name.lower())
@given(data=st.data())
def test_strict_values_depend_on_neither_shape_nor_size(kind: Kind, data: st.DataObject) -> None:
    reduction = data.draw(st.sampled_from([Reduction.SUM, Reduction.AVG, Reduction.PREMUL_SUM, Reduction.PRODUCT]))
    ranks = data.draw(st.integers(2, 7))
    root = data.draw(st.integers(0, ranks - 1)) if BY_KIND[kind].rooted else -1
    length = data.draw(st.integers(1, 70))
    counts = [length] * ranks if BY_KIND[kind].ragged else length
    found = set()
    for chunk in (4, 64 * ranks, 1 << 16):
        labels = data.draw(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks).filter(lambda drawn: len(set(drawn)) > 1))
        topology = Topology.of_labels(labels)
        request = Request(kind, "float32", reduction, root, data.draw(st.booleans()))
        case = make_case(request, topology, counts, Options(chunk_bytes=chunk, deterministic=True), seed=5)
        check(case, topology, seed=chunk)
        found.add(b"".join(block.tobytes() for blocks in case.call.outputs for block in blocks))
    assert len(found) == 1


@pytest.mark.parametrize("labels", LAYOUTS)
@pytest.mark.parametrize("kind", COLLECTIVES, ids=lambda kind: kind.name.lower())
def test_known_layouts(labels: str, kind: Kind) -> None:
    topology = Topology.of_labels(labels)
    row, size = BY_KIND[kind], topology.size
    reduction = Reduction.SUM if row.reduces else Reduction.NONE
    for root in (0, size - 1) if row.rooted else (-1,):
        for small in (False, True):
            request = Request(kind, "int32", reduction, root, small)
            counts = [[a + b for b in range(size)] for a in range(size)] if kind is Kind.ALL_TO_ALL_V else 333
            if row.ragged and isinstance(counts, int):
                counts = [17 * rank for rank in range(size)]
            check(make_case(request, topology, counts, Options(chunk_bytes=256 * size)), topology)


@pytest.mark.parametrize("small", [False, True])
def test_one_rank_needs_no_one(small: bool) -> None:
    topology = Topology.singletons(1)
    for kind in COLLECTIVES:
        row = BY_KIND[kind]
        for reduction in (Reduction.SUM, Reduction.AVG, Reduction.PREMUL_SUM) if row.reduces else (Reduction.NONE,):
            request = Request(kind, "float16", reduction, 0 if row.rooted else -1, small)
            counts = [[50]] if kind is Kind.ALL_TO_ALL_V else [50] if row.ragged else 50
            report = check(make_case(request, topology, counts, Options(chunk_bytes=32)), topology)
            assert report.messages == 0


@pytest.mark.parametrize("labels", ["AABB", "ABC", "AAB"])
def test_send_reaches_its_peer_on_the_right_lane(labels: str) -> None:
    topology = Topology.of_labels(labels)
    for receiver in range(topology.size):
        request = Request(Kind.SEND, "float32", root=receiver)
        report = check(make_case(request, topology, 1000, Options(chunk_bytes=128)), topology)
        inside = topology.island_of(receiver) == topology.island_of((receiver + 1) % topology.size)
        assert sum(report.payload.values()) == (0 if inside else 4000)


def test_a_float16_average_does_not_overflow_where_its_sum_would() -> None:
    topology = Topology.of_labels("AABBB")
    for kind in (Kind.ALL_REDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER):
        for small in (False, True):
            request = Request(kind, "float16", Reduction.AVG, 0 if kind is Kind.REDUCE else -1, small)
            case = make_case(request, topology, 90, Options(chunk_bytes=240))
            for blocks in case.call.inputs:
                for block in blocks:
                    block[...] = 40000
            simulate([case.call], topology)
            for blocks in case.call.outputs:
                assert all(np.allclose(block, 40000, rtol=1e-2) for block in blocks)


def test_integer_averages_truncate_towards_zero() -> None:
    topology = Topology.of_labels("AAB")
    case = make_case(Request(Kind.ALL_REDUCE, "int32", Reduction.AVG), topology, 3)
    for rank, blocks in enumerate(case.call.inputs):
        blocks[0][...] = [-rank - 1, rank, 3]
    case.call.inputs[0][0][0] = -2
    simulate([case.call], topology)
    assert case.call.outputs[2][0].tolist() == [-2, 1, 3]


def test_what_no_plan_exists_for_is_refused() -> None:
    two = Topology.of_labels("AB")
    with pytest.raises(ValueError, match="needs no bridge"):
        plan(Request(Kind.ALL_REDUCE, "int32", Reduction.SUM), Topology(((0, 1),)), 0)
    with pytest.raises(ValueError, match="no rank 7"):
        plan(Request(Kind.BROADCAST, "int32", root=7), two, 0)
    with pytest.raises(ValueError, match="no rank 2"):
        plan(Request(Kind.BARRIER), two, 2)
    with pytest.raises(ValueError, match="unknown dtype"):
        plan(Request(Kind.ALL_GATHER, "float13"), two, 0)
    with pytest.raises(ValueError, match="with itself"):
        plan(Request(Kind.SEND, "int32", root=1), two, 1)
    for islands in (((1, 0),), ((0, 2), (2, 1)), ((1,), (0,)), ((0,), ()), ()):
        with pytest.raises(ValueError, match="islands"):
            Topology(islands)
