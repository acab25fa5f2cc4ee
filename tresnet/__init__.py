"""TResNet image classifiers for GPUs."""
