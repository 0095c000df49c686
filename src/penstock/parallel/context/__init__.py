"""Context parallelism: samples whose tokens replicas divide."""
