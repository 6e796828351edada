"""List the training utterances of a folder in VoxCeleb's layout, or pack a folder.

python recipes/VoxCeleb/prepare.py FILE [--key=value ...]
python recipes/VoxCeleb/prepare.py --pack FOLDER PACKED [--sample_rate=16000]
    [--bad_files=refuse|drop] [--resample=true|false] [--channel=NUMBER|mix]
    [--outside_files]

The second packs audio (speech, noise or room impulse responses) into the folder PACKED, whose
name ends in .packed: a tar of WAV files, and an index. It stands wherever FOLDER stood
(data_folder, noise_folder, rir_folder, trials_folder), is read many times faster, and needs
FOLDER no more. Interrupted, it goes on when the same command is given again.

The first does what train.py does before training, with the same settings. It writes
into the run's save folder, never into the data folder:

- train.csv: the training manifest (ID, wav, samples, spk_id)
- valid_trials.txt: trials between held-out speakers, if any are held out
- valid.csv: the files of these trials
- label_encoder.txt: the number of each speaker, as SpeechBrain writes it
- left_out.csv: each file that is not used, and why
- prepared.json: the settings, and a digest of settings and data; while both are equal,
  nothing is done, and with others, once there are checkpoints, it is refused: speakers
  keep their numbers
- SHA256SUMS: checksums of the lists and the settings, which are compared when one is read
"""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence
from pathlib import Path

from speechbrain_rev.audio.checks import MIX
from speechbrain_rev.cli import ArgumentParser, run_script
from speechbrain_rev.data.listing import DataSettings
from speechbrain_rev.data.packing import pack
from speechbrain_rev.data.preparation import prepare
from speechbrain_rev.data.rows import counted
from speechbrain_rev.files import check_writable
from speechbrain_rev.hparams import compose, plain_settings
from speechbrain_rev.training.run_folder import owned
from speechbrain_rev.training.start_from import Start


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or {"-h", "--help"} & set(argv):
        print(__doc__)
    elif "--pack" in argv:
        parser = ArgumentParser()
        parser.add_argument("--pack", nargs=2, type=Path, metavar=("FOLDER", "PACKED"))
        parser.add_argument("--sample_rate", type=int, default=16000)
        parser.add_argument("--bad_files", choices=("refuse", "drop"), default="refuse")
        parser.add_argument("--resample", choices=("true", "false"), default="false")
        parser.add_argument("--channel", type=_channel)
        parser.add_argument("--outside_files", action="store_true")
        options = parser.parse_args(argv)
        source, packed = options.pack
        count = pack(
            source,
            packed,
            sample_rate=options.sample_rate,
            drop=options.bad_files == "drop",
            resample=options.resample == "true",
            channel=options.channel,
            outside_files=options.outside_files,
        )
        print(f"{packed}: {counted(count, 'file')}. Give it in the place of {source}.")
    else:
        settings = plain_settings(compose(argv, model_of=Start().model_of).text)
        folder = Path(settings["output_folder"])
        data = DataSettings.of(settings)
        if not folder.exists():
            # What is refused leaves no folder behind.
            data.check_there()
        check_writable("output_folder", folder)
        with owned(folder, Path(settings["save_folder"])):
            prepared = prepare(data, settings["save_folder"])
        print(prepared.in_words())


def _channel(text: str) -> int | str:
    """Read a channel's number, or mix."""
    if text == MIX:
        return text
    if not text.isdecimal():
        raise ArgumentTypeError(
            f"{text!r} is no number of a channel from 0 on, and not {MIX}"
        )
    return int(text)


if __name__ == "__main__":
    run_script(main)
