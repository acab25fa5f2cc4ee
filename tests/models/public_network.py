"""A TResNet with the public code's parameter names, written from the description of its format.

It shares nothing with the package: nested Sequentials give the names, and the norm is either the
real inplace-abn package's module or a stand-in with the same parameters and plain operations.
"""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import nn


class StandInABN(nn.Module):
    """gamma = |w| + eps, BN, leaky ReLU: the formula of in-place ABN without its package."""

    def __init__(self, num_features, activation="leaky_relu", activation_param=0.01):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))
        self.register_buffer("num_batches_tracked", torch.tensor(0))
        self.slope = activation_param if activation == "leaky_relu" else 1.0

    def forward(self, x):
        # where w = 0 the package takes the gradient's sign as +1, abs() takes 0
        gamma = torch.where(self.weight < 0, -self.weight, self.weight) + 1e-5
        x = F.batch_norm(
            x, self.running_mean, self.running_var, gamma, self.bias, self.training, 0.1, 1e-5
        )
        return F.leaky_relu(x, self.slope)


class Blur(nn.Module):
    def __init__(self, channels, stored):
        super().__init__()
        line = torch.tensor([1.0, 2.0, 1.0])
        filt = (torch.outer(line, line) / 16).expand(channels, 1, 3, 3).contiguous()
        self.register_buffer("filt", filt, persistent=stored)

    def forward(self, x):
        return F.conv2d(F.pad(x, (1, 1, 1, 1), "reflect"), self.filt, stride=2, groups=x.shape[1])


class SE(nn.Module):
    def __init__(self, channels, reduced):
        super().__init__()
        self.fc1 = nn.Conv2d(channels, reduced, 1)
        self.fc2 = nn.Conv2d(reduced, channels, 1)

    def forward(self, x):
        scale = self.fc2(F.relu(self.fc1(x.mean((2, 3), keepdim=True))))
        return x * torch.sigmoid(scale)


class Block(nn.Module):
    """A basic block (`wide=False`) or a bottleneck."""

    def __init__(self, net, channels, planes, stride, wide, use_se):
        super().__init__()
        out = planes * (4 if wide else 1)
        blur = stride == 2
        if wide:
            self.conv1 = net.conv(channels, planes, 1)
            self.conv2 = net.conv(planes, planes, 3, blur=blur)
            self.conv3 = net.conv(planes, out, 1, act=False)
        else:
            self.conv1 = net.conv(channels, planes, 3, blur=blur)
            self.conv2 = net.conv(planes, out, 3, act=False)
        self.wide = wide
        self.se = SE(planes, max(out // (8 if wide else 4), 64)) if use_se else None
        self.downsample = None
        if stride == 2 or channels != out:
            pool = [nn.AvgPool2d(2, 2, ceil_mode=True, count_include_pad=False)]
            shortcut = net.conv(channels, out, 1, act=False)
            self.downsample = nn.Sequential(*pool * (stride == 2), shortcut)

    def forward(self, x):
        y = self.conv2(self.conv1(x))
        if self.se is not None:
            y = self.se(y)
        if self.wide:
            y = self.conv3(y)
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class SpaceToDepth(nn.Module):
    def forward(self, x):
        n, c, h, w = x.shape
        x = x.view(n, c, h // 4, 4, w // 4, 4).permute(0, 3, 5, 1, 2, 4)
        return x.reshape(n, 16 * c, h // 4, w // 4)


class PublicTResNet(nn.Module):
    def __init__(self, layers, planes, num_classes, v2=False, abn=StandInABN, filters=False):
        super().__init__()
        self.abn, self.filters = abn, filters
        self.slope = 1e-6 if v2 else 1e-3
        parts = [("SpaceToDepth", SpaceToDepth())]
        parts.append(("conv1", self.conv(48, planes, 3, slope=1e-6 if v2 else 1e-2)))
        channels = planes
        for stage, count in enumerate(layers):
            wide = v2 or stage >= 2
            blocks = []
            for i in range(count):
                stride = 2 if stage and i == 0 else 1
                blocks.append(Block(self, channels, planes << stage, stride, wide, stage < 3))
                channels = (planes << stage) * (4 if wide else 1)
            parts.append((f"layer{stage + 1}", nn.Sequential(*blocks)))
        self.body = nn.Sequential(OrderedDict(parts))
        self.head = nn.Sequential(OrderedDict([("fc", nn.Linear(channels, num_classes))]))

    def conv(self, channels, out, kernel, act=True, blur=False, slope=None):
        abn = self.abn(
            out,
            activation="leaky_relu" if act else "identity",
            activation_param=self.slope if slope is None else slope,
        )
        conv = nn.Conv2d(channels, out, kernel, padding=kernel // 2, bias=False)
        pair = nn.Sequential(conv, abn)
        # the public code's anti-alias layer holds the blur as `op`
        held = nn.Sequential(OrderedDict(op=Blur(out, self.filters)))
        return nn.Sequential(pair, held) if blur else pair

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


@torch.no_grad()
def randomise(model, generator):
    """Give every tensor of a public network values a training could: w negative and zero too."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("running_var"):
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
        elif name.endswith(("running_mean", ".bias")):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
        elif tensor.dim() == 1:  # ABN weights
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
            tensor[1::7] = 0.0
        elif name.endswith("num_batches_tracked"):
            tensor.fill_(5)
        elif tensor.dim() > 1 and not name.endswith("filt"):
            fan_in = tensor[0].numel()
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * (2 / fan_in) ** 0.5)
    return model
