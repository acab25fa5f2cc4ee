"""Measure time, throughput and memory of models and operations, and record the results."""
