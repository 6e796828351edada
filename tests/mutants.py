"""Sabotage the engine line by line and see that the tests notice.

Each mutant replaces one piece of code by a plausible mistake, in a copy of the
project, and runs the tests that guard it. A mutant that lives, a piece of code that is
no longer there and a test selection that cannot run are failures.

    python tests/mutants.py [--only WORDS] [--list]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHAIN = "tests/unit/reversible/test_chain.py"
COMPOSITION = "tests/unit/reversible/test_composition.py"
NORM = "tests/unit/reversible/test_norm.py"
ENCODER = "tests/unit/lobes/test_encoder.py"
REPLAY_CODE = "speechbrain_rev/reversible/replay.py"
SEGMENT_CODE = "speechbrain_rev/reversible/segment.py"
GRADIENTS_CODE = "speechbrain_rev/reversible/gradients.py"
SECOND_RUN = "tests/unit/reversible/test_second_run.py"
STREAMS_CODE = "speechbrain_rev/reversible/streams.py"
CHAIN_CODE = "speechbrain_rev/reversible/chain.py"
NORM_CODE = "speechbrain_rev/reversible/norm.py"
ENCODER_CODE = "speechbrain_rev/lobes/encoder.py"
TESTS_FAILED = 1


@dataclass(frozen=True)
class Mutant:
    """One sabotage: which promise it breaks, where, how, and who must notice."""

    promise: str
    file: str
    code: str
    sabotage: str
    tests: str
    select: str


MUTANTS = [
    Mutant(
        "1: F runs a third time",
        SEGMENT_CODE,
        "    y = second_run(f, recording,",
        "    first_run(f, x, *mask)\n    y = second_run(f, recording,",
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
        "ctx.recordings.append((f_recording, g_recording))",
        "ctx.recordings.append((f_recording, g_recording))\n"
        "                g_recording.kept = y1.clone()",
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
        "keep = x.new_ones(()) if mask is None else mask",
        "keep = x.new_ones(())",
        NORM,
        "masked",
    ),
    Mutant(
        "10: autocast is not entered again",
        SEGMENT_CODE,
        "        with ctx.autocast():\n            for block, (f, g)",
        "        with torch.enable_grad():\n            for block, (f, g)",
        COMPOSITION,
        "autocast_of_the_first",
    ),
    Mutant(
        "10: autocast is not entered again in recomputation",
        SEGMENT_CODE,
        "        with ctx.autocast():\n            outputs = second_run(",
        "        with torch.enable_grad():\n            outputs = second_run(",
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
        "total + grad",
        "grad",
        COMPOSITION,
        "shared",
    ),
    Mutant(
        "11: a parameter left unused loses its gradient",
        GRADIENTS_CODE,
        "            if grad is None:\n                continue\n",
        "            if grad is None:\n                self.sums[i] = None\n"
        "                continue\n",
        COMPOSITION,
        "leaves_unused",
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
        "11: the caller's tensors are written to",
        SEGMENT_CODE,
        "        add = format.add\n        with",
        "        add = format.add_\n        with",
        COMPOSITION,
        "callers_tensors",
    ),
    Mutant(
        "11: the caller's gradients are written to",
        GRADIENTS_CODE,
        "self._in_place = given, False, in_place",
        "self._in_place = given, True, in_place",
        COMPOSITION,
        "callers_gradients",
    ),
    Mutant(
        "11: the output shares the engine's storage",
        STREAMS_CODE,
        "return format.decode(value).clone()",
        "return format.decode(value)",
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
        SEGMENT_CODE,
        "        raise RuntimeError(_NO_DOUBLE_BACKWARD)",
        "        pass",
        COMPOSITION,
        "differentiating_twice",
    ),
    Mutant(
        "11: sharded parameters are accepted",
        SEGMENT_CODE,
        "    if sharded:",
        "    if False:",
        COMPOSITION,
        "sharded",
    ),
    Mutant(
        "11: nothing trains where the input needs no gradient",
        SEGMENT_CODE,
        "        *parameters.tensors,\n    )  # fmt: skip",
        "        *(t.detach() for t in parameters.tensors),\n    )  # fmt: skip",
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
        CHAIN_CODE,
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
        "        _refuse_other_leaves(module, [y for y, _ in pairs], leaves)\n",
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
        "ctx.in_place = not any(map(_is_watched, parameters.places))",
        "ctx.in_place = True",
        SECOND_RUN,
        "hooks_keep",
    ),
    Mutant(
        "12: evaluation goes through the engine",
        CHAIN_CODE,
        "        if not trains(self):\n            for block",
        "        if False:\n            for block",
        COMPOSITION,
        "evaluation_with_gradients",
    ),
    Mutant(
        "the gradient of one function does not reach the other",
        SEGMENT_CODE,
        "block.f, f, gradients, inputs, y1, total1.value)",
        "block.f, f, gradients, inputs, y1, grad1)",
        CHAIN,
        "equal_plain_autograds and basic",
    ),
    Mutant(
        "pooling takes padding for speech",
        ENCODER_CODE,
        "statistics_pooling(part, masks[level],",
        "statistics_pooling(part, None,",
        ENCODER,
        "padded_utterances",
    ),
]


def run_tests(folder: Path, mutants: list[Mutant]) -> int:
    """Run the tests that guard some promises in a copy of the project."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += sorted({mutant.tests for mutant in mutants})
    command += ["-k", " or ".join(f"({mutant.select})" for mutant in mutants)]
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "2"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, check=False
    ).returncode


def copy_project(folder: Path) -> None:
    """Copy what the tests need, and see that it is the copy that gets tested."""
    for name in ("speechbrain_rev", "tests"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    shutil.copy(ROOT / "setup.cfg", folder)
    imported = subprocess.run(
        [sys.executable, "-c", "import speechbrain_rev as s; print(s.__file__)"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    if not Path(imported.strip()).resolve().is_relative_to(folder.resolve()):
        sys.exit(f"The tests would import {imported.strip()}, not the mutant.")


def verdict(folder: Path, mutant: Mutant) -> str | None:
    """Say what is wrong with the tests of one mutant, if anything is."""
    file = folder / mutant.file
    code = file.read_text()
    if code.count(mutant.code) != 1:
        return f"stands {code.count(mutant.code)} times in {mutant.file}: update it"
    file.write_text(code.replace(mutant.code, mutant.sabotage))
    try:
        compile(file.read_text(), mutant.file, "exec")
        status = run_tests(folder, [mutant])
    except SyntaxError as error:
        return f"does not compile: {error}"
    finally:
        file.write_text(code)
    if status == 0:
        return "LIVES: no test notices"
    return None if status == TESTS_FAILED else f"tests did not run (pytest {status})"


def main() -> None:
    """Try all mutants and exit with 1 if one lives."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="mutants whose promise has this")
    parser.add_argument("--list", action="store_true", help="name the mutants")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if options.only in m.promise]
    if options.list or not chosen:
        print("\n".join(m.promise for m in MUTANTS))
        sys.exit(0 if options.list else f"No mutant matches {options.only!r}.")
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_project(folder)
        status = run_tests(folder, chosen)
        if status != 0:
            sys.exit(f"Tests end with {status} without any sabotage: mend that first.")
        for mutant in chosen:
            reason = verdict(folder, mutant)
            wrong += reason is not None
            print(f"{'killed' if reason is None else reason:10} {mutant.promise}")
            sys.stdout.flush()
    print(f"{len(chosen) - wrong} of {len(chosen)} mutants killed")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
