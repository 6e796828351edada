"""Speaker encoders: filterbanks in, one embedding per utterance out.

All 25 encoders are one class, whose modules ``build`` makes from a row of
``architectures``: a stem, stages, each entered through a transition, and a linear
layer after statistics pooling. In the reversible families the stages are chains of
couplings. Their streams pass from the stem to the pooling and never become one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pkgutil import resolve_name
from typing import Any, cast

import torch
from torch import Tensor, nn

from speechbrain_rev.architectures import counterparts
from speechbrain_rev.compression.activations import ActivationCompression
from speechbrain_rev.heads import POOLINGS
from speechbrain_rev.lobes.build import (
    check_name,
    check_switch,
    parts_of,
    zero_residuals,
)
from speechbrain_rev.lobes.description import (
    DESCRIPTION,
    EncoderDescription,
    FrontEnd,
    front_end_of,
)
from speechbrain_rev.lobes.geometry import check_input, maps_and_masks, unit_channels
from speechbrain_rev.lobes.layers import run_unit
from speechbrain_rev.lobes.pooling import Pooling, embedded
from speechbrain_rev.lobes.stages import Levels, Runner, Stage, walk
from speechbrain_rev.modes import (
    FOLLOWING,
    LOSSLESS,
    MEMORY_FORMATS,
    WITHOUT_INVERSE,
    AppliedPlan,
    Mode,
    as_mode,
    fallback,
    is_lossless,
)
from speechbrain_rev.reversible.chain import ReversibleChain
from speechbrain_rev.reversible.flags import Flags, cudnn_flags
from speechbrain_rev.reversible.hooks import Moment, has_hooks, notify, notify_end
from speechbrain_rev.reversible.monitor import Checks, Verify
from speechbrain_rev.reversible.norm import BatchNorm, updated_together
from speechbrain_rev.reversible.recompute import trains
from speechbrain_rev.reversible.streams import Streams, as_format
from speechbrain_rev.torch_private import is_tracing


class SpeakerEncoder(nn.Module):
    """Map filterbanks to one embedding per utterance.

    Parameters
    ----------
    name : str
        One of ``speechbrain_rev.architectures.ENCODERS``.
    n_mels : int
        Mel bands of the input, at least the product of all strides in frequency; in
        encoders of type II a multiple of it, 8.
    embedding_dim : int
        Size of the embedding.
    mode : Mode or str, or mapping of block name to these, or Plan, or None
        What blocks keep for the backward pass. None reconstructs what is reversible
        and stores in vanilla encoders. A plan gives its channels at a time too.
    streams : {"exact", "float"}
        Number format of reversible streams. Exact ones are fixed-point numbers below
        16,384, from which every memory mode makes the same gradients to the bit. Float
        ones are reconstructed up to an error that grows with depth.
    verify : {"first", "raise", "warn"} or None
        What happens if exact streams are not reconstructed to the bit, or a recomputed
        block saves something else, because something does not compute the same twice.
        "first" raises in the first step, after each block, and warns later; None looks at
        nothing.
    verify_every : int
        Forward passes in training from one look to the next.
    chunk : int, "auto" or None
        Working set of reversible encoders: bytes of the float32 map that residual
        functions work on at a time, for an utterance of 200 frames; stem and transitions
        take half of it. "auto" works on 1,024,000 bytes where a step holds most, and on more
        where that takes no more memory. Normalisations take some channels, bottlenecks'
        convolutions some utterances of the batch. None works on all at once, in more memory.
        It decides the order of sums: gradients are equal to the bit in all modes at one
        chunk.
    memory_format : {"contiguous", "channels_last"}
        How maps and the weights of convolutions lie in memory. Convolutions of both do the
        same in another order of sums: gradients are equal to the bit in all modes at one
        format.
    deterministic : bool
        Kernels of cuDNN in training, in both passes and all modes, see
        :func:`~speechbrain_rev.reversible.cudnn_flags`. False is faster: bits are no longer
        equal between modes, and ``verify`` reports it.
    sync_batchnorm : bool
        Whether batch statistics are shared between processes.
    pooling : str
        How the last stage's maps become one vector: a name of
        ``speechbrain_rev.heads.POOLINGS``.
    pooling_variance : {"population", "unbiased"}
        Which variance pooling takes; WeSpeaker has the unbiased one.
    zero_init_residual : bool
        Whether blocks begin as the identity, see
        :func:`~speechbrain_rev.lobes.build.zero_residuals`. They do so in the
        recipe.
    compression : ActivationCompression or None
        How blocks in mode "compress" do it; None for its defaults.
    widths, blocks : sequence of int, or None
        Channels and blocks of each stage, to make an encoder of another size.
    front_end : FrontEnd, mapping of its fields, or None
        How the features are made that it is trained on, see
        :class:`~speechbrain_rev.lobes.description.FrontEnd`. It is in the state dict, with
        what the encoder was built of, for whoever loads the weights. None where it is not
        known.

    Raises
    ------
    ValueError
        If there is no such encoder, a size does not fit its family, a switch is neither
        True nor False, or ``front_end`` has other bands than ``n_mels``.

    Examples
    --------
    >>> encoder = SpeakerEncoder("revnet46", widths=(8, 16, 16, 16), blocks=(1, 1, 1, 1))
    >>> encoder(torch.randn(2, 30, 80)).shape
    torch.Size([2, 1, 256])

    In a YAML:

    >>> from hyperpyyaml import load_hyperpyyaml
    >>> text = "model: !new:speechbrain_rev.lobes.SpeakerEncoder {name: resnet34}"
    >>> load_hyperpyyaml(text)["model"].architecture.name
    'resnet34'
    """

    def __init__(
        self,
        name: str,
        *,
        n_mels: int = 80,
        embedding_dim: int = 256,
        mode: Mode | str | Mapping[str, Mode | str] | AppliedPlan | None = None,
        streams: str = "exact",
        verify: Verify | None = "first",
        verify_every: int = 100,
        chunk: int | str | None = "auto",
        memory_format: str = "contiguous",
        deterministic: bool = True,
        sync_batchnorm: bool = False,
        pooling: str = "statistics",
        pooling_variance: str = "population",
        zero_init_residual: bool = False,
        compression: ActivationCompression | None = None,
        widths: Sequence[int] | None = None,
        blocks: Sequence[int] | None = None,
        front_end: FrontEnd | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        check_switch("zero_init_residual", zero_init_residual)
        check_switch("deterministic", deterministic)
        self.deterministic = deterministic
        #: Of what is recomputed outside of chains.
        self.checks = Checks(verify, verify_every)
        parts = parts_of(
            name,
            n_mels=n_mels,
            embedding_dim=embedding_dim,
            streams=streams,
            verify=verify,
            verify_every=verify_every,
            chunk=chunk,
            sync_batchnorm=sync_batchnorm,
            pooling=pooling,
            pooling_variance=pooling_variance,
            widths=widths,
            blocks=blocks,
        )
        self.architecture, self.geometry = parts.row, parts.geometry
        self.channels = parts.channels
        self.stem = parts.stem
        self.stages = nn.ModuleList(parts.stages)
        self.pooling, self.fc = parts.pooling, parts.fc
        #: The description that its state dict holds.
        self.description = EncoderDescription(
            name=name,
            widths=tuple(parts.row.widths),
            blocks=tuple(parts.row.blocks),
            n_mels=n_mels,
            embedding_dim=embedding_dim,
            pooling=pooling,
            pooling_variance=pooling_variance,
            front_end=front_end_of(front_end, n_mels),
        )
        self.register_load_state_dict_pre_hook(_described)
        before = None
        for key, chain in self._chains().items():
            chain.monitor.name, chain.monitor.before = key, before
            before = chain.monitor
        if zero_init_residual:
            zero_residuals(self)
        if compression is None:
            compression = ActivationCompression()
        elif not isinstance(compression, ActivationCompression):
            raise ValueError(
                f"compression is {compression!r}; give an ActivationCompression, whose "
                "rules choose the bounds, or None for its defaults."
            )
        #: How blocks in mode "compress" do it.
        self.compression = compression
        self.memory_format = "contiguous"
        if memory_format != self.memory_format:
            self.set_memory_format(memory_format)
        self._modes: dict[str, Mode] = {}
        self.set_mode(parts.row.default_mode)
        if mode is not None:
            self.set_mode(mode)

    @property
    def n_mels(self) -> int:
        """Mel bands of the input."""
        return self.geometry.n_mels

    def get_extra_state(self) -> Tensor:
        """Give the description of the encoder, which its state dict takes along.

        Returns
        -------
        torch.Tensor, [bytes], int32
            As :meth:`~speechbrain_rev.lobes.description.EncoderDescription.as_tensor`
            writes it. It is the same in all modes.
        """
        return self.description.as_tensor()

    def set_extra_state(self, state: Tensor) -> None:
        """Leave the encoder as it was built, whatever loaded weights say of themselves."""

    def block_modes(self) -> dict[str, Mode]:
        """Give the mode of each block: what it keeps for the backward pass.

        Returns
        -------
        dict of str to Mode
            In the order of execution.
        """
        return dict(self._modes)

    def reversible_blocks(self) -> set[str]:
        """Name the blocks whose inputs follow from their outputs."""
        return {name for name in self._block_names() if ".chain." in name}

    def named_blocks(self) -> dict[str, nn.Module]:
        """Give the blocks by their names.

        Returns
        -------
        dict of str to nn.Module
            In the order of execution.
        """
        return {
            name: self.get_submodule(name.replace(".chain.", ".chain.blocks."))
            for name in self._block_names()
        }

    def allowed_modes(self) -> dict[str, tuple[Mode, ...]]:
        """Give the modes that each block can have.

        Returns
        -------
        dict of str to tuple of Mode
            In the order of execution.
        """
        names, reversible = self._block_names(), self.reversible_blocks()
        if not reversible:
            return {n: FOLLOWING if i else WITHOUT_INVERSE for i, n in enumerate(names)}
        return {n: LOSSLESS if n in reversible else WITHOUT_INVERSE for n in names}

    def set_mode(
        self, mode: Mode | str | Mapping[str, Mode | str] | AppliedPlan
    ) -> None:
        """Choose what blocks keep for the backward pass, at any time.

        Parameters
        ----------
        mode : Mode or str, or mapping of block name to these, or Plan
            For all blocks, or for some by the names of ``block_modes``. "reconstruct"
            for all recomputes stem and transitions. "join" is for blocks of vanilla
            encoders that follow one that recomputes or joins. A plan gives channels too.

        Raises
        ------
        ValueError
            If there is no such mode or block, a block cannot be reconstructed, or one is
            to join where none before it recomputes: then modes are what they were.
        """
        if isinstance(mode, AppliedPlan):
            mode.apply(self)
            return
        names, reversible = self._block_names(), self.reversible_blocks()
        if isinstance(mode, Mapping):
            modes = {name: as_mode(m) for name, m in mode.items()}
            unknown = sorted(modes.keys() - set(names))
            if unknown:
                raise ValueError(
                    f"{self.architecture.name} has no block {unknown[0]!r}; its blocks "
                    f"are {', '.join(names)}."
                )
            for name in sorted(modes.keys() - reversible):
                if modes[name].spec.needs_inverse:
                    raise ValueError(
                        f"Block {name!r} of {self.architecture.name} is not "
                        "reversible. Give it mode 'recompute' or 'store'."
                    )
        else:
            modes = self._modes_for_all(as_mode(mode), names, reversible)
        modes = {name: modes.get(name) or self._modes[name] for name in names}
        self._check_joins(modes)
        if modes != self._modes:
            self.checks.restart()
        self._modes = modes
        for name, chain in self._chains().items():
            chain.set_mode(
                [m for n, m in self._modes.items() if n.startswith(f"{name}.")]
            )

    def set_memory_format(self, memory_format: str) -> None:
        """Choose how maps and the weights of convolutions lie in memory.

        It decides in which order numbers are added up: choose before the first step.
        Weights of either format can be loaded.

        Parameters
        ----------
        memory_format : {"contiguous", "channels_last"}
            Of the weights from now on, and of all maps.

        Raises
        ------
        ValueError
            If there is no such format.

        Examples
        --------
        >>> encoder = SpeakerEncoder("resnet34", blocks=(1, 1, 1, 1))
        >>> encoder.set_memory_format("channels_last")
        >>> weight = encoder.get_parameter("stages.1.blocks.0.conv1.weight")
        >>> weight.shape, weight.stride()
        (torch.Size([64, 32, 3, 3]), (288, 1, 96, 32))
        """
        check_name("memory_format", memory_format, MEMORY_FORMATS)
        layout = resolve_name(MEMORY_FORMATS[memory_format])
        self.memory_format = memory_format
        for p in self.parameters():
            if p.dim() == 4:
                p.data = p.data.clone(memory_format=layout)

    def _check_joins(self, modes: Mapping[str, Mode]) -> None:
        """Refuse blocks that have none before them to run again with."""
        before: Mode | None = None
        allowed = self.allowed_modes()
        for name, mode in modes.items():
            if mode.spec.joins and not (
                mode in allowed[name] and mode.can_follow(before)
            ):
                follows = (
                    "none" if before is None else f"one with mode {before.value!r}"
                )
                raise ValueError(
                    f"Block {name!r} of {self.architecture.name} cannot have mode "
                    f"{mode.value!r}: it follows {follows}. In encoders that are not "
                    "reversible a block can join one that recomputes or joins. Give it "
                    "mode 'recompute'."
                )
            before = mode

    def set_channels(self, channels: Sequence[int | None]) -> None:
        """Choose how many channels reversible encoders work on at a time.

        It decides in which order numbers are added up: choose before the first step.

        Parameters
        ----------
        channels : sequence of int or None
            As ``geometry.channels_by_level`` gives them: of blocks at each level, and
            then of stem and transitions, which else take half of them.

        Raises
        ------
        ValueError
            If the encoder is not reversible and channels are not all None, or they are
            not one number, or None, for each level, or two.
        """
        if len(channels) not in (self.geometry.levels, 2 * self.geometry.levels):
            raise ValueError(
                f"channels are {list(channels)}; there must be one for each of the "
                f"{self.geometry.levels} levels, or two: of blocks, then of stem and "
                "transitions."
            )
        if any(c is not None and (type(c) is not int or c < 1) for c in channels):
            raise ValueError(
                f"channels are {list(channels)}; each must be at least 1, or None for all."
            )
        if not self.reversible_blocks() and any(channels):
            raise ValueError(
                f"{self.architecture.name} has no reversible blocks and works on all "
                f"channels at once; channels are {list(channels)}."
            )
        self.channels = list(channels)
        levels = self.geometry.stage_levels
        for stage, (_, level) in zip(self._stages(), levels, strict=True):
            if stage.chain is not None:
                stage.chain.chunk = channels[level]

    @property
    def streams(self) -> str | None:
        """The number format of the streams; None if there are none."""
        return next((c.format_name for c in self._chains().values()), None)

    def check_streams(self) -> None:
        """Wait for the device and warn of what was noted about the streams up to now.

        Without this call a later training step warns, which does not wait.

        Raises
        ------
        StreamError
            If streams were not reconstructed to the bit and ``verify="raise"``.
        """
        for chain in self._chains().values():
            chain.check_streams()

    def equal_bits(self) -> dict[str, bool | None]:
        """Report which blocks had equal bits in both of their runs, as ``verify`` saw it.

        Returns
        -------
        dict of str to bool or None
            For each block that runs twice in a step: None if its runs were not compared since
            its mode was set, as without ``verify``, and where float streams are
            reconstructed. False if a block of its chain, or one of those outside of chains,
            differed.

        Examples
        --------
        >>> encoder = SpeakerEncoder("resnet34", blocks=(1, 1, 1, 1), mode={"stem": "recompute"})
        >>> before = encoder.equal_bits()
        >>> encoder(torch.randn(2, 30, 80)).sum().backward()
        >>> before, encoder.equal_bits()
        ({'stem': None}, {'stem': True})
        """
        chains, equal = self._chains(), dict[str, bool | None]()
        for name, mode in self._modes.items():
            chain = chains.get(name.rpartition(".")[0])
            checks = self.checks if chain is None else chain.monitor.checks
            is_float = chain is not None and chain.format_name == "float"
            is_compared = checks.is_settled and not (
                is_float and mode.spec.needs_inverse
            )
            if mode.spec.runs_twice:
                equal[name] = not checks.differs if is_compared else None
        return equal

    def largest_streams(self) -> dict[str, float]:
        """Wait for the device and give the largest magnitudes of exact streams.

        Returns
        -------
        dict of str to float
            The largest magnitude in each stage since the last call; its limit is 16,384.
            Empty where streams have no limit.
        """
        return {
            name: chain.largest_stream()
            for name, chain in self._chains().items()
            if math.isfinite(as_format(chain.format_name).limit)
        }

    def _chains(self) -> dict[str, ReversibleChain]:
        return {
            f"stages.{i}.chain": stage.chain
            for i, stage in enumerate(self._stages())
            if stage.chain is not None
        }

    def _modes_for_all(
        self, mode: Mode, names: Sequence[str], reversible: set[str]
    ) -> dict[str, Mode]:
        if not mode.spec.needs_inverse:
            return dict.fromkeys(names, mode)
        if not reversible:
            raise ValueError(
                f"{self.architecture.name} has no reversible blocks. Use mode "
                "'recompute', or one of its reversible counterparts: "
                f"{', '.join(counterparts(self.architecture.name))}."
            )
        return {name: fallback(mode, m) for name, m in self.allowed_modes().items()}

    def _block_names(self) -> list[str]:
        stages = enumerate(self._stages())
        return ["stem"] + [
            f"stages.{i}.{name}" for i, stage in stages for name in stage.block_names()
        ]

    def _stages(self) -> list[Stage]:
        return [cast(Stage, stage) for stage in self.stages]

    def forward(self, feats: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Embed utterances.

        Parameters
        ----------
        feats : torch.Tensor, [batch, time, n_mels]
            Filterbanks; what they hold beyond an utterance's length does not matter.
        lengths : torch.Tensor, [batch], or None
            Relative lengths, 1.0 for an utterance of all frames. None if no utterance
            is padded. A length on a GPU that is not above 0 and at most 1 makes its
            embedding NaN.

        Returns
        -------
        torch.Tensor, [batch, 1, embedding_dim]
            Embeddings; under autocast in its dtype, which the linear layer has as all
            before it, while pooling is float32.

        Raises
        ------
        ValueError
            If the input has not the shape that the encoder was built for, or lengths
            are not relative.
        """
        if lengths is not None and torch.compiler.is_exporting():
            raise RuntimeError(
                f"torch.export of {self.architecture.name} itself takes no lengths, at "
                f"whose values training looks. {_WAYS_OUT}"
            )
        lengths = check_input(self.architecture.name, self.geometry, feats, lengths)
        if is_tracing() and (
            lengths is not None or self.training or self.geometry.rearranges
        ):
            raise RuntimeError(
                f"torch.jit.trace would fix the number of frames of "
                f"{self.architecture.name}: it records no training, no lengths and no "
                f"encoder of type II. {_WAYS_OUT}"
            )
        x, masks = maps_and_masks(feats, lengths, self.geometry)
        if self.memory_format == "channels_last":
            # One channel is of both layouts: the strides say which the stem's output has.
            x = x.clone(memory_format=torch.channels_last)
        wanted = not is_lossless(self._modes.values())
        with (
            cudnn_flags(deterministic=self.deterministic),
            updated_together(),
            self.compression.during(self, everywhere=False, wanted=wanted),
        ):
            runner = _EngineRunner(self, masks)
            flags = Flags.now({x.device} if trains(self) else ())
            with flags():
                pooled = walk(self, x, runner)
        (y,) = flags.carry(
            embedded(self.fc, pooled, feats.dtype, training=self.training)
        )
        return y

    def __prepare_scriptable__(self) -> nn.Module:
        """Refuse ``torch.jit.script``, which knows no autograd functions."""
        raise RuntimeError(
            f"{self.architecture.name} cannot be given to torch.jit.script. {_WAYS_OUT}"
        )


def _described(
    encoder: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object
) -> None:
    """Let weights of other programs, which have no description, be loaded strictly too."""
    state_dict.setdefault(prefix + DESCRIPTION, encoder.get_extra_state())


class _EngineRunner(Runner):
    """Run the parts as their modes say, in training on some channels at a time."""

    def __init__(self, encoder: SpeakerEncoder, masks: list[Tensor | None]) -> None:
        super().__init__(masks)
        self.modes, self.checks = encoder._modes, encoder.checks.begin()
        self.channels = unit_channels(encoder.channels, encoder.geometry)
        self.channels_last = encoder.memory_format == "channels_last"

    def unit(
        self, name: str, unit: nn.Module, levels: Levels, given: Tensor | Streams
    ) -> Tensor:
        mode = self.modes[name]
        sizes = [self.channels[level] for level in levels]
        notify(unit, Moment.FORWARD_BEGINS)
        with mode.spec.around():
            y = run_unit(
                unit,
                self.around(levels),
                given,
                sizes,
                recomputes=mode.spec.runs_twice,
                joins=mode.spec.joins,
                checks=self.checks,
                name=name,
            )
        if self.channels_last:
            # A view already, but where torch has no kernel of this layout.
            y = y.contiguous(memory_format=torch.channels_last)
        notify_end(unit, y)
        return y

    def chain(
        self, chain: ReversibleChain, held: list[Tensor | Streams], level: int
    ) -> Tensor | Streams:
        # No name here or at the caller keeps their input alive.
        halves = list(cast(Tensor, held.pop()).chunk(2, dim=1))
        if trains(chain) and not has_hooks(chain):
            return chain.train_step(halves, self.masks[level])
        if self.channels_last:
            # A part of the channels is not dense, and each block would copy it.
            layout = torch.channels_last
            halves = [half.contiguous(memory_format=layout) for half in halves]
        return torch.cat(chain(*halves, self.masks[level]), dim=1)

    def pooled(self, pooling: Pooling, parts: Sequence[Tensor]) -> Tensor:
        y: Tensor = pooling(self.masks[-1], *parts)
        return y


_WAYS_OUT = (
    "Export it: speechbrain-rev export writes ONNX or a torch.export program, and "
    "speechbrain_rev.lobes.inference_form(encoder) can be given to torch.export by itself."
)


def build_encoder(
    name: str,
    *,
    n_mels: int = 80,
    embedding_dim: int = 256,
    mode: Mode | str | Mapping[str, Mode | str] | AppliedPlan | None = None,
    streams: str = "exact",
    verify: Verify | None = "first",
    verify_every: int = 100,
    chunk: int | str | None = "auto",
    memory_format: str = "contiguous",
    deterministic: bool = True,
    sync_batchnorm: bool = False,
    pooling: str = "statistics",
    pooling_variance: str = "population",
    zero_init_residual: bool = False,
    compression: ActivationCompression | None = None,
    widths: Sequence[int] | None = None,
    blocks: Sequence[int] | None = None,
    front_end: FrontEnd | Mapping[str, Any] | None = None,
) -> SpeakerEncoder:
    """Build an encoder by its name: what ``SpeakerEncoder`` does, as a function.

    A YAML that names it has to write ``!apply:``; ``!new:`` takes classes.

    Parameters
    ----------
    name, n_mels, embedding_dim, mode, streams, verify, verify_every, chunk, memory_format, \
    deterministic, sync_batchnorm, pooling, pooling_variance, zero_init_residual, compression, widths, blocks, \
    front_end
        As :class:`SpeakerEncoder` takes them.

    Returns
    -------
    SpeakerEncoder
        The encoder, initialised from torch's random state.

    Raises
    ------
    ValueError
        As :class:`SpeakerEncoder` does.

    Examples
    --------
    >>> encoder = build_encoder("revnet46", widths=(8, 16, 16, 16), blocks=(1, 1, 1, 1))
    >>> encoder(torch.randn(2, 30, 80)).shape
    torch.Size([2, 1, 256])
    """
    return SpeakerEncoder(
        name,
        n_mels=n_mels,
        embedding_dim=embedding_dim,
        mode=mode,
        streams=streams,
        verify=verify,
        verify_every=verify_every,
        chunk=chunk,
        memory_format=memory_format,
        deterministic=deterministic,
        sync_batchnorm=sync_batchnorm,
        pooling=pooling,
        pooling_variance=pooling_variance,
        zero_init_residual=zero_init_residual,
        compression=compression,
        widths=widths,
        blocks=blocks,
        front_end=front_end,
    )


def settings_of(encoder: SpeakerEncoder) -> dict[str, Any]:
    """Give the settings that make an encoder like another one, whatever its depth.

    Parameters
    ----------
    encoder : SpeakerEncoder
        As ``build_encoder`` makes them.

    Returns
    -------
    dict of str to object
        Keywords of ``build_encoder`` beside blocks: all that changes the memory or time of
        a training step. Left out are mode and chunk, which can change later
        (``block_modes``, ``channels``), and compression, which has a mode of its own.

    Raises
    ------
    ValueError
        If the last layer was replaced by one without ``out_features``, or the pooling.

    Examples
    --------
    >>> encoder = build_encoder("resnet34", blocks=(1, 1, 1, 1), pooling_variance="unbiased")
    >>> settings = settings_of(encoder)
    >>> settings["pooling_variance"], settings["widths"]
    ('unbiased', (32, 64, 128, 256))
    """
    poolings = {row.made: name for name, row in POOLINGS.items()}
    known = {
        "fc": hasattr(encoder.fc, "out_features"),
        "pooling": type(encoder.pooling) in poolings,
    }
    for name in (name for name, is_known in known.items() if not is_known):
        raise ValueError(
            f"{name} of {encoder.architecture.name} is a "
            f"{type(getattr(encoder, name)).__name__}, which build_encoder does not make. "
            "Plan the network as it is, by "
            "speechbrain_rev.planner.plan(module, example_batch)."
        )
    settings = {
        "widths": encoder.architecture.widths,
        "n_mels": encoder.n_mels,
        "embedding_dim": encoder.fc.out_features,
        "pooling": poolings[type(encoder.pooling)],
        "pooling_variance": encoder.pooling.variance,
        "memory_format": encoder.memory_format,
        "deterministic": encoder.deterministic,
        "sync_batchnorm": any(
            norm.sync for norm in encoder.modules() if isinstance(norm, BatchNorm)
        ),
    }
    for chain in encoder.modules():
        if isinstance(chain, ReversibleChain):
            settings["streams"] = chain.format_name
            settings["verify"] = chain.monitor.verify
            settings["verify_every"] = chain.monitor.every
    return settings
