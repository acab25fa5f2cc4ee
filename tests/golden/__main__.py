"""Write golden files again, after a change on purpose: `python -m tests.golden [NAME ...]`."""

import importlib
import json
import sys
from pathlib import Path

SOURCES = {
    "memory": "tests.memory.test_prediction",
    "recipes": "tests.engine.test_recipes",
    "zoo": "tests.models.test_zoo",
}

for name in sys.argv[1:] or SOURCES:
    values = importlib.import_module(SOURCES[name]).golden()
    path = Path(__file__).with_name(f"{name}.json")
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
