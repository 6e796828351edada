"""SpeechBrain's way from trial lists to embeddings, as its verification script has it.

That is ``recipes/VoxCeleb/SpeakerRec/speaker_verification_cosine.py`` of SpeechBrain, which
its wheel leaves out: a dataset for the enrolment side of the list and one for the test side,
sorted by duration; batches in that order, padded to the longest; each side embedded by
itself and kept in a dictionary.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import soundfile
import torch
from speechbrain.dataio.dataio import read_audio
from speechbrain.dataio.dataloader import make_dataloader
from speechbrain.dataio.dataset import DynamicItemDataset
from torch import Tensor
from torch.utils.data import DataLoader

from speechbrain_rev.inference import WaveformEncoder

#: Of ``verification_ecapa.yaml``, whose loaders have no workers.
BATCH = 8


class VerificationScript:
    """What embeds the sides of a trial list.

    Parameters
    ----------
    model : WaveformEncoder
        Its features, normalisation and encoder are called as the script calls them.
    device : torch.device
        Where to run.
    sides : mapping of str to sequence of str
        The names of each side's utterances.
    files : mapping of str to pathlib.Path
        Where they are.
    folder : pathlib.Path
        Takes a manifest for each side.
    """

    def __init__(
        self,
        model: WaveformEncoder,
        device: torch.device,
        *,
        sides: Mapping[str, Sequence[str]],
        files: Mapping[str, Path],
        folder: Path,
    ) -> None:
        self.model = model.to(device).eval()
        self.device = device
        self.loaders = {}
        for side, names in sides.items():
            manifest = folder / f"{side}.csv"
            _write_manifest(manifest, {name: files[name] for name in names})
            self.loaders[side] = _loader(manifest)

    def embed(self, sides: Sequence[str]) -> dict[str, dict[str, Tensor]]:
        """Embed each utterance of each of these sides: [1, embedding_dim] by name."""
        return {side: self._embed_side(self.loaders[side]) for side in sides}

    def _embed_side(self, loader: DataLoader) -> dict[str, Tensor]:
        found = {}
        for batch in loader:
            batch = batch.to(self.device)
            wavs, lens = batch.sig
            embeddings = self._compute(wavs, lens)
            for name, embedding in zip(batch.id, embeddings, strict=True):
                found[name] = embedding.detach().clone()
        return found

    @torch.no_grad()
    def _compute(self, wavs: Tensor, lens: Tensor) -> Tensor:
        features = self.model.front_end.compute_features(wavs)
        normalised = self.model.front_end.mean_var_norm(features, lens)
        embeddings: Tensor = self.model.encoder(normalised, lens)
        return embeddings


def _write_manifest(path: Path, files: Mapping[str, Path]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["ID", "duration", "wav", "start", "stop", "spk_id"])
        for name, wav in files.items():
            info = soundfile.info(wav)
            speaker = name.partition("/")[0]
            rows.writerow([name, info.duration, wav, 0, info.frames, speaker])


def _loader(manifest: Path) -> DataLoader:
    def read(wav: str, start: str, stop: str) -> Tensor:
        part = {"file": wav, "start": int(start), "stop": int(stop)}
        signal: Tensor = read_audio(part)
        return signal

    dataset = DynamicItemDataset.from_csv(csv_path=str(manifest))
    dataset.add_dynamic_item(read, takes=["wav", "start", "stop"], provides="sig")
    dataset.set_output_keys(["id", "sig"])
    by_duration = dataset.filtered_sorted(sort_key="duration")
    loader: DataLoader = make_dataloader(by_duration, batch_size=BATCH)
    return loader
