"""SpeechBrain's way from trial lists to embeddings, as its verification script has it.

That is ``recipes/VoxCeleb/SpeakerRec/speaker_verification_cosine.py`` of SpeechBrain, which
its wheel leaves out: a dataset for the enrolment side of the list and one for the test side,
sorted by duration; batches in that order, padded to the longest; each side embedded by
itself and kept in a dictionary.
"""

from __future__ import annotations

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
    """

    def __init__(
        self,
        model: WaveformEncoder,
        device: torch.device,
        sides: Mapping[str, Sequence[str]],
        files: Mapping[str, Path],
    ) -> None:
        self.model = model.to(device).eval()
        self.device = device
        self.loaders = {
            side: _loader({name: files[name] for name in names})
            for side, names in sides.items()
        }

    @torch.no_grad()
    def embed(self, sides: Sequence[str]) -> dict[str, dict[str, Tensor]]:
        """Embed each utterance of each of these sides: [1, embedding_dim] by name."""
        embeddings: dict[str, dict[str, Tensor]] = {side: {} for side in sides}
        for side in sides:
            for batch in self.loaders[side]:
                batch = batch.to(self.device)
                wavs, lens = batch.sig
                features = self.model.front_end.compute_features(wavs)
                normalised = self.model.front_end.mean_var_norm(features, lens)
                embedded = self.model.encoder(normalised, lens)
                for name, embedding in zip(batch.id, embedded, strict=True):
                    embeddings[side][name] = embedding.detach().clone()
        return embeddings


def _loader(files: Mapping[str, Path]) -> DataLoader:
    rows = {}
    for name, wav in files.items():
        info = soundfile.info(wav)
        seconds, samples = info.duration, info.frames
        rows[name] = {"wav": str(wav), "duration": seconds, "stop": samples}

    def read(wav: str, stop: int) -> Tensor:
        signal: Tensor = read_audio({"file": wav, "start": 0, "stop": stop})
        return signal

    dataset = DynamicItemDataset(rows)
    dataset.add_dynamic_item(read, takes=["wav", "stop"], provides="sig")
    dataset.set_output_keys(["id", "sig"])
    by_duration = dataset.filtered_sorted(sort_key="duration")
    loader: DataLoader = make_dataloader(by_duration, batch_size=BATCH)
    return loader
