"""Sabotages of work on some channels or utterances at a time: item 7 of the contract."""

from .mutant import Source, Tests

TESTS = Tests("tests/unit/lobes/test_layers.py")
ENCODER = Tests("tests/unit/lobes/test_encoder.py")
BLOCKS_CODE = Source("speechbrain_rev/lobes/blocks.py")
CONVOLUTION_CODE = Source("speechbrain_rev/reversible/convolution.py")
SEGMENT_CODE = Source("speechbrain_rev/reversible/segment.py")
LAYERS_CODE = Source("speechbrain_rev/lobes/layers.py")
PIECES_CODE = Source("speechbrain_rev/reversible/recompute_each.py")
CHAIN_CODE = Source("speechbrain_rev/reversible/chain.py")
TRACE_TESTS = Tests("tests/unit/planner/test_trace.py")
CHAIN_TESTS = Tests("tests/unit/reversible/test_chain.py")

STREAMS_TESTS = Tests("tests/unit/reversible/test_streams.py")

CHUNKS = [
    LAYERS_CODE(
        "7: running statistics of a piece are not updated",
        '"running_mean": means[i],',
        '"running_mean": means[i].clone(),',
        TESTS("pieces_add_up"),
    ),
    LAYERS_CODE(
        "7: every piece counts the batch",
        "None if i else count",
        "count",
        TESTS("pieces_add_up"),
    ),
    CHAIN_CODE(
        "7: a stream is read for all pieces before the first runs",
        "    for _ in pieces:\n"
        "        yield read(stream, floats, alone=len(pieces) > 1)\n",
        "    yield from [read(stream, floats, alone=True) for _ in pieces]\n",
        TESTS("small_pieces"),
    ),
    LAYERS_CODE(
        "7: a convolution with a bias is split, too",
        "layer.bias is None\n            and ",
        "",
        TESTS("not_as_it_was_built"),
    ),
    LAYERS_CODE(
        "7: a hook does not keep a function whole",
        " and not any(map(has_hooks, layers))",
        "",
        TESTS("not_as_it_was_built"),
    ),
    SEGMENT_CODE(
        "7: of pieces that are added together only the last one is",
        "changed, residuals, notes.row(i)",
        "changed, residuals[-1:], notes.row(i)",
        TESTS("those_of_the_whole"),
    ),
    CONVOLUTION_CODE(
        "7: a piece's gradient replaces that of the stream",
        ".baddbmm_(matrices, grad.flatten(2))",
        ".baddbmm_(matrices, grad.flatten(2), beta=0)",
        STREAMS_TESTS("added_to_those"),
    ),
    CONVOLUTION_CODE(
        "7: second derivatives lose what a piece read",
        "grad, x, weight, ctx.needs_input_grad[0], of_weight",
        "grad, x.detach(), weight, ctx.needs_input_grad[0], of_weight",
        STREAMS_TESTS("added_to_those"),
    ),
    CONVOLUTION_CODE(
        "7: a stream gets a gradient from a piece's weights",
        "if not tangent.requires_grad:",
        "if False:",
        STREAMS_TESTS("without_gradient"),
    ),
    SEGMENT_CODE(
        "11: pieces add to a gradient that a hook kept",
        "value if self._in_place else value.clone()",
        "value",
        TESTS("beside_pieces"),
    ),
    CONVOLUTION_CODE(
        "5: what reads streams in parts makes numbers of what left its range",
        "return weight if validity is None else weight + validity.to(weight.dtype)",
        "return weight",
        STREAMS_TESTS("left_their_range"),
    ),
    CONVOLUTION_CODE(
        "5: gradients of what was read in parts are numbers",
        "        if ctx.validity is not None and of_x:",
        "        if False:",
        STREAMS_TESTS("left_their_range"),
    ),
    CONVOLUTION_CODE(
        "7: a weight's gradient is that of the last part of a batch",
        "self.value.add_(slope)",
        "self.value = slope",
        TESTS("those_of_the_whole"),
    ),
    CONVOLUTION_CODE(
        "7: what one convolution hands down to the streams drops the other's",
        "total = of_part if total is None else total + of_part",
        "total = of_part",
        TESTS("those_of_the_whole"),
    ),
    CONVOLUTION_CODE(
        "7: streams cannot be differentiated twice, without an error",
        "            if torch.is_grad_enabled():\n                halves",
        "            if False:\n                halves",
        ENCODER("second_derivative and chunked"),
    ),
    SEGMENT_CODE(
        "7: a bottleneck's gradient replaces that of the stream",
        "grad[part].add_(of_part)",
        "grad[part].copy_(of_part)",
        ENCODER("bits_of_storing and chunked and revnet140"),
    ),
    SEGMENT_CODE(
        "7: a bottleneck's output is not masked when it is subtracted",
        "            y.mul_(mask[part].to(y.dtype))\n",
        "",
        ENCODER("bits_of_storing and chunked and revnet140"),
    ),
    BLOCKS_CODE(
        "7: a storage is spent that others read",
        "own = (1,) if isinstance(given, Reading) else ()",
        "own = (0, 1)",
        TESTS("those_of_the_whole"),
    ),
    LAYERS_CODE(
        "7: within a recomputed encoder the stem returns nothing",
        "    return each(modules, arguments, **options)",
        "    return each(modules, arguments, last=last, **options)",
        TESTS("a_recomputed_encoder"),
    ),
    PIECES_CODE(
        "7: an encoder without gradients returns nothing in a second run",
        "joins._replace(empty=False)",
        "joins",
        TESTS("without_gradients_in"),
    ),
    CONVOLUTION_CODE(
        "7: gradients of products are rounded under autocast",
        "with autocast_off(grad.device):\n            if of_x:",
        "if True:\n            if of_x:",
        ENCODER("bits_of_storing and backward"),
    ),
    PIECES_CODE(
        "7: what a unit returns is put together twice",
        "empty=last and repeating()",
        "empty=False",
        TESTS("no_more_than_promised"),
    ),
    PIECES_CODE(
        "7: spent storage is not used",
        "if i in ctx.reuse and own is not None:",
        "if False:",
        TESTS("no_more_than_promised"),
    ),
    SEGMENT_CODE(
        "7: bottlenecks take their gradients as a whole",
        "if ctx.in_place and isinstance(half[0], BoundaryConvolutions):",
        "if False:",
        TESTS("no_more_than_promised"),
    ),
    CHAIN_CODE(
        "7: a chain keeps what a run within it began with",
        "                del streams  # the run alone has it, and drops it\n",
        "",
        TRACE_TESTS("begins_within"),
    ),
    CHAIN_CODE(
        "7: a chain writes to the tensors that it is given",
        "own = bool(self.modes) and self.modes[0].spec.needs_inverse",
        "own = False",
        CHAIN_TESTS("callers_tensors"),
    ),
]
