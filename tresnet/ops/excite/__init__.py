"""The gate of a squeeze and excitation (arXiv 1709.01507), which `tresnet.ops.abn` calls."""
