"""Data: images in class folders, transforms, loaders, and the digits of scikit-learn."""
