"""Test benchmarks/profile_step.py on a synthetic trace, and on a real trace of a CPU."""

import pytest

from benchmarks.profile_step import Options, Work, gaps, main, our_kernels, read_work, table
from tresnet.measure.cases import BenchCase


def operator(name, number, begin, duration, dims=(), strides=()):
    about = {"External id": number, "Input Dims": dims, "Input Strides": strides}
    return {"cat": "cpu_op", "name": name, "tid": 1, "ts": begin, "dur": duration, "args": about}


def kernel(name, number, begin, duration, cat="kernel"):
    about = {"External id": number}
    return {"cat": cat, "name": name, "tid": 7, "ts": begin, "dur": duration, "args": about}


X, WEIGHT = [8, 64, 56, 56], [64, 64, 3, 3]
NHWC, NCHW = [200704, 1, 3584, 64], [200704, 3136, 56, 1]
OURS = sorted(our_kernels())[0]
GPU = [
    operator("aten::cudnn_convolution", 1, 0, 9, [X, WEIGHT], [NHWC, []]),
    operator("aten::convolution_backward", 2, 9, 9, [X, X, WEIGHT], [NCHW, NCHW, []]),
    operator("aten::add", 3, 20, 5),
    operator("aten::copy_", 4, 25, 5),
    kernel("sm90_xmma_fprop", 1, 100, 30),
    kernel("sm90_xmma_dgrad", 2, 130, 40),
    kernel("sm90_xmma_wgrad", 2, 165, 10),  # overlaps with the previous kernel
    kernel(OURS, 99, 180, 20),
    kernel("triton_poi_fused_add_12", 98, 200, 7),
    kernel("vectorized_elementwise", 3, 207, 3),
    kernel("copy_kernel", 4, 220, 4),
    kernel("Memset (Device)", 97, 224, 1, "gpu_memset"),
]


def test_kernels_are_distinguished():
    assert read_work(GPU, our_kernels()) == [
        Work("convolution", "forward 8x64x56x56 * 64x64x3x3, channels_last", 30),
        Work("convolution", "backward 8x64x56x56 * 64x64x3x3", 40),
        Work("convolution", "backward 8x64x56x56 * 64x64x3x3", 10),
        Work("our kernels", OURS, 20),
        Work("Inductor's kernels", "triton_poi_fused_add", 7),
        Work("other small kernels", "aten::add", 3),
        Work("copies", "aten::copy_", 4),
        Work("copies", "gpu_memset", 1),
    ]
    assert gaps(GPU) == 5 + 10  # from 175 to 180 and from 210 to 220


def test_the_table_adds_up():
    lines = table(GPU, steps=2, most_lines=3, ours=our_kernels()).splitlines()
    assert lines[1].split() == ["convolution", "all", "40", "2", "61.5"]
    assert lines[-1].split()[:4] == ["the", "rest", "5", "more"]
    total = sum(float(line.split()[-1]) for line in lines[1:] if " all " in line)
    assert total == pytest.approx(100, abs=0.3)


def test_a_case_that_fails_leaves_the_others(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # so that device 'auto' is a CPU
    models = "timm:vit_tiny_patch16_224", "timm:test_resnet"
    size = {"case": BenchCase(input_size=32), "batch_size": 2, "warmup_steps": 1, "steps": 1}
    assert main(Options(models=models, output_dir=tmp_path, **size)) == 1
    printed = capsys.readouterr()
    assert "vit_tiny_patch16_224: AssertionError: Input height (32)" in printed.err
    assert "convolution " in printed.out
    assert [path.name for path in tmp_path.iterdir()] == ["timm_test_resnet_batch_2_fp32.json.gz"]
