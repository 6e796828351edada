"""Sabotages of blocks that make outputs of normalisations again."""

from .mutant import Source, Tests

SELECTIVE_TESTS = Tests("tests/unit/reversible/test_selective.py")
ENCODERS = Tests("tests/unit/lobes/test_encoder.py")
CODE = Source("speechbrain_rev/reversible/selective.py")

SELECTIVE = [
    CODE(
        "selective: running statistics have each batch twice",
        "call.arguments.update(running_mean=None, running_var=None)",
        "pass",
        SELECTIVE_TESTS("bits_are_those"),
    ),
    CODE(
        "selective: an output that was written to is made as it was before",
        "if each.version == version and each.place.covers(place):",
        "if each.place.covers(place):",
        SELECTIVE_TESTS("bits_are_those"),
    ),
    CODE(
        "selective: another tensor has the storage of one that was freed",
        "lambda _: known.pop(key, None)",
        "lambda _: None",
        SELECTIVE_TESTS("bits_are_those"),
    ),
    CODE(
        "selective: autocast is that of the backward pass",
        "with self._autocast():",
        "with contextlib.nullcontext():",
        SELECTIVE_TESTS("bits_are_those"),
    ),
    CODE(
        "selective: ReLU and convolution do not share what is made",
        "self._shared = x if self._asked % self._users else None",
        "self._shared = None",
        SELECTIVE_TESTS("made_again_once"),
    ),
    CODE(
        "selective: what was made stays with a kept graph",
        "self._shared = x if self._asked % self._users else None",
        "self._shared = x",
        SELECTIVE_TESTS("kept_graph"),
    ),
    CODE(
        "selective: a map that makes another counts each who takes that",
        "if self._users == 1 and isinstance(self.source, _CheapCall):",
        "if isinstance(self.source, _CheapCall):",
        SELECTIVE_TESTS("kept_graph"),
    ),
    CODE(
        "selective: what ReLU saved does not count as taken",
        "        if self._users:\n            call.use()",
        "        pass",
        SELECTIVE_TESTS("bits_are_those"),
    ),
    CODE(
        "selective: ReLU keeps its output",
        "            view.map.make_by(call)",
        "            pass",
        SELECTIVE_TESTS("but_maps_that"),
    ),
    CODE(
        "selective: a map in the place of another as large",
        "if 2 * new_bytes < y.nbytes:",
        "if True:",
        SELECTIVE_TESTS("not_made_again"),
    ),
    CODE(
        "selective: a kept tensor that was written to is taken for what it was",
        "if isinstance(source, _CheapCall) and before.place.covers(before.map.place):",
        "if before.place.covers(before.map.place):",
        SELECTIVE_TESTS("bits_are_those"),
    ),
    CODE(
        "selective: what was written to a part is written to the whole",
        "if isinstance(source, _CheapCall) and before.place.covers(before.map.place):",
        "if isinstance(source, _CheapCall):",
        SELECTIVE_TESTS("bits_are_those"),
    ),
    CODE(
        "selective: ReLU in place keeps its output",
        "elif version_of(y) != version and before is not None:",
        "elif False:",
        SELECTIVE_TESTS("but_maps_that"),
    ),
    CODE(
        "selective: hooks around a block see nothing",
        "        if self._hooks is None:\n",
        "        if True:\n",
        SELECTIVE_TESTS("hooks_around"),
    ),
    CODE(
        "selective: parts of a copy are looked for in the layout of the original",
        "if x.stride() != whole.strides and self.place.shape != whole.shape:",
        "if False:",
        SELECTIVE_TESTS("hooks_around"),
    ),
    CODE(
        "selective: first runs of recomputed blocks note what they drop",
        " or running() or ",
        " or ",
        SELECTIVE_TESTS("recomputed_block"),
    ),
    CODE(
        "selective: without gradients calls are noted",
        " or not torch.is_grad_enabled():",
        ":",
        SELECTIVE_TESTS("without_gradients"),
    ),
    CODE(
        "selective: the compiler follows what notes calls",
        "if torch.compiler.is_compiling() or ",
        "if ",
        SELECTIVE_TESTS("compiled_blocks"),
    ),
    CODE(
        "selective: the table lives on with what it refers to",
        "        table.clear()",
        "        pass",
        SELECTIVE_TESTS("after_its_graph"),
    ),
    CODE(
        "selective: normalisations of this package keep their outputs",
        "        normalised, F",
        "        F",
        ENCODERS("selective_blocks"),
    ),
]
