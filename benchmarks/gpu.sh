#!/usr/bin/env bash
# What a GPU has to tell, in three parts of at most nine minutes each from cold caches. The baseline is
# measured first in each, then ours; every case is recorded as soon as it is measured.
#
#   benchmarks/gpu.sh 1            the kernels' tests, eager training, the operations, where a step goes
#   benchmarks/gpu.sh 2            compiled training of M and L
#   benchmarks/gpu.sh 3            XL, inference, memory by batch size, the largest batch
#   benchmarks/gpu.sh              all three, one after another
#   benchmarks/gpu.sh train_m      these stages alone
#   benchmarks/gpu.sh gpu_tests    in no part: the other tests that need a GPU (CUDA graphs, loaders, memory)
#   benchmarks/gpu.sh --rehearse   before any of these: the same command lines on the CPU, with tiny
#                                  models, one step and no compiler: nothing it writes is a measurement
#
# A stage that fails, hangs or is killed leaves what it had measured, and the other stages. What does not
# fit into a part's time is left out and named at the end; run it as a stage of its own.
#
#   PYTHON    the interpreter that has the package's dependencies         (python3)
#   RECORDS   where records and the archives of the stages' output go     (benchmarks/records)
#   REPORT    where report.md goes                                          (benchmarks)
#   TOTAL_S   seconds for each part                                       (530)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

rehearsing=false
if [[ ${1:-} == --rehearse ]]; then
    rehearsing=true
    shift
fi
python=${PYTHON:-python3}
total_s=${TOTAL_S:-530}
scratch=$(mktemp -d)
child='' stopped=false
trap 'rm -rf "$scratch"' EXIT
set -m # a stage is a process group of its own, which a signal reaches as a whole
trap 'stopped=true; [[ -z $child ]] || kill -TERM -- "-$child" 2>/dev/null' INT TERM HUP
records=${RECORDS:-benchmarks/records}
report=${REPORT:-benchmarks}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

# What a case is called and how it runs. Ours and the peers at the settings that may be their best;
# the report takes each one's fastest. The public stack reads channels_last badly, and has no bf16.
m=tresnet_m l=tresnet_l xl=tresnet_xl
timm_m=timm:tresnet_m timm_l=timm:tresnet_l timm_xl=timm:tresnet_xl resnet=torchvision:resnet50
kernels=impl=triton graph=cuda_graph=true public=norm=inplace_abn,amp=fp16,channels_last=false
device=cuda batch=256 half_batch=128 double_batch=512
common=(--input-size 224 --channels-last)
steps=(--warmup-steps 3 --rounds 4 --steps 5)
ops_options=(--batch-size 128 --input-size 224 --dtype bf16 --rounds 20)
largest_options=(--first 64 --granularity 16 --gpu-memory 79GiB)
kernel_tests=(tests/ops/test_abn_kernels.py tests/ops/test_blur_kernels.py tests/models/test_kernels.py)
gpu_rooms=(tests/steps tests/ops tests/models tests/data tests/measure tests/memory tests/checkpoints)
if $rehearsing; then
    m=tresnet_t l=tresnet_t xl=tresnet_t
    timm_m=timm:test_resnet timm_l=timm:test_resnet timm_xl=timm:test_resnet
    resnet=torchvision:squeezenet1_1
    kernels=impl=reference graph=recompute=none public=norm=inplace_abn,channels_last=false
    device=cpu batch=2 half_batch=3 double_batch=4
    common=(--input-size 32 --channels-last)
    steps=(--warmup-steps 1 --rounds 2 --steps 1)
    ops_options=(--batch-size 2 --input-size 32 --dtype fp32 --rounds 1)
    largest_options=(--first 2 --granularity 2 --at-most 4)
    kernel_tests=(tests/measure/test_throughput.py) gpu_rooms=(tests/steps)
    records=${RECORDS:-$scratch/records} report=${REPORT:-$scratch}
    total_s=${TOTAL_S:-1500}
    export TORCHDYNAMO_DISABLE=1
fi
[[ $total_s =~ ^[0-9]+$ ]] || { echo "expected TOTAL_S in whole seconds, got $total_s" >&2; exit 2; }
total_s=$((10#$total_s)) # a leading zero makes no octal number
mkdir -p "$records" "$report" || exit 1
compiled=compile=default
peer=$compiled,layout_opt=true # torch 2.12 and later may lose channels_last in backward without it

# Cases that are compiled, by stage: they are compiled beforehand, several at a time, into the compiler's
# caches, so that no clock runs beside it.
train_m_compiled=("$timm_m@$compiled" "$timm_m@$peer" "$m@$compiled" "$m@$kernels,$compiled" "$resnet@$peer")
# Training on a GPU pads L and XL to multiples of 8; pad=1 leaves their widths.
train_l_compiled=("$timm_l@$peer" "$l@$compiled")
train_xl_compiled=("$timm_xl@$peer" "$xl@$compiled")
infer_compiled=(
    "$timm_m@$compiled,freeze=true" "$timm_m@compile=max-autotune,freeze=true"
    "$m@$compiled,freeze=true" "$m@compile=max-autotune,freeze=true" "$resnet@$compiled,freeze=true"
)

tool() { timeout --foreground -k 5 "$limit_s" "$python" -m tresnet.cli.main bench "$@"; } # stopped at limit_s seconds

own_limit() { echo $((limit_s > 30 ? limit_s - 15 : limit_s > 5 ? limit_s - 4 : 1)); } # to end by itself

measure() { tool "$@" --device "$device" --output-dir "$records" --time-limit-s "$(own_limit)"; }

compare() { # compare KIND BATCHES CASE...: cases in turns
    local kind=$1 batches=$2
    shift 2
    # shellcheck disable=SC2086
    measure "$kind" "$@" --batch-size $batches "${common[@]}" "${steps[@]}"
}

warm_one() { # warm_one KIND CASE: compile a case; its record is thrown away
    records=$scratch/warm steps=(--warmup-steps 2 --rounds 1 --steps 1)
    TORCHINDUCTOR_COMPILE_THREADS=4 compare "$1" "$batch" "$2" >"$scratch/warm.${2//[^a-z0-9]/_}" 2>&1 ||
        { echo "not compiled: $2"; tail -n 5 "$scratch/warm.${2//[^a-z0-9]/_}"; return 1; }
}

warm() { # warm KIND CASE...: compile cases, four at a time
    local kind=$1 case failed=0
    shift
    for case in "$@"; do
        while (($(jobs -rp | wc -l) >= 4)); do wait -n || failed=1; done
        warm_one "$kind" "$case" &
    done
    while [[ -n $(jobs -p) ]]; do wait -n || failed=1; done
    return "$failed"
}

pytest() { timeout --foreground -k 5 "$limit_s" "$python" -m pytest -q --no-header "$@"; }
kernels() { pytest -x "${kernel_tests[@]}"; }
gpu_tests() { pytest -m gpu "${gpu_rooms[@]}"; }

eager() { compare train "$1" "$timm_m" "$m@$kernels" "$resnet" "$m@$kernels,recompute=none" "$m@$public"; }
eager_256() { eager "$batch"; }
eager_128() { eager "$half_batch"; }
graphs() { compare train "$half_batch $batch" "$timm_m" "$m@$kernels,$graph"; }

ops() { measure ops --contenders copy eager triton "${ops_options[@]}"; } # the heaviest first

where_a_step_goes() { # where_a_step_goes CASE...
    timeout --foreground -k 5 "$limit_s" "$python" benchmarks/profile_step.py "$@" --batch-size "$batch" \
        "${common[@]}" --device "$device" --output-dir "$output"
}
profile_eager() { where_a_step_goes "$timm_m" "$m@$kernels"; }
profile_compiled() { where_a_step_goes "$timm_m@$peer" "$m@$compiled"; }

warm_ml() { warm train "${train_m_compiled[@]}" "${train_l_compiled[@]}"; }
train_m() { compare train "$batch" "${train_m_compiled[@]}"; }
train_l() { compare train "$batch" "${train_l_compiled[@]}" "$timm_l" "$l@$kernels" "$l@pad=1,$kernels"; }
warm_xl() { warm train "${train_xl_compiled[@]}"; }
train_xl() { compare train "$batch" "${train_xl_compiled[@]}" "$timm_xl" "$xl@$kernels" "$xl@pad=32,$kernels"; }
warm_infer() { warm infer "${infer_compiled[@]}"; }
infer() { compare infer "$batch" "${infer_compiled[@]}" "$timm_m" "$m" "$resnet" "$m@fold=false"; }

memory() { # peak memory over batch sizes
    compare train "$half_batch $batch $double_batch" "$timm_m" "$m@$kernels" \
        "$m@$kernels,recompute=outputs" "$m@$public" "$resnet"
}

max_batch() {
    measure max-batch "$timm_m" "$m@$kernels" "$m@$kernels,recompute=outputs" "${common[@]}" \
        "${largest_options[@]}"
}

report() {
    "$python" benchmarks/tables.py "$records" >"$scratch/draft.md" && cp "$scratch/draft.md" "$report/report.md" &&
        echo "report: $report/report.md"
}

# Most seconds of each stage; those of a part add up to less than 530.
declare -A limits=(
    [kernels]=120 [eager_256]=110 [eager_128]=80 [ops]=90 [profile_eager]=60 [graphs]=50
    [warm_ml]=190 [train_m]=130 [train_l]=110 [profile_compiled]=70
    [warm_xl]=100 [train_xl]=80 [warm_infer]=80 [infer]=70 [memory]=75 [max_batch]=100
    [report]=20 [gpu_tests]=170
)
parts=(
    [1]='kernels eager_256 eager_128 ops profile_eager graphs report'
    [2]='warm_ml train_m train_l profile_compiled report'
    [3]='warm_xl train_xl warm_infer infer memory max_batch report'
)

run_stage() { # run_stage NAME: in the background, so that a signal reaches it; its output is kept
    output=$scratch/output/$1
    mkdir -p "$output"
    printf '\n--- %s, at most %d s\n' "$1" "$limit_s"
    (trap - INT TERM HUP; "$1") > >(trap '' INT TERM HUP; exec tee "$output/log.txt") 2>&1 &
    child=$!
    wait "$child"
    local status=$?
    while kill -0 "$child" 2>/dev/null; do wait "$child"; done # a signal ended the first wait
    sleep 0.2 # tee reads what is left
    kill -KILL -- "-$child" 2>/dev/null # what the stage started and left behind
    child=''
    return "$status"
}

run_part() { # run_part NAME STAGE...: stages until the time is up
    local name=$1 began_s=$SECONDS stage_s stage reserved_s left_s archive
    shift
    archive=$records/gpu_$name.tar.gz
    rm -rf "$scratch/output"
    for stage in "$@"; do
        $stopped && { left_out+=("$stage"); continue; }
        reserved_s=0
        [[ $stage == report ]] || reserved_s=${limits[report]}
        left_s=$((total_s - (SECONDS - began_s) - reserved_s))
        limit_s=${limits[$stage]}
        $rehearsing && limit_s=$((3 * limit_s)) # on whatever CPU there is
        ((limit_s <= left_s)) || limit_s=$left_s
        ((limit_s >= 5)) || { left_out+=("$stage"); continue; }
        stage_s=$SECONDS
        run_stage "$stage" || failed+=("$stage")
        times+=("$(printf '%6d  %s' "$((SECONDS - stage_s))" "$stage")")
        tar -czf "$archive" -C "$scratch/output" . && echo "output: $archive"
    done
}

failed=() left_out=() times=()
names=("$@")
(($#)) || names=(1 2 3)
for name in "${names[@]}"; do
    [[ $name =~ ^[123]$ || -n ${limits[${name:-none}]:-} ]] || {
        echo "expected parts out of 1 2 3, or stages out of ${parts[*]} gpu_tests, got $name" >&2
        exit 2
    }
done
for name in "${names[@]}"; do
    # shellcheck disable=SC2086
    if [[ $name =~ ^[123]$ ]]; then
        run_part "part$name" ${parts[$name]}
    else
        run_part "$name" "$name"
    fi
done

printf '\n--- seconds per stage\n'
printf '%s\n' "${times[@]}" "$(printf '%6d  all' "$SECONDS")"
((${#left_out[@]} == 0)) || echo "left out for want of time: ${left_out[*]}"
((${#failed[@]} == 0)) || echo "not everything measured in: ${failed[*]}"
((${#left_out[@]} + ${#failed[@]} == 0))
