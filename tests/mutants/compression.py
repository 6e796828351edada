"""Sabotages of what is compressed between forward and backward pass."""

from .mutant import Mutant

ACTIVATIONS = "tests/unit/compression/test_activations.py"
ADAPTIVE = "tests/unit/compression/test_adaptive.py"
CHAINS = "tests/unit/reversible/test_compress.py"
OTHERS = "tests/unit/compression/test_other_networks.py"
SAVING_CODE = "speechbrain_rev/compression/saving.py"
ACTIVATIONS_CODE = "speechbrain_rev/compression/activations.py"
ADAPTIVE_CODE = "speechbrain_rev/compression/adaptive.py"
LAYERS_CODE = "speechbrain_rev/compression/layers.py"
MOMENTUM_CODE = "speechbrain_rev/compression/momentum.py"
CHAIN_CODE = "speechbrain_rev/reversible/chain.py"

COMPRESSION = [
    Mutant(
        "compressed: the original stays beside the copy",
        SAVING_CODE,
        "    counter.data = x.new_empty(0)\n",
        "",
        ACTIVATIONS,
        "freed",
    ),
    Mutant(
        "compressed: a change in place goes unnoticed",
        SAVING_CODE,
        "if saved.own._version != saved.version:",
        "if False:",
        ACTIVATIONS,
        "change",
    ),
    Mutant(
        "compressed: custom functions get what was decoded",
        SAVING_CODE,
        "    if frame.f_code is not _APPLY:\n        return True\n",
        "    return True\n",
        ACTIVATIONS,
        "custom_functions",
    ),
    Mutant(
        "compressed: the larger of two bounds holds",
        SAVING_CODE,
        "return min([first, *others], key=float)",
        "return max([first, *others], key=float)",
        ACTIVATIONS,
        "smaller_bound",
    ),
    Mutant(
        "compressed: another view is decoded in the place of the first",
        SAVING_CODE,
        "        return x.as_strided(other.shape, other.strides, offset)",
        "        return x",
        ACTIVATIONS,
        "views_of_one_storage or layout",
    ),
    Mutant(
        "compressed: evaluation is, too",
        ACTIVATIONS_CODE,
        "return network.training and torch.is_grad_enabled() and not backward",
        "return torch.is_grad_enabled() and not backward",
        ACTIVATIONS,
        "without_training",
    ),
    Mutant(
        "compressed: what runs a second time in the backward pass",
        ACTIVATIONS_CODE,
        "return network.training and torch.is_grad_enabled() and not backward",
        "return network.training and torch.is_grad_enabled()",
        CHAINS,
        "recomputed_around",
    ),
    Mutant(
        "compressed: pooled statistics",
        ACTIVATIONS_CODE,
        "SMALLEST_MAP = 16",
        "SMALLEST_MAP = 0",
        OTHERS,
        "pooled",
    ),
    Mutant(
        "compressed: an error leaves its pass under way",
        ACTIVATIONS_CODE,
        "        finally:\n            _passes.under_way.pop()\n",
        "        finally:\n            pass\n",
        ACTIVATIONS,
        "leaves_no_pass",
    ),
    Mutant(
        "compressed: all blocks of a chain, if one is",
        CHAIN_CODE,
        "with registering(mode is Mode.COMPRESS):",
        "with registering():",
        CHAINS,
        "only_blocks",
    ),
    Mutant(
        "compressed: under autocast what is saved is not what is registered",
        LAYERS_CODE,
        "    return x.to(torch.get_autocast_dtype(kind))",
        "    return x",
        ACTIVATIONS,
        "autocast",
    ),
    Mutant(
        "compressed: a storage's parts that no layer takes",
        SAVING_CODE,
        "if wanted is not None and wanted.touches(Place(x)):",
        "if wanted is not None:",
        ACTIVATIONS,
        "no_layer_takes",
    ),
    Mutant(
        "compressed: changes that are counted apart are taken for none",
        SAVING_CODE,
        "return found if _share_counter(found.counter, x) else None",
        "return found",
        ACTIVATIONS,
        "counted_apart",
    ),
    Mutant(
        "compressed: a copy takes the shape of another view",
        SAVING_CODE,
        "self._encode(copy.place.of(x), wanted)",
        "self._encode(x, wanted)",
        ACTIVATIONS,
        "another_view",
    ),
    Mutant(
        "bounds: clipping and loss scale are not seen",
        ADAPTIVE_CODE,
        "    return float(weight.grad.detach().float().norm()) / scale / raw\n",
        "    return 1.0\n",
        ADAPTIVE,
        "do_not_depend",
    ),
    Mutant(
        "bounds: zeros count as values with an error",
        ADAPTIVE_CODE,
        "nonzero = x.detach().count_nonzero() / max(1, x.numel())",
        "nonzero = torch.ones(())",
        ADAPTIVE,
        "deviation_that_was_asked_for or literal",
    ),
    Mutant(
        "bounds: only the last part of an accumulated batch counts",
        ADAPTIVE_CODE,
        "sums.squares = sums.squares + nonzero",
        "sums.squares = nonzero",
        ADAPTIVE,
        "do_not_depend",
    ),
    Mutant(
        "bounds: SGD's buffer is taken for an average",
        MOMENTUM_CODE,
        "scale = (1 - kept) if sums else 1.0",
        "scale = 1.0",
        ADAPTIVE,
        "gradients_scale",
    ),
    Mutant(
        "bounds: steps are not resumed",
        ADAPTIVE_CODE,
        'self.steps = int(state.get("steps", 0))',
        "self.steps = 0",
        ADAPTIVE,
        "saved_and_resumed",
    ),
]
