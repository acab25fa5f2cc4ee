"""Training and evaluation: configurations, recipes, the loops, and the files of a run.

| to change | file |
|---|---|
| a recipe | `recipes.py` |
| an option, or options that exclude each other | `config.py`, or `tresnet/settings/` |
| what an option becomes if it is left open; what a resumed run may change | `resolve.py` |
| the order of a run: data, model, step, loop, end | `train.py` |
| how the model and the training step are built | `run.py` |
| an epoch; when a run saves, stops or skips a step | `loop.py` |
| the checkpoints of a run, and how a run resumes | `recovery.py`, `state.py` |
| the files in a run's directory | `rundir.py`, `logs.py` |
| what a run shows | `train.py`, `loop.py`, `console.py` |
| the processes of a run, and signals to stop | `distributed.py` |
| a loss, a metric | `losses.py`, `evaluate.py` |
| micro-batches, `--batch-size auto`, advice about full memory | `batch_size.py`, `recovery.py` |
"""
