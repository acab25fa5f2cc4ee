"""What really happened: time, throughput and memory of runs, and the records that keep them."""
