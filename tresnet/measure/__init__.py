"""Measured time, throughput and memory of runs, and their records."""
