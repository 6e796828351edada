"""Sabotages of half precision: what must be float32, repeated alike, or not finite."""

from .mutant import Mutant

AUTOCAST_CODE = "speechbrain_rev/reversible/replay.py"
CLASSIFIER_TESTS = "tests/unit/lobes/test_classifier.py"
ENGINE_TESTS = "tests/unit/reversible/test_chain.py"
ENCODER_TESTS = "tests/unit/lobes/test_encoder.py"
POOLING_TESTS = "tests/unit/lobes/test_pooling.py"
NORM_TESTS = "tests/unit/reversible/test_norm.py"
CHAIN_CODE = "speechbrain_rev/reversible/chain.py"
CLASSIFIER_CODE = "speechbrain_rev/lobes/classifier.py"
FORMATS_CODE = "speechbrain_rev/reversible/streams.py"
GRADIENTS_CODE = "speechbrain_rev/reversible/recompute.py"
NORM_CODE = "speechbrain_rev/reversible/norm.py"
POOLING_CODE = "speechbrain_rev/lobes/pooling.py"
SEGMENT_CODE = "speechbrain_rev/reversible/segment.py"

HALF_PRECISION = [
    Mutant(
        "half: the second run is in the other half",
        AUTOCAST_CODE,
        "torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)",
        "torch.is_autocast_enabled(kind), torch.bfloat16",
        ENCODER_TESTS,
        "bits_of_storing and fp16",
    ),
    Mutant(
        "half: casts of weights are shared in a second run, their gradients summed",
        AUTOCAST_CODE,
        "self.enabled, cache_enabled=False",
        "self.enabled, cache_enabled=True",
        ENGINE_TESTS,
        "equals_plain and shared and bf16",
    ),
    Mutant(
        "half: gradients are made under the forward pass's autocast",
        SEGMENT_CODE,
        "with recording.flags():\n                    read =",
        "with recording.flags(), recording.autocast():\n                    read =",
        ENGINE_TESTS,
        "equals_plain and partly_float32",
    ),
    Mutant(
        "half: the scaler does not see that a weight's gradient overflowed",
        GRADIENTS_CODE,
        "self.values[i] = grad",
        "self.values[i] = grad if grad is None else grad.nan_to_num(0, 0, 0)",
        ENGINE_TESTS,
        "gradients_overflow",
    ),
    Mutant(
        "half: a stream's gradient is cut off at half's largest number",
        GRADIENTS_CODE,
        "self.grad = grad.to(self._dtype)",
        "self.grad = grad.clamp(-65504, 65504).to(self._dtype)",
        ENGINE_TESTS,
        "too_large_for_half",
    ),
    Mutant(
        "half: a residual that overflowed leaves a finite stream",
        FORMATS_CODE,
        "        return torch.add(value, f, out=out)",
        "        return torch.add(value, f.nan_to_num(), out=out)",
        ENGINE_TESTS,
        "never_silent",
    ),
    Mutant(
        "half: streams are halves in training",
        FORMATS_CODE,
        "x.detach().to(wide)",
        "x.detach()",
        ENGINE_TESTS,
        "small_residuals",
    ),
    Mutant(
        "half: streams are halves in evaluation",
        CHAIN_CODE,
        "                x1, x2 = x1.float(), x2.float()\n",
        "                pass\n",
        ENGINE_TESTS,
        "small_residuals",
    ),
    Mutant(
        "half: networks converted to half precision train",
        CHAIN_CODE,
        "if x1.dtype in _HALVES and not _half_under_autocast(x1):",
        "if False:",
        ENGINE_TESTS,
        "cannot_be_trained and to_half",
    ),
    Mutant(
        "half: batch statistics are rounded to half",
        NORM_CODE,
        "batch_statistics(lambda: self._measure(x.detach(), mask))",
        "batch_statistics(lambda: tuple(t.to(x.dtype).to(t.dtype)"
        " for t in self._measure(x.detach(), mask)))",
        NORM_TESTS,
        "sums_over_half",
    ),
    Mutant(
        "half: pooling adds up in half",
        POOLING_CODE,
        "(x.float() if x.dtype.itemsize < 4 else x).flatten(1, 2)",
        "x.flatten(1, 2)",
        POOLING_TESTS,
        "pooling_and_its_gradient",
    ),
    Mutant(
        "half: cosines are autocast's",
        CLASSIFIER_CODE,
        "        with autocast_off(embeddings.device):\n",
        "        if True:\n",
        CLASSIFIER_TESTS,
        "under_autocast",
    ),
    Mutant(
        "half: the loss of cosines in half is computed in half",
        CLASSIFIER_CODE,
        "predictions.squeeze(1).float()",
        "predictions.squeeze(1)",
        CLASSIFIER_TESTS,
        "loss_of_cosines_in_half",
    ),
    # with norm.patch
    Mutant(
        "half: a batch that overflowed stays in the running statistics",
        NORM_CODE,
        "finite = self.running_mean.isfinite() & self.running_var.isfinite()",
        "finite = torch.ones_like(self.running_var, dtype=torch.bool)",
        NORM_TESTS,
        "overflowed_leaves",
    ),
    Mutant(
        "half: a backward pass under autocast adds masked gradients up in half",
        NORM_CODE,
        "with autocast_off(grad.device):",
        "if True:",
        NORM_TESTS,
        "under_autocast_adds_up",
    ),
    # with encoder.patch
    Mutant(
        "half: lengths in half precision lose frames",
        "speechbrain_rev/lobes/geometry.py",
        "lengths.dtype in (torch.float16, torch.bfloat16)",
        "False",
        "tests/unit/lobes/test_geometry.py",
        "no_relative_lengths",
    ),
]
