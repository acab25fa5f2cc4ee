"""Labelled inputs for tests and benchmarks of the blur: (N, C, H, W)."""

CASES: dict[str, tuple[int, int, int, int]] = {
    "stage_2": (2, 128, 56, 56),
    "odd": (2, 3, 7, 5),
    "non_square": (1, 8, 12, 6),
    "smallest": (1, 1, 2, 2),
    "one_row_out": (3, 2, 2, 9),
    "width_of_l": (1, 76, 14, 14),
}
