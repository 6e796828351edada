"""Sabotages of the 8-bit optimizers."""

from .mutant import Source, Tests

REFERENCE_CODE = Source("speechbrain_rev/optim/reference.py")
KERNEL_CODE = Source("speechbrain_rev/kernels/optimizer.py")
OPTIMIZER_CODE = Source("speechbrain_rev/optim/optimizer.py")
STATES_CODE = Source("speechbrain_rev/optim/states.py")
REFERENCE_TESTS = Tests("tests/unit/optim/test_reference.py")
STEP_TESTS = Tests("tests/unit/optim/test_steps.py")
ROW_TESTS = Tests("tests/unit/optim/test_rows.py")
KERNEL_TESTS = Tests("tests/unit/kernels/test_optimizer.py")

OPTIMIZER = [
    REFERENCE_CODE(
        "8 bit: a value midway between two codes takes the upper one",
        "above = normalised > tree",
        "above = normalised >= tree",
        REFERENCE_TESTS("midway_between"),
    ),
    REFERENCE_CODE(
        "8 bit: a gradient that is not finite is taken",
        "healthy.mul_(largest.square().isfinite())",
        "healthy.mul_(1)",
        STEP_TESTS("not_finite_changes_nothing"),
    ),
    REFERENCE_CODE(
        "8 bit: a gradient whose square is not finite is taken",
        "healthy.mul_(largest.square().isfinite())",
        "healthy.mul_(largest.isfinite())",
        STEP_TESTS("not_finite_changes_nothing"),
    ),
    REFERENCE_CODE(
        "8 bit: second moments read back as zero",
        "new_codes.clamp_(min=i)",
        "new_codes.clamp_(min=0)",
        STEP_TESTS("too_small_for_its_block"),
    ),
    REFERENCE_CODE(
        "8 bit: blocks of which nothing is trained are stored anew",
        "blocks = any_trained = _blocks(own, block).any(dim=1)",
        "blocks = any_trained = _blocks(own, block).any(dim=1) | True",
        STEP_TESTS("keeps_its_bits_in_blocks"),
    ),
    KERNEL_CODE(
        "8 bit: a kernel reads what lies behind a tensor as codes",
        "tl.where(exists, tl.load(values + codes) * scales, 0.0)",
        "tl.load(values + codes) * scales",
        KERNEL_TESTS("have_the_bits_of_the_reference"),
    ),
    KERNEL_CODE(
        "8 bit: a kernel writes where a gradient is not finite",
        "end = tl.where(tl.load(healthy) > 0.0, end, begin)",
        "end = end",
        KERNEL_TESTS("is_left_alone"),
    ),
    OPTIMIZER_CODE(
        "8 bit: what a loss scaler found is not heard",
        "(overflow.reshape(1) == 0)",
        "(overflow.reshape(1) == overflow.reshape(1))",
        STEP_TESTS("loss_scaler_hands_over"),
    ),
    KERNEL_CODE(
        "8 bit: a kernel takes a gradient whose square is not finite",
        "    square = g * g\n",
        "    square = g\n",
        KERNEL_TESTS("is_left_alone"),
    ),
    OPTIMIZER_CODE(
        "8 bit: a state that was exchanged is stepped as it was",
        "                    state.get(key) is not view for key, view in views.items()\n",
        "                    False for key, view in views.items()\n",
        STEP_TESTS("states_belong_to_parameters"),
    ),
    OPTIMIZER_CODE(
        "8 bit: a parameter in another group keeps the options of its first",
        "if groups.get(param) != arena.group or any(",
        "if param not in groups or any(",
        STEP_TESTS("states_belong_to_parameters"),
    ),
    STATES_CODE(
        "8 bit: small tensors that moved take the scales of their new neighbours",
        'if own.get("offset") != source.get("offset"):',
        "if False:",
        Tests("tests/unit/optim/test_checkpoint.py")("keep_their_states_where"),
    ),
    OPTIMIZER_CODE(
        "8 bit: a parameter that left keeps the buffers of all",
        "self.state[param][key] = value.clone()",
        "self.state[param][key] = value",
        STEP_TESTS("hold_no_buffers"),
    ),
    OPTIMIZER_CODE(
        "8 bit: skipped steps are forgotten where states are laid out anew",
        "            self._skipped_before = self.skipped_steps\n",
        "",
        STEP_TESTS("skipped_are_counted_on"),
    ),
    REFERENCE_CODE(
        "8 bit: Lion's momentum keeps the part of its direction",
        "first.mul_(beta2).add_(gradient * less2)",
        "first.mul_(beta1).add_(gradient * less1)",
        ROW_TESTS("float64"),
    ),
    KERNEL_CODE(
        "8 bit: a kernel's Lion steps where its direction is zero",
        "tl.where(direction < 0, -lr, 0.0)",
        "-lr",
        KERNEL_TESTS("have_the_bits_of_the_reference"),
    ),
    OPTIMIZER_CODE(
        "8 bit: options of an earlier group reach the next one",
        "self._options | own)",
        "(self._options.update(own), self._options)[1])",
        ROW_TESTS("float64"),
    ),
    OPTIMIZER_CODE(
        "options that are null are passed on",
        "for key, value in options.items() if value is not None}",
        "for key, value in options.items()}",
        Tests("tests/unit/optim/test_arguments.py")("none_are_not_given"),
    ),
    OPTIMIZER_CODE(
        "states of the other backend are loaded",
        "    if own != saved:\n",
        "    if own.split()[0] != saved.split()[0]:\n",
        Tests("tests/unit/optim/test_checkpoint.py")("refused"),
    ),
]
