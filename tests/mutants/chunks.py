"""Sabotages of work on some channels or utterances at a time: item 7 of the contract."""

from .mutant import Mutant

TESTS = "tests/unit/lobes/test_layers.py"
ENCODER = "tests/unit/lobes/test_encoder.py"
BLOCKS_CODE = "speechbrain_rev/lobes/blocks.py"
CONVOLUTION_CODE = "speechbrain_rev/reversible/convolution.py"
ENDS_CODE = "speechbrain_rev/reversible/segment.py"
LAYERS_CODE = "speechbrain_rev/lobes/layers.py"
READING_CODE = "speechbrain_rev/reversible/convolution.py"
RECOMPUTE_CODE = "speechbrain_rev/reversible/recompute.py"
SEGMENT_CODE = "speechbrain_rev/reversible/segment.py"
CHAIN_CODE = "speechbrain_rev/reversible/chain.py"

CHUNKS = [
    Mutant(
        "7: running statistics of a piece are not updated",
        LAYERS_CODE,
        '"running_mean": means[i],',
        '"running_mean": means[i].clone(),',
        TESTS,
        "pieces_add_up",
    ),
    Mutant(
        "7: every piece counts the batch",
        LAYERS_CODE,
        "None if i else count",
        "count",
        TESTS,
        "pieces_add_up",
    ),
    Mutant(
        "7: a stream is read for all pieces before the first runs",
        CHAIN_CODE,
        "    for _ in pieces:\n"
        "        yield read(stream, floats, alone=len(pieces) > 1)\n",
        "    yield from [read(stream, floats, alone=True) for _ in pieces]\n",
        TESTS,
        "small_pieces",
    ),
    Mutant(
        "7: a convolution with a bias is split, too",
        LAYERS_CODE,
        "layer.bias is None\n            and ",
        "",
        TESTS,
        "not_as_it_was_built",
    ),
    Mutant(
        "7: a hook does not keep a function whole",
        LAYERS_CODE,
        " and not any(map(has_hooks, layers))",
        "",
        TESTS,
        "not_as_it_was_built",
    ),
    Mutant(
        "7: a weight's gradient is that of the last part of a batch",
        CONVOLUTION_CODE,
        "self.value.add_(slope)",
        "self.value = slope",
        TESTS,
        "those_of_the_whole",
    ),
    Mutant(
        "7: what one convolution hands down to the streams drops the other's",
        READING_CODE,
        "total = of_part if total is None else total + of_part",
        "total = of_part",
        TESTS,
        "those_of_the_whole",
    ),
    Mutant(
        "7: streams cannot be differentiated twice, and nobody says so",
        READING_CODE,
        "            if torch.is_grad_enabled():\n                halves",
        "            if False:\n                halves",
        ENCODER,
        "second_derivative and chunked",
    ),
    Mutant(
        "7: a bottleneck's gradient replaces that of the stream",
        ENDS_CODE,
        "grad[part].add_(of_part)",
        "grad[part].copy_(of_part)",
        ENCODER,
        "bits_of_storing and chunked and revnet140",
    ),
    Mutant(
        "7: a bottleneck's output is not masked when it is subtracted",
        ENDS_CODE,
        "            y.mul_(mask[part].to(y.dtype))\n",
        "",
        ENCODER,
        "bits_of_storing and chunked and revnet140",
    ),
    Mutant(
        "7: a storage is spent that others read",
        BLOCKS_CODE,
        "own = (1,) if isinstance(given, Reading) else ()",
        "own = (0, 1)",
        TESTS,
        "those_of_the_whole",
    ),
    Mutant(
        "7: within a recomputed encoder the stem returns nothing",
        LAYERS_CODE,
        "    return recompute_each(modules, arguments, **options)",
        "    return recompute_each(modules, arguments, last=last, **options)",
        TESTS,
        "a_recomputed_encoder",
    ),
    Mutant(
        "7: an encoder without gradients returns nothing in a second run",
        RECOMPUTE_CODE,
        "joins._replace(empty=False)",
        "joins",
        TESTS,
        "without_gradients_in",
    ),
    Mutant(
        "7: gradients of products are rounded under autocast",
        CONVOLUTION_CODE,
        "with autocast_off(grad.device):",
        "if True:",
        ENCODER,
        "bits_of_storing and backward",
    ),
    Mutant(
        "7: what a unit returns is put together twice",
        RECOMPUTE_CODE,
        "empty=last and repeating()",
        "empty=False",
        TESTS,
        "no_more_than_promised",
    ),
    Mutant(
        "7: spent storage is not used",
        RECOMPUTE_CODE,
        "if i in ctx.reuse and own is not None:",
        "if False:",
        TESTS,
        "no_more_than_promised",
    ),
    Mutant(
        "7: bottlenecks take their gradients as a whole",
        SEGMENT_CODE,
        "if ctx.in_place and isinstance(half[0], BoundaryConvolutions):",
        "if False:",
        TESTS,
        "no_more_than_promised",
    ),
    Mutant(
        "7: a chain keeps what a run within it began with",
        CHAIN_CODE,
        "                del streams  # the run alone has it, and drops it\n",
        "",
        "tests/unit/planner/test_trace.py",
        "begins_within",
    ),
    Mutant(
        "7: a chain writes to the tensors that it is given",
        CHAIN_CODE,
        "own = bool(self.modes) and self.modes[0].spec.needs_inverse",
        "own = False",
        "tests/unit/reversible/test_chain.py",
        "callers_tensors",
    ),
]
