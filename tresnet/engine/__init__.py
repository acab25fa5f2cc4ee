"""Training and evaluation: configurations, recipes, the loops, and the files of a run.

| to change | file |
|---|---|
| a recipe | `recipes.py` |
| an option, or options that exclude each other | `config.py`, or `tresnet/settings/` |
| the phases of a run | `train.py`, which calls `plan.py`, `prepare.py` and `loop.py` |
| an epoch; when a run saves, stops or skips a step | `loop.py` |
| the checkpoints of a run, and how a run resumes | `recovery.py`, `state.py` |
| the files in a run's directory | `rundir.py`, `logs.py` |
| what a run shows | `train.py`, `loop.py`, `console.py` |
| the processes of a run, and signals to stop | `distributed.py` |
| a loss, a metric | `losses.py`, `evaluate.py` |
| `--batch-size auto`, advice about full memory | `batch_size.py`, `recovery.py` |
"""
