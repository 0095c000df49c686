"""Weights that are in host memory or on disk while no op reads them.

    memory.py       tensors in host memory or in files
    stored.py       a parameter: its values at home and on the device, and its gradient
    participant.py  the part in a step of one rank: fetches, drops, gradients that go home
    update.py       an update whose moments are in files, too
    store.py        the store of a process: what it refuses, and its parts above

Between two steps every parameter *is* its home: ``p.data`` and ``p.grad`` are in host memory or in a mapped file. So
optimizers, clipping, states and checkpoints see a plain model on the CPU, and need to know nothing of the store. Within a
step the ops read copies on the device, which come and go as `penstock.schedule.residency` says; without its copy a parameter
has its shape, and all its elements are one NaN (0 if it has whole numbers).

Gradients are added up by autograd in their own dtype and in the order of plain PyTorch: a stage whose next microbatches
add to sums at home gets these back first. So losses, gradients and updates have the bits of a pipeline without a store.
"""
