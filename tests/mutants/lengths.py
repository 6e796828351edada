"""Sabotages of lengths: an utterance padded must be the utterance alone."""

from .mutant import Source, Tests

LENGTHS_TESTS = Tests("tests/unit/lobes/test_geometry.py")
SPEAKER_TESTS = Tests("tests/unit/inference/test_speaker.py")
BLOCKS_CODE = Source("speechbrain_rev/lobes/blocks.py")
GEOMETRY_CODE = Source("speechbrain_rev/lobes/geometry.py")
POOLING_CODE = Source("speechbrain_rev/lobes/pooling.py")
NORM_CODE = Source("speechbrain_rev/reversible/norm.py")
FILTERBANKS_CODE = Source("speechbrain_rev/filterbanks.py")
NORM_TESTS = Tests("tests/unit/reversible/test_norm.py")

LENGTHS = [
    GEOMETRY_CODE(
        "lengths: the padding enters the stem",
        "x.where(masks[0] > 0, 0), ",
        "x, ",
        LENGTHS_TESTS("TestLengths and alone"),
    ),
    GEOMETRY_CODE(
        "lengths: a half frame is lost at each level",
        "(valid / step).ceil()",
        "(valid / step).floor()",
        LENGTHS_TESTS("TestLengths and alone"),
    ),
    BLOCKS_CODE(
        "lengths: the residual of a basic block leaks into the padding",
        "return convolved_and_masked(self.conv2, x, mask)",
        "return self.conv2(x)",
        LENGTHS_TESTS("TestLengths and alone and revnet46"),
    ),
    NORM_CODE(
        "lengths: normalisation fills the padding",
        "return y if mask is None else y * mask.to(y.dtype)",
        "return y",
        LENGTHS_TESTS("TestLengths and alone and df_resnet56"),
    ),
    POOLING_CODE(
        "lengths: pooling divides by all frames",
        "frames = keep.sum(2)",
        "frames = torch.ones_like(keep).sum(2)",
        LENGTHS_TESTS("TestLengths and alone and revnet57"),
    ),
    NORM_CODE(
        "lengths: the padding counts in the gradient of normalisation",
        "        product.mul_(mask)\n",
        "",
        NORM_TESTS("masked_frames"),
    ),
    POOLING_CODE(
        "lengths: the pooled deviation has no gradient",
        ".mul_(slope)",
        ".mul_(0 * slope)",
        LENGTHS_TESTS("leaves_the_padding_out and revnet46"),
    ),
    GEOMETRY_CODE(
        "lengths: the host waits for the device",
        "    time = x.shape[3]\n",
        "    time = x.shape[3]\n    valid.max().item()\n",
        LENGTHS_TESTS("nothing_waits"),
    ),
    FILTERBANKS_CODE(
        "lengths: a padded waveform has the frames of its samples alone",
        "return 1 + (samples - window) //",
        "return (samples - window) //",
        SPEAKER_TESTS("companions"),
    ),
]
