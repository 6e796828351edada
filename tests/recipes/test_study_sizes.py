"""The encoders that the study compares have as many parameters."""

import pytest

from speechbrain_rev.lobes import build_encoder
from tests.recipes.study import study

conditions, sizes = study("design.conditions"), study("design.sizes")
SMALL = sizes.SIZES["small"]


def parameters(arch):
    settings = SMALL.settings_of(arch)
    given = {key: settings[key] for key in ("n_mels", "embedding_dim", "widths")}
    return sum(p.numel() for p in build_encoder(arch, **given).parameters())


@pytest.mark.parametrize(
    ("vanilla", "reversible"),
    [(one, other) for one, others in conditions.PAIRS.items() for other in others],
)
def test_encoders_of_the_small_study_have_as_many_parameters(vanilla, reversible):
    limit = study("report.sentences").MOST_PARAMETERS
    assert limit == 0.02
    ratio = parameters(reversible) / parameters(vanilla)
    assert abs(ratio - 1) <= limit, f"{reversible} has {ratio:.3f} times as many"
