"""Probabilities of images with several labels."""

import torch

from tresnet.cli.predict import name_classes


def test_each_label_has_a_probability_of_its_own():
    logits = torch.tensor([0.0, 4.0, 4.0])
    assert name_classes(logits, ("a", "b", "c"), 3, several=True) == (
        "b (98.2 %), c (98.2 %), a (50.0 %)"
    )
