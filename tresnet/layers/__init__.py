"""The modules TResNet is assembled from, a thin file each."""
