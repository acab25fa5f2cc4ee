"""Files of weights, in the order of the data: locate, read, rename, describe, fit, install.

`locate` finds a file by tag, path or hub name. `read` returns its tensors and what is beside them.
`rename` brings other programs' names to ours, by a table with a row for each format. `describe`
makes a `Checkpoint`, which says which model fits. `fit` compares its tensors with a model's and
installs them. `creation` builds the model too; `save` and `push` write files.
"""
