"""What the objects of a run's hyperparams.yaml say, which nobody builds here.

SpeechBrain's script trains what its YAML describes, under names of the file's choosing. The
encoder, its features and the files of its checkpoints are found by the classes that are
named there; their arguments are read as data.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NoReturn

import yaml
from speechbrain.lobes.features import Fbank
from speechbrain.processing.features import InputNormalization

from speechbrain_rev.inference.own_files import REFUSED
from speechbrain_rev.inference.plain_yaml import YamlFile, in_words
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.speech import SpeakerAugment

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
#: Whose one weight has a direction for each class.
CLASSIFIERS = (
    "!new:speechbrain.lobes.models.ECAPA_TDNN.Classifier",
    "!new:speechbrain_rev.lobes.classifier.CosineClassifier",
)
_AUGMENTATION = (
    "!new:speechbrain_rev.speech.SpeakerAugment",
    "!new:speechbrain_rev.speech.augmentation.SpeakerAugment",
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
            ``ENCODER_SETTINGS`` and ``pooling_variance``; None if the file describes no
            encoder of this package.

        Raises
        ------
        ValueError
            If there are several encoders, an argument is no plain value, or features are
            made in a way that is not ours.
        """
        found = self.encoders()
        if len(found) > 1:
            lines = ", ".join(str(_line(node)) for node in found)
            raise ValueError(
                f"{self.file.path} describes {len(found)} encoders of this package, on "
                f"lines {lines}, and which of them was trained is not known. Keep one, or "
                "add arch, widths, blocks, n_mels, embedding_dim and sample_rate to the "
                "file as plain values."
            )
        if not found:
            return None
        (node,) = found
        given = self._arguments(node, build_encoder)
        if "name" not in given:
            self.file.refuse(node, f"{node.tag} has no name. Give an encoder's.")
        settings = {
            ours: self._value(node, theirs, given[theirs])
            for ours, theirs in _ENCODER_ARGUMENTS.items()
        }
        n_mels, settings["sample_rate"] = self._features(node)
        self._check_normalisation(node)
        if n_mels != settings["n_mels"]:
            self.file.refuse(
                node,
                f"the encoder takes n_mels {settings['n_mels']}, but the Fbank makes "
                f"{n_mels}. Are both of one training?",
            )
        return settings

    def left_out(self) -> dict[str, Any]:
        """Give the encoder's sizes that the file leaves to their defaults."""
        found = self.encoders()
        if len(found) != 1:
            return {}
        given = self._arguments(found[0], build_encoder)
        sizes = {n: given[n] for n in ("n_mels", "embedding_dim")}
        return {n: v for n, v in sizes.items() if not isinstance(v, yaml.Node)}

    def saved_encoder(self) -> str:
        """Give the name that checkpoints have for the encoder."""
        return self._saved(ENCODERS, "embedding_model")

    def saved_classifier(self) -> str:
        """Give the name that checkpoints have for the classifier."""
        return self._saved(CLASSIFIERS, "classifier")

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
        """Tell whether SpeechBrain's own Checkpointer wrote the checkpoints."""
        return any(self._tagged((_SPEECHBRAIN_CHECKPOINTER,)))

    def has_cosines(self) -> bool:
        """Tell whether a classifier is described whose one weight has the directions."""
        return any(self._tagged(CLASSIFIERS))

    def speeds(self) -> int | None:
        """Give how many classes augmentation made of a speaker, if the file says it."""
        counts = set()
        for _, node in self._tagged(_AUGMENTATION):
            given = self._arguments(node, SpeakerAugment)["speeds"]
            speeds = self._value(node, "speeds", given)
            if not isinstance(speeds, list | tuple):
                self.file.refuse(node, f"speeds of {node.tag} is no list of numbers.")
            counts.add(len(speeds))
        return counts.pop() if len(counts) == 1 else None

    def epochs(self) -> int | None:
        """Give how many epochs the training was to have, if the file says it."""
        for _, node in self._tagged(_EPOCH_COUNTER):
            if isinstance(node, yaml.MappingNode):
                limit = self._plain(self.file.members(node).get("limit"))
                return limit if isinstance(limit, int) else None
        return None

    def plain_values(self, names: Sequence[str]) -> dict[str, Any]:
        """Give those of the names at top level whose values are plain."""
        found = {}
        for name in names:
            with contextlib.suppress(yaml.YAMLError, *REFUSED):
                found[name] = self._followed(self.file.top[name])
        return found

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
            self._check_rate(node, rate)
            sizes.append((values["n_mels"], rate))
        if any(size != sizes[0] for size in sizes):
            self.file.refuse(
                nodes[-1],
                f"{_FBANK[0]} has other sizes than on line {_line(nodes[0])}, and none is "
                "called compute_features. Give that name to what the encoder was trained on.",
            )
        return sizes[0]

    def _check_rate(self, node: yaml.Node, rate: object) -> None:
        """Refuse filters of another rate than the speech that SpeechBrain's script reads."""
        speech = self._plain(self.file.top.get("sample_rate"))
        if speech is not None and speech != rate:
            self.file.refuse(
                node,
                f"{node.tag} has sample_rate: {rate}{self._origin(node, 'sample_rate')}, "
                f"but the file's sample_rate is {speech}: filters for {rate} Hz saw speech "
                f"at {speech} Hz. Train with sample_rate: !ref <sample_rate> in Fbank, or "
                "embed with SpeechBrain's own classes.",
            )

    def _origin(self, node: yaml.Node, name: str) -> str:
        """Say of an argument that the file does not give whose default it is."""
        called = InputNormalization if node.tag in _NORMALISATION else Fbank
        given = self._arguments(node, called).get(name)
        return "" if isinstance(given, yaml.Node) else " (SpeechBrain's default)"

    def _check_normalisation(self, encoder: yaml.Node) -> None:
        """Refuse normalisation of features that is not ours."""
        for node in self._needed(
            encoder, _NORMALISATION, "mean_var_norm", "normalisation"
        ):
            self._checked(
                node, InputNormalization, _NORMALISATION_USUAL, _NORMALISATION_FREE
            )

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
        found = self._tagged(tags)
        if not found:
            self.file.refuse(
                encoder,
                f"beside this encoder the file describes no {tags[0]}, so that the "
                f"{what} it was trained on cannot be made again. {_REMEDY}",
            )
        named = [node for name, node in found if name == usual]
        return named or [node for _, node in found]

    def _refuse_features(
        self, node: yaml.Node, name: str, value: object, usual: object
    ) -> NoReturn:
        words = ("null" if v is None else str(v)[:60] for v in (value, usual))
        found, wanted = words
        self.file.refuse(
            node,
            f"{node.tag} has {name}: {found}{self._origin(node, name)}, but this package makes features with "
            f"{name}: {wanted} only. {_REMEDY}",
        )

    def _tagged(self, tags: tuple[str, ...]) -> list[tuple[str, yaml.Node]]:
        return [(name, node) for name, node in self._nodes if node.tag in tags]

    def _saved(self, tags: tuple[str, ...], usual: str) -> str:
        """Give the name of an object among recoverables, or its own in the file."""
        found = self._tagged(tags)
        names = self._recovered([node for _, node in found])
        if usual in names or (not names and len(found) != 1):
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
        ((own, wanted),) = found
        return _file_name(self.file, wanted, own or usual)

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
        found = self.file.follow(node)
        if (
            isinstance(found, yaml.SequenceNode)
            and found.tag == _CAST
            and len(found.value) == 2
        ):
            return self.file.follow(found.value[1])
        return found

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
                node, f"{node.tag}: {error}. Are the versions those of the training?"
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
