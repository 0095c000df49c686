"""Recordings of what a run computes, and their comparison: the first tensor that differs."""
