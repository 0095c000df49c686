"""Helpers that several test modules share: oracles, small models and folders, programs that tests start."""
