"""Options of timm's train.py and validate.py that have another name here."""

from collections.abc import Sequence

from tresnet.errors import ConfigError

# timm's name to the options here. Names that both have are left out.
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
}
_TABLE = "the table 'Coming from timm's train.py' in docs/training.md"


def refuse_timm_options(arguments: Sequence[str], own: Sequence[str] = ()) -> None:
    """Raise ConfigError for timm's names among `arguments`, except options of the command's own."""
    names = (argument.partition("=")[0].replace("_", "-") for argument in arguments)
    foreign = [name for name in dict.fromkeys(names) if name in TIMM_OPTIONS and name not in own]
    if foreign:
        pairs = [f"{name} is {TIMM_OPTIONS[name]}" for name in foreign]
        raise ConfigError(f"got options of timm's scripts: here {'; '.join(pairs)} (see {_TABLE})")
