"""Training and evaluation: configurations, recipes, the loops, and what a run leaves behind.

| to change | file |
|---|---|
| a recipe | `recipes.py` |
| an option | `config.py`; one of the model, its images or its step: `tresnet/settings/` |
| which options exclude each other | `validate.py` |
| the phases of a run | `train.py`: `plan.py`, `prepare.py`, `loop.py`, and its `finish` |
| what an epoch does; when a run saves, stops or skips | `loop.py` |
| what a run saves, and how it is resumed | `recovery.py`, `state.py` |
| what a run's directory holds | `rundir.py`, `logs.py`, `picture.py` |
| what a run says | `words.py`, `console.py` |
| a loss, a metric | `losses.py`, `evaluate.py` |
| `--batch-size auto`, advice where the memory is full | `batch_size.py` |
"""
