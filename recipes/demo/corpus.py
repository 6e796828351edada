"""Speak a small multi-speaker corpus with espeak-ng, in VoxCeleb's layout.

A speaker is a voice variant, a language, a pitch, an intonation range and a rate; a
session adds its own microphone and background noise and lets pitch and rate drift a
little. What is read are random numbers: espeak-ng says them in every language, so no
text is needed and nothing is downloaded. Synthetic voices prove that the path works,
not how accurate a network is on people.

``python recipes/demo/corpus.py FOLDER`` writes::

    wav/<speaker>/<session>/<utterance>.flac    16 kHz, mono
    train_list.txt                              "speaker path"
    trials.txt                                  "label path path", other speakers
    voices.csv                                  what each speaker is made of
    corpus.json                                 the request, written last
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import soundfile
from tqdm import tqdm

SAMPLE_RATE = 16000
LANGUAGES = ("en-us", "de", "es", "it", "pl", "ru", "nl", "sv", "tr", "hu")
# espeak-ng's variants without its whispers and its near copies of one another.
VARIANTS = (  # noqa: SIM905 (as a list it would take 84 lines)
    "Alex Alicia Andrea Andy Annie Denis Diogo Gene Gene2 Henrique Hugo Jacky Lee Marco"
    " Mario Michael Mike Nguyen Reed RicishayMax RicishayMax2 Storm Tweaky UniRobot"
    " adam anika announcer antonio aunty belinda benjamin boris caleb croak david ed"
    " edward edward2 f1 f2 f3 f4 f5 grandma grandpa gustave ian iven iven2 iven3 iven4"
    " john kaukovalta klatt klatt3 klatt5 klatt6 linda m1 m2 m3 m4 m5 m6 m7 m8 marcelo"
    " max michel miguel mike2 norbert pablo paul pedro quincy rob robosoft robosoft3"
    " robosoft5 robosoft6 robosoft7 sandro shelby steph steph2 steph3 travis victor zac"
).split()

# Frequencies at which a session's microphone has its own gain, and how far it strays.
MICROPHONE_HERTZ = (60.0, 150.0, 400.0, 1000.0, 2200.0, 4000.0, 8000.0)
MICROPHONE_DB = 3.0
NOISE_SNR_DB = (15.0, 30.0)


@dataclass(frozen=True)
class Request:
    """How large a corpus to make; equal requests give equal corpora."""

    train_speakers: int = 32
    test_speakers: int = 12
    sessions: int = 3
    utterances: int = 4
    numbers: int = 3
    seed: int = 1

    def __post_init__(self) -> None:
        if self.train_speakers < 2 or self.test_speakers < 2:
            raise ValueError(
                f"a corpus of {self.train_speakers} training and {self.test_speakers} "
                "test speakers: at least 2 of each are needed to compare speakers."
            )
        if self.sessions < 2 or self.utterances < 1 or self.numbers < 1:
            raise ValueError(
                f"{self.sessions} sessions of {self.utterances} utterances of "
                f"{self.numbers} numbers: at least 2 sessions (trials compare across "
                "sessions), 1 utterance and 1 number are needed."
            )


@dataclass(frozen=True)
class Voice:
    """One speaker, in espeak-ng's terms (pitch and range 0-100, rate in words/min)."""

    speaker: str
    language: str
    variant: str
    pitch: int
    pitch_range: int
    rate: int


def voices(request: Request) -> list[Voice]:
    """Draw the speakers; a variant is used twice only when all have been used.

    >>> [voice.speaker for voice in voices(Request(2, 2))]
    ['spk000', 'spk001', 'spk002', 'spk003']
    """
    draw = np.random.default_rng(request.seed)
    variants = draw.permutation(VARIANTS)
    return [
        Voice(
            speaker=f"spk{i:03d}",
            language=LANGUAGES[(i + i // len(variants)) % len(LANGUAGES)],
            variant=str(variants[i % len(variants)]),
            pitch=int(draw.integers(25, 76)),
            pitch_range=int(draw.integers(35, 76)),
            rate=int(draw.integers(140, 191)),
        )
        for i in range(request.train_speakers + request.test_speakers)
    ]


@dataclass(frozen=True)
class Microphone:
    """How a session sounds.

    Attributes
    ----------
    gains_db : numpy.ndarray
        At MICROPHONE_HERTZ.
    noise_tilt_db : float
        Of the background noise, per octave.
    snr_db : float
        Speech above the noise.
    """

    gains_db: np.ndarray
    noise_tilt_db: float
    snr_db: float

    @classmethod
    def drawn(cls, draw: np.random.Generator) -> Microphone:
        """Draw one."""
        return cls(
            gains_db=draw.normal(0.0, MICROPHONE_DB, len(MICROPHONE_HERTZ)),
            noise_tilt_db=draw.uniform(-6.0, 1.0),
            snr_db=draw.uniform(*NOISE_SNR_DB),
        )


class Espeak:
    """espeak-ng through ctypes: text in, 16-bit samples out.

    espeak-ng is one global machine: its wave phase runs on from one utterance to the
    next, also through a restart. Equal samples therefore need equal utterances in equal
    order from a fresh process, which is what `make_corpus` starts.
    """

    SYNCHRONOUS, DONT_EXIT, UTF8 = 2, 1 << 15, 1
    RATE, PITCH, RANGE = 1, 3, 4

    def __init__(self, library: str, data: str, seed: int):
        self.data = data
        self._chunks: list[bytes] = []
        self._library = ctypes.CDLL(library)
        self._library.espeak_Initialize.argtypes = (
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_char_p,
            ctypes.c_int,
        )
        self._library.espeak_Synth.argtypes = (
            ctypes.c_char_p,
            ctypes.c_size_t,
            ctypes.c_uint,
            ctypes.c_int,
            ctypes.c_uint,
            ctypes.c_uint,
            ctypes.c_void_p,
            ctypes.c_void_p,
        )
        self._library.espeak_ng_SetRandSeed.argtypes = (ctypes.c_long,)
        callback = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p
        )
        # Kept: the library holds only the address, Python must hold the object.
        self._callback = callback(self._receive)
        self.sample_rate = self._library.espeak_Initialize(
            self.SYNCHRONOUS, 0, data.encode(), self.DONT_EXIT
        )
        if self.sample_rate <= 0:
            raise RuntimeError(
                f"espeak-ng did not start with its data in {data}. Reinstall "
                "espeakng-loader 0.2: pip install --force-reinstall espeakng-loader"
            )
        self._library.espeak_SetSynthCallback(self._callback)
        self._library.espeak_ng_SetRandSeed(seed)

    def _receive(self, samples: int | None, count: int, _events: int | None) -> int:
        if samples and count > 0:
            self._chunks.append(ctypes.string_at(samples, 2 * count))
        return 0

    def say(self, text: str, voice: Voice) -> np.ndarray:
        """Speak `text`: [samples], float, at `sample_rate`."""
        # An unknown variant is silently the plain voice: look for its file first.
        if not (Path(self.data) / "voices" / "!v" / voice.variant).is_file():
            raise RuntimeError(
                f"this espeak-ng has no voice variant {voice.variant!r}."
            )
        name = f"{voice.language}+{voice.variant}"
        if self._library.espeak_SetVoiceByName(name.encode()) != 0:
            raise RuntimeError(f"this espeak-ng has no voice {name!r}.")
        for parameter, value in (
            (self.RATE, voice.rate),
            (self.PITCH, voice.pitch),
            (self.RANGE, voice.pitch_range),
        ):
            self._library.espeak_SetParameter(parameter, value, 0)
        self._chunks.clear()
        spoken = text.encode()
        self._library.espeak_Synth(
            spoken, len(spoken) + 1, 0, 0, 0, self.UTF8, None, None
        )
        self._library.espeak_Synchronize()
        if not self._chunks:
            raise RuntimeError(f"espeak-ng gave no sound for {text!r} by {name!r}.")
        return np.frombuffer(b"".join(self._chunks), dtype=np.int16) / 32768.0


@contextmanager
def espeak(seed: int) -> Iterator[Espeak]:
    """Open the espeak-ng that the package espeakng-loader carries."""
    try:
        import espeakng_loader
    except ImportError as error:
        raise ImportError(
            "the demo's voices come from the package espeakng-loader, which is not "
            "installed: pip install 'espeakng-loader>=0.2,<0.3'"
        ) from error
    with tempfile.TemporaryDirectory() as folder:
        # espeak-ng cuts the path of its data at 160 characters; a link is short.
        data = Path(folder) / "espeak-ng-data"
        data.symlink_to(espeakng_loader.get_data_path(), target_is_directory=True)
        yield Espeak(espeakng_loader.get_library_path(), str(data), seed)


def record(
    spoken: np.ndarray, rate: int, microphone: Microphone, draw: np.random.Generator
) -> np.ndarray:
    """Record speech at `rate` Hz through a microphone: [samples] at 16 kHz."""
    step = rate // np.gcd(rate, SAMPLE_RATE)
    padded = np.pad(spoken, (0, -len(spoken) % step))
    samples = len(padded) * SAMPLE_RATE // rate
    # Cutting the spectrum at 8 kHz resamples; the microphone multiplies the same bins.
    spectrum = np.fft.rfft(padded)[: samples // 2 + 1] * (samples / len(padded))
    hertz = np.arange(len(spectrum)) * SAMPLE_RATE / samples
    octaves = np.log2(np.maximum(hertz, 20.0) / 1000.0)
    places = np.log2(np.array(MICROPHONE_HERTZ) / 1000.0)
    gains_db = np.interp(octaves, places, microphone.gains_db)
    speech = np.fft.irfft(spectrum * 10 ** (gains_db / 20), samples)
    white = np.fft.rfft(draw.standard_normal(samples))
    tilt_db = microphone.noise_tilt_db * octaves
    noise = np.fft.irfft(white * 10 ** (tilt_db / 20), samples)
    noise_power = (speech**2).mean() / 10 ** (microphone.snr_db / 10)
    mixed = speech + noise * np.sqrt(noise_power / (noise**2).mean())
    return mixed * (draw.uniform(0.2, 0.9) / np.abs(mixed).max())


def write_session(
    folder: Path, voice: Voice, session: int, speaker: Espeak, request: Request
) -> list[str]:
    """Speak and record one session; its paths relative to the wav folder."""
    index = int(voice.speaker.removeprefix("spk"))
    draw = np.random.default_rng((request.seed, index, session))
    microphone = Microphone.drawn(draw)
    today = Voice(
        **asdict(voice)
        | {
            "pitch": voice.pitch + int(draw.integers(-4, 5)),
            "rate": round(voice.rate * draw.uniform(0.92, 1.08)),
        }
    )
    paths = []
    for utterance in range(1, request.utterances + 1):
        text = " ".join(f"{n}," for n in draw.integers(11, 1000, request.numbers))
        spoken = speaker.say(text, today)
        path = f"{voice.speaker}/s{session:02d}/{utterance:05d}.flac"
        (folder / "wav" / path).parent.mkdir(parents=True, exist_ok=True)
        recorded = record(spoken, speaker.sample_rate, microphone, draw)
        soundfile.write(folder / "wav" / path, recorded, SAMPLE_RATE)
        paths.append(path)
    return paths


def trials(
    speakers: list[Voice], paths: dict[str, list[str]], seed: int
) -> list[tuple[int, str, str]]:
    """Pair utterances of different sessions; as many impostors, of one language at most half.

    >>> pair = [Voice(s, "de", "f1", 50, 50, 170) for s in ("a", "b")]
    >>> trials(pair, {"a": ["a/s1/1", "a/s2/1"], "b": ["b/s1/1", "b/s2/1"]}, 0)[0]
    (1, 'a/s1/1', 'a/s2/1')
    """
    draw = np.random.default_rng(seed)
    targets = [
        (1, one, other)
        for voice in speakers
        for one, other in itertools.combinations(paths[voice.speaker], 2)
        if Path(one).parent != Path(other).parent
    ]
    impostors: dict[bool, list[tuple[int, str, str]]] = {True: [], False: []}
    for a, b in itertools.combinations(speakers, 2):
        impostors[a.language == b.language] += [
            (0, one, other)
            for one, other in itertools.product(paths[a.speaker], paths[b.speaker])
        ]
    near, far = (impostors[same] for same in (True, False))
    for each in (near, far):
        draw.shuffle(each)
    # Where one kind is too few, there are more of the other.
    half = max(len(targets) // 2, len(targets) - len(far))
    chosen = near[:half]
    return targets + chosen + far[: len(targets) - len(chosen)]


def write_corpus(folder: Path, request: Request) -> None:
    """Speak everything into `folder`, in a fixed order."""
    folder.mkdir(parents=True)
    drawn = voices(request)
    paths: dict[str, list[str]] = {voice.speaker: [] for voice in drawn}
    sessions = list(itertools.product(drawn, range(1, request.sessions + 1)))
    with espeak(request.seed) as speaker:
        for voice, session in tqdm(
            sessions, desc="speaking", unit="session", disable=None
        ):
            paths[voice.speaker] += write_session(
                folder, voice, session, speaker, request
            )
    train, test = drawn[: request.train_speakers], drawn[request.train_speakers :]
    (folder / "train_list.txt").write_text(
        "".join(f"{v.speaker} {path}\n" for v in train for path in paths[v.speaker])
    )
    (folder / "trials.txt").write_text(
        "".join(f"{k} {a} {b}\n" for k, a, b in trials(test, paths, request.seed))
    )
    with (folder / "voices.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, list(asdict(drawn[0])))
        table.writeheader()
        table.writerows(asdict(voice) for voice in drawn)
    (folder / "corpus.json").write_text(json.dumps(asdict(request), indent=2) + "\n")


def make_corpus(folder: str | Path, request: Request = Request()) -> Path:
    """Make the corpus in `folder`, or keep the one there if it is the same.

    A half-made corpus is never left under the final name.

    Raises
    ------
    ValueError
        If `folder` holds something else.
    """
    folder = Path(folder)
    if folder.exists():
        made = folder / "corpus.json"
        if made.is_file() and json.loads(made.read_text()) == asdict(request):
            return folder
        raise ValueError(
            f"{folder} exists and is not the corpus asked for ({asdict(request)}). "
            "Remove it, or give another folder."
        )
    options = [f"--{name}={value}" for name, value in asdict(request).items()]
    # A fresh process: see Espeak.
    subprocess.run([sys.executable, __file__, str(folder), *options], check=True)
    return folder


def main(argv: list[str] | None = None) -> None:
    """Speak a corpus from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where to; must not exist")
    for name, value in asdict(Request()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = vars(parser.parse_args(argv))
    folder = options.pop("folder")
    request = Request(**options)
    if folder.exists():
        raise ValueError(f"{folder} exists: remove it, or give another folder.")
    partial = folder.with_name(folder.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)
    write_corpus(partial, request)
    partial.rename(folder)


if __name__ == "__main__":
    main()
