"""What autograd saves, with one compressed copy for each storage that is registered.

Saved-tensor hooks see every tensor that autograd keeps for the backward pass. What is
compressed is registered, never guessed: a layer's input, while the layer runs. Whatever
else saved the same storage (the ReLU that made it, a second convolution) shares the one
copy, so that the original is really freed; what nobody registered (weights, copies that
autocast made, statistics, integers, tensors of custom functions) stays as it is.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from speechbrain_rev.compression.bounds import Bound
from speechbrain_rev.compression.codec import (
    ASSUMED_BITS,
    decode,
    encode,
    has_contents,
)
from speechbrain_rev.compression.compressed import Compressed, Form

#: The frame in which custom functions save their tensors.
_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


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
        return dense and self.first <= other.first and other.last <= self.last

    def of(self, x: Tensor) -> Tensor:
        """View this place in the storage of a tensor."""
        return x.detach().as_strided(self.shape, self.strides, self.first)

    def within(self, x: Tensor, other: Place) -> Tensor:
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

    __slots__ = ("copies", "counter", "left", "own", "saved", "wanted")

    def __init__(self, x: Tensor, known: dict[int, _Storage]) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        self.counter = _counter_of(x)

        def freed(_: Any) -> None:
            known.pop(key, None)

        self.own = weakref.ref(storage, freed)
        self.saved: list[weakref.ref[_Saved]] = []
        self.copies: list[weakref.ref[_Copy]] = []
        #: Versions and places that no copy made smaller, which smaller bounds cannot.
        self.left: list[tuple[int, Place]] = []
        #: What was registered, by the version it had.
        self.wanted: dict[int, Registration] = {}

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
        Told of each tensor that was compressed: the layer that registered it, the
        tensor and what became of it.
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
        copies = [copy for ref in storage.copies if (copy := ref()) is not None]
        for copy in copies:
            if copy.version == x._version and copy.place.covers(Place(x)):
                if float(bound(x)) < float(copy.compressed.error_bound):
                    copy.compressed = self._encode(copy.place.of(x), wanted)
                return

    def pack(self, x: Tensor) -> _Saved:
        """Take what autograd wants to keep."""
        saved = _Saved(x, x._version)
        if not _may_be_compressed(x):
            return saved
        storage = self._of(x)
        if storage is None:
            return saved
        storage.saved.append(weakref.ref(saved))
        wanted = storage.wanted.get(saved.version)
        if wanted is not None and wanted.covers(Place(x)):
            self._compress(storage, x, wanted)
        return saved

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
        return saved.copy.place.within(decode(saved.copy.compressed), saved.place)

    def forget(self) -> None:
        """Forget the storages of a forward pass that has ended."""
        self._storages.clear()

    def _of(self, x: Tensor) -> _Storage | None:
        """Give what is known of a tensor's storage; None if nothing may be shared.

        Its negation may wait to be done, and ``x.data`` counts changes for itself.
        """
        if x.is_neg() or x.is_inference():
            return None
        key = x.untyped_storage()._cdata
        found = self._storages.get(key)
        if found is None:
            found = self._storages[key] = _Storage(x, self._storages)
        return found if _share_counter(found.counter, x) else None

    def _compress(self, storage: _Storage, x: Tensor, wanted: Registration) -> None:
        place = Place(x)
        for reference in storage.copies:
            copy = reference()
            if copy and copy.version == x._version and copy.place.covers(place):
                break
        else:
            version = x._version
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
    torch._C._autograd._unsafe_set_version_counter((a,), (before,))
    return shared


def _may_be_compressed(x: Tensor) -> bool:
    """Whether a tensor that is saved now can be a registered one."""
    if not x.is_floating_point() or isinstance(x, torch.nn.Parameter):
        return False
    if x.layout is not torch.strided or not torch._C._has_storage(x):
        return False
    # Two frames up, past pack: what saves. A thread of autograd may have no such frame.
    frame = sys._getframe()
    for _ in range(2):
        if frame.f_back is None:
            return True
        frame = frame.f_back
    if frame.f_code is not _APPLY:
        return True
    # A custom function may do anything with what it saved, unless it says otherwise.
    return getattr(frame.f_locals.get("cls"), "saves_layer_input", False)


def _changed(saved: _Saved) -> str:
    shape = list(saved.own.shape if saved.place is None else saved.place.shape)
    return (
        "A tensor that autograd saved for the backward pass was changed in place "
        f"afterwards: {shape} {saved.own.dtype} is at version {saved.own._version}, but "
        f"was saved at version {saved.version}. Write to a copy, or use inplace=False "
        "in the layer that follows."
    )
