"""Labelled inputs for tests and benchmarks of space-to-depth: (N, C, H, W), block size."""

CASES: dict[str, tuple[tuple[int, int, int, int], int]] = {
    "image_224": ((2, 3, 224, 224), 4),
    "non_square": ((3, 3, 32, 20), 4),
    "one_channel": ((1, 1, 8, 8), 4),
    "cifar_block_2": ((4, 3, 32, 32), 2),
    "odd_block": ((2, 5, 9, 6), 3),
}
