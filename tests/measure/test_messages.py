"""Test the error messages of benchmarks for settings and directories that they cannot use."""

import os
from pathlib import Path

import pytest

from tresnet.errors import InputError
from tresnet.measure import records
from tresnet.measure.cases import BenchCase, parse_case
from tresnet.measure.records import check_directory
from tresnet.measure.settings import LargestSettings
from tresnet.settings.fields import replace

RESNET = "timm:resnet50"


@pytest.mark.parametrize(
    ("model", "training", "changes", "message"),
    [
        ("tresnet_x", True, {}, "did you mean 'tresnet_"),
        ("timm:resnet5O", True, {}, "did you mean 'resnet50'"),
        ("tresnet_t", True, {"freeze": True}, "it is for inference"),
        ("tresnet_t", True, {"dtype": "bf16"}, "no dtype for tresnet_t, got 'bf16': it is for inf"),
        ("tresnet_t", False, {"recompute": "none"}, "it is for training"),
        ("tresnet_t", False, {"accumulate": 2}, "it is for training"),
        ("tresnet_t", False, {"freeze": True}, "a compile mode with freeze=true .*, got none"),
        (RESNET, True, {"layout_opt": True}, "a compile mode with layout_opt=true"),
        (RESNET, True, {"recompute": "none"}, "a compile mode with recompute=none"),
        ("tresnet_t", True, {"accumulate": 2, "compile": "max-autotune"}, "loses gradients"),
        (RESNET, True, {"norm": "batchnorm"}, "no norm for timm:resnet50, got 'batchn"),
        (RESNET, True, {"impl": "triton"}, "no impl for timm:resnet50, got 'triton'"),
    ],
)
def test_cases_that_do_not_apply(model, training, changes, message):
    with pytest.raises(ValueError, match=message):
        replace(BenchCase(model), **changes).checked(training)


@pytest.mark.parametrize(
    ("call", "value", "message"),
    [
        *(
            (lambda option: parse_case(f"tresnet_t@{option}", BenchCase()), option, message)
            for option, message in (
                ("dtype", "expected MODEL@key=value,.* got 'dtype'"),
                ("model=x", "expected MODEL@key=value,.* got 'model=x'"),
                ("norm=", "expected MODEL@key=value,.* got 'norm='"),
                ("batch_size=many", "tresnet_t: batch_size: expected a valid integer, unable"),
                ("impl=auto,impl=triton", "expected impl= once for tresnet_t, got another 'impl"),
            )
        ),
        *(
            (lambda changes: LargestSettings(**changes).check(), changes, message)
            for changes, message in (
                ({"first": 3}, "expected a first batch divisible by 16, got 3"),
                ({"at_most": 63}, r"expected --at-most of at least 64 \(--first\), got 63"),
            )
        ),
        *(
            (check_directory, name, "expected a directory that records can be written to")
            for name in ("file", "file/sub", "link", "n" * 300)
        ),
    ],
)
def test_settings_and_directories_that_cannot_be_used(call, value, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("link").symlink_to(tmp_path / "gone" / "further")
    Path("file").touch()
    with pytest.raises(InputError, match=message):
        call(value)


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    def full(dir):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(records.tempfile, "TemporaryFile", full)
    with pytest.raises(InputError, match=r"No space left on device.*choose another or free"):
        check_directory(tmp_path)
