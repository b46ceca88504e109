"""Hypothesis profiles of the planner's tests: ``HYPOTHESIS_PROFILE=full`` tries many more cases than ``ci``, the default."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))  # planner_cases.py, which the tests share

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

settings.register_profile("ci", max_examples=60, deadline=None, derandomize=True, suppress_health_check=SLOW)
settings.register_profile("full", max_examples=3000, deadline=None, suppress_health_check=SLOW)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
