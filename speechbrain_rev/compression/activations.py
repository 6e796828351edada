"""Compression of what a network saves for its backward pass, as a context and as a mode.

Method of "A Novel Memory-Efficient Deep Learning Training Framework via Error-Bounded
Lossy Compression": inputs of convolutions and of batch normalisations are kept
compressed between forward and backward pass, under an absolute error bound for each.

Saved-tensor hooks see every tensor that autograd keeps for the backward pass. What is
compressed is registered, never guessed: a layer's input, while the layer runs. Whatever
else saved the same storage (the ReLU that made it, a second convolution) shares the one
copy, so that the original is really freed; what nobody registered (weights, copies that
autocast made, statistics, integers, tensors of custom functions) stays as it is.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import saved_tensors_hooks

from speechbrain_rev.compression.bounds import Bound, DeviationBound, RangeBound, Rule
from speechbrain_rev.compression.codec import (
    ASSUMED_BITS,
    Compressed,
    Form,
    Reason,
    decode,
    encode,
    has_contents,
)
from speechbrain_rev.compression.layers import (
    Kind,
    Watching,
    name_of,
    names_of_layers,
)
from speechbrain_rev.torch_private import (
    function_of,
    has_storage,
    in_backward,
    set_version,
    storage_key,
)


class Place:
    """Where a tensor lies in its storage.

    Parameters
    ----------
    x : torch.Tensor
        The tensor.
    """

    __slots__ = ("dtype", "first", "last", "shape", "strides")

    def __init__(self, x: Tensor) -> None:
        self.shape, self.strides, self.dtype = x.shape, x.stride(), x.dtype
        steps = zip(self.shape, self.strides, strict=True)
        self.first = x.storage_offset()
        #: The last element; without elements there is none.
        self.last = self.first + sum((n - 1) * step for n, step in steps)

    def covers(self, other: Place) -> bool:
        """Whether a copy of this place holds what lies in another one."""
        if self.dtype != other.dtype:
            return False
        if (self.first, self.shape, self.strides) == (
            other.first,
            other.shape,
            other.strides,
        ):
            return True
        dense = self.last - self.first < self.shape.numel()
        return bool(dense and self.first <= other.first and other.last <= self.last)

    def of(self, x: Tensor) -> Tensor:
        """View this place in the storage of a tensor."""
        return x.detach().as_strided(self.shape, self.strides, self.first)

    def part_in(self, x: Tensor, other: Place) -> Tensor:
        """View another place in a copy of this one."""
        if other.shape == self.shape and other.strides == self.strides:
            return x
        offset = x.storage_offset() + other.first - self.first
        return x.as_strided(other.shape, other.strides, offset)


class _Copy:
    """A compressed copy of a registered tensor at one version."""

    __slots__ = ("__weakref__", "compressed", "place", "version")

    def __init__(self, compressed: Compressed, place: Place, version: int) -> None:
        self.compressed, self.place, self.version = compressed, place, version


class _Saved:
    """What autograd keeps instead of a tensor."""

    __slots__ = ("__weakref__", "copy", "own", "place", "version")

    def __init__(self, x: Tensor, version: int) -> None:
        #: The contents without the graph, which autograd knows: a graph that is kept by
        #: what it saved would never be freed. Once a copy has them, nothing but the
        #: version counter.
        self.own = x.detach()
        self.version = version
        self.place: Place | None = None
        self.copy: _Copy | None = None

    def refer_to(self, copy: _Copy) -> None:
        """Let go of the tensor, for a copy has its contents."""
        self.place = Place(self.own)
        self.copy, self.own = copy, _counter_of(self.own)


class Registration:
    """Layers' wish that a tensor which is their input be compressed.

    Parameters
    ----------
    layer : str
        The name of the first layer that registered the tensor.
    """

    __slots__ = ("layer", "wishes")

    def __init__(self, layer: str) -> None:
        self.layer = layer
        self.wishes: list[tuple[Place, Bound]] = []

    def add(self, place: Place, bound: Bound) -> bool:
        """Note a layer's input and its bound; whether both together are new."""
        known = any(
            own.covers(place) and place.covers(own) and bound == its
            for own, its in self.wishes
        )
        if not known:
            self.wishes.append((place, bound))
        return not known

    def covers(self, place: Place) -> bool:
        """Whether a place is that of a layer's input or a part of it."""
        return any(own.covers(place) for own, _ in self.wishes)

    def error_bound(self, x: Tensor) -> float | Tensor:
        """Give the smallest bound of inputs that share something with a place."""
        place = Place(x)
        first, *others = [
            bound(own.of(x))
            for own, bound in self.wishes
            if own.covers(place) or place.covers(own)
        ]
        # Without data nobody knows which is smaller, nor does it matter.
        compared = others and has_contents(x)
        return min([first, *others], key=float) if compared else first


class _Storage:
    """What is known of one storage while it lives."""

    __slots__ = ("copies", "counter", "is_kept", "left", "own", "saved", "wanted")

    def __init__(self, x: Tensor, known: dict[int, _Storage]) -> None:
        storage = x.untyped_storage()
        key = storage_key(storage)
        self.counter = _counter_of(x)

        def freed(_: Any) -> None:
            known.pop(key, None)

        self.own = weakref.ref(storage, freed)
        self.saved: list[weakref.ref[_Saved]] = []
        self.copies: list[weakref.ref[_Copy]] = []
        #: Versions and places that no copy made smaller, which smaller bounds cannot.
        self.left: list[tuple[int, Place]] = []
        #: Registrations by the version of the tensor.
        self.wanted: dict[int, Registration] = {}
        #: Whether a custom function saved a part of it. The function keeps the storage
        #: alive, so that a compressed copy would be additional memory.
        self.is_kept = False

    def copy_of(self, x: Tensor) -> _Copy | None:
        """Give a copy that has the contents of a tensor, if there is one."""
        for reference in self.copies:
            copy = reference()
            if copy and copy.version == x._version and copy.place.covers(Place(x)):
                return copy
        return None

    def attach(self, copy: _Copy) -> None:
        """Let all that autograd saved of a copy's contents refer to the copy."""
        for reference in self.saved:
            saved = reference()
            if saved is None or saved.copy is not None or saved.version != copy.version:
                continue
            if copy.place.covers(Place(saved.own)):
                saved.refer_to(copy)


class SavedActivations:
    """Pack and unpack what autograd saves, for saved-tensor hooks.

    Parameters
    ----------
    encoded : callable
        Called for each compressed tensor with the layer that registered it, the tensor
        and its compressed form.
    assumed_bits : mapping of str to float
        By layer, of a value of which there is no data.
    """

    def __init__(
        self,
        encoded: Callable[[str, Tensor, Compressed], None],
        assumed_bits: Mapping[str, float],
    ) -> None:
        self._encoded, self._assumed_bits = encoded, assumed_bits
        self._storages: dict[int, _Storage] = {}

    def register(self, x: Tensor, layer: str, bound: Bound) -> None:
        """Have a tensor compressed, by whatever it was or will be saved.

        Parameters
        ----------
        x : torch.Tensor
            The input of a layer.
        layer : str
            The layer's name.
        bound : callable
            From the tensor to its absolute error bound. The smallest of several holds
            for what layers share.
        """
        storage = self._of(x)
        if storage is None:
            return
        wanted = storage.wanted.setdefault(x._version, Registration(layer))
        if not wanted.add(Place(x), bound) or not has_contents(x):
            return
        copy = storage.copy_of(x)
        if copy and float(bound(x)) < float(copy.compressed.error_bound):
            copy.compressed = self._encode(copy.place.of(x), wanted)

    def pack(self, x: Tensor) -> _Saved:
        """Take what autograd wants to keep."""
        saved = _Saved(x, x._version)
        if not _may_be_compressed(x):
            return saved
        storage = self._of(x)
        if storage is None or storage.is_kept:
            return saved
        storage.saved.append(weakref.ref(saved))
        wanted = storage.wanted.get(saved.version)
        if wanted is not None and wanted.covers(Place(x)):
            self._compress(storage, x, wanted)
        return saved

    def keep(self, x: Tensor) -> None:
        """Leave a tensor as it is, whatever saves it from now on."""
        if _may_be_compressed(x) and (storage := self._of(x)) is not None:
            storage.is_kept = True

    def unpack(self, saved: _Saved) -> Tensor:
        """Give autograd what it kept, or what the copy of it holds.

        Raises
        ------
        RuntimeError
            If the tensor was changed in place since.
        """
        if saved.own._version != saved.version:
            raise RuntimeError(_changed(saved))
        if saved.copy is None:
            return saved.own
        assert saved.place is not None
        return saved.copy.place.part_in(decode(saved.copy.compressed), saved.place)

    def forget(self) -> None:
        """Forget the storages of a forward pass that has ended."""
        self._storages.clear()

    def _of(self, x: Tensor) -> _Storage | None:
        """Give what is known of a tensor's storage; None if nothing may be shared.

        Its negation may wait to be done, and ``x.data`` counts changes for itself.
        """
        if x.is_neg() or x.is_inference():
            return None
        key = storage_key(x)
        found = self._storages.get(key)
        if found is None:
            found = self._storages[key] = _Storage(x, self._storages)
        return found if _share_counter(found.counter, x) else None

    def _compress(self, storage: _Storage, x: Tensor, wanted: Registration) -> None:
        copy = storage.copy_of(x)
        if copy is None:
            place, version = Place(x), x._version
            if any(v == version and own.covers(place) for v, own in storage.left):
                return
            compressed = self._encode(x, wanted)
            if compressed.form is Form.RAW:
                # Kept by autograd as it is.
                storage.left.append((version, place))
                return
            copy = _Copy(compressed, place, version)
            storage.copies.append(weakref.ref(copy))
        storage.attach(copy)

    def _encode(self, x: Tensor, wanted: Registration) -> Compressed:
        bits = self._assumed_bits.get(wanted.layer, ASSUMED_BITS)
        with torch.no_grad():
            compressed = encode(x, wanted.error_bound(x), assumed_bits=bits)
        self._encoded(wanted.layer, x, compressed)
        return compressed


def _counter_of(x: Tensor) -> Tensor:
    """Give an empty tensor that shares the version counter."""
    counter = x.detach()
    counter.data = x.new_empty(0)
    return counter


def _share_counter(a: Tensor, b: Tensor) -> bool:
    """Whether changes of one tensor in place are counted as changes of the other."""
    before, other = a._version, b._version
    torch.autograd.graph.increment_version(a)
    shared = b._version != other
    set_version(a, before)
    return shared


def _may_be_compressed(x: Tensor) -> bool:
    """Whether a tensor that is saved now can be a registered one."""
    if not x.is_floating_point() or isinstance(x, torch.nn.Parameter):
        return False
    return x.layout is torch.strided and has_storage(x)


def _changed(saved: _Saved) -> str:
    shape = list(saved.own.shape if saved.place is None else saved.place.shape)
    return (
        "A tensor that autograd saved for the backward pass was changed in place "
        f"afterwards: {shape} {saved.own.dtype} is at version {saved.own._version}, but "
        f"was saved at version {saved.version}. Write to a copy, or use inplace=False "
        "in the layer that follows."
    )


#: Values of a channel of an utterance. Of fewer there is little to save, and an error is
#: averaged over few: batch normalisation of pooled statistics would hand it down enlarged.
SMALLEST_MAP = 16


@dataclass(frozen=True)
class LayerRecord:
    """What came of a layer's input when it was last compressed.

    Attributes
    ----------
    values : int
        How many there were.
    original_bytes, kept_bytes : int
        Before and after.
    error_bound : float
        Absolute.
    form : str
        How it was packed: "sparse", "dense" or "raw".
    reason : str
        Why it was left as it is, if it was.
    """

    values: int
    original_bytes: int
    kept_bytes: int
    error_bound: float
    form: str
    reason: str

    @property
    def ratio(self) -> float:
        """How many times smaller it became."""
        return self.original_bytes / max(1, self.kept_bytes)

    @property
    def bits(self) -> float:
        """How many a value takes."""
        return 8 * self.kept_bytes / max(1, self.values)


class ActivationCompression:
    """Keep inputs of convolutions and batch normalisations compressed for the backward.

    Parameters
    ----------
    convolutions : Rule or None
        Chooses the error bounds of convolutions' inputs; None for 1e-3 of the range.
    normalisations : Rule or None
        Chooses those of batch normalisations' inputs; None for 3e-2 of the channels'
        deviation.

    Raises
    ------
    ValueError
        If what is given is no rule.

    Attributes
    ----------
    rules : dict of str to Rule
        Of "convolution" and "normalisation"; another one holds from the next pass on.
    records : dict of str to LayerRecord
        By layer, from the last forward pass that compressed. An input that several
        layers share is that of the first.
    nonfinite_count : int
        How often a tensor was left as it is because it held NaN or infinity.
    assumed_bits : dict of str to float
        By layer, what a value is taken to need where there are no data, on meta.

    Examples
    --------
    >>> network = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    >>> compression = ActivationCompression()
    >>> with compression.during(network):
    ...     y = network(torch.randn(4, 1, 40, 50))
    >>> y.sum().backward()
    >>> sorted(compression.records)
    ['0', '1']
    """

    def __init__(
        self, *, convolutions: Rule | None = None, normalisations: Rule | None = None
    ) -> None:
        self.rules: dict[Kind, Rule] = {
            Kind.CONVOLUTION: RangeBound(1e-3),
            Kind.NORMALISATION: DeviationBound(3e-2),
        }
        given = {Kind.CONVOLUTION: convolutions, Kind.NORMALISATION: normalisations}
        self.rules.update({k: rule for k, rule in given.items() if rule is not None})
        self._check_rules()
        self.records: dict[str, LayerRecord] = {}
        self.nonfinite_count = 0
        self.assumed_bits: dict[str, float] = {}

    @contextlib.contextmanager
    def during(
        self, network: nn.Module, *, everywhere: bool = True, wanted: bool = True
    ) -> Iterator[None]:
        """Compress what is saved in this context, which is around a forward pass.

        Nothing is done in evaluation, without gradients and in a backward pass,
        where activations are computed again and soon needed.

        Parameters
        ----------
        network : nn.Module
            What runs; its layers are named after it.
        everywhere : bool
            False to compress inside ``registering`` only.
        wanted : bool
            False to do nothing.
        """
        if not wanted or _passes.under_way or not _trains(network):
            # Inside another network's pass its rules hold.
            with registering() if wanted and everywhere else contextlib.nullcontext():
                yield
            return
        self._check_rules()
        forward = _Pass(self, network, everywhere)
        self.records.clear()
        _passes.under_way.append(forward)
        try:
            with (
                saved_tensors_hooks(forward.saved.pack, forward.saved.unpack),
                forward,
                _saving_watched,
            ):
                yield
        finally:
            _passes.under_way.pop()
            forward.saved.forget()

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Let rules that look at momentum follow the optimizer of the training.

        Parameters
        ----------
        optimizer : torch.optim.Optimizer
            That trains the network.
        """
        for rule in self.rules.values():
            rule.follow(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Give what the rules have to keep with a run."""
        return {kind.value: rule.state_dict() for kind, rule in self.rules.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what ``state_dict`` gave.

        Raises
        ------
        ValueError
            If it is that of other rules.
        """
        for kind, rule in self.rules.items():
            rule.load_state_dict(state[kind.value])

    def note(self, layer: str, x: Tensor, compressed: Compressed) -> None:
        """Keep a record of what was compressed."""
        self.nonfinite_count += compressed.reason is Reason.NOT_FINITE
        raw = compressed.form is Form.RAW
        size = x.numel() * x.element_size()
        self.records[layer] = LayerRecord(
            x.numel(),
            size,
            size if raw else compressed.nbytes,
            float(compressed.error_bound),
            compressed.form.value,
            compressed.reason.value if compressed.reason else "",
        )

    def _check_rules(self) -> None:
        if self.rules.keys() != set(Kind):
            raise ValueError(
                f"rules has {sorted(map(str, self.rules))}; it must have one of "
                f"{' and one of '.join(repr(kind.value) for kind in Kind)}."
            )
        for kind, rule in self.rules.items():
            if not isinstance(rule, Rule):
                raise ValueError(
                    f"The rule of {Kind(kind).value}s is {rule!r}; give one of "
                    "speechbrain_rev.compression, such as RangeBound(1e-3), or None for "
                    "the default."
                )


class _Pass(Watching):
    """A forward pass whose layers are noticed."""

    def __init__(
        self, compression: ActivationCompression, network: nn.Module, registers: bool
    ) -> None:
        super().__init__()
        self.compression, self.registers = compression, registers
        self.saved = SavedActivations(compression.note, compression.assumed_bits)
        self._names = names_of_layers(network)

    def before(self, kind: Kind, x: Tensor, weight: Tensor | None) -> None:
        """Register a layer's input."""
        if not self._notices(x):
            return
        layer = name_of(self._names, kind, x, weight)
        bound = self.compression.rules[kind].bound_for(layer)
        self.saved.register(x, layer, bound)

    def after(self, kind: Kind, x: Tensor, weight: Tensor | None, y: Tensor) -> None:
        """Call the rule, which may want the gradient of the output."""
        if self._notices(x):
            layer = name_of(self._names, kind, x, weight)
            self.compression.rules[kind].called(layer, x, weight, y)

    def _notices(self, x: Tensor) -> bool:
        is_map = len(x) > 0 and x.shape[2:].numel() >= SMALLEST_MAP
        return self.registers and not _passes.paused and is_map


class _SavingWatched:
    """Wraps ``FunctionCtx.save_for_backward`` while any thread has a pass under way."""

    def __init__(self) -> None:
        self._lock, self._passes = threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            self._passes += 1
            if self._passes == 1:
                self._original = FunctionCtx.save_for_backward
                wrapper = _keep_what_it_saves(self._original)
                FunctionCtx.save_for_backward = wrapper  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._passes -= 1
            if self._passes == 0:
                FunctionCtx.save_for_backward = self._original  # type: ignore[method-assign]


def _keep_what_it_saves(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``save_for_backward``, to compress nothing that a custom function saves.

    A custom function may do anything with its saved tensors. One with
    ``saves_layer_input`` takes them rounded.
    """

    def save_for_backward(ctx: Any, *tensors: Tensor | None) -> None:
        original(ctx, *tensors)
        function = function_of(ctx)
        if not _passes.under_way or getattr(function, "saves_layer_input", False):
            return
        # Autograd records no function under no_grad: it keeps nothing, and has no
        # successor in the graph.
        if ctx.next_functions:
            for x in tensors:
                if isinstance(x, Tensor):
                    _passes.under_way[-1].saved.keep(x)

    return save_for_backward


_saving_watched = _SavingWatched()


class _Passes(threading.local):
    """Passes under way in this thread, outermost first."""

    def __init__(self) -> None:
        self.under_way: list[_Pass] = []
        #: Whether what is saved is dropped, and compressed in vain.
        self.paused = False


_passes = _Passes()


@contextlib.contextmanager
def registering() -> Iterator[None]:
    """Compress what layers take in this context, if a pass is under way around it."""
    if not _passes.under_way:
        yield
        return
    outer = _passes.under_way[-1]
    before, outer.registers = outer.registers, True
    try:
        yield
    finally:
        outer.registers = before


def is_compressing() -> bool:
    """Whether what a layer saves now may come back rounded.

    Second runs are in a backward pass, and hold what they save as it is.
    """
    registers = bool(_passes.under_way) and _passes.under_way[-1].registers
    return registers and not _passes.paused and not in_backward()


@contextlib.contextmanager
def not_compressing() -> Iterator[None]:
    """Compress nothing in this context, whose saved activations are dropped."""
    before, _passes.paused = _passes.paused, True
    try:
        yield
    finally:
        _passes.paused = before


def compress_activations(
    network: nn.Module,
    *,
    convolutions: Rule | None = None,
    normalisations: Rule | None = None,
) -> ActivationCompression:
    """Compress what any network saves, in each of its training steps from now on.

    Parameters
    ----------
    network : nn.Module
        Any network; its class, parameters and state dict stay as they are.
    convolutions, normalisations : Rule or None
        As for ``ActivationCompression``.

    Returns
    -------
    ActivationCompression
        The records of the layers.

    Raises
    ------
    ValueError
        If the network's activations are compressed already.

    Examples
    --------
    >>> network = nn.Sequential(nn.Conv1d(20, 8, 3), nn.BatchNorm1d(8), nn.ReLU())
    >>> compression = compress_activations(network)
    >>> network(torch.randn(4, 20, 300)).sum().backward()
    >>> [record.form for record in compression.records.values()]
    ['dense', 'dense']
    """
    if compression_in(network) is not None:
        raise ValueError(
            f"{type(network).__name__} compresses its activations already. Change the "
            "rules of its compression, rules['convolution'] and rules['normalisation']. "
            "Or call stop_compressing first; blocks that compress, by a plan, take another "
            "mode."
        )
    compression = ActivationCompression(
        convolutions=convolutions, normalisations=normalisations
    )
    network.forward = Compressing(network, compression)
    return compression


def compress_blocks(network: nn.Module, compression: ActivationCompression) -> None:
    """Compress what blocks in mode "compress" save, in one pass over the whole network.

    The pass is around the network, not around each block: what two blocks save of one
    tensor (the ReLU at the end of one, the convolution that begins the next) is then one
    copy.

    Parameters
    ----------
    network : nn.Module
        Any network; its class, parameters and state dict stay as they are.
    compression : ActivationCompression
        How to compress, and what is noted of the layers.

    Raises
    ------
    ValueError
        If all of the network is compressed already.

    Examples
    --------
    >>> from speechbrain_rev.reversible.wrapping import Mode, give_mode
    >>> layer = lambda: nn.Sequential(nn.Conv1d(8, 8, 3), nn.ReLU())
    >>> network, compression = nn.Sequential(layer(), layer()), ActivationCompression()
    >>> compress_blocks(network, compression)
    >>> give_mode(network, Mode.COMPRESS, "1")
    >>> network(torch.randn(4, 8, 50)).sum().backward()
    >>> list(compression.records)
    ['1.0']
    """
    refuse_what_is_compressed(network)
    if compression_in(network) is not compression:
        stop_compressing_blocks(network)
        network.forward = Compressing(network, compression, everywhere=False)


def stop_compressing_blocks(network: nn.Module) -> None:
    """End ``compress_blocks``; ``compress_activations`` stays in force."""
    compressing = _compressing(network)
    if compressing is not None and not compressing.everywhere:
        compressing.leave()


def stop_compressing(network: nn.Module) -> None:
    """End ``compress_activations``: the network stores again what it saves.

    Parameters
    ----------
    network : nn.Module
        That ``compress_activations`` was called with.

    Raises
    ------
    ValueError
        If it was not, or the network's ``forward`` was replaced since.

    Examples
    --------
    >>> network = nn.Sequential(nn.Conv1d(20, 8, 3), nn.BatchNorm1d(8), nn.ReLU())
    >>> compression = compress_activations(network)
    >>> stop_compressing(network)
    >>> network(torch.randn(4, 20, 300)).sum().backward()
    >>> compression.records
    {}
    """
    compressing = _compressing(network)
    if compressing is None or not compressing.everywhere:
        raise ValueError(
            f"compress_activations is not in force for this {type(network).__name__}: "
            "give the network that it was called with, before its forward is replaced. "
            "Blocks that compress, by a plan, take another mode instead."
        )
    compressing.leave()


def compression_in(network: nn.Module) -> ActivationCompression | None:
    """Give what compresses a network's blocks or all of it, if there is any."""
    compressing = _compressing(network)
    return None if compressing is None else compressing.compression


def refuse_what_is_compressed(network: nn.Module) -> None:
    """Refuse a network all of which is compressed: no block is left to be chosen.

    Raises
    ------
    ValueError
        If ``compress_activations`` was called with it.
    """
    compressing = _compressing(network)
    if compressing is not None and compressing.everywhere:
        raise ValueError(
            f"{type(network).__name__} has all its activations compressed, by "
            "compress_activations, in whatever mode its blocks are: none can be given mode "
            "'compress' beside others, nor can it be planned. Call stop_compressing first."
        )


class Compressing:
    """Runs a network inside a pass; no hook of torch's is left by a KeyboardInterrupt.

    Parameters
    ----------
    network : nn.Module
        What is run instead of its ``forward``.
    compression : ActivationCompression
        How to compress.
    everywhere : bool
        False to compress inside ``registering`` only.
    """

    def __init__(
        self,
        network: nn.Module,
        compression: ActivationCompression,
        *,
        everywhere: bool = True,
    ) -> None:
        self.network, self.compression = network, compression
        self.everywhere = everywhere
        #: A forward that someone gave this very network before.
        self.own = vars(network).get("forward")

    def leave(self) -> None:
        """Give the network the ``forward`` that it had."""
        del self.network.forward
        if self.own is not None:
            self.network.forward = self.own

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        """Run the network."""
        with self.compression.during(self.network, everywhere=self.everywhere):
            if self.own is not None:
                return self.own(*inputs, **keywords)
            return type(self.network).forward(self.network, *inputs, **keywords)


def _compressing(network: nn.Module) -> Compressing | None:
    forward = vars(network).get("forward")
    return forward if isinstance(forward, Compressing) else None


def _trains(network: nn.Module) -> bool:
    backward = in_backward()
    trains = network.training and torch.is_grad_enabled()
    return trains and not backward and not _passes.paused
