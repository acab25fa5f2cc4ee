"""Tensor operations: a definition in plain PyTorch each, with gradients and faster forms beside it."""
