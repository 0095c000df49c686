"""Schedules that other projects make, read, proved, simulated and run beside plain PyTorch."""
