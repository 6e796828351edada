"""The command line: values for the hyperparameter file, and SpeechBrain's run options.

SpeechBrain's own parser accepts abbreviations, so a key that is the beginning of a run
option would be swallowed by it, and it splits values at ``=``. Here names count in full.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from speechbrain_rev.hparams.document import nearest


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
        Text by key, for ``resolve``.
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
    """
    overrides: dict[str, object] = {}
    run_arguments: list[str] = []
    for option, values in _options(arguments):
        name, equals, attached = option.removeprefix("--").partition("=")
        if name in keys:
            given = [attached, *values] if equals else values
            if len(given) != 1 or not given[0]:
                raise ValueError(
                    f"--{name} takes one value, not {' '.join(given) or 'none'}: write "
                    f"--{name}=value, in quotes where it has spaces."
                )
            if name in overrides:
                raise ValueError(
                    f"--{name} is given twice ({overrides[name]} and {given[0]}): "
                    "leave one."
                )
            overrides[name] = given[0]
        elif name in run_options:
            run_arguments += [option, *values]
        else:
            raise ValueError(
                f"command line: unknown key {name!r}."
                f"{nearest(name, [*keys, *run_options])}"
            )
    return overrides, tuple(run_arguments)


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each ``--option`` with the arguments up to the next one."""
    position = 0
    while position < len(arguments):
        option = arguments[position]
        if not option.startswith("--") or option == "--":
            raise ValueError(
                f"command line: {option!r} is no option: write --key=value."
            )
        end = position + 1
        while end < len(arguments) and not arguments[end].startswith("--"):
            end += 1
        yield option, list(arguments[position + 1 : end])
        position = end
