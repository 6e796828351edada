"""Shortened Brains of SpeechBrain's recipes, on networks of its lobes and of transformers."""

import speechbrain as sb
import torch
from speechbrain.dataio.batch import PaddedBatch
from speechbrain.lobes.features import Fbank
from speechbrain.lobes.models.ECAPA_TDNN import ECAPA_TDNN, Classifier
from speechbrain.lobes.models.ResNet import ResNet
from speechbrain.lobes.models.transformer.TransformerASR import TransformerASR
from speechbrain.lobes.models.Xvector import Xvector
from speechbrain.nnet.adapters import AdaptedModel, LoRA
from speechbrain.nnet.linear import Linear
from speechbrain.nnet.losses import (
    AdditiveAngularMargin,
    LogSoftmaxWrapper,
    ctc_loss,
    kldiv_loss,
)
from speechbrain.nnet.schedulers import CyclicLRScheduler
from speechbrain.processing.features import InputNormalization

RATE = 8000
SPEAKERS = 5


class SpeakerBrain(sb.Brain):
    """As in VoxCeleb/SpeakerRec/train_speaker_embeddings.py, without augmentation."""

    def compute_forward(self, batch, stage):
        batch = batch.to(self.device)
        wavs, lens = batch.sig
        feats = self.modules.compute_features(wavs)
        feats = self.modules.mean_var_norm(feats, lens)
        embeddings = self.modules.embedding_model(feats, lens)
        return self.modules.classifier(embeddings), lens

    def compute_objectives(self, predictions, batch, stage):
        predictions, lens = predictions
        speakers, _ = batch.spk_id_encoded
        loss = self.hparams.compute_cost(predictions, speakers, lens)
        if stage == sb.Stage.TRAIN:
            self.hparams.lr_annealing.on_batch_end(self.optimizer)
        return loss


class AsrBrain(sb.Brain):
    """As in LibriSpeech/ASR/transformer/train.py: a joint loss of encoder and decoder."""

    def compute_forward(self, batch, stage):
        batch = batch.to(self.device)
        wavs, lens = batch.sig
        tokens, _ = batch.tokens
        feats = self.hparams.normalize(self.hparams.compute_features(wavs), lens)
        encoded, decoded = self.modules.Transformer(feats, tokens, lens, pad_idx=0)
        ctc = self.hparams.log_softmax(self.hparams.ctc_lin(encoded))
        return ctc, self.hparams.log_softmax(self.hparams.seq_lin(decoded)), lens

    def compute_objectives(self, predictions, batch, stage):
        ctc, seq, lens = predictions
        tokens, token_lens = batch.tokens
        of_ctc = ctc_loss(ctc, tokens, lens, token_lens, blank_index=0)
        return 0.3 * of_ctc + 0.7 * kldiv_loss(seq, tokens, length=token_lens)


class FineTuningBrain(sb.Brain):
    """As in VoxCeleb's recipes with wav2vec2: its output's mean is classified."""

    def compute_forward(self, batch, stage):
        batch = batch.to(self.device)
        wavs, lens = batch.sig
        outputs = self.modules.wav2vec2(wavs).last_hidden_state
        return self.modules.classifier(outputs.mean(1, keepdim=True)), lens

    def compute_objectives(self, predictions, batch, stage):
        predictions, lens = predictions
        speakers, _ = batch.spk_id_encoded
        return self.hparams.compute_cost(predictions, speakers, lens)


def speaker(network, n_mels):
    embedding_dim = 16
    return SpeakerBrain, {
        "compute_features": Fbank(sample_rate=RATE, n_mels=n_mels),
        "mean_var_norm": InputNormalization(norm_type="sentence", std_norm=False),
        "embedding_model": network,
        "classifier": Classifier(embedding_dim, out_neurons=SPEAKERS),
    }


def ecapa(channels=64, attention_channels=16, n_mels=24):
    widths = [channels] * 4 + [3 * channels]
    network = ECAPA_TDNN(
        n_mels, lin_neurons=16, channels=widths, attention_channels=attention_channels
    )
    return speaker(network, n_mels)


def resnet():
    network = ResNet(
        32, channels=[8, 8, 16, 16], block_sizes=[2, 2, 2, 1], lin_neurons=16
    )
    return speaker(network, 32)


def xvector():
    network = Xvector(
        in_channels=24, tdnn_blocks=3, tdnn_channels=[32, 32, 64], tdnn_dilations=[1, 2, 1],
        tdnn_kernel_sizes=[5, 3, 1], lin_neurons=16,
    )  # fmt: skip
    return speaker(network, 24)


def conformer():
    network = TransformerASR(
        tgt_vocab=12, input_size=24, d_model=32, nhead=2, num_encoder_layers=3,
        num_decoder_layers=2, d_ffn=64, encoder_module="conformer",
        attention_type="RelPosMHAXL", normalize_before=True, causal=False,
    )  # fmt: skip
    linear = {
        "ctc_lin": Linear(12, input_size=32),
        "seq_lin": Linear(12, input_size=32),
    }
    return AsrBrain, {
        "normalize": InputNormalization(norm_type="sentence", std_norm=False),
        "compute_features": Fbank(sample_rate=RATE, n_mels=24),
        "Transformer": network,
        **linear,
    }


def wavlm():
    from transformers import WavLMConfig, WavLMModel

    settings = WavLMConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=128,
        conv_dim=(16, 16), conv_kernel=(10, 8), conv_stride=(5, 4),
        num_feat_extract_layers=2, num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2, mask_time_prob=0.0, layerdrop=0.1,
    )  # fmt: skip
    return FineTuningBrain, {
        "wav2vec2": WavLMModel(settings),
        "classifier": Classifier(32, out_neurons=SPEAKERS),
    }


def full_ecapa():
    """Make that of VoxCeleb's recipe, but for its 192 numbers an embedding."""
    return ecapa(1024, 128, 80)


def adapted_wavlm():
    """Train adapters of the attention's projections, in a WavLM that is frozen."""
    kind, modules = wavlm()
    modules["wav2vec2"].freeze_feature_encoder()
    targets = ["encoder.layers.*.feed_forward.*_dense"]
    adapted = AdaptedModel(
        modules["wav2vec2"], LoRA, target_layers=targets, adapter_kwargs={"rank": 4}
    )
    return kind, {**modules, "wav2vec2": adapted}


#: By name: makes a Brain's class and its modules.
RECIPES = {
    "ecapa": ecapa,
    "resnet": resnet,
    "xvector": xvector,
    "conformer": conformer,
    "wavlm": wavlm,
}


def batch_of(rows=4, seconds=0.5, seed=0):
    """A batch as SpeechBrain's loaders collate it, of utterances of several lengths."""
    draws = torch.Generator().manual_seed(seed)
    examples = []
    for i in range(rows):
        samples = int(RATE * seconds * (1 - 0.1 * (i % 3)))
        examples.append(
            {
                "id": f"utterance{i}",
                "sig": torch.randn(samples, generator=draws),
                "spk_id_encoded": torch.tensor([i % SPEAKERS]),
                "tokens": torch.randint(1, 12, (6 - i % 3,), generator=draws),
            }
        )
    return PaddedBatch(examples)


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def brain_of(recipe, *bases, seed=0, device="cpu", optimizer=sgd, **hparams):
    """A Brain as a recipe builds it; ``bases`` stand before its own class."""
    torch.manual_seed(seed)
    kind, modules = RECIPES.get(recipe, recipe)()
    given = {
        "log_softmax": torch.nn.LogSoftmax(dim=-1),
        "compute_cost": LogSoftmaxWrapper(AdditiveAngularMargin(margin=0.2, scale=30)),
        "lr_annealing": CyclicLRScheduler(base_lr=1e-3, max_lr=0.1, step_size=10),
        **modules,
        **hparams,
    }
    return type(kind.__name__, (*bases, kind), {})(
        modules,
        optimizer,
        given,
        {"device": device},
    )


def loader_of(*batches):
    """What fit takes for a loader of these batches."""
    return torch.utils.data.DataLoader(batches, batch_size=None)
