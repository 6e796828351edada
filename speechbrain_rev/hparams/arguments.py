"""The command line: values for the hyperparameter file, and SpeechBrain's run options.

SpeechBrain's own parser accepts abbreviations and splits values at ``=``. It would take a
key that is the beginning of a run option for that option. Here names count in full, and a
file that defines such a key is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from speechbrain_rev.architectures import nearest
from speechbrain_rev.hparams.document import KeyPath
from speechbrain_rev.hparams.knobs import KNOBS

COMMAND_LINE = "command line"
# Tests compare these with SpeechBrain 1.1, whose import takes seconds.
# fmt: off
RUN_OPTIONS = (
    "auto_mix_prec", "bfloat16_mix_prec", "ckpt_interval_minutes",
    "ckpt_interval_steps", "compile", "compile_mode", "compile_module_keys",
    "compile_using_dynamic_shape_tracing", "compile_using_fullgraph",
    "data_parallel_backend", "debug", "debug_batches", "debug_epochs",
    "debug_persistently", "device", "distributed_backend", "eval_precision",
    "find_unused_parameters", "grad_accumulation_factor", "help", "jit",
    "jit_module_keys", "log_config", "max_grad_norm", "nonfinite_patience",
    "noprogressbar", "optimizer_step_limit", "precision", "profile_steps",
    "profile_training", "profile_warmup", "remove_vector_weight_decay",
    "skip_nonfinite_grads", "test_only", "tqdm_colored_bar",
)
# fmt: on
#: Options of train.py itself, which takes them from its command line first.
SCRIPT_OPTIONS = ("dry_run",)


#: What the command line and other toolkits call a setting of the recipe.
_ALSO_CALLED = {
    "batch": "batch_size",
    "budget": "memory_budget",
    "card": "memory_budget",
    "encoder": "arch",
    "epochs": "number_of_epochs",
    "frames": "chunk_samples",
    "init_from_pretrained_model": "pretrained",
    "learning_rate": "lr",
    "model": "arch",
    "model_init": "pretrained",
    "out": "output_folder",
    "pretrained_run": "pretrained",
    "segment_seconds": "sentence_len",
    "workers": "num_workers",
}


def refuse_swallowed_keys(
    root: Mapping[str, object], places: Mapping[KeyPath, str]
) -> None:
    """Refuse keys that SpeechBrain's command line would take for run options.

    A key that is a run option by its full name passes: SpeechBrain's ``Brain`` looks
    for it in the file too.
    """
    for key in map(str, root):
        options = [name for name in RUN_OPTIONS if name.startswith(key)]
        # --help is no setting: it ends the program.
        if options and (key not in options or key == "help"):
            raise ValueError(
                f"{places[(key,)]}: the key {key!r} is the beginning of SpeechBrain's run "
                f"option --{' and --'.join(options)}, which --{key} would set there. "
                f"Rename the key, for instance to my_{key}."
            )


def unknown_key(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return that a key is unknown, and which known one it may have meant.

    Examples
    --------
    >>> unknown_key("optimiser_bits", ["optimizer_bits", "lr"])
    "unknown key 'optimiser_bits'. Did you mean optimizer_bits?"
    >>> unknown_key("frames", ["streams", "chunk_samples"])
    "unknown key 'frames'. Did you mean chunk_samples?"
    >>> unknown_key("device", ["lr"])
    "unknown key 'device'. It is a run option of SpeechBrain: give --device to what..."
    """
    if name in RUN_OPTIONS and not prefix:
        return (
            f"unknown key {name!r}. It is a run option of SpeechBrain: give --{name} to "
            "what trains, after the file."
        )
    known = list(known)
    ours = _ALSO_CALLED.get(name.lower(), "")
    near = nearest(ours if ours in known else name, known, prefix)
    return f"unknown key {prefix + name!a}.{near}"


def parse_arguments(
    arguments: Sequence[str],
    *,
    keys: Collection[str],
    run_options: Collection[str] = (),
) -> tuple[dict[str, object], tuple[str, ...]]:
    """Separate values for the hyperparameter file from SpeechBrain's run options.

    Parameters
    ----------
    arguments : sequence of str
        ``--key=value`` or ``--key value``; the value may contain ``=``.
    keys : collection of str
        Keys of the hyperparameter file. They win over run options of the same name.
    run_options : collection of str
        Names of the run options, which may have any number of values.

    Returns
    -------
    overrides : dict
        Text by key, for ``resolve``; a list of texts of a knob of several values that is
        given more than once.
    run_arguments : tuple of str
        What belongs to run options, unchanged.

    Raises
    ------
    ValueError
        If a name is unknown or given twice, or a value is missing or stray.

    Examples
    --------
    >>> parse_arguments(
    ...     ["--trials=a=b.txt", "--debug"], keys=["trials"], run_options=["debug"]
    ... )
    ({'trials': 'a=b.txt'}, ('--debug',))
    >>> parse_arguments(["--data_folder=a", "--data_folder=b"], keys=["data_folder"])[0]
    {'data_folder': ['a', 'b']}
    """
    groups: list[list[str]] = []
    for argument in arguments:
        if argument == "--" or not (groups or argument.startswith("--")):
            raise ValueError(
                f"{COMMAND_LINE}: {argument!r} is no option: write --key=value."
            )
        if argument.startswith("--"):
            groups.append([])
        groups[-1].append(argument)
    overrides: dict[str, object] = {}
    run_arguments: list[str] = []
    for option, *values in groups:
        name, equals, attached = option.removeprefix("--").partition("=")
        if name in keys:
            given = [attached, *values] if equals else values
            if len(given) != 1 or not given[0]:
                raise ValueError(
                    f"{COMMAND_LINE}: --{name} takes one value, not {' '.join(given) or 'none'}: write "
                    f"--{name}=value, in quotes where it has spaces."
                )
            if name in overrides and name in KNOBS and KNOBS[name].several:
                earlier = overrides[name]
                several = earlier if isinstance(earlier, list) else [earlier]
                overrides[name] = [*several, given[0]]
                continue
            if name in overrides:
                raise ValueError(
                    f"{COMMAND_LINE}: --{name} is given twice ({overrides[name]} and "
                    f"{given[0]}): leave one."
                )
            overrides[name] = given[0]
        elif name in run_options:
            run_arguments += [option, *values]
        elif run_options and name in SCRIPT_OPTIONS:
            raise ValueError(f"{COMMAND_LINE}: --{name} takes no value: leave it out.")
        else:
            known = [*keys, *run_options, *(SCRIPT_OPTIONS if run_options else ())]
            raise ValueError(f"{COMMAND_LINE}: {unknown_key(name, known)}")
    return overrides, tuple(run_arguments)
