"""Files of weights: finding them, reading them safely, renaming their keys, writing them."""
