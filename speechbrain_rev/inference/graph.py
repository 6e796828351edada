"""An encoder as one graph of standard operators: waveforms in, embeddings out."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule

from speechbrain_rev.inference.audio import MINIMUM_SECONDS
from speechbrain_rev.inference.graph_features import GRAPH_FRONT_ENDS
from speechbrain_rev.lobes import SpeakerEncoder
from speechbrain_rev.lobes.inference_form import inference_form
from speechbrain_rev.lobes.pooling import is_quantized


class EmbeddingGraph(nn.Module):
    """Map waveforms to embeddings in operations that can be exported.

    Parameters
    ----------
    encoder : SpeakerEncoder
        The trained encoder, which stays as it is.
    sample_rate : int
        Hertz.
    front_end : {"speechbrain", "kaldi"}
        Whose filterbanks it was trained with.

    Raises
    ------
    ValueError
        If the encoder is quantized, or was changed as ``inference_form`` refuses.

    Examples
    --------
    >>> from speechbrain_rev.lobes import build_encoder
    >>> encoder = build_encoder("revnet57", widths=(8,) * 4, blocks=(1,) * 4)
    >>> graph = EmbeddingGraph(encoder, sample_rate=16000, front_end="speechbrain")
    >>> graph(torch.randn(2, 16000), torch.tensor([16000, 9000])).shape
    torch.Size([2, 256])
    """

    def __init__(
        self, encoder: SpeakerEncoder, *, sample_rate: int, front_end: str
    ) -> None:
        super().__init__()
        if is_quantized(encoder):
            raise ValueError(
                f"{encoder.architecture.name} has quantized layers, which torch.export does "
                "not know. Export the encoder as it was, and quantize the ONNX file with "
                "onnxruntime.quantization."
            )
        self.sample_rate = sample_rate
        self.front_end = GRAPH_FRONT_ENDS[front_end](
            n_mels=encoder.n_mels, sample_rate=sample_rate
        )
        self.encoder = inference_form(encoder)

    def forward(self, waveforms: Tensor, samples: Tensor) -> Tensor:
        """Embed a batch.

        Parameters
        ----------
        waveforms : torch.Tensor, [batch, samples]
            Utterances from -1 to 1, padded with zeros to the longest.
        samples : torch.Tensor, [batch], int64
            How many samples of each are its own.

        Returns
        -------
        torch.Tensor, [batch, embedding_dim]
            Embeddings.
        """
        features, lengths = self.front_end(waveforms, samples)
        return self.encoder.embed(features, lengths).squeeze(1)


def exported(graph: EmbeddingGraph) -> ExportedProgram:
    """Trace a graph for batches of any size and utterances of any length.

    Parameters
    ----------
    graph : EmbeddingGraph
        What is traced.

    Returns
    -------
    torch.export.ExportedProgram
        Of inputs ``waveforms`` and ``samples``, both of dynamic batch; a quarter of a
        second is the shortest that it takes.
    """
    second = graph.sample_rate
    example = torch.zeros(2, second // 2), torch.tensor([second // 2, second // 3])
    batch = Dim("batch", min=1)
    longest = Dim("longest", min=int(MINIMUM_SECONDS * second))
    with torch.no_grad():
        program = torch.export.export(
            graph.eval(),
            example,
            dynamic_shapes={
                "waveforms": {0: batch, 1: longest},
                "samples": {0: batch},
            },
            strict=False,
            # Lengths are halved three times: true for all, but not proven by torch.
            prefer_deferred_runtime_asserts_over_guards=True,
        )
    for module in program.graph_module.modules():
        for node in cast(GraphModule, module).graph.nodes:
            # Names of files on the machine where it was traced.
            node.meta.pop("stack_trace", None)
    return program
