"""Measured time, throughput and memory of models and operations, and their records."""
