"""Branches to merge: the document's attention bottleneck, and its head of one group."""

from torch import Tensor, nn


class AttentionBranch(nn.Module):
    """1x1, BN, ReLU, 3x3, BN, ReLU, 1x1, BN, add, ReLU."""

    def __init__(self, channels: int, middle: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, middle, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(middle)
        self.conv2 = nn.Conv2d(middle, middle, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(middle)
        self.conv3 = nn.Conv2d(middle, channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x
        return self.relu(y)


class GroupHead(nn.Module):
    """Attention, global max pool, linear to the group's own classes."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.attention = AttentionBranch(channels, channels // 2)
        self.gmp = nn.AdaptiveMaxPool2d(1)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        y = self.gmp(self.attention(x))
        return self.fc(y.view(y.size(0), y.size(1)))
