"""Records as `tresnet bench` writes them, with figures made up for the tests."""

import json

GPU = {"type": "cuda", "name": "Test GPU 80GB", "power_limit_w": 700.0}
CPU = {"type": "cpu"}


def step_row(model, images_per_s, **changes):
    """A row of bench_train or bench_infer; `images_per_s` None is out of memory."""
    ok = images_per_s is not None
    return {
        **{"model": model, "batch_size": 256, "input_size": 224, "amp": "bf16", "dtype": None},
        **{"channels_last": True, "compile": "none", "norm": None if ":" in model else "abn"},
        **{"fold": False, "freeze": False, "impl": None, "input": "float"},
        "status": "ok" if ok else "out_of_memory",
        "error": None if ok else "CUDA out of memory",
        "p50_images_per_s": images_per_s,
        "round_p50_images_per_s": [images_per_s] if ok else [],
        "max_allocated_mib": 1000.0 if ok else None,
        "rss_peak_mib": None,
        **changes,
    }


def largest_row(model, largest, **changes):
    """A row of bench_max_batch."""
    found = {"largest_batch": largest, "limited_by": "memory", "memory_limit_mib": 81920.0}
    return {**step_row(model, 1.0), **found, **changes}


def op_row(contender, gb_per_s, share, **changes):
    """A row of bench_ops."""
    return {
        **{"op": "abn", "place": "stage 1", "shape": [128, 64, 56, 56], "dtype": "bf16"},
        **{"direction": "forward", "contender": contender, "status": "ok", "error": None},
        **{"ideal_bytes": 10**9, "p50_us": 1.0, "gb_per_s": gb_per_s, "share_of_copy": share},
        **changes,
    }


def content(what, rows, device=GPU, date="2026-01-01T00:00:00+00:00", torch="2.15.0", **settings):
    """A whole record."""
    cpu = {"model": "Test CPU", "logical_cores": 4, "torch_threads": 2}
    packages = {"torch": torch}
    return {
        "format": 2,
        "what": what,
        "command": f"tresnet {what.replace('_', ' ', 1)} ...",
        "environment": {"date_utc": date, "device": device, "cpu": cpu, "packages": packages},
        "settings": {"interleave": True, **settings},
        "warmup_steps": 1,
        "runs": 1,
        "rows": rows,
    }


def put(folder, name, *arguments, **keywords):
    """Write a record and return its path."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content(*arguments, **keywords)))
    return path
