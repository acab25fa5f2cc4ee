"""What the model is asked to get right: plain, smoothed or mixed labels, by timm's parts."""

from collections.abc import Callable

from torch import Tensor, nn

from tresnet.data import Mixer
from tresnet.data.seeding import mix_seed
from tresnet.engine.config import TrainConfig


class Losses:
    """The loss of each epoch, and the mixing of its batches."""

    def __init__(self, config: TrainConfig, classes: int, rank: int) -> None:
        """Build the losses that the configuration asks for.

        Args:
            config: The run's configuration.
            classes: Number of classes.
            rank: Each process mixes in its own way.
        """
        from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy

        augment = config.augment
        self._mixing_epochs = config.schedule.epochs - augment.mix_off_epochs
        self._plain: Callable[[Tensor, Tensor], Tensor] = (
            LabelSmoothingCrossEntropy(augment.label_smoothing)
            if augment.label_smoothing
            else nn.CrossEntropyLoss()
        )
        self._soft = SoftTargetCrossEntropy()
        self._mixer = None
        if augment.mixes:
            self._mixer = Mixer(
                classes,
                mixup_alpha=augment.mixup,
                cutmix_alpha=augment.cutmix,
                prob=augment.mix_prob,
                label_smoothing=augment.label_smoothing,
                seed=mix_seed(config.run.seed, rank),
            )

    def mixes(self, epoch: int) -> bool:
        """Whether the batches of an epoch are mixed, so that they have no accuracy."""
        return self._mixer is not None and epoch < self._mixing_epochs

    def prepare(
        self, images: Tensor, labels: Tensor, epoch: int, step: int
    ) -> tuple[Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]]:
        """Mix a batch if its epoch does.

        Args:
            images: (N, 3, H, W); overwritten by mixing.
            labels: (N,).
            epoch: From 0.
            step: Number of the batch in the whole run.

        Returns:
            Images, labels (N,) or label distributions (N, classes), and their loss.
        """
        if self._mixer is None or not self.mixes(epoch):
            return images, labels, self._plain
        images, soft = self._mixer(images, labels, step)
        return images, soft, self._soft
