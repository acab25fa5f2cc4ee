"""Run benchmarks one after another in this process, for `benchmarks/gpu.py`.

cuDNN searches a convolution's algorithms once per process, for 34 s with tresnet_m at batch 256 on
an H200. So all timings share a process, and nothing else runs on the GPU meanwhile.
"""

import json
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import tyro

from benchmarks import profile_step
from tresnet.cli import main as cli

LEAST_S = 25  # less time is not enough to set up a model
RESERVE_S = 8  # between a benchmark's own limit and the end of all


def run_all(timings: Sequence[tuple[str, float, Sequence[str]]], limit_s: float) -> list[str]:
    """Run each (name, limit in seconds, arguments); return a line for each that did not succeed.

    Arguments are those of `tresnet`, or of `benchmarks/profile_step.py` after the word `profile`.
    """
    end_s, failures = time.monotonic() + limit_s, []
    for name, own_limit_s, arguments in timings:
        began_s = time.monotonic()
        left_s = end_s - began_s
        if left_s < LEAST_S:
            failures.append(f"{name}: left out, because {left_s:.0f} s were left")
            continue
        print(f"--- {name}", flush=True)
        status = _run(arguments, int(min(own_limit_s, left_s - RESERVE_S)))
        print(f"--- {name}: {time.monotonic() - began_s:.0f} s", flush=True)
        if status:
            failures.append(f"{name}: {status}")
    return failures


def _run(arguments: Sequence[str], limit_s: int) -> str:
    """Run a benchmark; return why it failed, or an empty string."""
    try:
        if arguments[0] == "profile":
            code = profile_step.main(tyro.cli(profile_step.Options, args=arguments[1:]))
        else:
            limits = ["--time-limit-s", str(limit_s), "--case-limit-s", str(limit_s * 3 // 4)]
            code = cli.main([*arguments, *limits])
    except SystemExit as end:
        code = end.code
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return f"exit status {code}" if code else ""


def main(plan: str) -> int:
    """Run the timings of the JSON file `plan`; return 1 if one did not succeed."""
    content = json.loads(Path(plan).read_text())
    failures = run_all(content["timings"], content["limit_s"])
    print("\n".join(failures or ["all timings were made"]), flush=True)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
