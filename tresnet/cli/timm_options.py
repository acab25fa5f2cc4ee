"""Options of timm's train.py and validate.py that have another name here, or none."""

from collections.abc import Iterable, Sequence

from tresnet.errors import ConfigError

_ABSENT = (
    "--num-classes", "--mean", "--std", "--vflip", "--color-jitter", "--color-jitter-prob",
    "--grayscale-prob", "--gaussian-blur-prob", "--resplit", "--aug-splits", "--jsd-loss",
    "--no-aug", "--train-crop-mode", "--bce-sum", "--cutmix-minmax", "--mixup-switch-prob",
    "--mixup-mode", "--drop-connect", "--drop-block", "--bn-momentum", "--bn-eps",
    "--dist-bn", "--split-bn", "--sched-on-updates", "--lr-base-scale", "--lr-noise",
    "--lr-cycle-mul", "--lr-cycle-decay", "--lr-cycle-limit", "--lr-k-decay",
    "--decay-epochs", "--decay-milestones", "--decay-rate", "--cooldown-epochs",
    "--patience-epochs", "--warmup-prefix", "--epoch-repeats", "--start-epoch", "--opt-eps",
    "--opt-betas", "--opt-kwargs", "--clip-mode", "--gp", "--model-kwargs",
    "--head-init-scale", "--head-init-bias", "--fuser", "--fast-norm", "--amp-impl",
    "--model-dtype", "--no-ddp-bb", "--no-resume-opt", "--checkpoint-hist", "--save-images",
    "--pin-mem", "--no-prefetcher", "--eval-metric", "--tta", "--worker-seeding",
    "--validation-batch-size", "--model-ema-force-cpu", "--dataset-download",
    "--real-labels", "--use-ema", "--test-pool",
)  # fmt: skip
# timm's name to the options here; '' means that there is no such option. Names that both have are
# left out.
TIMM_OPTIONS = {
    "-b": "--batch-size",
    "-j": "--workers",
    "--data-dir": "--data",
    "--dataset": "--data",
    "--input-key": "--image-column",
    "--target-key": "--label-column",
    "--pretrained": "--weights TAG",
    "--pretrained-path": "--weights FILE",
    "--initial-checkpoint": "--weights FILE",
    "--checkpoint": "--weights FILE",
    "--img-size": "--input-size",
    "--train-interpolation": "--interpolation",
    "--scale": "--crop-scale",
    "--ratio": "--crop-ratio",
    "--aa": "--auto-augment",
    "--smoothing": "--label-smoothing",
    "--bce-loss": "--loss one-vs-all",
    "--bce-pos-weight": "--class-weights",
    "--mixup-prob": "--mix-prob",
    "--mixup-off-epoch": "--mix-off-epochs, counted from the end",
    "--drop": "--drop-rate",
    "--drop-path": "--drop-path-rate",
    "--lr-base": "--lr",
    "--lr-base-size": "--lr-batch",
    "--sched": "--lr-schedule",
    "--warmup-epochs": "--warmup-fraction, a fraction of all steps",
    "--warmup-lr": "--start-factor, a fraction of --lr",
    "--min-lr": "--end-factor, a fraction of --lr",
    "--grad-accum-steps": "--accumulate",
    "--amp-dtype": "--amp bf16 or fp16",
    "--torchcompile": "--compile default",
    "--torchscript": "--jit",
    "--model-ema": "--ema-decay",
    "--model-ema-decay": "--ema-decay",
    "--model-ema-warmup": "--ema-warmup",
    "--kd-model-name": "--teacher",
    "--recovery-interval": "--checkpoint-interval-s",
    "--output": "--runs",
    "--experiment": "--name",
    "--log-wandb": "--track wandb",
    "--wandb-project": "--track wandb, and the variable WANDB_PROJECT",
    "--results-file": "--output",
    "--valid-labels": "--only-data-classes",
    **dict.fromkeys(_ABSENT, ""),
}
_TABLE = "the table 'Coming from timm's train.py' in docs/training.md"


def refuse_timm_options(arguments: Sequence[str], own: Iterable[str]) -> None:
    """Raise ConfigError for timm's names among `arguments`, with their names here.

    `own` are the command's options, which may share a name with an option of timm's.
    """
    own = set(own)
    names = (argument.partition("=")[0].replace("_", "-") for argument in arguments)
    foreign = [name for name in dict.fromkeys(names) if name in TIMM_OPTIONS and name not in own]
    if foreign:
        pairs = [f"{name} is {TIMM_OPTIONS[name] or 'not there'}" for name in foreign]
        raise ConfigError(f"got options of timm's scripts: here {'; '.join(pairs)} (see {_TABLE})")
