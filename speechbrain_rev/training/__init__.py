"""Training runs with SpeechBrain: steps, epochs, logs, settings, memory plans.

A recipe subclasses ``ValidatedEpochs`` and says how a batch becomes a loss. Each module is
one part of a run: ``steps`` (gradients that are not finite, files that cannot be read),
``epochs`` (validation, log and checkpoint), ``epoch_log`` (lines, curves, TensorBoard,
wandb), ``progress`` (the bar and the line of an epoch), ``start_from`` (the pretrained model
that a run starts from), ``memory_plan`` (modes of an encoder's blocks, of a step as in
``recipe_step``, and the file that keeps them) and ``memory_budget`` (modes of any other
recipe's blocks).
"""

from speechbrain_rev import torchaudio_pair  # noqa: F401, imported before torchaudio
from speechbrain_rev.training.epoch_log import EpochLog, check_logger
from speechbrain_rev.training.epochs import ValidatedEpochs, dry_run
from speechbrain_rev.training.memory_budget import MemoryBudget
from speechbrain_rev.training.memory_plan import give_modes
from speechbrain_rev.training.steps import CheckedSteps, Tally

__all__ = [
    "CheckedSteps",
    "EpochLog",
    "MemoryBudget",
    "Tally",
    "ValidatedEpochs",
    "check_logger",
    "dry_run",
    "give_modes",
]
