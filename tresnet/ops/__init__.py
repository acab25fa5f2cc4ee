"""Tensor operations: each defined in plain PyTorch, with gradients and faster forms beside."""
