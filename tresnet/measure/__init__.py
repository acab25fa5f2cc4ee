"""Benchmarks of models and operations: time, throughput, memory, and records of the results."""
