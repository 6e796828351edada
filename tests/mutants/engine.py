"""Sabotages of the reversible engine, by the items of its contract."""

from .mutant import Mutant

CHAIN = "tests/unit/reversible/test_chain.py"
COMPOSITION = "tests/unit/reversible/test_composition.py"
NORM = "tests/unit/reversible/test_norm.py"
ENCODER = "tests/unit/lobes/test_encoder.py"
RECOMPUTE_CODE = "speechbrain_rev/reversible/recompute.py"
REPLAY_CODE = "speechbrain_rev/reversible/replay.py"
SEGMENT_CODE = "speechbrain_rev/reversible/segment.py"
GRADIENTS_CODE = "speechbrain_rev/reversible/gradients.py"
SECOND_RUN = "tests/unit/reversible/test_second_run.py"
STREAMS_CODE = "speechbrain_rev/reversible/streams.py"
CHAIN_CODE = "speechbrain_rev/reversible/chain.py"
NORM_CODE = "speechbrain_rev/reversible/norm.py"
ENCODER_CODE = "speechbrain_rev/lobes/encoder.py"

ENGINE = [
    Mutant(
        "1: F runs a third time",
        SEGMENT_CODE,
        "                y = second_run(f, recording,",
        "                first_run(f, *arguments(leaf, mask))\n"
        "                y = second_run(f, recording,",
        CHAIN,
        "runs_once",
    ),
    Mutant(
        "2: own running statistics are updated in both runs",
        REPLAY_CODE,
        "statistics = recording.next_statistics()",
        "statistics = measure()",
        CHAIN,
        "running_statistics and basic",
    ),
    Mutant(
        "2: torch's running statistics are updated in both runs",
        REPLAY_CODE,
        "copies.setdefault(id(b), kept.clone())",
        "copies.setdefault(id(b), kept)",
        CHAIN,
        "running_statistics and torch",
    ),
    Mutant(
        "2: a buffer is not put back for the second run",
        REPLAY_CODE,
        "(i, name): buffer.clone()",
        "(i, name): buffer",
        CHAIN,
        "output_depends_on",
    ),
    Mutant(
        "6: an activation of each block is kept",
        SEGMENT_CODE,
        "ctx.recordings.append(recording)\n            del x",
        "ctx.recordings.append(recording)\n"
        "                recording.kept = changed.clone()\n            del x",
        CHAIN,
        "does_not_grow and basic",
    ),
    Mutant(
        "6: recomputation stores",
        CHAIN_CODE,
        "again = mode is Mode.RECOMPUTE",
        "again = False",
        CHAIN,
        "two_streams_of_each_block",
    ),
    Mutant(
        "8: the second run takes the statistics of another layer",
        REPLAY_CODE,
        "return self.statistics[self._position - 1]",
        "return self.statistics[0]",
        ENCODER,
        "gradients_and_buffers and df_revnet66",
    ),
    Mutant(
        "8: processes do not share the gradients of statistics",
        NORM_CODE,
        "        dist.all_reduce(sums)\n",
        "",
        NORM,
        "over_processes",
    ),
    Mutant(
        "8: masked frames count in the statistics",
        NORM_CODE,
        "    kept = mask.to(x.dtype)\n",
        "    kept = torch.ones_like(mask).to(x.dtype)\n",
        NORM,
        "masked",
    ),
    Mutant(
        "10: autocast is not entered again",
        REPLAY_CODE,
        "recording.autocast(),\n        recording.flags(),\n        _recording(recording),\n"
        "        recording.replayed()",
        "recording.flags(),\n        _recording(recording),\n        recording.replayed()",
        COMPOSITION,
        "autocast_of_the_first",
    ),
    Mutant(
        "10: the random state is not restored for the second run",
        REPLAY_CODE,
        "    _set_random_state(recording.random_state)\n",
        "",
        COMPOSITION,
        "dropout_masks",
    ),
    Mutant(
        "10: the global random state is not left as found",
        REPLAY_CODE,
        "        _set_random_state(found)\n",
        "        pass\n",
        COMPOSITION,
        "global_random_state",
    ),
    Mutant(
        "11: parameters' own hooks fire in the second run too",
        GRADIENTS_CODE,
        "[t.detach().requires_grad_(t.requires_grad) for t in saved]",
        "list(saved)",
        COMPOSITION,
        "hooks_of_parameters",
    ),
    Mutant(
        "11: a shared parameter gets the gradient of one use",
        GRADIENTS_CODE,
        "for module in modules:\n            positions: dict[int, int] = {}",
        "positions: dict[int, int] = {}\n        for module in modules:",
        COMPOSITION,
        "shared",
    ),
    Mutant(
        "11: a parameter left unused gets a gradient",
        GRADIENTS_CODE,
        "            if grad is None:\n                continue\n",
        "            if grad is None:\n"
        "                grad = torch.zeros_like(self._leaves[i])\n",
        COMPOSITION,
        "no_function_uses",
    ),
    Mutant(
        "11: a kept graph is overwritten",
        SEGMENT_CODE,
        "y1, y2 = y1.clone(), y2.clone()",
        "pass",
        COMPOSITION,
        "kept_graph",
    ),
    Mutant(
        "11: the caller's gradients are written to",
        STREAMS_CODE,
        "        return None, _own(grad, ctx.poison), None, None\n\n\nclass _Join",
        "        return None, grad, None, None\n\n\nclass _Join",
        COMPOSITION,
        "callers_gradients",
    ),
    Mutant(
        "11: the output shares the engine's storage",
        STREAMS_CODE,
        "value, tangent.dtype, out=torch.empty_like(value, dtype=tangent.dtype)",
        "value, tangent.dtype",
        COMPOSITION,
        "writing_into_the_outputs",
    ),
    Mutant(
        "11: a residual function may write into its input",
        "speechbrain_rev/reversible/coupling.py",
        "if version_of(x) != version:",
        "if False:",
        CHAIN,
        "no_residual_function",
    ),
    Mutant(
        "11: parameters may change before the backward pass",
        SEGMENT_CODE,
        "        ctx.save_for_backward(y1, y2, mask, *tensors)\n",
        "        ctx.save_for_backward(y1, y2, mask, *(t.detach().clone()"
        ".requires_grad_(t.requires_grad) for t in tensors))\n",
        COMPOSITION,
        "changed_before_the_backward",
    ),
    Mutant(
        "11: differentiating twice is silently wrong",
        RECOMPUTE_CODE,
        "        raise RuntimeError(_NO_DOUBLE_BACKWARD)",
        "        pass",
        COMPOSITION,
        "differentiating_twice",
    ),
    Mutant(
        "11: sharded parameters are accepted",
        RECOMPUTE_CODE,
        "    if sharded:",
        "    if False:",
        COMPOSITION,
        "sharded",
    ),
    Mutant(
        "11: nothing trains where the input needs no gradient",
        SEGMENT_CODE,
        "        *tangents, *parameters.tensors,\n    )  # fmt: skip",
        "        *tangents, *(t.detach() for t in parameters.tensors),\n"
        "    )  # fmt: skip",
        COMPOSITION,
        "needs_no_gradient",
    ),
    Mutant(
        "2: a second run is in another training state than the first",
        REPLAY_CODE,
        "m.training = recording.training[i]",
        "pass",
        SECOND_RUN,
        "training_state",
    ),
    Mutant(
        "10: a nested chain runs plainly in the first run",
        RECOMPUTE_CODE,
        "(torch.is_grad_enabled() or running())",
        "torch.is_grad_enabled()",
        SECOND_RUN,
        "nested_chain",
    ),
    Mutant(
        "11: a gradient that is the stream's is changed later",
        GRADIENTS_CODE,
        "grad = grad.clone()",
        "pass",
        SECOND_RUN,
        "shape_of_the_stream",
    ),
    Mutant(
        "11: a gradient is lost outside the registered parameters",
        GRADIENTS_CODE,
        "        _refuse_other_leaves(self._parameters.modules[run], given, leaves)\n",
        "",
        SECOND_RUN,
        "neither_inputs_nor",
    ),
    Mutant(
        "11: leaves stay in the parameters' places",
        REPLAY_CODE,
        "            m._parameters.update(parameters)\n",
        "",
        SECOND_RUN,
        "layer_used_twice",
    ),
    Mutant(
        "11: what a hook kept is overwritten",
        SEGMENT_CODE,
        "ctx.in_place = not any(map(_is_watched, parameters.modules))",
        "ctx.in_place = True",
        SECOND_RUN,
        "hooks_keep",
    ),
    Mutant(
        "12: evaluation goes through the engine",
        CHAIN_CODE,
        "        if not trains(self):\n            if _half",
        "        if False:\n            if _half",
        COMPOSITION,
        "evaluation_with_gradients",
    ),
    Mutant(
        "the gradient of one function does not reach the other",
        SEGMENT_CODE,
        "root.receive(of_y)",
        "root.receive(grad2)",
        CHAIN,
        "equal_plain_autograds and basic",
    ),
    Mutant(
        "pooling takes padding for speech",
        ENCODER_CODE,
        "statistics_pooling(part, masks[level],",
        "statistics_pooling(part, None,",
        "tests/unit/lobes/test_lengths.py",
        "alone and revnet57",
    ),
]
