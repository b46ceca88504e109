"""The planner: pure functions that write the plan of a collective, and the simulator that proves it.

`plan` is the entry. ``plan.py`` defines what a plan is, ``topology.py`` who shares a library, ``all_reduce.py``, ``gathering.py``,
``rooted.py`` and ``direct.py`` hold the algorithms, ``payload.py`` counts bytes, and ``simulate.py`` (the only module that needs
NumPy) runs plans without processes. See ``docs/algorithms.md`` for the algorithms in pictures.
"""

from .planner import Options, Request, plan, small
from .topology import Topology

__all__ = ["Options", "Request", "Topology", "plan", "small"]
