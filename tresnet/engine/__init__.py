"""Training and evaluation: configurations, recipes, the loops, and what a run leaves behind.

| to change | file |
|---|---|
| a recipe | `recipes.py` |
| an option | `config.py`; one of the model, its images or its step: `tresnet/settings/` |
| which options exclude each other | `validate.py` |
| what an epoch does; when a run saves, stops or skips | `trainer.py` |
| what a run's directory holds | `rundir.py`, `logs.py`, `state.py` |
| a loss, a metric | `losses.py`, `evaluate.py` |
| `--batch-size auto`, advice where the memory is full | `batch_size.py` |
"""
