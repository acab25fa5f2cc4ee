import pytest

from tresnet.errors import InputError
from tresnet.measure.cases import BenchCase, Cases, CaseSettings, parse_case


def test_defaults_follow_from_the_device_and_the_work():
    def defaults(model, training, capability, **changes):
        case = BenchCase(model, **changes).checked(training, capability)
        return case.amp, case.channels_last, case.fold, case.columns()["norm"]

    assert defaults("tresnet_t", True, (8, 0)) == ("bf16", True, False, "abn")
    assert defaults("tresnet_t", True, None) == ("off", True, False, "abn")
    assert defaults("tresnet_t", False, (7, 5)) == ("fp16", True, True, "abn")
    assert defaults("tresnet_t", False, (9, 0), dtype="bf16") == ("off", True, True, "abn")
    assert defaults("timm:resnet50", False, (9, 0)) == ("bf16", True, False, None)


@pytest.mark.parametrize(
    ("model", "changes", "training", "message"),
    [
        ("tresnet_x", {}, True, "did you mean 'tresnet_"),
        ("timm:resnet5O", {}, True, "did you mean 'resnet50'"),
        ("tresnet_t", {"batch_size": 0}, True, "--batch-size: expected at least 1, got 0"),
        ("tresnet_t", {"freeze": True}, True, "it is for inference"),
        ("tresnet_t", {"dtype": "bf16"}, True, "no dtype for tresnet_t, got 'bf16': it is for inf"),
        ("tresnet_t", {"recompute": "none"}, False, "it is for training"),
        ("tresnet_t", {"accumulate": 2}, False, "it is for training"),
        ("tresnet_t", {"freeze": True}, False, "a compile mode with freeze=true .*, got none"),
        ("timm:resnet50", {"layout_opt": True}, True, "a compile mode with layout_opt=true"),
        ("timm:resnet50", {"recompute": "none"}, True, "a compile mode with recompute=none"),
        ("tresnet_t", {"accumulate": 2, "compile": "max-autotune"}, True, "loses gradients"),
        ("timm:resnet50", {"norm": "batchnorm"}, True, "no norm for timm:resnet50, got 'batchn"),
        ("timm:resnet50", {"impl": "triton"}, True, "no impl for timm:resnet50, got 'triton'"),
    ],
)
def test_what_does_not_apply_is_refused(model, changes, training, message):
    with pytest.raises(ValueError, match=message):
        BenchCase(model, **changes).checked(training)


def test_a_model_may_have_its_own_settings():
    defaults = CaseSettings(amp="bf16", norm="batchnorm", fold=False)
    text = "timm:resnet50@amp=fp16,channels_last=false,compile=default,batch_size=8,clip_grad=0.5"
    assert parse_case(text, defaults) == BenchCase(
        "timm:resnet50", 8, amp="fp16", channels_last=False, compile="default", clip_grad=0.5
    )
    ours = parse_case("tresnet_t@input_size=48", defaults, 16)
    assert (ours.norm, ours.input_size, ours.batch_size, ours.fold) == ("batchnorm", 48, 16, False)
    assert parse_case("tresnet_t@norm=abn", defaults).norm == "abn"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("dtype", "expected MODEL@key=value,.* got 'dtype'"),
        ("model=x", "expected MODEL@key=value,.* got 'model=x'"),
        ("norm=", "expected MODEL@key=value,.* got 'norm='"),
        ("batch_size=many", "tresnet_t: batch_size: expected a valid integer, unable"),
        ("impl=auto,impl=triton", "expected impl= once for tresnet_t, got it again"),
    ],
)
def test_bad_settings_of_a_model(option, message):
    with pytest.raises(InputError, match=message):
        parse_case(f"tresnet_t@{option}", CaseSettings())


def test_every_model_at_every_batch_size_but_its_own():
    chosen = Cases(models=("tresnet_t", "timm:resnet50@batch_size=3"), batch_size=(8, 16))
    assert [(case.model, case.batch_size) for case in chosen.cases()] == [
        ("tresnet_t", 8),
        ("tresnet_t", 16),
        ("timm:resnet50", 3),
    ]


def test_the_label_names_what_differs_from_the_defaults():
    text = "tresnet_t@recompute=none,amp=fp16,channels_last=false,compile=default"
    assert parse_case(text, CaseSettings(), 8).checked(training=True).label(True) == (
        "tresnet_t, batch 8, amp fp16, recompute none, no channels_last, compile default"
    )
    text = "timm:resnet50@input=uint8,compile=default,freeze=true,dtype=bf16"
    assert parse_case(text, CaseSettings()).checked(training=False).label(False) == (
        "timm:resnet50, batch 64, bf16, compile default, freeze, input uint8"
    )
