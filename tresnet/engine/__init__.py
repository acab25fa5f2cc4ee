"""Training and evaluation: configurations, recipes, the loops, and what a run leaves behind."""
