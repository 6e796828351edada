"""Sabotages of half precision: what must be float32, repeated alike, or not finite."""

from .mutant import Source, Tests

AUTOCAST_CODE = Source("speechbrain_rev/reversible/replay.py")
CLASSIFIER_TESTS = Tests("tests/unit/lobes/test_classifier.py")
ENGINE_TESTS = Tests("tests/unit/reversible/test_chain.py")
ENCODER_TESTS = Tests("tests/unit/lobes/test_encoder.py")
POOLING_TESTS = Tests("tests/unit/lobes/test_pooling.py")
NORM_TESTS = Tests("tests/unit/reversible/test_norm.py")
CHAIN_CODE = Source("speechbrain_rev/reversible/chain.py")
CLASSIFIER_CODE = Source("speechbrain_rev/lobes/classifier.py")
FORMATS_CODE = Source("speechbrain_rev/reversible/streams.py")
GRADIENTS_CODE = Source("speechbrain_rev/reversible/recompute.py")
NORM_CODE = Source("speechbrain_rev/reversible/norm.py")
POOLING_CODE = Source("speechbrain_rev/lobes/pooling.py")
SEGMENT_CODE = Source("speechbrain_rev/reversible/segment.py")
GEOMETRY_CODE = Source("speechbrain_rev/lobes/geometry.py")
BUDGET_TESTS = Tests("tests/unit/training/test_memory_budget.py")
GEOMETRY_TESTS = Tests("tests/unit/lobes/test_geometry.py")

HALF_PRECISION = [
    AUTOCAST_CODE(
        "half: weights that blocks have together are cast for each",
        "contextlib.nullcontext() if shares_casts else recording.autocast()",
        "recording.autocast()",
        BUDGET_TESTS("together and bf16"),
    ),
    AUTOCAST_CODE(
        "half: the second run is in the other half",
        "torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)",
        "torch.is_autocast_enabled(kind), torch.bfloat16",
        ENCODER_TESTS("bits_of_storing and fp16"),
    ),
    AUTOCAST_CODE(
        "half: casts of weights are shared in a second run, their gradients summed",
        "self.enabled, cache_enabled=False",
        "self.enabled, cache_enabled=True",
        ENGINE_TESTS("equals_plain and shared and bf16"),
    ),
    SEGMENT_CODE(
        "half: gradients are made under the forward pass's autocast",
        "with recording.flags():\n                    wanted =",
        "with recording.flags(), recording.autocast():\n                    wanted =",
        ENGINE_TESTS("equals_plain and partly_float32"),
    ),
    GRADIENTS_CODE(
        "half: the scaler does not see that a weight's gradient overflowed",
        "self.values[i] = grad",
        "self.values[i] = grad if grad is None else grad.nan_to_num(0, 0, 0)",
        ENGINE_TESTS("gradients_overflow"),
    ),
    GRADIENTS_CODE(
        "half: a stream's gradient is cut off at half's largest number",
        "self.grad = grad.to(self._dtype)",
        "self.grad = grad.clamp(-65504, 65504).to(self._dtype)",
        ENGINE_TESTS("too_large_for_half"),
    ),
    FORMATS_CODE(
        "half: a residual that overflowed leaves a finite stream",
        "            value = out = torch.add(value, f, out=out)",
        "            value = out = torch.add(value, f.nan_to_num(), out=out)",
        ENGINE_TESTS("never_silent"),
    ),
    FORMATS_CODE(
        "half: streams are halves in training",
        "x.detach().to(wide)",
        "x.detach()",
        ENGINE_TESTS("small_residuals"),
    ),
    CHAIN_CODE(
        "half: streams are halves in evaluation",
        "                x1, x2 = x1.float(), x2.float()\n",
        "                pass\n",
        ENGINE_TESTS("small_residuals"),
    ),
    CHAIN_CODE(
        "half: networks converted to half precision train",
        "if x1.dtype in _HALVES and not _half_under_autocast(x1):",
        "if False:",
        ENGINE_TESTS("cannot_be_trained and to_half"),
    ),
    NORM_CODE(
        "half: batch statistics are rounded to half",
        "batch_statistics(lambda: self._measure(x.detach(), mask))",
        "batch_statistics(lambda: tuple(t.to(x.dtype).to(t.dtype)"
        " for t in self._measure(x.detach(), mask)))",
        NORM_TESTS("sums_over_half"),
    ),
    POOLING_CODE(
        "half: pooling adds up in half",
        "x = x.float() if x.dtype.itemsize < 4 else x\n    # Flat",
        "# Flat",
        POOLING_TESTS("pooling_and_its_gradient"),
    ),
    CLASSIFIER_CODE(
        "half: cosines are autocast's",
        "        with autocast_off(embeddings.device):\n            embeddings, weight",
        "        if True:\n            embeddings, weight",
        CLASSIFIER_TESTS("under_autocast"),
    ),
    CLASSIFIER_CODE(
        "half: the loss of cosines in half is computed in half",
        "predictions.squeeze(1).float()",
        "predictions.squeeze(1)",
        CLASSIFIER_TESTS("loss_of_cosines_in_half"),
    ),
    # with norm.patch
    NORM_CODE(
        "half: a batch that overflowed stays in the running statistics",
        "after = torch.where(fine, before.lerp(values, weight), before)",
        "after = before.lerp(values, weight)",
        NORM_TESTS("overflowed_changes"),
    ),
    NORM_CODE(
        "half: a backward pass under autocast adds masked gradients up in half",
        "with autocast_off(grad.device):",
        "if True:",
        NORM_TESTS("under_autocast_adds_up"),
    ),
    # with encoder.patch
    GEOMETRY_CODE(
        "half: lengths in half precision lose frames",
        "lengths.dtype in (torch.float16, torch.bfloat16)",
        "False",
        GEOMETRY_TESTS("no_relative_lengths"),
    ),
    CLASSIFIER_CODE(
        "parts: the target of another part is forgotten",
        "target_cosines = torch.where(inside, own, target_cosines)",
        "target_cosines = own",
        CLASSIFIER_TESTS("plain_loops"),
    ),
    CLASSIFIER_CODE(
        "parts: targets and penalised classes have the slopes of others",
        "slope.scatter_(1, index, slopes).mul_(grad)",
        "slope.mul_(grad)",
        CLASSIFIER_TESTS("plain_loops"),
    ),
    CLASSIFIER_CODE(
        "parts: penalised classes of earlier parts have other numbers",
        "classes = classes.gather(1, index)",
        "classes = classes[:, :hardest]",
        CLASSIFIER_TESTS("plain_loops"),
    ),
]
