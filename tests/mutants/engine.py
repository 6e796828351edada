"""Sabotages of the reversible engine, by the items of its contract."""

from .mutant import Source, Tests

CHAIN = Tests("tests/unit/reversible/test_chain.py")
NORM = Tests("tests/unit/reversible/test_norm.py")
ENCODER = Tests("tests/unit/lobes/test_encoder.py")
RECOMPUTE_CODE = Source("speechbrain_rev/reversible/recompute.py")
PIECES_CODE = Source("speechbrain_rev/reversible/recompute_each.py")
REPLAY_CODE = Source("speechbrain_rev/reversible/replay.py")
SEGMENT_CODE = Source("speechbrain_rev/reversible/segment.py")
RECOMPUTE = Tests("tests/unit/reversible/test_recompute.py")
GENERATED = Tests("tests/unit/reversible/test_generated.py")
MONITOR = Tests("tests/unit/reversible/test_monitor.py")
WATCHING = Tests("tests/unit/reversible/test_hooks.py")
HOOKS = Tests("tests/unit/lobes/test_stages.py")
WATCHING_CODE = Source("speechbrain_rev/reversible/hooks.py")
STREAMS_CODE = Source("speechbrain_rev/reversible/streams.py")
CHAIN_CODE = Source("speechbrain_rev/reversible/chain.py")
NORM_CODE = Source("speechbrain_rev/reversible/norm.py")
ENCODER_CODE = Source("speechbrain_rev/lobes/encoder.py")
MONITOR_CODE = Source("speechbrain_rev/reversible/monitor.py")
STATE_CODE = Source("speechbrain_rev/reversible/state.py")
WRAPPING_CODE = Source("speechbrain_rev/reversible/wrapping.py")
COMPARISON_CODE = Source("speechbrain_rev/reversible/comparison.py")
WRAPPING_TESTS = Tests("tests/unit/reversible/test_wrapping.py")
STATE_TESTS = Tests("tests/unit/reversible/test_state.py")
STAGES_CODE = Source("speechbrain_rev/lobes/stages.py")
LAYERS_CODE = Source("speechbrain_rev/lobes/layers.py")
POOLING_CODE = Source("speechbrain_rev/lobes/pooling.py")
POOLING_TESTS = Tests("tests/unit/lobes/test_pooling.py")
GEOMETRY_TESTS = Tests("tests/unit/lobes/test_geometry.py")
KERNEL_CODE = Source("speechbrain_rev/kernels/norm.py")
KERNEL_TESTS = Tests("tests/unit/kernels/test_norm.py")

ENGINE = [
    SEGMENT_CODE(
        "1: F runs a third time",
        "                    y = second_run(f, recording,",
        "                    first_run(f, *arguments(leaf, mask))\n"
        "                    y = second_run(f, recording,",
        CHAIN("runs_once"),
    ),
    REPLAY_CODE(
        "2: own running statistics are updated in both runs",
        "statistics = recording.next_statistics()",
        "statistics = measure()",
        CHAIN("equals_plain and basic"),
    ),
    STATE_CODE(
        "2: torch's running statistics are updated in both runs",
        "return self._copy.clone()",
        "return self._x",
        CHAIN("equals_plain and torch"),
    ),
    REPLAY_CODE(
        "2: a buffer is not put back for the second run",
        "                    if untouched\n",
        "                    if True\n",
        CHAIN("equals_plain and spectral_norm"),
    ),
    SEGMENT_CODE(
        "6: an activation of each block is kept",
        "                ctx.recordings.append(recording)\n",
        "                ctx.recordings.append(recording)\n"
        "                recording.kept = changed.clone()\n",
        CHAIN("does_not_grow and basic"),
    ),
    CHAIN_CODE(
        "6: recomputation stores",
        "call = functools.partial(_recomputed, checks=self.monitor.checks)",
        "pass",
        CHAIN("two_streams_of_each_block"),
    ),
    REPLAY_CODE(
        "8: the second run takes the statistics of another layer",
        "return self.statistics[self._position - 1]",
        "return self.statistics[0]",
        ENCODER("bits_of_storing and revnet46"),
    ),
    NORM_CODE(
        "3: on a CPU parts of maps are normalised as whole ones are",
        "    if not (x.is_contiguous() and out.is_contiguous()):\n",
        "    if False:\n",
        NORM("bits_are_those"),
    ),
    NORM_CODE(
        "3: on a CPU normalisation adds eps twice",
        "mean, torch.ones_like(mean), False, 0.0, 0.0, out=outputs",
        "mean, torch.ones_like(mean), False, 0.0, 1e-5, out=outputs",
        NORM("bits_are_those"),
    ),
    NORM_CODE(
        "8: processes do not share the gradients of statistics",
        "        dist.all_reduce(sums)\n",
        "",
        NORM("over_processes"),
    ),
    NORM_CODE(
        "8: masked frames count in the statistics",
        "    kept = mask.to(x.dtype)\n",
        "    kept = torch.ones_like(mask).to(x.dtype)\n",
        NORM("masked"),
    ),
    REPLAY_CODE(
        "10: autocast is not entered again",
        "recording.autocast(),\n        recording.flags(),\n        _recording(recording),\n"
        "        recording.replayed()",
        "recording.flags(),\n        _recording(recording),\n        recording.replayed()",
        CHAIN("equals_plain and basic and bf16"),
    ),
    REPLAY_CODE(
        "10: the random state is not restored for the second run",
        "    _set_random_state(recording.random_state)\n",
        "",
        CHAIN("equals_plain and dropout"),
    ),
    REPLAY_CODE(
        "10: the global random state is not left as found",
        "        _set_random_state(state)\n",
        "        pass\n",
        CHAIN("equals_plain and dropout"),
    ),
    RECOMPUTE_CODE(
        "11: parameters' own hooks fire in the second run too",
        "[*map(stand_in, saved, parameters.looks)]",
        "list(saved)",
        CHAIN("equals_plain and hooks_of_parameters"),
    ),
    RECOMPUTE_CODE(
        "11: a shared parameter gets the gradient of one use",
        "for module in modules:\n            positions: dict[int, int] = {}",
        "positions: dict[int, int] = {}\n        for module in modules:",
        CHAIN("equals_plain and shared"),
    ),
    RECOMPUTE_CODE(
        "11: a parameter left unused gets a gradient",
        "            if grad is None:\n                continue\n",
        "            if grad is None:\n"
        "                grad = torch.zeros_like(self._leaves[i])\n",
        GENERATED("layer and unused"),
    ),
    SEGMENT_CODE(
        "11: a kept graph is overwritten",
        "y1, y2 = y1.clone(), y2.clone()",
        "pass",
        GENERATED("backward and twice"),
    ),
    STREAMS_CODE(
        "11: the caller's gradients are written to",
        "        own = None if grad is None else _own(grad, ctx.validity, ctx.layout)\n",
        "        own = grad\n",
        CHAIN("callers_tensors"),
    ),
    STREAMS_CODE(
        "11: the output shares the engine's storage",
        "value, tangent.dtype, out=torch.empty_like(value, dtype=tangent.dtype)",
        "value, tangent.dtype",
        CHAIN("equals_plain and outputs_written_to"),
    ),
    SEGMENT_CODE(
        "11: a residual function may write into its input",
        "if version_of(x) != version:",
        "if False:",
        CHAIN("cannot_be_trained and inplace"),
    ),
    SEGMENT_CODE(
        "11: parameters may change before the backward pass",
        "        ctx.save_for_backward(y1, y2, mask, *tensors)\n",
        "        ctx.save_for_backward(y1, y2, mask, *(t.detach().clone()"
        ".requires_grad_(t.requires_grad) for t in tensors))\n",
        CHAIN("changes_before_the_backward"),
    ),
    RECOMPUTE_CODE(
        "11: differentiating twice is silently wrong",
        "        raise RuntimeError(_NO_DOUBLE_BACKWARD)",
        "        pass",
        GENERATED("backward and doubly"),
    ),
    SEGMENT_CODE(
        "11: an output that nobody uses has a gradient of zeros",
        "            if of_y is None:\n",
        "            if of_y is None:\n"
        "                of_changed.filled(changed, ctx.dtype)\n"
        "                of_y = of_changed.value\n"
        "            if of_y is None:\n",
        GENERATED("unused and streams"),
    ),
    SEGMENT_CODE(
        "11: streams claim a graph that they have not",
        "if not n]",
        "if False]",
        GENERATED("streams and without"),
    ),
    WATCHING_CODE(
        "11: what was saved and then written to is taken as it is",
        "if version_of(x) != self._version:",
        "if False:",
        RECOMPUTE("second_run_that_differs"),
    ),
    RECOMPUTE_CODE(
        "11: a kept graph keeps what was computed again",
        "if self._run is not None and self._run.complete and graph_is_kept():",
        "if False:",
        RECOMPUTE("graph_that_is_kept"),
    ),
    RECOMPUTE_CODE(
        "11: fewer operations in the second run are no error",
        "if count != len(self._saved):",
        "if False:",
        RECOMPUTE("second_run_that_differs"),
    ),
    RECOMPUTE_CODE(
        "11: a first run holds what it saves till it ends",
        "        self._holds = False\n",
        "        self._holds = True\n",
        RECOMPUTE("outputs_and_nothing"),
    ),
    RECOMPUTE_CODE(
        "11: statistics of a run that is not over are measured again",
        "        with apart(self._recording) as recording:\n"
        "            self._run_again(kept, recording, until=len(self._saved))\n",
        "        self._run_again(kept, self._recording, until=len(self._saved))\n",
        RECOMPUTE("takes_gradients_itself"),
    ),
    REPLAY_CODE(
        "11: attributes are changed by both runs",
        "recording.attributes or contextlib.nullcontext()",
        "contextlib.nullcontext()",
        GENERATED("layer and list"),
    ),
    RECOMPUTE_CODE(
        "11: a block joins one whose output was written to since",
        "if y() is x and version_of(x) == version:",
        "if y() is x:",
        WRAPPING_TESTS("does_not_follow"),
    ),
    RECOMPUTE_CODE(
        "11: a block joins one that hands its own input on",
        "                if not any(y is x for x in tensors)\n",
        "",
        WRAPPING_TESTS("does_not_follow"),
    ),
    RECOMPUTE_CODE(
        "11: a run of blocks keeps the input of each",
        "own = [x for x, place in pairs if place is None]",
        "own = [x for x, place in pairs]",
        WRAPPING_TESTS("root_of_their_number"),
    ),
    RECOMPUTE_CODE(
        "11: weights lose their attributes in a block that is recomputed within another",
        "zip(of_parameters, parameters, self._looks, strict=True)",
        "zip(of_parameters, parameters, looks_of(parameters), strict=True)",
        GENERATED("recomputed and within"),
    ),
    STATE_CODE(
        "11: what a second run leaves in attributes stays",
        "            place.put(after)\n",
        "            pass\n",
        STATE_TESTS("sees_what_was_before"),
    ),
    STATE_CODE(
        "11: hooks of a first run fire in the second as well",
        "return [*map(dict, self.owner)] if any(self.owner) else []",
        "return []",
        STATE_TESTS("was_empty"),
    ),
    SEGMENT_CODE(
        "11: what somebody keeps of many runs is written over",
        "return y, recording, has_graph, keepable",
        "return y, recording, has_graph, False",
        WATCHING("keeps_of_many_runs"),
    ),
    WATCHING_CODE(
        "11: a loss on a kept tensor trains nothing",
        "            ctx.sources.refuse()\n",
        "            pass\n",
        WATCHING("loss_on_it_is_refused"),
    ),
    WATCHING_CODE(
        "11: graphs that hold themselves are built without end",
        ">= _MOST_ALIVE",
        "< 0",
        WATCHING("hold_themselves"),
    ),
    SEGMENT_CODE(
        "11: what somebody keeps of the input is written over",
        "has_graph, sources.is_input_kept()",
        "has_graph, False",
        WATCHING("keeps_of_many_runs"),
    ),
    SEGMENT_CODE(
        "11: blocks of a first step are not compared",
        "if notes.differs is not None and block > 0:",
        "if False:",
        MONITOR("block_that_differs"),
    ),
    WATCHING_CODE(
        "11: hooks fire twice without a word",
        "if len(named) > _reported.get(module, 0):",
        "if False:",
        WATCHING("fire_twice_are_named"),
    ),
    STAGES_CODE(
        "11: hooks on stages do not fire",
        "if has_hooks(stage):",
        "if False:",
        HOOKS("on_a_stage"),
    ),
    ENCODER_CODE(
        "11: hooks on chains do not fire",
        "if trains(chain) and not has_hooks(chain):",
        "if trains(chain):",
        HOOKS("fire_as_often and revnet46 and store and True"),
    ),
    LAYERS_CODE(
        "11: a mask is written into what a hook sees",
        "(isinstance(conv, nn.Conv2d) and not has_hooks(conv))",
        "True",
        HOOKS("fire_as_often and df_revnet89 and store and True"),
    ),
    COMPARISON_CODE(
        "11: a second run with other values is not noticed",
        "self._differ[place] = before[1] != now[1]",
        "self._differ[place] = before[1] != before[1]",
        RECOMPUTE("other_values_for_the_gradient"),
    ),
    MONITOR_CODE(
        "11: a map that is rolled has the same checksum",
        "weights.mul_(_SPREAD).bitwise_or_(1)",
        "torch.ones_like(weights)",
        RECOMPUTE("fingerprint_is_of_all_bits"),
    ),
    REPLAY_CODE(
        "11: a weight that is frozen between the passes has no gradient",
        "leaf = nn.Parameter(leaf, requires_grad)",
        "leaf = nn.Parameter(leaf, p.requires_grad)",
        RECOMPUTE("freeze_between"),
    ),
    STATE_CODE(
        "11: what lies in a list is not put back",
        "                self._places.append(_Sequence(value))\n",
        "                pass\n",
        GENERATED("layer and list"),
    ),
    POOLING_CODE(
        "11: a quantized layer hands down what is in memory",
        "        pooled = pooled.detach()\n",
        "",
        POOLING_TESTS("quantized"),
    ),
    ENCODER_CODE(
        "11: a trace has the number of frames in it",
        "or self.geometry.rearranges",
        "or False",
        ENCODER("trace_is_right"),
    ),
    NORM_CODE(
        "11: masked statistics are constants in a second derivative",
        "    mean = (values * kept).sum(_REDUCED) / some\n",
        "    mean = (values * kept).sum(_REDUCED).detach() / some\n",
        ENCODER("second_derivative and revnet57"),
    ),
    MONITOR_CODE(
        "11: a verdict that has not arrived is lost",
        "                self._under_way.append(each)",
        "                pass",
        MONITOR("none_is_lost"),
    ),
    CHAIN_CODE(
        "11: another mode is no first step of a chain",
        "            self.monitor.restart()",
        "            pass",
        MONITOR("comes_again"),
    ),
    WRAPPING_CODE(
        "11: another mode is no first step of a block",
        "            forget_checks(module)",
        "            pass",
        RECOMPUTE("change_of_mode"),
    ),
    COMPARISON_CODE(
        "11: a call of the first step is a later one once another has ended it",
        "self._is_first = not checks.is_settled",
        "self._is_first = False",
        RECOMPUTE("first_step"),
    ),
    COMPARISON_CODE(
        "11: another layout hides other values",
        "fingerprint(x, before[0])",
        "fingerprint(x)",
        RECOMPUTE("another_layout"),
    ),
    PIECES_CODE(
        "11: what is recomputed in pieces is not compared",
        "    comparison = begin_comparison(checks, name)",
        "    comparison = None",
        ENCODER("in_pieces_is"),
    ),
    RECOMPUTE_CODE(
        "11: sharded parameters are accepted",
        "    if any(map(is_sharded, modules)) or any(hasattr(",
        "    if False and any(hasattr(",
        CHAIN("cannot_be_trained and sharded"),
    ),
    SEGMENT_CODE(
        "11: nothing trains where the input needs no gradient",
        "        *tangents, *parameters.tensors,\n    )  # fmt: skip",
        "        *tangents, *(t.detach() for t in parameters.tensors),\n"
        "    )  # fmt: skip",
        CHAIN("equals_plain and no_input_needs"),
    ),
    REPLAY_CODE(
        "2: a second run is in another training state than the first",
        "m.training = recording.training[i]",
        "pass",
        GENERATED("between and evaluation"),
    ),
    RECOMPUTE_CODE(
        "10: a nested chain runs plainly in the first run",
        "(torch.is_grad_enabled() or running())",
        "torch.is_grad_enabled()",
        CHAIN("nested"),
    ),
    RECOMPUTE_CODE(
        "11: a gradient that is the stream's is changed later",
        "grad = grad.clone()",
        "pass",
        CHAIN("equals_plain and table"),
    ),
    RECOMPUTE_CODE(
        "11: a gradient is lost outside the registered parameters",
        "        _refuse_other_leaves(self._parameters.modules[run], given, leaves)\n",
        "",
        GENERATED("layer and unregistered"),
    ),
    REPLAY_CODE(
        "11: leaves stay in the parameters' places",
        "            m._parameters.update(parameters)\n",
        "",
        CHAIN("equals_plain and layer_twice"),
    ),
    SEGMENT_CODE(
        "11: what a hook kept is overwritten",
        "                    ctx.in_place = False\n",
        "                    pass\n",
        CHAIN("hooks_keep"),
    ),
    CHAIN_CODE(
        "12: evaluation goes through the engine",
        "        if not trains(self):\n            if _half",
        "        if False:\n            if _half",
        CHAIN("equals_plain and evaluation"),
    ),
    SEGMENT_CODE(
        "the gradient of one function does not reach the other",
        "roots[-1].receive(of_y)",
        "roots[-1].receive(grad2)",
        CHAIN("equals_plain and basic"),
    ),
    ENCODER_CODE(
        "pooling takes padding for speech",
        "pooling(self.masks[-1], *parts)",
        "pooling(None, *parts)",
        GEOMETRY_TESTS("TestLengths and alone and revnet57"),
    ),
    NORM_CODE(
        "kernels: the zeros of ReLU are those of an input that was rounded",
        "relu and (not fused or is_compressing())",
        "relu and not fused",
        KERNEL_TESTS("zeros_of_relu"),
    ),
    NORM_CODE(
        "kernels: what a kernel computed is a constant in a second derivative",
        "fused = ctx.fused and not torch.is_grad_enabled()",
        "fused = ctx.fused",
        KERNEL_TESTS("differentiated_twice and contiguous and True"),
    ),
    NORM_CODE(
        "kernels: what is not float32 is taken",
        "self.weight.dtype is self.bias.dtype is torch.float32",
        "True",
        KERNEL_TESTS("do_not_take"),
    ),
    KERNEL_CODE(
        "kernels: a gradient has the mean of all left in it",
        "(tl.fma(-centred, slope, g) - average) * scale",
        "tl.fma(-centred, slope, g) * scale",
        KERNEL_TESTS("references_bits and float32 and contiguous"),
    ),
    KERNEL_CODE(
        "kernels: a zero of ReLU passes its gradient",
        "output.to(tl.float32) <= 0",
        "output.to(tl.float32) < 0",
        KERNEL_TESTS("references_bits and float32 and contiguous"),
    ),
    KERNEL_CODE(
        "kernels: pieces are read as if there were no gaps between them",
        "tl.load(x + row * x_step + lane",
        "tl.load(x + row * channels * columns + lane",
        KERNEL_TESTS("pieces and contiguous"),
    ),
    KERNEL_CODE(
        "kernels: the order of sums depends on the number of channels",
        "min(SPLITS, -(-tiles // TILES))",
        "min(SPLITS, -(-tiles * channels // (8 * TILES)))",
        KERNEL_TESTS("pieces and contiguous"),
    ),
    KERNEL_CODE(
        "kernels: strides decide which kernel takes a map of one channel",
        "elif x.shape[1] == 1 or x.stride(1) == 1:",
        "elif x.stride(1) == 1:",
        KERNEL_TESTS("one_channel"),
    ),
]
