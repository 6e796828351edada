"""Train a speaker encoder.

python recipes/VoxCeleb/train.py hparams/df_revnet281.yaml --data_folder=VOXCELEB2

FILE names the settings; --key=value changes one of them; SpeechBrain's run options
(--device, --debug, ...) are accepted as well. --dry_run takes two steps and says how
long the training and how large its memory would be. --self_test takes three steps with
all blocks stored and three as configured, compares their bits, memory and time, and ends
with status 1 if they do not agree; it needs no data and writes nothing. A run that was
interrupted goes on where its last checkpoint is when the same command is given again.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
import warnings
from pathlib import Path

import speechbrain as sb
import torch
import training_log as log
import yaml
from epoch_log import EpochLog, check_logger, logs_in_words
from fine_tuning import refuse_own_folder, start_from
from hyperpyyaml import load_hyperpyyaml
from memory_plan import give_modes
from run_settings import (
    ENCODER,
    changed_settings,
    finished,
    kept_in,
    mark_finished,
    owned,
    refuse_other_network,
    refuse_without_checkpoints,
    write_hyperparams,
)
from self_test import WatchedSteps, run_self_test, without_data
from speechbrain.utils.checkpoints import (
    mark_as_loader,
    mark_as_saver,
    register_checkpoint_hooks,
)
from speechbrain.utils.distributed import get_local_rank, get_rank, run_on_main
from speechbrain.utils.run_opts import RunOptions
from steps import CheckedSteps

from speechbrain_rev.catalog.columns import terminal_width
from speechbrain_rev.cli import run_script
from speechbrain_rev.data import GlobalRandomState
from speechbrain_rev.data.dataset import train_loader, valid_loader
from speechbrain_rev.data.listing import DataSettings
from speechbrain_rev.data.preparation import (
    VALID_TRIALS,
    prepare,
    read_prepared,
    write_missing_sums,
)
from speechbrain_rev.hparams import (
    OptimizerWarning,
    compose,
    plain_settings,
)
from speechbrain_rev.inference.run_folder import HYPERPARAMS, WEIGHTS, saved_bytes
from speechbrain_rev.lobes.checkpoints import (
    CHANNELS,
    KeptChannels,
    average_of_last_epochs,
    is_end_of_epoch,
)
from speechbrain_rev.scoring import Trials, cosine_trials, eer, read_trials
from speechbrain_rev.whole_files import check_writable, write_whole

logger = logging.getLogger("train")

DRY_RUN = ("--dry_run", "--dry-run")
SELF_TEST = ("--self_test", "--self-test")


@register_checkpoint_hooks
class SpeakerBrain(CheckedSteps):
    """Trains on chunks of speech; validates on trials between whole utterances."""

    epoch_log: EpochLog
    valid_trials: Trials | None = None

    def init_optimizers(self):
        """Build the optimizer, whose momentum the bounds of compression follow."""
        super().init_optimizers()
        self.hparams.compression.follow(self.optimizer)

    def compute_forward(self, batch, stage):
        """Embed a batch and, in training, compare it with the training speakers."""
        batch = batch.to(self.device)
        wavs, lens = batch.wavs, batch.lens
        if stage == sb.Stage.TRAIN:
            wavs, lens = self.hparams.wav_augment(wavs, lens)
        feats = self.modules.mean_var_norm(self.modules.compute_features(wavs), lens)
        encoder = self.modules.embedding_model
        if stage != sb.Stage.TRAIN:
            # As wrapped for several processes it would wait for them, who may have
            # fewer utterances that can be read.
            encoder = getattr(encoder, "module", encoder)
        embeddings = encoder(feats)
        if stage == sb.Stage.TRAIN:
            return self.modules.classifier(embeddings)
        return embeddings

    def compute_objectives(self, predictions, batch, stage):
        """Return the loss, and set the learning rate and margin of the step."""
        speakers = self.hparams.wav_augment.replicate_labels(batch.speakers)
        speakers = speakers.to(self.device)
        loss = self.hparams.compute_cost(predictions, speakers, batch.lens)
        correct = (predictions.detach().argmax(-1) == speakers).sum()
        self.measured = torch.stack([loss.detach().float(), correct.float()])
        self.hparams.lr_annealing.on_batch_end(self.optimizer)
        return loss

    def evaluate_batch(self, batch, stage):
        """Embed one utterance; held-out speakers have no class, hence no loss."""
        name, utterance = batch
        if isinstance(utterance, str):
            logger.warning(f"Validation goes on without an utterance: {utterance}")
            return torch.zeros(())
        with self.evaluation_ctx:
            embedding = self.compute_forward(utterance, stage)
        self.embeddings[name] = embedding.flatten().float().cpu()
        self.bar.update()
        return torch.zeros(())

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        """Show the progress."""
        size = self.train_sampler.batch_size
        log.show_step(self.bar, size, self.mean_loss, self.device)

    def on_stage_start(self, stage, epoch=None):
        """Start the clock, the bar and, in the middle of an epoch, the sampler."""
        self.stage_start, self.first_step = time.monotonic(), self.step
        if stage == sb.Stage.TRAIN:
            if not self.step:
                self.tally = log.Tally()
            self.train_sampler.set_epoch(epoch)
            self.train_sampler.start_at(self.step)
            size = self.train_sampler.batch_size
            total, done = len(self.train_sampler) * size, self.step * size
            name = f"epoch {epoch}"
        else:
            assert self.valid_trials is not None
            self.embeddings = {}
            name, total, done = "valid", len(self.valid_trials.utterances), 0
        self.bar = log.progress_bar(name, total, done, off=self.noprogressbar)

    def on_stage_end(self, stage, stage_loss, epoch=None):
        """Summarise the stage; the last one of the epoch writes log and checkpoint."""
        self.bar.close()
        seconds = time.monotonic() - self.stage_start
        if stage == sb.Stage.TRAIN:
            self.end_of_steps()
            self.epoch_stats = self.training_stats(stage_loss, epoch, seconds)
        else:
            if not self.debug:
                self.epoch_stats |= self.validated()
            self.epoch_stats["minutes"] += seconds / 60
        if stage == sb.Stage.VALID or self.valid_trials is None:
            self.end_epoch(epoch)

    def training_stats(self, loss, epoch, seconds):
        """Collect what the log says about an epoch's training."""
        sampler, schedule = self.train_sampler, self.hparams.lr_annealing
        seen = (self.step - self.first_step) * sampler.batch_size
        utterances = self.step * sampler.batch_size
        return {
            "epoch": epoch,
            "steps": schedule.step,
            "train_loss": loss,
            "train_accuracy_percent": 100 * self.tally.correct / utterances,
            "skipped_steps": self.tally.skipped,
            "unread_files": self.tally.unread,
            "lr": schedule.current_lr,
            "margin": self.hparams.compute_cost.margin,
            "minutes": seconds / 60,
            "utterances_per_second": seen / seconds,
            **self.tally.ask(self.modules.embedding_model),
            **log.peak_memory(self.device),
        }

    def validated(self):
        """Score the validation trials by cosine, those whose speech could be read."""
        assert self.valid_trials is not None
        found = {}
        lost = len(self.valid_trials.utterances) - len(self.embeddings)
        if unread := sum(self.sum_over_processes(lost)):
            found["unread_validation_files"] = int(unread)
        try:
            trials = self.valid_trials.among(self.embeddings)
        except ValueError as error:
            logger.warning(f"There is no validation EER: {error}")
            return found
        enrol, test = trials.rows(list(self.embeddings))
        embeddings = torch.stack(list(self.embeddings.values())).numpy()
        scores = cosine_trials(embeddings, enrol, test)
        return found | {"valid_eer_percent": 100 * float(eer(scores, trials.labels))}

    def end_epoch(self, epoch):
        """Write the log lines and the checkpoint."""
        stats = self.epoch_stats
        if self.debug:
            run_on_main(print, args=[f"--debug: no EER, no log. {log.shown(stats)}"])
        else:
            self.hparams.train_logger.log_stats(log.shown(stats))
            run_on_main(self.epoch_log.write, args=[stats])
        self.checkpointer.save_and_keep_only(
            meta=stats,
            num_to_keep=self.hparams.keep_checkpoints,
            ckpt_predicate=is_end_of_epoch,
        )

    @mark_as_saver
    def _save(self, path):
        super()._save(path)
        self.tally.ask(self.modules.embedding_model)
        with open(path, "a", encoding="utf-8") as file:
            yaml.safe_dump({"tally": vars(self.tally)}, file)

    @mark_as_loader
    def _recover(self, path, end_of_epoch):
        super()._recover(path, end_of_epoch)
        self.tally = log.Tally(**yaml.safe_load(Path(path).read_text())["tally"])
        if end_of_epoch:
            self.step, self.avg_train_loss = 0, 0.0


class SelfTestBrain(WatchedSteps, SpeakerBrain):
    """Takes the steps of a training run where they are compared."""


def dry_run(brain, loader):
    """Take two steps; say what the training would take."""
    brain.checkpointer = None
    brain.on_fit_start()
    brain.modules.train()
    brain.on_stage_start(sb.Stage.TRAIN, 1)
    batches = iter(loader)
    brain.step = 1
    brain.fit_batch(next(batches))
    start, brain.step = time.monotonic(), 2
    brain.fit_batch(next(batches))
    seconds = time.monotonic() - start
    brain.bar.close()
    epochs = brain.hparams.number_of_epochs
    words = [log.forecast(len(loader), seconds, epochs, brain.device)]
    told = brain.tally.ask(brain.modules.embedding_model)
    if "compression_ratio" in told:
        ratio = told["compression_ratio"]
        words.append(f"Compressed activations: {ratio:.1f} times smaller.")
    words.append(
        logs_in_words(
            brain.hparams.output_folder,
            to=brain.hparams.logger,
            project=brain.hparams.wandb_project,
        )
    )
    run_on_main(print, args=["\n".join(words)])


def compose_run(argv):
    """Read the command line: the complete text, its plain settings, run options."""
    if get_rank():
        # The first process says it for all.
        warnings.simplefilter("ignore", OptimizerWarning)
    composition = compose(argv, run_options=list(RunOptions.__dataclass_fields__))
    _, run_opts, left_over = RunOptions.from_command_line_args(
        [composition.file, *composition.run_arguments]
    )
    if left_over:
        raise ValueError(
            f"SpeechBrain's command line does not take {left_over.split(':')[0]!r}: "
            "leave it out."
        )
    return composition.text, plain_settings(composition.text), run_opts


def prepare_run(text, settings, folder):
    """List the data and write the settings; the main process works, all read."""
    log.begin(settings["output_folder"])
    run_on_main(prepare, args=[DataSettings.of(settings), settings["save_folder"]])
    run_on_main(write_missing_sums, args=[settings["save_folder"]])
    prepared = read_prepared(settings["save_folder"])
    run_on_main(write_hyperparams, args=[folder, text, settings, prepared])
    run_on_main(print, args=[prepared.in_words()])
    text = (folder / HYPERPARAMS).read_text(encoding="utf-8")
    hparams = load_hyperpyyaml(text)
    run_on_main(print, args=[hparams["wav_augment"].in_words()])
    return prepared, hparams


def build_brain(hparams, run_opts, kind=None):
    """Put modules, optimizer and all that a resumed run needs together."""
    if hparams["pretrained_run"]:
        start_from(hparams)
    # The rate is that of the utterances of one step of the optimizer.
    hparams["lr_annealing"].batch_size *= run_opts.grad_accumulation_factor
    keep = hparams["checkpointer"].add_recoverable
    random_state = GlobalRandomState()
    random_state.fold_rank()
    keep("random_state", random_state)
    channels = KeptChannels(hparams["modules"]["embedding_model"])
    keep(CHANNELS, channels, optional_load=True)
    hparams["checkpointer"].add_state("compression", hparams["compression"])
    return (kind or SpeakerBrain)(
        modules=hparams["modules"],
        opt_class=hparams["opt_class"],
        hparams=hparams,
        run_opts=run_opts,
        checkpointer=hparams["checkpointer"],
    )


def main(argv=None):
    """Train."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or {"-h", "--help"} & set(argv):
        print(__doc__)
        return
    others = [a for a in argv if a not in DRY_RUN + SELF_TEST]
    dry = any(a in DRY_RUN for a in argv)
    if any(a in SELF_TEST for a in argv):
        if dry:
            raise ValueError("--dry_run and --self_test are given: leave one out.")
        self_test(without_data(others))
        return
    text, settings, run_opts = compose_run(others)
    sb.utils.distributed.ddp_init_group(run_opts)
    refuse_own_folder(settings)
    refuse_other_network(settings)
    check_logger(settings["logger"], settings["wandb_project"])
    # Persistent, debugging leaves checkpoints, which need their settings.
    trial = dry or (run_opts.debug and not run_opts.debug_persistently)
    output = Path(settings["output_folder"])
    if not trial and finished(settings):
        # As its lists are: what differs is refused.
        prepare(DataSettings.of(settings), settings["save_folder"])
        run_on_main(print, args=[_already_finished(settings)])
    else:
        check_writable("output_folder", output)
        save = Path(settings["save_folder"])
        with owned(output, save), kept_in(settings, trial=trial) as folder:
            if not trial:
                refuse_without_checkpoints(settings)
                run_on_main(mark_finished, args=[settings], kwargs={"done": False})
            prepared, hparams = prepare_run(text, settings, folder)
            train(prepared, hparams, run_opts, folder, dry)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _already_finished(settings):
    words = (
        f"{settings['output_folder']} is a finished run of at least "
        f"{settings['number_of_epochs']} epochs: nothing is trained or changed. To train "
        "on, give more by --number_of_epochs; to train anew, another output_folder."
    )
    if changes := changed_settings(settings):
        words += f" These settings had no effect: {'; '.join(changes)}."
    return words


def self_test(argv):
    """Compare steps as configured with steps that store; end with status 1 if they differ."""
    text, settings, run_opts = compose_run(argv)

    def build(hparams):
        return build_brain(hparams, run_opts, SelfTestBrain)

    found = run_self_test(text, settings, build)
    print(found.text(terminal_width()))
    if not found.agrees:
        sys.exit(1)


def train(prepared, hparams, run_opts, folder, dry):
    """Train on prepared lists, or only say what that would take."""
    brain = build_brain(hparams, run_opts)
    train_set = train_loader(hparams)
    brain.train_sampler = train_set.batch_sampler
    brain.train_dataset = train_set.dataset
    give_modes(brain, folder)
    if dry:
        dry_run(brain, train_set)
        return
    valid_set = None
    if prepared.valid_trials:
        brain.valid_trials = read_trials(Path(hparams["save_folder"], VALID_TRIALS))
        valid_set = valid_loader(hparams, brain.valid_trials)
    text = (folder / HYPERPARAMS).read_text(encoding="utf-8")
    with EpochLog(
        hparams["output_folder"],
        to=None if brain.debug else hparams["logger"],
        project=hparams["wandb_project"],
        config=plain_settings(text),
    ) as brain.epoch_log:
        brain.fit(hparams["epoch_counter"], train_set, valid_set, progressbar=False)
    if brain.debug:
        run_on_main(print, args=["--debug: embedding_model.ckpt is not written."])
    else:
        run_on_main(finish, args=[hparams])


def finish(hparams):
    """Write the run's results."""
    checkpointer = hparams["checkpointer"]
    # A run that was killed behind its last checkpoint has one too many.
    checkpointer.delete_checkpoints(
        num_to_keep=hparams["keep_checkpoints"], ckpt_predicate=is_end_of_epoch
    )
    average = average_of_last_epochs(
        checkpointer, ENCODER, hparams["average_checkpoints"]
    )
    write_whole(Path(hparams["output_folder"], WEIGHTS), saved_bytes(average))
    mark_finished(hparams, done=True)


def run():
    """Train, as the script that this is: it ends the process.

    One of several processes leaves without taking the interpreter apart. torch 2.11 does
    not free the reducer of DistributedDataParallel, so threads of a group outlive it, and
    one that lets go of a tensor while the interpreter ends aborts the process.
    """
    run_script(main)
    if get_local_rank() is None:
        return
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    run()
