"""Proof that training computes what plain PyTorch does: trained beside it, or recorded and compared tensor by tensor."""

from penstock.verify.training import VerifyTarget

__all__ = ["VerifyTarget"]
