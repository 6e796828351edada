"""Train a speaker encoder.

python recipes/VoxCeleb/train.py hparams/df_revnet281.yaml --data_folder=VOXCELEB2

FILE names the settings; --key=value changes one of them; SpeechBrain's run options
(--device, --debug, ...) are accepted as well. --dry_run takes two steps and prints how
long training would take, how much memory, and whether what is computed twice had equal
bits. The same command resumes an interrupted run from its last checkpoint.
"""

from __future__ import annotations

import sys

from speechbrain_rev.cli import run_script
from speechbrain_rev.hparams import settings_help

HELP = f"""{__doc__}
{settings_help()}

All settings: docs/yaml_reference.md
Their values in a file: speechbrain-rev resolve FILE"""


def asks_for_help(argv):
    """Return whether a command line asks for the help, or names nothing."""
    return not argv or bool({"-h", "--help"} & set(argv))


if __name__ == "__main__" and asks_for_help(sys.argv[1:]):
    # Before what takes seconds to import, and prints.
    run_script(lambda: print(HELP))
    sys.exit()

from speechbrain_rev import torchaudio_pair  # noqa: F401, before SpeechBrain

# isort: split

import logging
import warnings
from pathlib import Path

import speechbrain as sb
import torch
from hyperpyyaml import load_hyperpyyaml
from speechbrain.utils.distributed import get_rank, run_on_main
from speechbrain.utils.run_opts import RunOptions

from speechbrain_rev.data import GlobalRandomState
from speechbrain_rev.data.augmentation import check_noise
from speechbrain_rev.data.dataset import (
    too_many_workers,
    train_loader,
    valid_loader,
)
from speechbrain_rev.data.listing import DataSettings
from speechbrain_rev.data.preparation import (
    VALID_TRIALS,
    prepare,
    read_prepared,
    write_missing_sums,
)
from speechbrain_rev.devices import described
from speechbrain_rev.files import check_writable
from speechbrain_rev.hparams import OptimizerWarning, compose, plain_settings
from speechbrain_rev.inference.runs import HYPERPARAMS
from speechbrain_rev.lobes.checkpointer import CHANNELS, KeptArithmetic
from speechbrain_rev.processes import end_process, process_count
from speechbrain_rev.scoring import read_trials
from speechbrain_rev.training import (
    EpochLog,
    ValidatedEpochs,
    check_logger,
    dry_run,
    give_modes,
)
from speechbrain_rev.training.progress import beginning_log, keep_routine_off_terminal
from speechbrain_rev.training.run_folder import (
    RANDOM_STATE,
    already_finished,
    begin_record,
    changed_settings,
    finish,
    finished,
    has_run,
    kept_in,
    owned,
    partial_epoch,
    refuse_folders_of_another_run,
    refuse_other_checkpoints,
    refuse_other_network,
    write_hyperparams,
)
from speechbrain_rev.training.start_from import (
    DirectionMeans,
    Start,
    check_start,
    head_in_words,
    start_from,
)

logger = logging.getLogger("train")
DRY_RUN = ("--dry_run", "--dry-run")


class SpeakerBrain(ValidatedEpochs):
    """Trains on chunks of speech; validates on trials between whole utterances."""

    def init_optimizers(self):
        """Build the optimizer, whose momentum the bounds of compression follow."""
        if self.hparams.pretrained or self.hparams.encoder_lr:
            # The encoder has a rate of its own.
            groups = [
                {"params": list(self.modules[name].parameters())}
                for name in ("embedding_model", "classifier")
            ]
            self.optimizer = self.opt_class(groups)
            self.optimizers_dict = {"opt_class": self.optimizer}
            self.checkpointer.add_recoverable("optimizer", self.optimizer)
        else:
            super().init_optimizers()
        self.hparams.compression.follow(self.optimizer)

    def compute_forward(self, batch, stage):
        """Embed a batch and, in training, compare it with the training speakers."""
        batch = batch.to(self.device)
        wavs, lens = batch.wavs, batch.lens
        if stage == sb.Stage.TRAIN:
            wavs, lens = self.hparams.wav_augment(wavs, lens)
        feats = self.modules.mean_var_norm(self.modules.compute_features(wavs), lens)
        if stage != sb.Stage.TRAIN:
            return self.embed(feats)
        return self.modules.classifier(self.embed_training(feats))

    def compute_objectives(self, predictions, batch, stage):
        """Return the loss, and set the learning rate and margin of the step."""
        speakers = self.hparams.wav_augment.replicate_labels(batch.speakers)
        speakers = speakers.to(self.device)
        loss = self.hparams.compute_cost(predictions, speakers, batch.lens)
        correct = (predictions.detach().argmax(-1) == speakers).sum()
        self.measured = torch.stack([loss.detach().float(), correct.float()])
        self.hparams.lr_annealing.on_batch_end(self.optimizer)
        return loss


def list_data(settings):
    """List the speech that a run's settings name; the main process works, all read."""
    save = settings["save_folder"]
    begun = {"begun": has_run(settings)}
    run_on_main(prepare, args=[DataSettings.of(settings), save], kwargs=begun)
    run_on_main(write_missing_sums, args=[save])
    prepared = read_prepared(save)
    run_on_main(print, args=[prepared.in_words()])
    return prepared


def build_brain(hparams, run_opts):
    """Build the Brain of loaded settings, with all that a resumed run needs."""
    # The rate is that of the utterances of one step of the optimizer.
    hparams["lr_annealing"].batch_size *= run_opts.grad_accumulation_factor
    keep = hparams["checkpointer"].add_recoverable
    random_state = GlobalRandomState()
    random_state.fold_rank()
    keep(RANDOM_STATE, random_state)
    arithmetic = KeptArithmetic(hparams["modules"]["embedding_model"])
    keep(CHANNELS, arithmetic)
    hparams["checkpointer"].add_state("compression", hparams["compression"])
    return SpeakerBrain(
        modules=hparams["modules"],
        opt_class=hparams["opt_class"],
        hparams=hparams,
        run_opts=run_opts,
        checkpointer=hparams["checkpointer"],
    )


def compose_run(argv):
    """Read the command line.

    Return the complete YAML, its plain settings, the run options, FILE, and the pretrained
    model or None.
    """
    if get_rank():
        # The first process warns for all.
        warnings.simplefilter("ignore", OptimizerWarning)
    options = list(RunOptions.__dataclass_fields__)
    start = Start()
    composition = compose(
        argv, options, model_of=start.model_of, recorded_of=start.recorded_of
    )
    _, run_opts, left_over = RunOptions.from_command_line_args(
        [composition.file, *composition.run_arguments]
    )
    if left_over:
        raise ValueError(
            f"SpeechBrain's command line does not take {left_over.split(':')[0]!r}: "
            "leave it out."
        )
    settings = plain_settings(composition.text)
    model = None if has_run(settings) else start.model
    return composition.text, settings, run_opts, composition.file, model


def main(argv=None, dry_run=dry_run):
    """Run the command line; ``dry_run`` takes the steps of --dry_run."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if asks_for_help(argv):
        print(HELP)
        return
    keep_routine_off_terminal()
    others = [a for a in argv if a not in DRY_RUN]
    dry = len(others) < len(argv)
    text, settings, run_opts, file, model = compose_run(others)
    sb.utils.distributed.ddp_init_group(run_opts)
    check_start(settings)
    refuse_folders_of_another_run(settings, file)
    refuse_other_network(settings)
    check_logger(settings["logger"])
    # Debugging that is persistent leaves checkpoints, which need their settings.
    debugs = run_opts.debug and run_opts.debug_persistently
    trial = dry or (run_opts.debug and not debugs)
    output, save = Path(settings["output_folder"]), Path(settings["save_folder"])
    if not trial and finished(settings):
        # Other data settings than those of its lists are refused.
        prepare(DataSettings.of(settings), save, begun=True)
        run_on_main(print, args=[already_finished(settings)])
    else:
        check_noise(settings)
        if not output.exists():
            # What is refused leaves no folder behind.
            DataSettings.of(settings).check_there()
        check_writable("output_folder", output)
        if save.exists():
            check_writable("save_folder", save)
        with owned(output, save):
            if dry or not trial:
                refuse_other_checkpoints(settings)
            with kept_in(settings, trial=trial) as files:
                train(text, settings, run_opts, files, dry_run if dry else None, model)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def train(text, settings, run_opts, files, dry_run, model):
    """Train, or make a dry run."""
    with beginning_log(settings["output_folder"]):
        # From here, since it keeps a copy of the file that calls it.
        sb.create_experiment_directory(settings["output_folder"])
    if changed := changed_settings(settings, run_opts.grad_accumulation_factor):
        run_on_main(print, args=[changed])
    prepared = list_data(settings)
    if partial := partial_epoch(settings, prepared):
        run_on_main(print, args=[partial])
    run_on_main(write_hyperparams, args=[files.folder, text, settings, prepared])
    text = (files.folder / HYPERPARAMS).read_text(encoding="utf-8")
    hparams = load_hyperpyyaml(text)
    run_on_main(print, args=[hparams["wav_augment"].in_words()])
    if crowded := too_many_workers(hparams["num_workers"]):
        run_on_main(print, args=[crowded])
        # It has the words of torch for it, twice.
        warnings.filterwarnings("ignore", "This DataLoader will create")
    if model is not None:
        new_head_reason = start_from(model, hparams)
    brain = build_brain(hparams, run_opts)
    run_on_main(print, args=[hparams["lr_annealing"].in_words()])
    train_set = train_loader(hparams)
    brain.train_sampler = train_set.batch_sampler
    brain.train_dataset = train_set.dataset
    give_modes(brain, files.folder)
    brain.record = begin_record(
        plain_settings(text),
        prepared,
        hparams["wav_augment"].used(),
        f"{described(torch.device(brain.device))}, {process_count()} process(es)",
    )
    brain.files = files
    means = None
    if model is not None:
        if new_head_reason and hparams["head_init"] == "means":
            means = DirectionMeans(brain)
        run_on_main(
            logger.info,
            args=[
                head_in_words(model, new_head_reason, means, hparams["freeze_epochs"])
            ],
        )
    if dry_run:
        dry_run(brain, train_set, means)
        return
    if means is not None:
        means.fill()
    valid_set = None
    if prepared.valid_trials:
        brain.valid_trials = read_trials(Path(hparams["save_folder"], VALID_TRIALS))
        valid_set = valid_loader(hparams, brain.valid_trials)
    with EpochLog(
        hparams["output_folder"],
        to=None if brain.debug else hparams["logger"],
        config=plain_settings(text),
    ) as brain.epoch_log:
        brain.fit(hparams["epoch_counter"], train_set, valid_set, progressbar=False)
    if brain.debug:
        run_on_main(print, args=["--debug: embedding_model.ckpt is not written."])
    else:
        run_on_main(print, args=[run_on_main(finish, args=[hparams, brain.record])])


def run():
    """Train, as the script that this is: it ends the process."""
    run_script(main)
    end_process()


if __name__ == "__main__":
    run()
