"""Data sets of images (class folders, label files, Hugging Face), transforms and loaders."""
