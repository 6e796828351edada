"""WeSpeaker's networks in plain torch, by their published layout, for comparison."""

from pathlib import Path

import torch
from torch import nn
from torchaudio.compliance import kaldi


def _norm(channels):
    return nn.BatchNorm2d(channels)


class _Block(nn.Module):
    """Basic, or a bottleneck that expands four times; the 3x3 of it has the stride."""

    def __init__(self, inputs, width, stride, bottleneck):
        super().__init__()
        outputs = 4 * width if bottleneck else width
        sizes = (
            [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
            if bottleneck
            else [(inputs, width, 3, stride), (width, width, 3, 1)]
        )
        self.depth = len(sizes)
        for i, (a, b, kernel, step) in enumerate(sizes, start=1):
            conv = nn.Conv2d(a, b, kernel, step, padding=kernel // 2, bias=False)
            self.add_module(f"conv{i}", conv)
            self.add_module(f"bn{i}", _norm(b))
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, _norm(outputs))

    def forward(self, x):
        y = x
        for i in range(1, self.depth + 1):
            y = self.get_submodule(f"bn{i}")(self.get_submodule(f"conv{i}")(y))
            if i < self.depth:
                y = y.relu()
        return (y + self.shortcut(x)).relu()


def _pooled(x):
    """Means and deviations over time of [batch, channel, freq, time]."""
    mean = x.mean(dim=-1).flatten(1)
    deviation = (x.var(dim=-1, unbiased=True) + 1e-7).sqrt().flatten(1)
    return torch.cat([mean, deviation], dim=1)


class ResNet(nn.Module):
    """Filterbanks [batch, time, freq] to embeddings [batch, embed_dim]."""

    def __init__(
        self, blocks, *, bottleneck=False, channels=32, feat_dim=80, embed_dim=256
    ):
        super().__init__()
        self.conv1 = nn.Conv2d(1, channels, 3, padding=1, bias=False)
        self.bn1 = _norm(channels)
        inputs = channels
        for i, count in enumerate(blocks):
            layer = nn.Sequential()
            for j in range(count):
                stride = 2 if i > 0 and j == 0 else 1
                layer.append(_Block(inputs, channels * 2**i, stride, bottleneck))
                inputs = channels * 2**i * (4 if bottleneck else 1)
            self.add_module(f"layer{i + 1}", layer)
        self.seg_1 = nn.Linear(2 * inputs * (feat_dim // 8), embed_dim)

    def forward(self, feats):
        x = self.bn1(self.conv1(feats.permute(0, 2, 1).unsqueeze(1))).relu()
        for i in range(1, 5):
            x = self.get_submodule(f"layer{i}")(x)
        return self.seg_1(_pooled(x))


class _DepthFirst(nn.Module):
    """1x1 to four times the width, depthwise 3x3, 1x1 back."""

    def __init__(self, width):
        super().__init__()
        wide = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(width, wide, 1, bias=False), _norm(wide)
        self.conv2 = nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False)
        self.bn2 = _norm(wide)
        self.conv3, self.bn3 = nn.Conv2d(wide, width, 1, bias=False), _norm(width)

    def forward(self, x):
        y = self.bn1(self.conv1(x)).relu()
        y = self.bn2(self.conv2(y)).relu()
        return (self.bn3(self.conv3(y)) + x).relu()


class GeminiDFResNet(nn.Module):
    """Filterbanks [batch, time, freq] to embeddings [batch, embed_dim].

    Every stage halves the frequencies, the second one the frames too.
    """

    def __init__(self, blocks, *, channels=32, feat_dim=80, embed_dim=256):
        super().__init__()
        widths = [channels * 2**i for i in range(len(blocks))]
        stem = nn.Conv2d(1, channels, 3, padding=1, bias=False)
        self.downsample_layers = nn.ModuleList(
            [nn.Sequential(stem, _norm(channels), nn.ReLU())]
        )
        self.stages = nn.ModuleList()
        inputs = [channels, *widths]
        for i, (width, count) in enumerate(zip(widths, blocks, strict=True)):
            stride = (2, 2 if i == 1 else 1)
            conv = nn.Conv2d(inputs[i], width, 3, stride, padding=1, bias=False)
            self.downsample_layers.append(nn.Sequential(conv, _norm(width)))
            self.stages.append(
                nn.Sequential(*(_DepthFirst(width) for _ in range(count)))
            )
        self.seg_1 = nn.Linear(2 * widths[-1] * (feat_dim // 16), embed_dim)

    def forward(self, feats):
        x = self.downsample_layers[0](feats.permute(0, 2, 1).unsqueeze(1))
        for entry, stage in zip(self.downsample_layers[1:], self.stages, strict=True):
            x = stage(entry(x))
        return self.seg_1(_pooled(x))


def with_statistics(model, seed=0):
    """Give normalisations statistics and scales that training could leave."""
    draw = torch.Generator().manual_seed(seed)
    norms = [n for n, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)]
    shifts = {f"{name}.{what}" for name in norms for what in ("running_mean", "bias")}
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name in shifts:
                tensor.uniform_(-0.2, 0.2, generator=draw)
            elif name.endswith("running_var"):
                tensor.uniform_(0.5, 1.5, generator=draw)
            elif name.endswith("num_batches_tracked"):
                tensor.fill_(1234)
            else:
                noise = torch.rand(tensor.shape, generator=draw)
                tensor.mul_(0.8 + 0.4 * noise)
    return model.eval()


def embed(model, waveform, sample_rate=16000, n_mels=80):
    """Embed [samples] from -1 to 1 as WeSpeaker's extraction does."""
    feats = kaldi.fbank(
        (waveform * (1 << 15)).unsqueeze(0),
        num_mel_bins=n_mels,
        frame_length=25,
        frame_shift=10,
        dither=0.0,
        sample_frequency=sample_rate,
        window_type="hamming",
        use_energy=False,
    )
    feats = feats - torch.mean(feats, dim=0)
    with torch.no_grad():
        return model(feats.unsqueeze(0))[0].numpy()


BASIC = {"blocks": (1, 2, 1, 1), "channels": 4, "embed_dim": 16}


def write_model(folder: Path, model: nn.Module) -> Path:
    """Write avg_model.pt as WeSpeaker does."""
    torch.save(model.state_dict(), folder / "avg_model.pt")
    return folder / "avg_model.pt"
