"""Settings that were renamed or removed, so that files of older versions stay readable."""

from typing import Any

from tresnet.errors import ConfigError

# A key is a former setting NAME, or NAME=VALUE for one of its values. The entry is what it is now,
# in the same form; None if it is no longer needed; or what to do if nothing replaces it.
CHANGES: dict[str, str | ConfigError | None] = {
    "impl=reference": "impl=plain",
    "new_head": None,  # follows from the classes of weights and data
    "recompute=outputs": ConfigError(
        "recompute 'outputs' was removed: start a new run with --recompute activations, and"
        " --grad-checkpointing if memory is short (--weights takes the best weights along)"
    ),
}


def translated(settings: dict[str, Any], source: str) -> dict[str, Any]:
    """Return settings as this version has them; ConfigError: a value was removed in `source`."""
    result = dict(settings)
    for old, new in CHANGES.items():
        name, is_value, text = old.partition("=")
        if name not in settings or (is_value and settings[name] != text):
            continue
        if isinstance(new, ConfigError):
            raise ConfigError(f"{source}: {new}")
        value = result.pop(name)
        if new is not None:
            now, _, replacement = new.partition("=")
            result[now] = replacement or value
    return result
