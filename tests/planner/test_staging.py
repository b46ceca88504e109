"""Plans for ranks on devices: the same results, and no step of the host touches device memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_cases import COLLECTIVES, scenes, topologies

from polyccl.planner import plan
from polyccl.planner.plan import Buffer, Lane, Section, Slice, Verb
from polyccl.planner.staging import Memory
from polyccl.planner.topology import Topology
from polyccl.planner.verify import check, make_case
from polyccl.spec import Kind


def on_device(section: Section, part: Slice) -> bool:
    return part.buffer < Buffer.SCRATCH or part.buffer - Buffer.SCRATCH in section.on_device


def check_places(section: Section, memory: Memory) -> None:
    for step in section.steps:
        places = {on_device(section, part) for part in step.src + step.dst}
        library = step.lane is not Lane.CROSS or memory is Memory.DEVICE_MESSAGES
        match step.verb:
            case Verb.LOCAL:
                assert False not in places
            case Verb.SEND | Verb.RECV:
                assert places == {library}
            case Verb.REDUCE | Verb.SCALE:
                assert places == {False}


@pytest.mark.parametrize("kind", COLLECTIVES, ids=lambda kind: kind.name.lower())
@given(data=st.data())
def test_devices_on_some_ranks_change_no_result(kind: Kind, data: st.DataObject) -> None:
    topology = data.draw(topologies())
    scene = data.draw(scenes(topology, [kind]))
    devices = data.draw(st.lists(st.sampled_from([Memory.HOST, Memory.DEVICE]), min_size=topology.size, max_size=topology.size))
    plans = {rank: plan(scene.request, topology, rank, scene.options, devices[rank]) for rank in range(topology.size)}
    for rank, memory in enumerate(devices):
        for section in plans[rank].sections() if memory is not Memory.HOST else ():
            check_places(section, memory)
    case = make_case(scene.request, topology, scene.counts, scene.options, in_place=scene.in_place, planner=plans.get)
    check(case, topology, window=data.draw(st.integers(1, 5)), seed=data.draw(st.integers(0, 1000)))


@pytest.mark.parametrize("kind", COLLECTIVES, ids=lambda kind: kind.name.lower())
@given(data=st.data())
def test_a_library_that_only_has_messages_does_every_collective_on_devices(kind: Kind, data: st.DataObject) -> None:
    topology = Topology.singletons(data.draw(st.integers(1, 5)))
    scene = data.draw(scenes(topology, [kind]))
    memory = Memory.DEVICE_MESSAGES
    plans = {rank: plan(scene.request, topology, rank, scene.options, memory) for rank in range(topology.size)}
    for written in plans.values():
        for section in written.sections():
            check_places(section, memory)
    case = make_case(scene.request, topology, scene.counts, scene.options, in_place=scene.in_place, planner=plans.get)
    check(case, topology, window=1, seed=data.draw(st.integers(0, 1000)))
