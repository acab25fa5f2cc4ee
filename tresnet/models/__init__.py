"""TResNet: blocks, heads, the model and the table of its variants."""
