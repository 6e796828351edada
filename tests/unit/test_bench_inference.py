"""The benchmarks of inference and of graphs, with encoders that are small."""

import pytest
import torch

from speechbrain_rev.lobes import inference_form
from tests.benchmarks import graphs, inference
from tests.benchmarks.harness import NotEqual

SMALL = inference.Setting(
    vanilla=("df_resnet56",),
    widths=(16,) * 4,
    blocks=(1,) * 4,
    batch=1,
    frames=40,
    repeats=2,
)
CPU = torch.device("cpu")


def test_each_encoder_has_a_ratio_to_its_counterpart(tmp_path):
    result = inference.run(CPU, SMALL)
    rows = {(row["encoder"], row["way"]): row for row in result.rows}
    assert {name for name, _ in rows} == {"df_resnet56", "df_revnet66", "df_revnet89"}
    baseline = rows["df_resnet56", inference.FORM]
    assert baseline["times the baseline's MB"] == 1.0
    assert baseline["times the baseline's ms"] == 1.0
    reversible = rows["df_revnet89", inference.FORM]
    assert reversible["times the baseline's MB"] < 1.0
    result.save(tmp_path, CPU)


@torch.no_grad()
def test_a_form_that_embeds_otherwise_has_no_figures():
    encoder = inference.encoder_of("df_resnet56", SMALL)
    form = inference_form(encoder)
    form.fc.bias += 1e-3
    with pytest.raises(NotEqual, match="df_resnet56's form for inference is off by"):
        inference.check("df_resnet56", encoder, form, torch.randn(1, 40, 80))


@pytest.mark.slow
def test_graphs_have_a_ratio_to_pytorch(tmp_path):
    pytest.importorskip("onnxruntime")
    setting = graphs.Setting(
        encoders=("df_revnet89",), sizes=SMALL, batches=(1, 2), seconds=0.5, repeats=2
    )
    result = graphs.run(CPU, setting)
    assert len(result.rows) == 6
    for row in result.rows:
        assert row["times the baseline"] > 0
        if row["way"] == graphs.BASELINE:
            assert row["times the baseline"] == 1.0
    result.save(tmp_path, CPU)


def test_a_graph_that_embeds_otherwise_has_no_figures():
    plain = graphs.WaveformEncoder(inference.encoder_of("df_resnet56", SMALL)).eval()
    ways = {"graph": lambda waves, samples: 1.001 * plain(waves, samples)}
    with pytest.raises(NotEqual, match="df_resnet56, graph: an embedding is off by"):
        graphs.check("df_resnet56", plain, ways, graphs.voices(2, 8000))
