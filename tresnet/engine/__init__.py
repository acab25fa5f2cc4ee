"""Training and evaluation: configurations, recipes, the loops, and the files of a run.

| to change | file |
|---|---|
| a recipe | `recipes.py` |
| an option | `config.py`; one of the model, its images or its step: `tresnet/settings/` |
| which options exclude each other | `validate.py` |
| the phases of a run | `train.py`: `plan.py`, `prepare.py`, `loop.py`, and its `finish` |
| an epoch; when a run saves, stops or skips | `loop.py` |
| the checkpoints of a run, and how it is resumed | `recovery.py`, `state.py` |
| the files in a run's directory | `rundir.py`, `logs.py` |
| the messages of a run | `words.py`, `console.py` |
| its processes, and signals to stop | `distributed.py` |
| a loss, a metric | `losses.py`, `evaluate.py` |
| `--batch-size auto`, advice about full memory | `batch_size.py` |
"""
