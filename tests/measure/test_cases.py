import pytest

from tresnet.errors import InputError
from tresnet.measure.cases import BenchCase, parse_case, parse_cases


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("tresnet_x", "did you mean 'tresnet_"),
        ("timm:resnet5O", "did you mean 'resnet50'"),
        ("torchvision:resnet-50", "did you mean 'resnet50'"),
    ],
)
def test_wrong_name_suggests_the_nearest(name, nearest):
    with pytest.raises(InputError, match=nearest):
        BenchCase(name).checked(training=True)


def test_defaults_are_resolved_and_said():
    train = BenchCase("tresnet_t", dtype="bf16").checked(training=True)
    infer = BenchCase("timm:resnet50", dtype="bf16").checked(training=False)
    exact = BenchCase("timm:resnet50", dtype="fp32", cast="pure").checked(training=False)
    assert (train.cast, train.norm) == ("autocast", "abn")
    assert (infer.cast, infer.norm) == ("pure", None)
    assert exact.cast is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "fp8"}, "expected dtype out of fp32, bf16, fp16, got 'fp8'"),
        ({"cast": "none"}, "expected cast out of autocast, pure, got 'none'"),
        ({"cast": "pure"}, "expected cast autocast in training, got 'pure'"),
        ({"compile": "fast"}, "expected compile out of none, default, .* got 'fast'"),
        ({"norm": "group"}, "expected norm out of abn, batchnorm, inplace_abn, got 'group'"),
        ({"input": "int8"}, "expected input out of float, uint8, got 'int8'"),
        ({"batch_size": 0}, "expected batch size of at least 1, got 0"),
        ({"input_size": -32}, "expected input size of at least 1, got -32"),
    ],
)
def test_bad_values(changes, message):
    with pytest.raises(InputError, match=message):
        BenchCase(**{"model": "tresnet_t", **changes}).checked(training=True)


@pytest.mark.parametrize(
    ("model", "changes", "training", "message"),
    [
        ("tresnet_t", {"fold": True}, True, "fold=false in training, got true for tresnet_t"),
        ("tresnet_t", {"freeze": True}, True, "freeze=false in training, got true"),
        ("timm:resnet50", {"fold": True}, False, "fold=false for timm:resnet50, .* only ours"),
        ("timm:resnet50", {"recompute": "none"}, True, "no recompute for timm:resnet50"),
        ("tresnet_t", {"recompute": "outputs"}, False, "'abn' of ours has a choice, in training"),
        (
            "tresnet_t",
            {"recompute": "outputs", "norm": "batchnorm"},
            True,
            "no recompute for tresnet_t, got 'outputs'",
        ),
        ("tresnet_t", {"recompute": "all"}, True, "out of none, activations, outputs, got 'all'"),
        ("timm:resnet50", {"pad": True}, True, "pad=false for timm:resnet50, .* only ours"),
        ("tresnet_t", {"freeze": True}, False, "a compile mode with freeze=true .*, got none"),
    ],
)
def test_what_is_for_inference_only(model, changes, training, message):
    with pytest.raises(InputError, match=message):
        BenchCase(model, **changes).checked(training)


def test_norm_of_a_peer_is_an_error():
    with pytest.raises(InputError, match="expected no norm for timm:resnet50, got 'abn'"):
        BenchCase("timm:resnet50", norm="abn").checked(training=True)


def test_a_model_may_have_its_own_settings():
    defaults = BenchCase("", batch_size=64, dtype="bf16", norm="batchnorm")
    text = "timm:resnet50@dtype=fp16,channels_last=true,compile=default,batch_size=8"
    assert parse_case(text, defaults) == BenchCase(
        "timm:resnet50", 8, None, "fp16", None, True, "default", None
    )
    assert parse_case("tresnet_t", defaults).norm == "batchnorm"
    assert parse_case("tresnet_t@norm=abn,input_size=48", defaults).input_size == 48


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("dtype", "expected MODEL@key=value,.* got 'dtype'"),
        ("model=x", "with a key out of batch_size, .* got 'model=x'"),
        ("batch_size=many", "expected batch_size= a whole number, got 'many'"),
        ("channels_last=1", "expected channels_last=true or false, got '1'"),
        ("fold=yes", "expected fold=true or false, got 'yes'"),
    ],
)
def test_bad_settings_of_a_model(option, message):
    with pytest.raises(InputError, match=message):
        parse_case(f"tresnet_t@{option}", BenchCase(""))


def test_every_model_at_every_batch_size_but_its_own():
    cases = parse_cases(["tresnet_t", "timm:resnet50@batch_size=3"], BenchCase(""), [8, 16])
    assert [(case.model, case.batch_size) for case in cases] == [
        ("tresnet_t", 8),
        ("tresnet_t", 16),
        ("timm:resnet50", 3),
    ]


def test_label_names_what_differs():
    case = BenchCase("tresnet_t", 8, dtype="fp16", channels_last=True, compile="default")
    assert case.checked(training=True).label() == (
        "tresnet_t, batch 8, fp16, autocast, abn, channels_last, compile default"
    )


def test_label_names_the_input():
    case = parse_case("timm:resnet50@input=uint8", BenchCase("", dtype="fp32"))
    assert case.checked(training=True).label() == "timm:resnet50, batch 64, fp32, uint8 input"


def test_label_names_a_folded_and_frozen_case():
    case = parse_case(
        "tresnet_t@fold=true,compile=default,freeze=true", BenchCase("", dtype="fp32")
    )
    assert case.checked(training=False).label() == (
        "tresnet_t, batch 64, fp32, abn, folded, compile default freeze"
    )


@pytest.mark.parametrize(
    ("model", "changes", "training", "message"),
    [
        ("tresnet_t", {"impl": "fast"}, True, "expected impl out of auto, .* got 'fast'"),
        ("timm:resnet50", {"impl": "auto"}, True, "expected no impl for timm:resnet50 .* 'auto'"),
        (
            "tresnet_t",
            {"impl": "triton", "norm": "batchnorm"},
            False,
            "expected no impl for tresnet_t with norm batchnorm, got 'triton'",
        ),
        (
            "tresnet_t",
            {"partitioner": "x"},
            True,
            "expected partitioner out of aggressive, got 'x'",
        ),
        (
            "tresnet_t",
            {"partitioner": "aggressive"},
            True,
            "expected a compiled training step .*, got training with compile=none",
        ),
        (
            "timm:resnet50",
            {"partitioner": "aggressive", "compile": "default"},
            False,
            "expected a compiled training step .*, got inference with compile=default",
        ),
    ],
)
def test_what_implementations_and_partitioners_suit(model, changes, training, message):
    with pytest.raises(InputError, match=message):
        BenchCase(model, **changes).checked(training)


def test_label_names_implementation_and_partitioner():
    text = (
        "tresnet_t@impl=reference,recompute=outputs,pad=true,compile=default,partitioner=aggressive"
    )
    assert parse_case(text, BenchCase("", dtype="fp32")).label() == (
        "tresnet_t, batch 64, fp32, impl reference, recompute outputs, padded, compile default, partitioner aggressive"
    )
