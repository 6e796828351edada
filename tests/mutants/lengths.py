"""Sabotages of lengths: an utterance padded must be the utterance alone."""

from .mutant import Mutant

LENGTHS_TESTS = "tests/unit/lobes/test_geometry.py"
SPEAKER_TESTS = "tests/unit/inference/test_speaker.py"
BLOCKS_CODE = "speechbrain_rev/lobes/blocks.py"
GEOMETRY_CODE = "speechbrain_rev/lobes/geometry.py"
POOLING_CODE = "speechbrain_rev/lobes/pooling.py"
NORM_CODE = "speechbrain_rev/reversible/norm.py"
FRONT_END_CODE = "speechbrain_rev/inference/front_ends.py"

LENGTHS = [
    Mutant(
        "lengths: the padding enters the stem",
        GEOMETRY_CODE,
        "x.where(masks[0] > 0, 0), ",
        "x, ",
        LENGTHS_TESTS,
        "TestLengths and alone",
    ),
    Mutant(
        "lengths: a half frame is lost at each level",
        GEOMETRY_CODE,
        "(valid / step).ceil()",
        "(valid / step).floor()",
        LENGTHS_TESTS,
        "TestLengths and alone",
    ),
    Mutant(
        "lengths: the residual of a basic block leaks into the padding",
        BLOCKS_CODE,
        "return convolved_and_masked(self.conv2, x, mask)",
        "return self.conv2(x)",
        LENGTHS_TESTS,
        "TestLengths and alone and revnet46",
    ),
    Mutant(
        "lengths: normalisation fills the padding",
        NORM_CODE,
        "return y if mask is None else y * mask.to(y.dtype)",
        "return y",
        LENGTHS_TESTS,
        "TestLengths and alone and df_resnet56",
    ),
    Mutant(
        "lengths: pooling divides by all frames",
        POOLING_CODE,
        "frames = keep.sum(2)",
        "frames = torch.ones_like(keep).sum(2)",
        LENGTHS_TESTS,
        "TestLengths and alone and revnet57",
    ),
    Mutant(
        "lengths: the padding counts in the gradient of normalisation",
        NORM_CODE,
        "        product.mul_(mask)\n",
        "",
        "tests/unit/reversible/test_norm.py",
        "masked_frames",
    ),
    Mutant(
        "lengths: the pooled deviation has no gradient",
        POOLING_CODE,
        ".mul_(slope)",
        ".mul_(0 * slope)",
        LENGTHS_TESTS,
        "leaves_the_padding_out and revnet46",
    ),
    Mutant(
        "lengths: the host waits for the device",
        GEOMETRY_CODE,
        "    time = x.shape[3]\n",
        "    time = x.shape[3]\n    valid.max().item()\n",
        LENGTHS_TESTS,
        "nothing_waits",
    ),
    Mutant(
        "lengths: a padded waveform has the frames of its samples alone",
        FRONT_END_CODE,
        "return 1 + samples //",
        "return samples //",
        SPEAKER_TESTS,
        "companions",
    ),
]
