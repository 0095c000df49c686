"""Faults put into real runs, and what became of them: one table, one row a fault.

python -m bench.faults [--rows 1,4,7] [--quick] [--soak MINUTES] [--json]
"""
