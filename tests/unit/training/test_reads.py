"""A step asks the device for no number: what would make the host wait, or end a capture."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.lobes.classifier import build_classifier, build_loss
from speechbrain_rev.lobes.schedules import SpeakerSchedule
from speechbrain_rev.optim import build_optimizer

aten = torch.ops.aten
#: Operations whose result, or its shape, the host has to wait for.
READS = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
}
MODES = {
    "revnet46": ("store", "selective", "reconstruct", "recompute"),
    "resnet34": ("store", "selective", "recompute"),
}


class Reads(TorchDispatchMode):
    """Notes the operations that wait."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # States of random generators, which are bytes, are the host's.
        of_host = all(x.dtype == torch.uint8 for x in args if torch.is_tensor(x))
        if func in READS and not of_host:
            self.seen.append(func)
        return func(*args, **(kwargs or {}))


def steps_of(name, mode, optimizer, bits, device="cpu"):
    """Make the steps of a small training, one by one."""
    with torch.device(device):
        encoder = build_encoder(
            name, widths=(8, 8, 8, 8), blocks=(1, 1, 1, 1), mode=mode
        )
        classifier = build_classifier("aam_softmax", input_size=256, out_neurons=40)
        x = torch.randn(3, 40, 80)
        labels = torch.zeros(3, 1, dtype=torch.long)
    loss = build_loss("aam_softmax", margin=0.2, scale=32.0)
    parameters = [*encoder.parameters(), *classifier.parameters()]
    taken = build_optimizer(parameters, name=optimizer, bits=bits, lr=0.1)
    schedule = SpeakerSchedule(
        lr=0.1, final_lr=0.01, number_of_epochs=2, warmup_epochs=0, steps_per_epoch=9,
        loss=loss,
    )  # fmt: skip

    def step():
        loss(classifier(encoder(x)), labels).backward()
        schedule.on_batch_end(taken)
        torch.nn.utils.clip_grad_norm_(parameters, 5.0)
        taken.step()
        taken.zero_grad()

    return step


#: Of 32-bit SGD: at 8 bits a CPU computes by the reference, which reads, and a GPU by a kernel,
#: which does not; torch's AdamW reads its count of steps, which is the host's.
CASES = [(name, mode, "sgd", 32) for name, modes in MODES.items() for mode in modes]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_after_the_first_read_nothing(case):
    step = steps_of(*case)
    # What is computed twice is compared, and scores are looked at.
    step()
    with Reads() as reads:
        for _ in range(2):
            step()
    assert not reads.seen


def test_a_read_is_noticed():
    with Reads() as reads:
        bool(torch.ones(()) > 0)
        torch.equal(torch.ones(2), torch.ones(2))
    assert len(reads.seen) == 2


@pytest.mark.parametrize("mode", MODES["revnet46"])
def test_a_step_needs_no_contents_of_tensors(mode):
    """On meta each read of one is an error, however it is made."""
    step = steps_of("revnet46", mode, "sgd", 8, device="meta")
    for _ in range(2):
        step()
