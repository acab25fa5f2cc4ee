"""Labelled inputs for tests and benchmarks of abn: shape and negative slope."""

CASES: dict[str, tuple[tuple[int, ...], float | None]] = {
    "stem": ((4, 64, 56, 56), 1e-2),
    "block": ((2, 128, 28, 28), 1e-3),
    "no_activation": ((2, 16, 7, 7), None),
    "public_v2_slope": ((3, 5, 6, 4), 1e-6),
    "one_channel": ((5, 1, 3, 3), 1e-2),
    "one_sample": ((1, 7, 5, 3), 1e-3),
    "one_pixel": ((6, 8, 1, 1), 1e-3),
    "width_of_xl": ((2, 83, 9, 11), 1e-3),
    "vector": ((16, 12), 1e-2),
}
