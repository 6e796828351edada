"""Some steps of training under SpeechBrain's Checkpointer, also as a new process.

Called with a folder, it resumes each optimizer of CASES from ``folder/<case>`` and
writes what it ends with to ``folder/<case>.pt``.
"""

import pathlib
import sys

import torch
from speechbrain.utils.checkpoints import Checkpointer

from speechbrain_rev.optim import build_optimizer

CASES = {
    "sgd8": {"name": "sgd", "bits": 8, "lr": 0.05, "weight_decay": 1e-4},
    "adam8": {"name": "adam", "bits": 8, "lr": 1e-3},
    "adamw8": {"name": "adamw", "bits": 8, "lr": 1e-3, "weight_decay": 0.05},
    "sgd32": {"name": "sgd", "bits": 32, "lr": 0.05, "weight_decay": 1e-4},
    "adamw32": {"name": "adamw", "bits": 32, "lr": 1e-3, "weight_decay": 0.05},
}
SAVED_AFTER, STEPS = 3, 6


def run(case, folder):
    """A network, its optimizer and its checkpointer, before the first step."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(16, 64, 3),  # 9,216 weights: 8 bit
        torch.nn.BatchNorm2d(64),  # small: 32 bit
        torch.nn.Conv2d(64, 64, 1),  # 4,096: the first that has 8 bit
        torch.nn.Flatten(),
        torch.nn.Linear(64, 100),  # kept at 32 bit
    ).to(memory_format=torch.channels_last)
    optimizer = build_optimizer(
        network.parameters(), keep_32bit=[network[-1]], **CASES[case]
    )
    recoverables = {"network": network, "optimizer": optimizer}
    return network, optimizer, Checkpointer(folder, recoverables)


def train(network, optimizer, start, stop):
    for step in range(start, stop):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(8, 16, 3, 3, generator=generator)
        targets = torch.randint(100, (8,), generator=generator)
        optimizer.param_groups[0]["lr"] *= 0.9
        loss = torch.nn.functional.cross_entropy(network(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def outcome(network, optimizer):
    return {"network": network.state_dict(), "optimizer": optimizer.state_dict()}


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    for case in CASES:
        network, optimizer, checkpointer = run(case, folder / case)
        if checkpointer.recover_if_possible() is None:
            raise FileNotFoundError(f"no checkpoint in {folder / case}")
        train(network, optimizer, SAVED_AFTER, STEPS)
        torch.save(outcome(network, optimizer), folder / f"{case}.pt")
