"""Strict composition of hyperparameters: a complete file, override files, command line.

A complete file is plain HyperPyYAML. An override file names its parent (``base:``) and
states only differences. HyperPyYAML's own overriding ignores mistakes: it adds a misspelt
nested key, ignores another class for an object, and loses a key that is the beginning of
a run option. Here each is an error that names the key, the place and what to write
instead. Values out of range are errors too.
"""

from speechbrain_rev.hparams.arguments import parse_arguments
from speechbrain_rev.hparams.composition import (
    Composition,
    OptimizerWarning,
    compose,
    placeholders,
    plain_settings,
    resolve,
    top_level_keys,
)
from speechbrain_rev.hparams.shipped import settings_help

__all__ = [
    "Composition",
    "OptimizerWarning",
    "compose",
    "parse_arguments",
    "placeholders",
    "plain_settings",
    "resolve",
    "settings_help",
    "top_level_keys",
]
