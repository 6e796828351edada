"""Lengths on a CUDA device: the same embedding, and no step waits for the device."""

import pytest
import torch
from torch.nn.functional import pad

from tests.unit.lobes.encoders import KINDS, feats, tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("mode", ["store", "recompute"])
@pytest.mark.parametrize("name", KINDS)
def test_training_with_lengths_waits_for_nothing(name, mode):
    encoder = tiny(name, mode=mode).cuda()
    x = feats(3, 43, torch.float32).cuda()
    lengths = torch.tensor([1.0, 0.5, 0.2])
    encoder(x, lengths.cuda()).sum().backward()  # libraries set themselves up
    for given in (lengths.cuda(), lengths):
        torch.cuda.set_sync_debug_mode("error")
        try:
            encoder(x, given).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@torch.no_grad()
@pytest.mark.parametrize("name", KINDS)
def test_padded_utterances_have_the_embedding_that_they_have_alone(name):
    encoder = tiny(name).cuda().eval()
    long, short = (feats(1, n, torch.float32).cuda() for n in (93, 50))
    padded = torch.cat([long, pad(short, (0, 0, 0, 43))])
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        together = encoder(padded, torch.tensor([1.0, 50 / 93]))
        alone = torch.cat([encoder(long), encoder(short)])
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=0)
