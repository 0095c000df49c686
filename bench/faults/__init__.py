"""Faults injected into real runs, and their outcomes: one table, with one row per fault.

python -m bench.faults [--rows 1,4,7] [--quick] [--json]
"""
