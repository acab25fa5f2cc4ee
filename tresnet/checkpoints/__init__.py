"""Files of weights: reading them safely, renaming their keys, writing them whole."""
