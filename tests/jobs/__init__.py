"""Tests with several processes: every operation, on every shape of islands, with real libraries."""
