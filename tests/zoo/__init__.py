"""A differential test: models drawn from a list of kinds of layers and habits, pipelined and in plain PyTorch."""
