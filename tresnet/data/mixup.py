"""timm's mixup and cutmix with a seed of their own, so that a resumed run mixes the same way."""

import torch

from tresnet.data.seeding import mix_seed, preserved_generators, seed_cpu_generators
from tresnet.errors import ConfigError, InputError


class Mixer:
    """Mix each batch with its mirror order and its labels alike.

    What is drawn depends only on (seed, step): not on the batches before, nor on other users of
    the global generators, which are left as found.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        mixup_alpha: float = 0.2,
        cutmix_alpha: float = 0.0,
        prob: float = 1.0,
        switch_prob: float = 0.5,
        label_smoothing: float = 0.1,
        seed: int = 0,
    ) -> None:
        """Configure the mixing; give each rank a seed of its own.

        Args:
            num_classes: width of the soft labels.
            mixup_alpha: both parameters of the beta distribution of the share; 0 is no mixup.
            cutmix_alpha: the same for the pasted box's share; 0 is no cutmix.
            prob: probability that a batch is mixed at all.
            switch_prob: probability of cutmix where both are on.
            label_smoothing: mass spread evenly over the classes.
            seed: any integer.

        Raises:
            ConfigError: neither mixup nor cutmix is on.
        """
        from timm.data.mixup import Mixup

        if mixup_alpha <= 0 and cutmix_alpha <= 0:
            raise ConfigError(
                "expected mixup_alpha or cutmix_alpha above 0, got "
                f"{mixup_alpha} and {cutmix_alpha}: leave the mixer out instead"
            )
        self.seed = seed
        self._mixup = Mixup(
            mixup_alpha=mixup_alpha,
            cutmix_alpha=cutmix_alpha,
            prob=prob,
            switch_prob=switch_prob,
            label_smoothing=label_smoothing,
            num_classes=num_classes,
        )

    def __call__(
        self, images: torch.Tensor, targets: torch.Tensor, step: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mix a batch, overwriting `images`.

        Args:
            images: (N, C, H, W), floating point, N even.
            targets: class numbers (N,), int64.
            step: number of the batch in the whole run.

        Returns:
            The images, and soft labels (N, num_classes) in float32.

        Raises:
            InputError: N is odd.
        """
        if len(images) % 2:
            raise InputError(
                f"expected an even batch to mix in pairs, got {len(images)} images: "
                "change the batch size or drop the last batch"
            )
        with preserved_generators():
            seed_cpu_generators(mix_seed(self.seed, step))
            return self._mixup(images, targets)
