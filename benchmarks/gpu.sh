#!/usr/bin/env bash
# Everything the README's table wants, on one GPU, in under nine minutes; writes records and draws
# the report from them.
#
#   benchmarks/gpu.sh                    all stages, in the order below
#   benchmarks/gpu.sh train_m report     these stages
#   benchmarks/gpu.sh tiles              not among them: the kernels with their work cut otherwise, for
#                                        whoever tunes them
#   benchmarks/gpu.sh --rehearse         the same command lines on the CPU, with tiny models, one step
#                                        and no compiler: nothing it writes is a measurement
#
# A stage that fails, or is stopped at its limit, leaves the records of the others. What does not fit
# into TOTAL_S seconds is left out and named at the end; run it as stages of its own.
#
#   PYTHON    the interpreter that has the package's dependencies         (python)
#   RECORDS   where records go                                            (benchmarks/records)
#   REPORT    where report.md and the pictures go                         (benchmarks)
#   TOTAL_S   seconds for all stages together                             (530)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

rehearsing=false
if [[ ${1:-} == --rehearse ]]; then
    rehearsing=true
    shift
fi
python=${PYTHON:-python}
total_s=${TOTAL_S:-530}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
records=${RECORDS:-benchmarks/records}
report=${REPORT:-benchmarks}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

# What a case is called and how it runs. Ours and the peers at the settings that may be their best;
# the report takes each one's fastest. The public stack reads channels_last badly, and has no bf16.
m=tresnet_m l=tresnet_l xl=tresnet_xl
timm_m=timm:tresnet_m timm_l=timm:tresnet_l timm_xl=timm:tresnet_xl resnet=torchvision:resnet50
half=fp16 kernels=impl=triton public=norm=inplace_abn,dtype=fp16,channels_last=false
device=cuda batch=256 half_batch=128 double_batch=512 infer_batch=256
common=(--input-size 224 --dtype bf16 --channels-last)
steps=(--warmup-steps 3 --rounds 4 --steps 5)
ops_options=(--batch-size 128 --input-size 224 --dtype bf16 --repeats 20)
largest_options=(--first 64 --granularity 16 --memory-gib 79)
if $rehearsing; then
    m=tresnet_t l=tresnet_t xl=tresnet_t
    timm_m=timm:test_resnet timm_l=timm:test_resnet timm_xl=timm:test_resnet
    resnet=torchvision:squeezenet1_1
    half=bf16 kernels=impl=recompute public=norm=inplace_abn,dtype=fp32,channels_last=false
    device=cpu batch=2 half_batch=3 double_batch=4 infer_batch=2
    common=(--input-size 32 --dtype fp32 --channels-last)
    steps=(--warmup-steps 1 --rounds 1 --steps 1)
    ops_options=(--batch-size 2 --input-size 32 --dtype fp32 --repeats 1)
    largest_options=(--first 2 --granularity 2 --at-most 4)
    records=${RECORDS:-$scratch/records} report=${REPORT:-$scratch}
    total_s=${TOTAL_S:-600}
    export TORCHDYNAMO_DISABLE=1
fi
[[ $total_s =~ ^[0-9]+$ ]] || { echo "expected TOTAL_S in whole seconds, got $total_s" >&2; exit 2; }
total_s=$((10#$total_s)) # a leading zero makes no octal number
mkdir -p "$records" "$report" || exit 1
compiled=compile=default
ours_compiled=$compiled,partitioner=aggressive

# Cases that are compiled, by stage: `warm` fills the compiler's caches with them, several at a time,
# which is most of the compiler's work done on all cores.
train_m_compiled=("$m@$ours_compiled" "$m@$kernels,$compiled" "$timm_m@$compiled" "$resnet@$compiled")
train_l_compiled=("$l@pad=true,$ours_compiled" "$timm_l@$compiled")
train_xl_compiled=("$xl@pad=true,$ours_compiled" "$timm_xl@$compiled")
infer_compiled=(
    "$m@fold=true,$compiled,freeze=true" "$m@fold=true,compile=reduce-overhead,freeze=true"
    "$timm_m@$compiled" "$timm_m@$compiled,freeze=true" "$timm_m@compile=reduce-overhead,freeze=true"
    "$resnet@$compiled,freeze=true"
)

bench() { # bench KIND ARGUMENT...: one measurement into the records, stopped at limit_s seconds
    timeout -k 5 "$limit_s" \
        "$python" -m tresnet.cli.main bench "$@" --device "$device" --output-dir "$records"
}

compare() { # compare KIND BATCHES CASE...: cases in turns, ending by themselves before the limit
    local kind=$1 batches=$2 own_limit_s=$((limit_s > 30 ? limit_s - 15 : 15))
    shift 2
    # shellcheck disable=SC2086
    bench "$kind" "$@" --batch-size $batches "${common[@]}" "${steps[@]}" --time-limit-s "$own_limit_s"
}

public_stack() { # the public stack's case, where its package is installed
    if "$python" -c 'import inplace_abn' 2>/dev/null; then
        echo "$m@$public"
    else
        echo 'the public stack is left out: the inplace-abn package is not installed' >&2
    fi
}

warm_one() { # warm_one KIND BATCH CASE: compile a case; its record is thrown away
    local records=$scratch/warm steps=(--warmup-steps 2 --rounds 1 --steps 1)
    local limit_s=$((warm_until_s - SECONDS))
    ((limit_s >= 15)) || { echo "not compiled, for want of time: $3"; return 1; }
    TORCHINDUCTOR_COMPILE_THREADS=4 compare "$@" >>"$scratch/warm.log" 2>&1 ||
        { echo "not compiled: $3"; return 1; }
}

warm() {
    local case running=0 failed=0 warm_until_s=$((SECONDS + limit_s))
    for case in "${train_m_compiled[@]}" "${train_l_compiled[@]}" "${train_xl_compiled[@]}" \
        "${infer_compiled[@]/#/infer:}"; do
        if ((running == 4)); then
            wait -n || failed=1
        else
            running=$((running + 1))
        fi
        if [[ $case == infer:* ]]; then
            warm_one infer "$infer_batch" "${case#infer:}" &
        else
            warm_one train "$batch" "$case" &
        fi
    done
    while ((running-- > 0)); do
        wait -n || failed=1
    done
    ((failed == 0)) || tail -n 20 "$scratch/warm.log"
    return "$failed"
}

train_m() {
    local stack
    stack=$(public_stack)
    compare train "$batch" "$m@$kernels" "$m@$kernels,recompute=none" "${train_m_compiled[@]}" \
        "$timm_m" ${stack:+"$stack"} "$resnet" "$timm_m@channels_last=false" \
        "$timm_m@dtype=$half" "$resnet@dtype=$half"
}

train_l() {
    compare train "$batch" "$l@pad=true,$kernels" "$l@pad=true,$kernels,recompute=none" \
        "${train_l_compiled[@]}" "$timm_l"
}

train_xl() {
    compare train "$batch" "$xl@pad=true,$kernels" "$xl@pad=true,$kernels,recompute=none" \
        "${train_xl_compiled[@]}" "$timm_xl"
}

infer() { compare infer "$infer_batch" "$m@fold=true" "${infer_compiled[@]}" "$timm_m" "$resnet"; }

memory() { # peak memory over batch sizes, and the eager cases' best batch
    local stack
    stack=$(public_stack)
    compare train "$half_batch $batch $double_batch" "$m@$kernels" "$timm_m" ${stack:+"$stack"} \
        "$resnet" "$m@$kernels,recompute=outputs"
}

max_batch() { # a third of the time for each
    bench max-batch "$m@$kernels" "$timm_m" "$m@$kernels,recompute=outputs" "${common[@]}" \
        "${largest_options[@]}" --time-limit-s $((limit_s > 60 ? (limit_s - 15) / 3 : 15))
}

ops() { bench ops "${ops_options[@]}" --time-limit-s $((limit_s > 30 ? limit_s - 15 : 15)); }

tiles() { # all operations at once fill the compiler's cache, then each is timed alone
    local op began_s=$SECONDS contenders=(triton
        triton@warps=2 triton@warps=8 triton@tile=1024 triton@tile=4096 triton@tile=4096,warps=8
        triton@blur_tile=512 triton@blur_tile=2048,warps=8 triton@programs=512 triton@programs=2048
        triton@programs=4096 triton@most_tiles=1 triton@most_tiles=2 triton@most_tiles=8)
    for op in abn abn_blur abn_se abn_join blur stem; do
        timeout -k 5 $((limit_s / 2)) "$python" -m tresnet.cli.main bench ops "$op" "${ops_options[@]}" \
            --contenders "${contenders[@]}" --repeats 1 --device "$device" \
            --output-dir "$scratch/tiles" >>"$scratch/warm.log" 2>&1 &
    done
    wait
    limit_s=$((limit_s - (SECONDS - began_s)))
    bench ops "${ops_options[@]}" --contenders "${contenders[@]}" \
        --time-limit-s $((limit_s > 30 ? limit_s - 15 : 15))
}

report() {
    "$python" -m tresnet.cli.main bench report --records "$records" --pictures "$report" \
        >"$scratch/draft.md" && cp "$scratch/draft.md" "$report/report.md" &&
        echo "report: $report/report.md"
}

# Most seconds of each stage. The compiler's work comes first, so that no clock runs beside it.
declare -A limits=([ops]=70 [warm]=150 [train_m]=120 [train_l]=60 [train_xl]=60 [infer]=70
    [max_batch]=105 [memory]=70 [report]=20
    [tiles]=300)
stages=(ops warm train_m train_l train_xl infer max_batch memory report)
if (($#)); then
    for name in "$@"; do
        [[ -n $name && -n ${limits[$name]:-} ]] || { echo "expected stages out of ${stages[*]} tiles, got $name" >&2; exit 2; }
    done
    stages=("$@")
fi

failed=() left_out=() times=()
for name in "${stages[@]}"; do
    reserved_s=0
    [[ $name == report ]] || reserved_s=${limits[report]}
    left_s=$((total_s - SECONDS - reserved_s))
    limit_s=${limits[$name]}
    $rehearsing && limit_s=$left_s
    ((limit_s <= left_s)) || limit_s=$left_s
    if ((limit_s < 15)); then
        left_out+=("$name")
        continue
    fi
    printf '\n--- %s, at most %d s\n' "$name" "$limit_s"
    began_s=$SECONDS
    "$name" || failed+=("$name")
    times+=("$(printf '%6d  %s' "$((SECONDS - began_s))" "$name")")
done

printf '\n--- seconds per stage\n'
printf '%s\n' "${times[@]}" "$(printf '%6d  all' "$SECONDS")"
((${#left_out[@]} == 0)) || echo "left out for want of time: ${left_out[*]}"
((${#failed[@]} == 0)) || echo "not everything measured in: ${failed[*]}"
((${#left_out[@]} + ${#failed[@]} == 0))
