"""Sabotages of what is compressed between forward and backward pass."""

from .mutant import Source, Tests

ACTIVATIONS = Tests("tests/unit/compression/test_activations.py")
ADAPTIVE = Tests("tests/unit/compression/test_adaptive.py")
CHAINS = Tests("tests/unit/reversible/test_chain.py")
ACTIVATIONS_CODE = Source("speechbrain_rev/compression/activations.py")
ADAPTIVE_CODE = Source("speechbrain_rev/compression/adaptive.py")
LAYERS_CODE = Source("speechbrain_rev/compression/layers.py")
CHAIN_CODE = Source("speechbrain_rev/reversible/chain.py")

COMPRESSION = [
    ACTIVATIONS_CODE(
        "compressed: the original stays beside the copy",
        "    counter.data = x.new_empty(0)\n",
        "",
        ACTIVATIONS("one_compressed_copy"),
    ),
    ACTIVATIONS_CODE(
        "compressed: a change in place goes unnoticed",
        "if saved.own._version != saved.version:",
        "if False:",
        ACTIVATIONS("change"),
    ),
    ACTIVATIONS_CODE(
        "compressed: custom functions get what was decoded",
        "        if ctx.next_functions:\n",
        "        if False:\n",
        ACTIVATIONS("custom_function"),
    ),
    ACTIVATIONS_CODE(
        "compressed: what functions under no_grad saw is not",
        "        if ctx.next_functions:\n",
        "        if True:\n",
        ACTIVATIONS("custom_function"),
    ),
    ACTIVATIONS_CODE(
        "compressed: custom functions are watched after the pass",
        "            if self._passes == 0:\n",
        "            if False:\n",
        ACTIVATIONS("custom_functions_are_watched"),
    ),
    ACTIVATIONS_CODE(
        "compressed: the first pass that ends takes the watch from the others",
        "            if self._passes == 0:\n",
        "            if True:\n",
        ACTIVATIONS("custom_functions_are_watched"),
    ),
    ACTIVATIONS_CODE(
        "compressed: the larger of two bounds holds",
        "return min([first, *others], key=float)",
        "return max([first, *others], key=float)",
        ACTIVATIONS("smaller_bound"),
    ),
    ACTIVATIONS_CODE(
        "compressed: another view is decoded in the place of the first",
        "        return x.as_strided(other.shape, other.strides, offset)",
        "        return x",
        ACTIVATIONS("views_of_one_storage or layout"),
    ),
    ACTIVATIONS_CODE(
        "compressed: evaluation is, too",
        "trains = network.training and torch.is_grad_enabled()",
        "trains = torch.is_grad_enabled()",
        ACTIVATIONS("nothing_is_trained"),
    ),
    ACTIVATIONS_CODE(
        "compressed: what runs a second time in the backward pass",
        "return trains and not backward and not _passes.paused",
        "return trains",
        CHAINS("recomputed_around"),
    ),
    ACTIVATIONS_CODE(
        "compressed: pooled statistics",
        "SMALLEST_MAP = 16",
        "SMALLEST_MAP = 0",
        ACTIVATIONS("pooled"),
    ),
    ACTIVATIONS_CODE(
        "compressed: an error leaves its pass under way",
        "        finally:\n            _passes.under_way.pop()\n",
        "        finally:\n            pass\n",
        ACTIVATIONS("leaves_no_pass"),
    ),
    CHAIN_CODE(
        "compressed: all blocks of a chain, if one is",
        "with mode.spec.around():",
        "with Mode.COMPRESS.spec.around():",
        CHAINS("only_blocks"),
    ),
    LAYERS_CODE(
        "compressed: under autocast what is saved is not what is registered",
        "    return x.to(torch.get_autocast_dtype(kind))",
        "    return x",
        ACTIVATIONS("no_activation"),
    ),
    ACTIVATIONS_CODE(
        "compressed: a storage's parts that no layer takes",
        "if wanted is not None and wanted.covers(Place(x)):",
        "if wanted is not None:",
        ACTIVATIONS("no_layer_takes"),
    ),
    ACTIVATIONS_CODE(
        "compressed: a part has the bound of the whole",
        "bound(own.of(x))",
        "bound(x)",
        ACTIVATIONS("bound_of_its_own"),
    ),
    ACTIVATIONS_CODE(
        "compressed: what is saved keeps the graph that saved it",
        "self.own = x.detach()",
        "self.own = x",
        ACTIVATIONS("no_backward_pass_releases"),
    ),
    ACTIVATIONS_CODE(
        "compressed: changes that are counted apart are taken for none",
        "return found if _share_counter(found.counter, x) else None",
        "return found",
        ACTIVATIONS("counted_apart"),
    ),
    ACTIVATIONS_CODE(
        "compressed: a copy takes the shape of another view",
        "self._encode(copy.place.of(x), wanted)",
        "self._encode(x, wanted)",
        ACTIVATIONS("another_view"),
    ),
    ADAPTIVE_CODE(
        "bounds: clipping and loss scale are not seen",
        "    return float(weight.grad.detach().float().norm()) / scale / raw\n",
        "    return 1.0\n",
        ADAPTIVE("do_not_depend"),
    ),
    ADAPTIVE_CODE(
        "bounds: zeros count as values with an error",
        "nonzero = x.detach().count_nonzero() / max(1, x.numel())",
        "nonzero = torch.ones(())",
        ADAPTIVE("deviation_that_was_asked_for or equation_nine"),
    ),
    ADAPTIVE_CODE(
        "bounds: only the last part of an accumulated batch counts",
        "self.squares = self.squares + part * nonzero * squares",
        "self.squares = part * nonzero * squares",
        ADAPTIVE("do_not_depend"),
    ),
    ADAPTIVE_CODE(
        "bounds: SGD's buffer is taken for an average",
        "found, scale = _mean_of_state(state), 1 - kept",
        "found, scale = _mean_of_state(state), 1.0",
        ADAPTIVE("gradients_scale"),
    ),
    ADAPTIVE_CODE(
        "bounds: steps are not resumed",
        'self.steps = int(state["steps"])',
        "self.steps = 0",
        ADAPTIVE("saved_and_resumed"),
    ),
    ADAPTIVE_CODE(
        "bounds: a look that was due is not taken after resuming",
        'bool(state["due"])',
        "False",
        ADAPTIVE("two_steps and resumed"),
    ),
    ADAPTIVE_CODE(
        "bounds: each part of a weight counts as the whole",
        "part = weight.numel() / whole.numel()",
        "part = 1.0",
        ADAPTIVE("two_steps"),
    ),
    ADAPTIVE_CODE(
        "bounds: gradients that were thrown away count",
        "if sums is None or (sums.raw_norm is not None and _is_zero(whole.grad)):",
        "if sums is None:",
        ADAPTIVE("two_steps and thrown_away"),
    ),
    ADAPTIVE_CODE(
        "bounds: no part of the range limits them",
        "return self.limit(x).clamp_max(self.error_bound)",
        "return torch.tensor(self.error_bound)",
        ADAPTIVE("part_of_the_range"),
    ),
    ADAPTIVE_CODE(
        "bounds: RMSprop's momentum is taken for a gradient's",
        'and "nesterov" in group ',
        "",
        ADAPTIVE("another_scale"),
    ),
]
