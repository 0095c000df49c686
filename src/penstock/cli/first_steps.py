"""Commands to start with, printed by ``penstock`` without arguments."""

from __future__ import annotations

from penstock import __version__

FIRST_STEPS = f"""\
Penstock {__version__}: train PyTorch models split into pipeline stages; see, prove and predict what the pipeline does.

Train something now: a small decoder on the source of Python, on two ranks, in about 90 s on two cores
    penstock train train.name=first

See where the time of that run went; runs/first/report.html shows more
    penstock trace runs/first

Prove that pipelined training equals plain PyTorch
    penstock verify --ranks 2

Plan a run: the layout of a model on machines, with its time and memory
    penstock plan runs/first/config.toml --cluster 'h100*8'

All commands: penstock --help; one of them: penstock COMMAND --help. In Python: help("penstock.Pipeline").
Documentation: README.md and docs/ in Penstock's repository and source distribution.
"""
