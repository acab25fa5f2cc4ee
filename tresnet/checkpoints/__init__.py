"""Functions that find, read, convert, check and write files of weights."""
