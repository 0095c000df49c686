"""Tensor parallelism: matrices that processes share."""
