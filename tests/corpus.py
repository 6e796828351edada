"""A tiny corpus in VoxCeleb's layout: speakers that differ in pitch and formants."""

from pathlib import Path

import av
import numpy as np
import soundfile

RATE = 16000


def write_corpus(
    folder: Path,
    *,
    speakers: int = 6,
    sessions: int = 2,
    utterances: int = 2,
    seconds: float = 0.8,
    suffix: str = ".wav",
    seed: int = 0,
) -> Path:
    """Write wav/<speaker>/<session>/<utterance> and return the folder."""
    draw = np.random.default_rng(seed)
    for speaker in range(speakers):
        voice = draw.uniform(80, 300), draw.uniform(400, 3000)
        for session in range(sessions):
            for utterance in range(utterances):
                name = f"id{speaker:05d}/s{session:02d}/{utterance:05d}{suffix}"
                path = folder / "wav" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                length = round(seconds * RATE * draw.uniform(0.7, 1.3))
                write = write_m4a if suffix == ".m4a" else soundfile.write
                write(path, speak(*voice, length, draw), RATE)
    return folder


def speak(
    pitch: float, formant: float, samples: int, draw: np.random.Generator
) -> np.ndarray:
    """Harmonics under one formant, in bursts, over a little noise."""
    time = np.arange(samples) / RATE
    harmonics = pitch * np.arange(1, int(7000 / pitch))
    gains = np.exp(-(((harmonics - formant) / 600) ** 2)) + 0.05
    phases = draw.uniform(0, 2 * np.pi, len(harmonics))
    waves = np.sin(2 * np.pi * harmonics[:, None] * time + phases[:, None])
    bursts = 0.6 + 0.4 * np.sin(2 * np.pi * draw.uniform(2, 5) * time)
    wave = bursts * (gains @ waves) + 0.01 * draw.standard_normal(samples)
    return 0.5 * wave / np.abs(wave).max()


def write_m4a(path: Path, wav: np.ndarray, rate: int = RATE, **options: str) -> Path:
    """Write AAC of [samples] or [channels, samples], as ffmpeg makes it."""
    channels = np.atleast_2d(wav).astype(np.float32)
    layout = {1: "mono", 2: "stereo"}[len(channels)]
    with av.open(str(path), "w", format="ipod", options=options) as container:
        stream = container.add_stream("aac", rate=rate, layout=layout)
        frame = av.AudioFrame.from_ndarray(
            np.ascontiguousarray(channels), format="fltp", layout=layout
        )
        frame.sample_rate, frame.pts = rate, 0
        for packet in (*stream.encode(frame), *stream.encode(None)):
            container.mux(packet)
    return path


def write_noise(folder: Path, *, clips: int = 2, seconds: float = 1.5) -> Path:
    """Write noise of several colours, below a folder as MUSAN has them."""
    draw = np.random.default_rng(1)
    for clip in range(clips):
        path = folder / "noise" / f"clip_{clip}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        white = draw.standard_normal(round(seconds * RATE))
        coloured = np.convolve(white, np.ones(clip + 1), mode="same")
        soundfile.write(path, 0.3 * coloured / np.abs(coloured).max(), RATE)
    return folder


def write_rirs(folder: Path, *, responses: int = 2) -> Path:
    """Write decaying impulse responses, each with a delay before the direct path."""
    draw = np.random.default_rng(2)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(responses):
        response = 0.1 * draw.standard_normal(1600) * np.exp(-np.arange(1600) / 300)
        response[40 * number] = 0.9
        response[: 40 * number] = 0
        soundfile.write(folder / f"room_{number}.wav", response, RATE)
    return folder
