"""Expert parallelism: experts that replicas divide."""
