"""The folder that a training run leaves behind, read without running any of it.

A run's folder may come from somebody else. HyperPyYAML would build whatever objects its
YAML names, and a pickle whatever it likes; here only a few plain values are read from
the one and only tensors from the other, and only from files of that folder.

SpeechBrain's script trains what its YAML describes, under names of the file's choosing. The
encoder, its features and the files of its checkpoints are known by the classes that are
named there; their arguments are read as data.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path, PurePath
from typing import Any, NoReturn

import torch
import yaml
from speechbrain.lobes.features import Fbank
from speechbrain.processing.features import InputNormalization

from speechbrain_rev.data import SpeakerAugment
from speechbrain_rev.files import (
    check_sum,
    folder_whole,
    parse_json,
    refusing,
    write_whole,
    writing_alone,
)
from speechbrain_rev.heads import HEADS, head_of
from speechbrain_rev.inference.archive import fingerprint_of
from speechbrain_rev.inference.untrusted import (
    REFUSED,
    YamlFile,
    in_words,
    load_tensors,
    open_own,
    own_file,
    plain_values,
    short,
)
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.lobes.checkpointer import (
    BRAIN,
    COUNTER,
    check_known,
    place_of,
)
from speechbrain_rev.lobes.classifier import (
    build_classifier,
    build_loss,
)
from speechbrain_rev.scoring import MEASURES

RESULTS = "scores/results.json"

_MAX_BYTES = 1_000_000


def read_results(folder: Path) -> dict[str, Any] | None:
    """Read a run's results.

    Parameters
    ----------
    folder : pathlib.Path
        The run's.

    Returns
    -------
    dict or None
        None if it was not scored. Else ``model``, the fingerprint, a text;
        ``subtract_mean``, a truth value; ``results``, mappings of texts ``trials`` and
        ``method`` to begin with, and of numbers by the keys of ``MEASURES``; ``cohort``,
        of integers ``speakers`` and ``top_n``.

    Raises
    ------
    ValueError
        If the file is anything else, or leads out of the folder.
    """
    if not (folder / RESULTS).exists():
        return None
    with open_own(folder, RESULTS) as file:
        content = file.read(_MAX_BYTES + 1)
    with refusing(
        f"{folder / RESULTS} is not what recipes/VoxCeleb/score.py writes",
        "Run it again, or remove the file.",
    ):
        if len(content) > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES:,} bytes")
        report: dict[str, Any] = parse_json(content)
        _check(report)
        return report


def _check(report: object) -> None:
    """Refuse what users of the results would stumble over."""
    if not isinstance(report, dict) or type(report.get("model")) is not str:
        raise ValueError("it does not say of which model it is")
    if type(report.get("subtract_mean")) is not bool:
        raise ValueError(f"subtract_mean is {short(report.get('subtract_mean'))}")
    rows = report.get("results")
    if not isinstance(rows, list):
        raise ValueError(f"results are {short(rows)}")
    for row in rows:
        texts = isinstance(row, dict) and [row.get(n) for n in ("trials", "method")]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"a result is {short(row)}")
        _check_figures(row)
    cohort = report.get("cohort")
    names = ("speakers", "top_n")
    counts = [cohort.get(n) for n in names] if isinstance(cohort, dict) else [None]
    if not all(type(count) is int and count >= 1 for count in counts):
        raise ValueError(f"cohort is {short(cohort)}")


def _check_figures(row: Mapping[str, Any]) -> None:
    """Refuse measures that are no numbers, and intervals that are no two of them."""
    for measure in MEASURES.values():
        figure, bounds = measure.figure(row), measure.figure(row, "_95")
        if figure is not None and not _is_finite(figure):
            raise ValueError(f"{measure.name} is {short(figure)}")
        pair = isinstance(bounds, list) and len(bounds) == 2
        if bounds is not None and not (pair and all(map(_is_finite, bounds))):
            raise ValueError(f"{measure.name}_95 is {short(bounds)}")


def _is_finite(figure: object) -> bool:
    return type(figure) in (int, float) and -math.inf < figure < math.inf  # type: ignore[operator]


#: How a YAML names our encoders.
ENCODERS = (
    "!new:speechbrain_rev.lobes.SpeakerEncoder",
    "!apply:speechbrain_rev.lobes.build_encoder",
    "!new:speechbrain_rev.lobes.encoder.SpeakerEncoder",
    "!apply:speechbrain_rev.lobes.encoder.build_encoder",
    "!apply:speechbrain_rev.lobes.build.build_encoder",
)
_FBANK = ("!new:speechbrain.lobes.features.Fbank",)
_NORMALISATION = ("!new:speechbrain.processing.features.InputNormalization",)
_BUILT_CLASSIFIER = "!apply:speechbrain_rev.lobes.classifier.build_classifier"
#: How a YAML names classifiers whose one weight has a direction for each class.
CLASSIFIERS = {
    "!new:speechbrain.lobes.models.ECAPA_TDNN.Classifier": "cosine",
    **{head.tag: name for name, head in HEADS.items()},
}
_BUILT_LOSS = "!apply:speechbrain_rev.lobes.classifier.build_loss"
# How a YAML names losses of a row of HEADS by their classes.
_LOSSES = {
    "!new:speechbrain.nnet.losses.AdditiveAngularMargin": "aam_softmax",
    "!new:speechbrain.nnet.losses.AngularMargin": "am_softmax",
    **{
        f"!new:{path.replace(':', '.')}": name
        for head in HEADS.values()
        for name, path in head.losses.items()
    },
}
_AUGMENTATION = (
    "!new:speechbrain_rev.data.SpeakerAugment",
    "!new:speechbrain_rev.data.augmentation.SpeakerAugment",
)
_SPEECHBRAIN_CHECKPOINTER = "!new:speechbrain.utils.checkpoints.Checkpointer"
_CHECKPOINTERS = (
    _SPEECHBRAIN_CHECKPOINTER,
    "!new:speechbrain_rev.lobes.checkpointer.WholeCheckpointer",
)
_EPOCH_COUNTER = ("!new:speechbrain.utils.epoch_loop.EpochCounter",)
# On SpeechBrain's command line it gives an object that takes the place of another.
_CAST = "!apply:typing.cast"

# What settings call the arguments of build_encoder that weights and embeddings depend on.
_ENCODER_ARGUMENTS = {
    "arch": "name",
    "widths": "widths",
    "blocks": "blocks",
    "n_mels": "n_mels",
    "embedding_dim": "embedding_dim",
    "pooling": "pooling",
    "pooling_variance": "pooling_variance",
}
# Trained filters and contexts are refused, and then these change nothing.
_FBANK_FREE = (
    "param_change_factor",
    "param_rand_factor",
    "left_frames",
    "right_frames",
)
_FBANK_READ = ("sample_rate", "n_mels", "f_max")
# Of statistics over many sentences, of the deviation, or of padding.
_NORMALISATION_FREE = ("update_until_epoch", "avoid_padding_norm", "epsilon", "device")
_NORMALISATION_USUAL = {"norm_type": "sentence", "std_norm": False}
_REMEDY = "Train with what it makes, or embed with SpeechBrain's own classes."


class RunObjects:
    """The objects that a run's YAML describes.

    Parameters
    ----------
    file : YamlFile
        The run's hyperparams.yaml.

    Raises
    ------
    ValueError
        By each method, if what it looks for is written in another way than as plain
        values and ``!ref <name>``; the message names the line.
    """

    def __init__(self, file: YamlFile) -> None:
        self.file = file
        self._nodes = list(file.nodes())

    def encoders(self) -> list[yaml.Node]:
        """Give the nodes of our encoders."""
        return [node for _, node in self._tagged(ENCODERS)]

    def settings(self) -> dict[str, Any] | None:
        """Read which encoder the file describes, and that its features are ours.

        Returns
        -------
        dict of str to object, or None
            ``ENCODER_SETTINGS``, ``pooling`` and ``pooling_variance``; None if the file describes no
            encoder of this package.

        Raises
        ------
        ValueError
            If there are several encoders, an argument is no plain value, or features are
            made in a way that is not ours.
        """
        encoders = self.encoders()
        if len(encoders) > 1:
            lines = ", ".join(str(_line(node)) for node in encoders)
            raise ValueError(
                f"{self.file.path} describes {len(encoders)} encoders of this package, on "
                f"lines {lines}, and which of them was trained is not known. Keep one, or "
                "add arch, widths, blocks, n_mels, embedding_dim and sample_rate to the "
                "file as plain values."
            )
        if not encoders:
            return None
        (node,) = encoders
        given = self._arguments(node, build_encoder)
        if "name" not in given:
            self.file.refuse(node, f"{node.tag} has no name. Give an encoder's.")
        settings = {
            ours: self._value(node, theirs, given[theirs])
            for ours, theirs in _ENCODER_ARGUMENTS.items()
        }
        n_mels, settings["sample_rate"] = self._features(node)
        for one in self._needed(node, _NORMALISATION, "mean_var_norm", "normalisation"):
            self._checked(
                one, InputNormalization, _NORMALISATION_USUAL, _NORMALISATION_FREE
            )
        if n_mels != settings["n_mels"]:
            self.file.refuse(
                node,
                f"the encoder takes n_mels {settings['n_mels']}, but the Fbank makes "
                f"{n_mels}. Are both of one run?",
            )
        return settings

    def left_out(self) -> dict[str, Any]:
        """Give the encoder's sizes that the file leaves to their defaults."""
        encoders = self.encoders()
        if len(encoders) != 1:
            return {}
        given = self._arguments(encoders[0], build_encoder)
        sizes = {n: given[n] for n in ("n_mels", "embedding_dim")}
        return {n: v for n, v in sizes.items() if not isinstance(v, yaml.Node)}

    def saved(self, tags: tuple[str, ...], usual: str) -> str:
        """Give the name that checkpoints have for an object, ``usual`` where it is open.

        That is its name among the recoverables, or its own in the file.
        """
        objects = self._tagged(tags)
        names = self._recovered([node for _, node in objects])
        if usual in names or (not names and len(objects) != 1):
            return usual
        if len(names) > 1:
            raise ValueError(
                f"{self.file.path} has {len(names)} objects of this kind among its "
                f"recoverables, {', '.join(names)}, and which was trained is not known. "
                f"Call that one {usual} there."
            )
        if names:
            ((name, member),) = names.items()
            return _file_name(self.file, member, name)
        ((own, wanted),) = objects
        return _file_name(self.file, wanted, own or usual)

    def checkpoints(self) -> Path:
        """Give the folder of checkpoints, relative to the run's."""
        usual = Path("save")
        output = self._text(self.file.top.get("output_folder"))
        for _, node in self._tagged(_CHECKPOINTERS):
            if not isinstance(node, yaml.MappingNode):
                continue
            folder = self._text(self.file.members(node).get("checkpoints_dir"))
            if output and folder and PurePath(folder).is_relative_to(output):
                place = Path(folder).relative_to(output)
                return usual if ".." in place.parts else place
        return usual

    def by_speechbrain(self) -> bool:
        """Return whether SpeechBrain's own Checkpointer wrote the checkpoints."""
        return any(self._tagged((_SPEECHBRAIN_CHECKPOINTER,)))

    def head(self) -> str | None:
        """Name the row of ``HEADS`` whose classifier the file describes, if it is one."""
        heads = {CLASSIFIERS[node.tag] for _, node in self._tagged(tuple(CLASSIFIERS))}
        for _, node in self._tagged((_BUILT_CLASSIFIER,)):
            loss = self._arguments(node, build_classifier)["loss"]
            heads.add(head_of(self._value(node, "loss", loss)).name)
        return heads.pop() if len(heads) == 1 else None

    def loss(self) -> str | None:
        """Name the loss in a row of ``HEADS`` that the file describes, if it is one."""
        losses = {_LOSSES[node.tag] for _, node in self._tagged(tuple(_LOSSES))}
        for _, node in self._tagged((_BUILT_LOSS,)):
            name = self._arguments(node, build_loss)["name"]
            losses.add(self._value(node, "name", name))
        return losses.pop() if len(losses) == 1 else None

    def speeds(self) -> int | None:
        """Give how many classes augmentation made of a speaker, if the file has it."""
        counts = set()
        for _, node in self._tagged(_AUGMENTATION):
            given = self._arguments(node, SpeakerAugment)["speeds"]
            speeds = self._value(node, "speeds", given)
            if not isinstance(speeds, list | tuple):
                self.file.refuse(node, f"speeds of {node.tag} is no list of numbers.")
            counts.add(len(speeds))
        return counts.pop() if len(counts) == 1 else None

    def epochs(self) -> int | None:
        """Give how many epochs the training was to have, if the file has it."""
        for _, node in self._tagged(_EPOCH_COUNTER):
            if isinstance(node, yaml.MappingNode):
                limit = self._plain(self.file.members(node).get("limit"))
                return limit if isinstance(limit, int) else None
        return None

    def plain_values(self, names: Sequence[str]) -> dict[str, Any]:
        """Give those of the names at top level whose values are plain."""
        values = {}
        for name in names:
            with contextlib.suppress(yaml.YAMLError, *REFUSED):
                values[name] = self._followed(self.file.top[name])
        return values

    def _features(self, encoder: yaml.Node) -> tuple[Any, Any]:
        """Refuse features that are not made as ours; give their mel bands and rate."""
        sizes = []
        nodes = self._needed(encoder, _FBANK, "compute_features", "features")
        for node in nodes:
            values = self._checked(node, Fbank, {}, (*_FBANK_READ, *_FBANK_FREE))
            rate, highest = values["sample_rate"], values["f_max"]
            whole = isinstance(rate, int) and highest in (rate // 2, rate / 2)
            if highest is not None and not whole:
                self._refuse_features(node, "f_max", highest, None)
            speech = self._plain(self.file.top.get("sample_rate"))
            if speech is not None and speech != rate:
                # The script would have read other speech than its filters are for.
                self.file.refuse(
                    node,
                    f"{node.tag} has sample_rate: {rate}"
                    f"{self._origin(node, 'sample_rate')}, but the file's sample_rate is "
                    f"{speech}: filters for {rate} Hz saw speech at {speech} Hz. Train "
                    "with sample_rate: !ref <sample_rate> in Fbank, or embed with "
                    "SpeechBrain's own classes.",
                )
            sizes.append((values["n_mels"], rate))
        if any(size != sizes[0] for size in sizes):
            self.file.refuse(
                nodes[-1],
                f"{_FBANK[0]} has other sizes than on line {_line(nodes[0])}, and none is "
                "called compute_features. Give that name to what the encoder was trained on.",
            )
        return sizes[0]

    def _origin(self, node: yaml.Node, name: str) -> str:
        """Say of an argument that the file does not give whose default it is."""
        called = InputNormalization if node.tag in _NORMALISATION else Fbank
        given = self._arguments(node, called).get(name)
        return "" if isinstance(given, yaml.Node) else " (SpeechBrain's default)"

    def _checked(
        self,
        node: yaml.Node,
        called: Callable[..., Any],
        usual: Mapping[str, Any],
        free: tuple[str, ...],
    ) -> dict[str, Any]:
        """Give an object's arguments; refuse those that make other features than ours."""
        parameters = inspect.signature(called).parameters
        values = {}
        for name, value in self._arguments(node, called).items():
            if name in free and name not in _FBANK_READ:
                continue
            values[name] = self._value(node, name, value)
            wanted = usual.get(name, parameters[name].default)
            if name not in free and values[name] != wanted:
                self._refuse_features(node, name, values[name], wanted)
        return values

    def _needed(
        self, encoder: yaml.Node, tags: tuple[str, ...], usual: str, what: str
    ) -> list[yaml.Node]:
        """Find what makes features: what has SpeechBrain's name for it, or all there is."""
        objects = self._tagged(tags)
        if not objects:
            self.file.refuse(
                encoder,
                f"beside this encoder the file describes no {tags[0]}, so that the "
                f"{what} it was trained on cannot be made again. {_REMEDY}",
            )
        named = [node for name, node in objects if name == usual]
        return named or [node for _, node in objects]

    def _refuse_features(
        self, node: yaml.Node, name: str, value: object, usual: object
    ) -> NoReturn:
        given, wanted = ("null" if v is None else str(v)[:60] for v in (value, usual))
        self.file.refuse(
            node,
            f"{node.tag} has {name}: {given}{self._origin(node, name)}, but this package "
            f"makes features with {name}: {wanted} only. {_REMEDY}",
        )

    def _tagged(self, tags: tuple[str, ...]) -> list[tuple[str, yaml.Node]]:
        return [(name, node) for name, node in self._nodes if node.tag in tags]

    def _recovered(self, wanted: list[yaml.Node]) -> dict[str, yaml.Node]:
        """Give those of the recoverables that are among some objects, by their names."""
        names: dict[str, yaml.Node] = {}
        for _, node in self._tagged(_CHECKPOINTERS):
            members = (
                self.file.members(node) if isinstance(node, yaml.MappingNode) else {}
            )
            recoverables = members.get("recoverables")
            followed = None if recoverables is None else self.file.follow(recoverables)
            if isinstance(followed, yaml.MappingNode):
                names |= {
                    name: member
                    for name, member in self.file.members(followed).items()
                    if any(self._object(member) is one for one in wanted)
                }
        return names

    def _object(self, node: yaml.Node) -> yaml.Node | None:
        """Follow references, and what SpeechBrain's command line is given, to an object."""
        followed = self.file.follow(node)
        if (
            isinstance(followed, yaml.SequenceNode)
            and followed.tag == _CAST
            and len(followed.value) == 2
        ):
            return self.file.follow(followed.value[1])
        return followed

    def _arguments(self, node: yaml.Node, called: Callable[..., Any]) -> dict[str, Any]:
        """Give the arguments of an object by their names: nodes, or defaults."""
        positional: list[yaml.Node] = []
        named: Mapping[str, yaml.Node] = {}
        if isinstance(node, yaml.MappingNode):
            named = self.file.members(node)
        elif isinstance(node, yaml.SequenceNode):
            positional = node.value
        try:
            bound = inspect.signature(called).bind_partial(*positional, **named)
        except TypeError as error:
            self.file.refuse(
                node, f"{node.tag}: {error}. Are the versions those of training?"
            )
        bound.apply_defaults()
        return dict(bound.arguments)

    def _value(self, owner: yaml.Node, name: str, value: Any) -> Any:
        """Make the plain value of an argument, through simple references."""
        if not isinstance(value, yaml.Node):
            return value
        try:
            return self._followed(value)
        except (yaml.YAMLError, *REFUSED) as error:
            raise ValueError(
                f"{self.file.path}, {in_words(error)}: {name} of {owner.tag} is read where "
                "it is a plain value, or !ref <name> of one at top level. Write that there."
            ) from error

    def _followed(self, value: yaml.Node) -> Any:
        node = self.file.follow(value)
        if node is None:
            raise ValueError(f"line {_line(value)} has !ref {str(value.value)[:60]}")
        if isinstance(node, yaml.SequenceNode) and any(
            member.tag == "!ref" for member in node.value
        ):
            # Plain members only: lists of references to lists have no end.
            members = [self.file.follow(member) or member for member in node.value]
            return [self.file.plain(member) for member in members]
        return self.file.plain(node)

    def _plain(self, node: yaml.Node | None) -> Any:
        """Make a plain value where there is one."""
        followed = None if node is None else self.file.follow(node)
        with contextlib.suppress(yaml.YAMLError, *REFUSED):
            return None if followed is None else self.file.plain(followed)
        return None

    def _text(self, node: yaml.Node | None) -> str | None:
        value = self._plain(node)
        return value if isinstance(value, str) else None


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _file_name(file: YamlFile, node: yaml.Node, name: str) -> str:
    """Refuse a name that would lead out of the folder of a checkpoint."""
    if name != Path(name).name or name.startswith("."):
        file.refuse(node, f"{name[:60]!r} is no name of a file.")
    return name


HYPERPARAMS = "hyperparams.yaml"
WEIGHTS = "embedding_model.ckpt"
#: The weights that training ended with, as checksums in save_folder name them.
LAST_WEIGHTS = f"../{WEIGHTS}"

METAFNAME = "CKPT.yaml"
#: What recipes/VoxCeleb/train.py leaves of its data, and no other script.
PREPARED = "save/prepared.json"

_MAX_NUMBER = 20


@dataclass(frozen=True)
class Weights:
    """The parameters and buffers of a trained encoder.

    Attributes
    ----------
    path : pathlib.Path
        The file they are from.
    fingerprint : str
        Of the weights, see ``fingerprint_of``.
    state_dict : dict of str to torch.Tensor
        On the CPU.
    """

    path: Path
    fingerprint: str
    state_dict: dict[str, torch.Tensor]


def read_settings(
    folder: str | PathLike[str], names: Sequence[str], *, optional: Sequence[str] = ()
) -> dict[str, Any]:
    r"""Read plain values from a run's ``hyperparams.yaml``, following no tag.

    Parameters
    ----------
    folder : str or path-like
        The ``output_folder`` of a training run.
    names : sequence of str
        The keys wanted, all at top level; everything else in the file is passed over.
    optional : sequence of str
        Keys that are read too where they are there.

    Returns
    -------
    dict
        A number, string, truth value, None, list or mapping for each name there.

    Raises
    ------
    FileNotFoundError
        If there is no such folder, or no hyperparams.yaml in it.
    ValueError
        If the file is no YAML mapping, lacks a name, or has a tag where a plain value
        is needed.

    Example
    -------
    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "hyperparams.yaml")
    ...     _ = path.write_text("arch: revnet57\nmodel: !new:os.system [ls]\n")
    ...     read_settings(folder, ["arch"])
    {'arch': 'revnet57'}
    """
    values = plain_values(Path(folder), HYPERPARAMS, [*names, *optional])
    missing = [name for name in names if name not in values]
    if missing:
        raise ValueError(
            f"{Path(folder, HYPERPARAMS)} lacks {', '.join(missing)}. Give the "
            "output_folder of a run of recipes/VoxCeleb/train.py. Where another recipe "
            "trained an encoder of this package, add these to the file as plain values."
        )
    return values


def read_objects(folder: str | PathLike[str]) -> RunObjects:
    """Read which objects a run's ``hyperparams.yaml`` describes, building none.

    Parameters
    ----------
    folder : str or path-like
        The ``output_folder`` of a training run.

    Returns
    -------
    RunObjects
        To ask for the encoder and for what its checkpoints are called.

    Raises
    ------
    FileNotFoundError
        If there is no such folder, or no hyperparams.yaml in it.
    ValueError
        If the file is no YAML mapping, or too large.
    """
    return RunObjects(YamlFile(Path(folder), HYPERPARAMS))


def read_weights(folder: str | PathLike[str]) -> Weights:
    """Read the weights a run ended with, or those of its newest checkpoint.

    Parameters
    ----------
    folder : str or path-like
        The ``output_folder`` of a training run. ``embedding_model.ckpt``, written at
        the end of training, is taken if it is there, else the encoder in the newest of
        the checkpoints, under the name that the Checkpointer of hyperparams.yaml gives it.

    Returns
    -------
    Weights
        The state dict and where it is from.

    Raises
    ------
    FileNotFoundError
        If the folder holds neither.
    ValueError
        If the file holds anything but tensors, they are not finite, or it is not as
        training wrote it.
    """
    folder = Path(folder)
    if (folder / WEIGHTS).exists():
        path = own_file(folder, WEIGHTS)
        check_sum(path, folder=folder / "save")
        return _read_tensors(path)
    return _of_checkpoint(folder, ENCODERS, "embedding_model")


def read_classifier(folder: str | PathLike[str]) -> Weights:
    """Read the classifier of a run's newest checkpoint.

    Parameters
    ----------
    folder : str or path-like
        The ``output_folder`` of a training run.

    Returns
    -------
    Weights
        The state dict and where it is from.

    Raises
    ------
    FileNotFoundError
        If there is no checkpoint with a classifier.
    ValueError
        If the file holds anything but tensors, or they are not finite.
    """
    return _of_checkpoint(Path(folder), (*CLASSIFIERS, _BUILT_CLASSIFIER), "classifier")


def by_our_recipe(folder: str | PathLike[str]) -> bool:
    """Return whether recipes/VoxCeleb/train.py made a run, as extract.py and score.py need.

    Parameters
    ----------
    folder : str or path-like
        The ``output_folder`` of a training run.

    Returns
    -------
    bool
        False of runs of SpeechBrain's own script, whatever classes their YAML names.

    Example
    -------
    >>> by_our_recipe(getfixture("tmp_path"))
    False
    """
    return Path(folder, PREPARED).exists()


def trained_epochs(folder: str | PathLike[str], checkpoint: Path) -> int | None:
    """Give the epoch at whose end a checkpoint was written.

    Parameters
    ----------
    folder : str or path-like
        The ``output_folder`` of a training run.
    checkpoint : pathlib.Path
        The folder of a checkpoint in it.

    Returns
    -------
    int or None
        From 1 on; None if it was written within an epoch, or does not say.
    """
    epoch, ended, *_ = _place(Path(folder), checkpoint.relative_to(folder))
    return epoch if ended else None


def _read_tensors(path: Path) -> Weights:
    state_dict = load_tensors(
        path,
        "Remove it to use a checkpoint before it, train again, or ask whoever made it "
        "for torch.save(encoder.state_dict(), ...).",
    )
    broken = [
        name for name, value in state_dict.items() if not bool(value.isfinite().all())
    ]
    if broken:
        raise ValueError(
            f"{path} holds NaN or infinity in {broken[0]}: this run has diverged. "
            "Train with a lower lr, or remove the checkpoint to use one before it."
        )
    return Weights(path, fingerprint_of(state_dict), state_dict)


def write_run(
    folder: str | PathLike[str],
    settings: Mapping[str, Any],
    state_dict: Mapping[str, torch.Tensor],
) -> None:
    """Write a folder that ``read_settings`` and ``read_weights`` read.

    Parameters
    ----------
    folder : str or path-like
        A new or an empty folder.
    settings : mapping of str to object
        Plain values.
    state_dict : mapping of str to torch.Tensor
        The encoder's.

    Raises
    ------
    ValueError
        If there is something of that name already, or another process writes it.
    OSError
        If it cannot be written; then nothing of it stays.
    """
    with new_folder(folder) as new, folder_whole(new) as part:
        write_whole(part / WEIGHTS, saved_bytes(state_dict))
        text = yaml.safe_dump(dict(settings), sort_keys=False)
        write_whole(part / HYPERPARAMS, text)


@contextlib.contextmanager
def new_folder(folder: str | PathLike[str]) -> Iterator[Path]:
    """Give the whole path of a folder that is to be written, by this process alone.

    Raises
    ------
    ValueError
        If it is there and not empty, or another process writes it.
    """
    # "." and ".." have no name that one beside them could begin with.
    folder = Path(folder).resolve()
    # Which makes the folders above, and deletes what one that was killed at its end left.
    with writing_alone(folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(
                f"{folder} is there already and not empty: nothing is overwritten. Give "
                "another folder, or remove it."
            )
        yield folder


def saved_bytes(state_dict: Mapping[str, torch.Tensor]) -> bytes:
    """Give what ``torch.save`` writes of a state dict."""
    content = io.BytesIO()
    torch.save(dict(state_dict), content)
    return content.getvalue()


def _of_checkpoint(folder: Path, tags: tuple[str, ...], usual: str) -> Weights:
    """Read an object of these tags from the newest of the checkpoints that have it."""
    stem, place = usual, Path("save")
    if (folder / HYPERPARAMS).exists():
        objects = read_objects(folder)
        stem, place = objects.saved(tags, usual), objects.checkpoints()
    path = in_newest(folder, place, f"{stem}.ckpt")
    check_known(path.parent, [path.name])
    return _read_tensors(path)


def in_newest(folder: Path, place: Path, name: str) -> Path:
    """Find a file in the newest of the checkpoints that have it.

    Parameters
    ----------
    folder : pathlib.Path
        The ``output_folder`` of a training run.
    place : pathlib.Path
        Where its checkpoints are, see ``RunObjects.checkpoints``.
    name : str
        Of the file.

    Returns
    -------
    pathlib.Path
        The file, in the folder.

    Raises
    ------
    FileNotFoundError
        If no checkpoint has it.
    ValueError
        If a checkpoint does not give its epoch and step, or the file leads out of the folder.
    """
    checkpoints = [
        meta.parent.relative_to(folder)
        for meta in (folder / place).glob(f"CKPT*/{METAFNAME}")
        if (meta.parent / name).exists()
    ]
    if not checkpoints:
        raise FileNotFoundError(
            f"{folder} has neither {name} nor a checkpoint with it in {place}: has this run "
            "been trained? Give its output_folder once the first checkpoint is there "
            "(ckpt_interval_steps, or the end of an epoch)."
        )
    newest = max(checkpoints, key=lambda one: (_place(folder, one), one))
    return own_file(folder, newest / name)


def _place(folder: Path, checkpoint: Path) -> tuple[int, bool, int, float]:
    """Read how far a checkpoint is; SpeechBrain's loader of CKPT.yaml builds objects."""
    meta, counter, brain = (checkpoint / name for name in (METAFNAME, COUNTER, BRAIN))
    check_known(folder / checkpoint, (METAFNAME, COUNTER, BRAIN))
    try:
        counted = None
        if (folder / counter).exists():
            with open_own(folder, counter) as file:
                counted = file.read(_MAX_NUMBER).decode()
        return place_of(
            plain_values(folder, meta, ["unixtime", "end-of-epoch"]),
            counted,
            plain_values(folder, brain, ["step"]) if (folder / brain).exists() else {},
        )
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{folder / checkpoint} does not say its epoch and step ({error}), so that the "
            "newest checkpoint is not known. Remove that checkpoint to use another."
        ) from error
