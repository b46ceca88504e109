"""The planner: pure functions that write the plan of a collective, and the simulator that proves it.

See ``docs/algorithms.md`` for the algorithms in pictures.
"""
