from tresnet.measure.cases import BenchCase, parse_case, parse_cases
from tresnet.settings.fields import flatten, replace


def test_a_model_may_have_its_own_settings():
    defaults = replace(BenchCase(), amp="bf16", norm="batchnorm", fold=False)
    text = "timm:resnet50@amp=fp16,channels_last=false,compile=default,batch_size=8,clip_grad=0.5"
    changes = {"amp": "fp16", "channels_last": False, "compile": "default", "clip_grad": 0.5}
    assert parse_case(text, defaults) == replace(BenchCase("timm:resnet50", 8), **changes)
    ours = flatten(parse_case("tresnet_t@input_size=48", replace(defaults, batch_size=16)))
    expected = {"norm": "batchnorm", "input_size": 48, "batch_size": 16, "fold": False}
    assert ours.items() >= expected.items()
    assert parse_case("tresnet_t@norm=abn", defaults).step.build.norm == "abn"


def test_every_model_at_every_batch_size_but_its_own():
    cases = parse_cases(("tresnet_t", "timm:resnet50@batch_size=3"), (8, 16), BenchCase())
    assert [(case.model, case.batch_size) for case in cases] == [
        ("tresnet_t", 8),
        ("tresnet_t", 16),
        ("timm:resnet50", 3),
    ]


def test_the_label_names_what_differs_from_the_defaults():
    text = "tresnet_t@recompute=none,amp=fp16,channels_last=false,compile=default"
    assert parse_case(text, BenchCase(batch_size=8)).checked(training=True).label(True) == (
        "tresnet_t, batch 8, amp fp16, recompute none, no channels_last, compile default"
    )
    text = "timm:resnet50@input=uint8,compile=default,freeze=true,dtype=bf16"
    assert parse_case(text, BenchCase()).checked(training=False).label(False) == (
        "timm:resnet50, batch 64, bf16, compile default, freeze, input uint8"
    )
