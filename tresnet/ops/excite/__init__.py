"""Functions that compute a squeeze and excitation (arXiv 1709.01507) for `tresnet.ops.abn`."""
