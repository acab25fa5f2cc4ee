"""TResNet: residual blocks, heads, the model class and the table of variants."""
