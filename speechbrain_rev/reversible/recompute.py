"""Activations computed again instead of stored.

A module's first run builds autograd's graph as ever, but what operations save for the
backward pass is dropped. When the backward pass asks for it, the module runs again, alike,
and what is saved this time takes its place. So whatever comes of the first run, outputs of
any kind, maps that a hook caught or that a module kept, has the gradient of plain autograd.

A module that joins the one before it does not keep its input either: that one runs again
first and makes it. So a run of modules keeps the input of its first one, as in Chen et al.,
"Training deep nets with sublinear memory cost", and each still runs twice.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import (
    get_gradient_edge,
    saved_tensors_hooks,
)
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from speechbrain_rev.compression.activations import not_compressing
from speechbrain_rev.reversible.comparison import (
    Comparison,
    begin_comparison,
    checks_of,
    in_words,
)
from speechbrain_rev.reversible.hooks import Held, report_hooks
from speechbrain_rev.reversible.monitor import Checks, Verify
from speechbrain_rev.reversible.replay import (
    Place,
    RunRecord,
    apart,
    looks_of,
    naming_transforms,
    places_of,
    recorded,
    refuse_transforms,
    repeated,
    running,
    stand_in,
)
from speechbrain_rev.reversible.state import (
    is_ours,
    modules_of,
    version_of,
)
from speechbrain_rev.torch_private import (
    graph_is_kept,
    is_sharded,
    parametrized_weights_are_kept,
    storage_key,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)


class Parameters:
    """The parameters of modules that run one after the other in the backward pass.

    A parameter of several runs is listed for each: autograd then adds its gradients up
    one by one in the order of the runs, as it does where activations are stored.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self.tensors: list[Tensor] = []
        self.places: list[dict[Place, int]] = []
        for module in modules:
            positions: dict[int, int] = {}
            places: dict[Place, int] = {}
            for place, tensor in places_of(module):
                if id(tensor) not in positions:
                    positions[id(tensor)] = len(self.tensors)
                    self.tensors.append(tensor)
                places[place] = positions[id(tensor)]
            self.places.append(places)
        self.looks = looks_of(self.tensors)


class Gradients:
    """Detached leaves in the parameters' place, and their gradients, by run."""

    def __init__(self, parameters: Parameters, saved: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._leaves = [*map(stand_in, saved, parameters.looks)]
        self.values: list[Tensor | None] = [None] * len(saved)

    def leaves(self, run: int) -> dict[Place, Tensor]:
        """Give the leaves of one run's parameters by place."""
        places = self._parameters.places[run]
        return {place: self._leaves[i] for place, i in places.items()}

    def keep(self, run: int, place: Place, grad: Tensor | None) -> None:
        """Keep a gradient of a run's parameter that was computed without a graph."""
        self.values[self._parameters.places[run][place]] = grad

    def backward(
        self, run: int, roots: Sequence[Root], inputs: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Keep the gradients of a run's parameters; return those of its inputs."""
        own = sorted(set(self._parameters.places[run].values()))
        used = [i for i in own if self._leaves[i].requires_grad]
        given = [root for root in roots if root.edge is not None]
        if not given:
            return [None] * len(inputs)
        leaves = [*inputs, *(self._leaves[i] for i in used)]
        _refuse_other_leaves(self._parameters.modules[run], given, leaves)
        slopes: Sequence[Tensor | None] = torch.autograd.grad(
            [root.edge for root in given],  # type: ignore[arg-type]
            leaves,
            [root.grad for root in given],
            allow_unused=True,
        )
        storages = {storage_key(root.grad) for root in given}
        for i, grad in zip(used, slopes[len(inputs) :], strict=True):
            if grad is None:
                continue
            dense = grad.layout is torch.strided
            if dense and storage_key(grad) in storages:
                # A gradient that was handed in is added to later; this must not change with it.
                grad = grad.clone()
            self.values[i] = grad
        return list(slopes[: len(inputs)])


class Root:
    """Where a backward pass begins: a tensor's place in the graph, not the tensor.

    Parameters
    ----------
    y : torch.Tensor
        The tensor; without a graph it begins nothing.
    grad : torch.Tensor or None
        Its gradient, in any dtype; None to give it later by ``receive``.
    """

    def __init__(self, y: Tensor, grad: Tensor | None = None) -> None:
        self.edge = get_gradient_edge(y) if y.requires_grad else None
        self._dtype = y.dtype
        if grad is not None:
            self.receive(grad)

    def receive(self, grad: Tensor) -> None:
        """Take the gradient."""
        self.grad = grad.to(self._dtype)


def _refuse_other_leaves(
    module: nn.Module, roots: Sequence[Root], leaves: Sequence[Tensor]
) -> None:
    """Refuse a graph that reaches tensors whose gradient would be lost."""
    known = {id(leaf) for leaf in leaves}
    nodes = [root.edge.node for root in roots if root.edge is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in known:
            raise RuntimeError(
                f"{type(module).__name__} uses a tensor of shape "
                f"{list(variable.shape)} that needs a gradient and is neither its "
                "input nor its registered parameter. Register it, pass it in, or use "
                "mode='store'. (Replicas of DataParallel have none registered: use "
                "DistributedDataParallel.)"
            )
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)


_NO_DOUBLE_BACKWARD = (
    "Activations that were not stored cannot be differentiated twice "
    "(create_graph=True was asked for). Use mode='store' for this network."
)


def refuse_double_backward(*grads: Tensor | None) -> None:
    """Refuse to differentiate what has no graph of its own, and vectorised gradients."""
    if torch.is_grad_enabled():
        raise RuntimeError(_NO_DOUBLE_BACKWARD)
    for grad in grads:
        if grad is not None and grad.layout is torch.strided:
            try:
                grad.untyped_storage()
            except NotImplementedError as error:
                raise RuntimeError(
                    "Reconstructed blocks take one gradient at a time: call "
                    "torch.autograd.grad without is_grads_batched, or use mode='store' or "
                    "'recompute' for this network."
                ) from error


class Recompute(nn.Module):
    """A module whose activations are computed again instead of being stored.

    Unlike ``torch.utils.checkpoint`` it updates running statistics, and whatever else the
    forward pass changes, once.

    Parameters
    ----------
    module : nn.Module
        Any module.
    verify : {"first", "raise", "warn"} or None
        What follows where the second run saves other values for the gradient than the
        first, see ``recompute_blocks``.
    verify_every : int
        Calls from one comparison to the next, after the first step.

    Examples
    --------
    >>> block = Recompute(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout()))
    >>> block(torch.randn(2, 4)).shape
    torch.Size([2, 8])
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        verify: Verify | None = "first",
        verify_every: int = 100,
    ) -> None:
        super().__init__()
        self.module = module
        self.checks = Checks(verify, verify_every)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Run the module.

        Parameters
        ----------
        *inputs, **keywords
            The module's arguments.

        Returns
        -------
        outputs
            What the module returns.
        """
        if trains(self):
            checks = self.checks.begin()
            return recompute_call(
                self.module, self.module, inputs, keywords, checks=checks
            )
        return self.module(*inputs, **keywords)

    def __prepare_scriptable__(self) -> nn.Module:
        """Refuse ``torch.jit.script``, which would leave the recomputation out."""
        raise RuntimeError(
            "torch.jit.script would store what Recompute computes again. Script "
            "the module within it."
        )


def trains(module: nn.Module) -> bool:
    """Whether a module's call is part of a training step.

    The first run of a reconstructed function is, though it has no graph.
    """
    return module.training and (torch.is_grad_enabled() or running())


def recompute(module: nn.Module, *inputs: Any, **keywords: Any) -> Any:
    """Run a module and keep its inputs only; it runs again in the backward pass.

    Parameters
    ----------
    module : nn.Module
        Any module. Random numbers, autocast, batch statistics, weights, buffers and plain
        attributes of the second run are those of the first; all are updated once.
    *inputs, **keywords
        Its arguments.

    Returns
    -------
    outputs
        What the module returns.

    Raises
    ------
    RuntimeError
        If the module wrote into its input, cannot run again, or computed something else
        in its second run.
    """
    checks = checks_of(module).begin()
    return recompute_call(
        module, module, inputs, keywords, shares_casts=False, checks=checks
    )


def recompute_call(
    function: Callable[..., Any],
    owner: nn.Module,
    inputs: tuple[Any, ...],
    keywords: dict[str, Any],
    *,
    joins: bool = False,
    shares_casts: bool = True,
    checks: Checks | None = None,
    name: str | None = None,
) -> Any:
    """Recompute a function of a module, as ``recompute`` does a module of ours.

    Parameters
    ----------
    function : callable
        What runs twice: the module, or its ``forward`` without the hooks on it.
    owner : nn.Module
        The module.
    inputs, keywords
        The function's arguments.
    joins : bool
        Whether it runs again in one go with what was recomputed just before, and keeps
        none of its inputs that were made there. If none was, ``JoinWarning`` names it, once.
    shares_casts : bool
        Whether autocast casts its weights as in plain torch: once for all who use them,
        who add up its gradient in half precision. In chains each use has its own cast.
    checks : Checks or None
        Of the step that has begun; None to compare nothing.
    name : str or None
        Where the module is, for messages.

    Returns
    -------
    outputs
        What the function returns.
    """
    if not torch.is_grad_enabled():
        return function(*inputs, **keywords)
    if torch.compiler.is_compiling():
        eager = torch.compiler.disable(recompute_call)
        return eager(
            function, owner, inputs, keywords,
            joins=joins, shares_casts=shares_casts, checks=checks, name=name,
        )  # fmt: skip
    modules = modules_of(owner)
    refuse_what_cannot_run_again(modules)
    report_hooks(modules, "A module is recomputed", within=function is not owner)
    run = _Run(function, owner, inputs, keywords, joins, name)
    return run.first(modules, shares_casts, checks)


def refuse_what_cannot_run_again(modules: Sequence[nn.Module]) -> None:
    """Refuse a module, which those within it follow, whose second run would not be like the first.

    Raises
    ------
    RuntimeError
        If FSDP shards the parameters, which are gathered around each module's forward
        pass only; if the first forward pass makes parameters; if the module is scripted;
        inside ``parametrize.cached()``, which would hand weights made without a graph to
        the second run; or under transforms of ``torch.func``.
    """
    special = [
        p
        for m in modules
        for p in m._parameters.values()
        if p is not None and type(p) is not nn.Parameter
    ]
    if any(map(is_lazy, special)):
        raise RuntimeError(
            f"{type(modules[0]).__name__} has parameters that its first forward pass makes. "
            "Use it once in evaluation before it trains."
        )
    if any(map(is_sharded, modules)) or any(hasattr(p, "device_mesh") for p in special):
        raise RuntimeError(
            "Reversible and recomputed blocks cannot run a second time on parameters "
            "sharded by FSDP. Use DistributedDataParallel, or mode='store'."
        )
    if any(issubclass(kind, torch.jit.ScriptModule) for kind in {*map(type, modules)}):
        raise RuntimeError(
            "A scripted module cannot run a second time on other leaves. Use the "
            "module before torch.jit.script, or mode='store'."
        )
    if parametrized_weights_are_kept() and any(
        map(parametrize.is_parametrized, modules)
    ):
        raise RuntimeError(
            "Inside parametrize.cached() the second run would get weights without a "
            "graph. Leave the context, or use mode='store'."
        )
    refuse_transforms()


class _SavedAgain(Held):
    """What an operation of the first run saved, and the second run makes again."""

    __slots__ = ("_form", "_pin", "_run")

    def __init__(self, run: _Run, x: Tensor) -> None:
        self._name, self._value, self._version = run.name, None, 0
        self._run: _Run | None = run
        self._form = x.shape, x.dtype, x.device

    def put_again(self, held: Held) -> None:
        """Hold what the second run saved in this place."""
        x = held._value
        assert x is not None
        form = x.shape, x.dtype, x.device
        if form != self._form:
            assert self._run is not None
            how = f"{_in_words(*form)} for {_in_words(*self._form)}"
            raise RuntimeError(self._run.differs(how))
        self._value, self._version = x, held._version

    def get(self) -> Tensor:
        """Give the value; as it was dropped, the module runs again for it."""
        if self._value is None:
            assert self._run is not None
            self._run.again()
        x = super().get()
        if self._run is not None and self._run.complete and graph_is_kept():
            self.put(None)  # else a kept graph would be a stored one
        return x

    def part(self, pin: _Pin) -> None:
        """Forget the run, which is not needed for the value any more."""
        self._run, self._pin = None, pin


class _Pin:
    """Held as long as values of a second run are: its flags are in force till then."""


class _ThatFar(BaseException):
    """Ends a run that is needed for what was saved up to here."""


def named(module: nn.Module, name: str | None) -> str:
    """Call a module by its class, and by where it is if that is known."""
    kind = type(module).__name__
    return kind if name is None else f"{name} ({kind})"


def _in_words(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> str:
    return f"{list(shape)} {dtype} {device}"


class JoinWarning(UserWarning):
    """A module was to run again with the one before it, and had to keep its input."""


#: Modules that were to join and kept their input, which was reported.
_alone: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def kept_its_input(module: nn.Module) -> bool:
    """Whether a module was to join the one before it and, ever since, could not."""
    return module in _alone


#: Has ``run``, a reference to what was recomputed last in each thread.
_latest = threading.local()


class _Run:
    """A call of a module that keeps its inputs and what a second run must repeat."""

    def __init__(
        self,
        function: Callable[..., Any],
        owner: nn.Module,
        inputs: tuple[Any, ...],
        keywords: dict[str, Any],
        joins: bool,
        name: str | None,
    ) -> None:
        self._function, self._owner, self._joins = function, owner, joins
        #: The run that makes inputs which are not kept, and their places there.
        self._before: _Run | None = None
        self._made: list[int | None] = []
        #: Tensors that it made and returned, by place, and their versions.
        self._returned: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        #: The module's name in messages.
        self.name = named(owner, name)
        self._given = inputs, keywords
        self._saved: list[weakref.ref[_SavedAgain]] = []
        #: Whether the first run holds what it saves.
        self._holds = False
        #: Whether the first run has ended.
        self.complete = False

    def differs(self, how: str) -> str:
        """Say that the second run was another one."""
        return in_words(self.name, how)

    def first(
        self,
        modules: Sequence[nn.Module],
        shares_casts: bool,
        checks: Checks | None,
    ) -> Any:
        """Run the module; what its operations save is dropped at once."""
        (inputs, keywords), owner = self._given, self._owner
        self._is_ours = is_ours(modules)
        leaves = tree_leaves(self._given)
        tensors = [*{id(x): x for x in leaves if isinstance(x, Tensor)}.values()]
        # Containers of their own, for the module may change those it is given.
        places = {id(x): place for place, x in enumerate(tensors)}
        self._leaves = [places.get(id(x), x) for x in leaves]
        self._are_tensors = [isinstance(x, Tensor) for x in leaves]
        self._structure = tree_flatten(self._given)[1]
        del self._given
        self._tensors, self._versions = tensors, [*map(version_of, tensors)]
        self._join(tensors)
        self._comparison = begin_comparison(checks, self.name)
        runs = [self]

        def save(x: Tensor) -> _SavedAgain:
            (run,) = runs
            saved = _SavedAgain(run, x)
            run._saved.append(weakref.ref(saved))
            if run._comparison is not None:
                run._comparison.note(x)
            if run._holds:
                saved.put(x.detach())
            return saved

        try:
            with (
                recorded(
                    modules, tensors, shares_casts=shares_casts
                ) as self._recording,
                not_compressing(),
                naming_transforms(self.name),
                saved_tensors_hooks(save, lambda saved: saved.get()),
            ):
                outputs = self._function(*inputs, **keywords)
        finally:
            self.complete = True
            if self._holds:
                for reference in self._saved:
                    if (saved := reference()) is not None:
                        saved.put(None)
            # Saved tensors would keep the run, through its hooks.
            runs.clear()
        self._refuse_written_inputs()
        del self._tensors
        if self._saved:
            if self._joins and self._before is None and owner not in _alone:
                _report_alone(owner)
            made = _tensors_of(outputs)
            self._outputs = len(made)
            parameters = self._list_parameters(tensors)
            pairs = zip(tensors, self._made, strict=True)
            own = [x for x, place in pairs if place is None]
            # Hooks around this module see its inputs; their versions are compared.
            given = *own, *parameters
            self._kept = _Keep.apply(_ANCHOR, *given)
            # A tensor that goes through it as it is is kept by whoever reads it.
            self._returned = {
                place: (weakref.ref(y), version_of(y))
                for place, y in enumerate(made)
                if not any(y is x for x in tensors)
            }
            _latest.run = weakref.ref(self)
        return outputs

    def _join(self, tensors: Sequence[Tensor]) -> None:
        """Find which inputs the latest run returned, as they still are, if it joins."""
        self._made = [None] * len(tensors)
        self._need_grad = [x.requires_grad for x in tensors]
        before = getattr(_latest, "run", lambda: None)() if self._joins else None
        returned = {} if before is None else before._returned
        for i, x in enumerate(tensors):
            for place, (y, version) in returned.items():
                if y() is x and version_of(x) == version:
                    self._made[i], self._before = place, before

    def _refuse_written_inputs(self) -> None:
        if [*map(version_of, self._tensors)] != self._versions:
            raise RuntimeError(
                f"{self.name} wrote into its input and cannot run again. Use "
                "inplace=False in its first layer; outside a coupling mode='store' "
                "works, too, and so does leaving it out of recompute_blocks."
            )

    def _list_parameters(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Note where parameters are, and which tensors a second run replaces."""
        listed = [*places_of(self._owner)]
        parameters = [p for _, p in listed]
        self._first_ids = [*map(id, tensors)], [*map(id, parameters)]
        self._looks = looks_of(parameters)
        self._places = [place for place, _ in listed]
        return parameters

    def again(self) -> None:
        """Run the module again for what was dropped."""
        if self.complete:
            self.second()
        else:
            self._hold()

    def _hold(self) -> None:
        """Make again what was saved so far, for a gradient that the module takes itself.

        From here on the first run holds what it saves, till it ends.
        """
        self._refuse_written_inputs()
        self._holds = True
        kept = *self._tensors, *self._list_parameters(self._tensors)
        with apart(self._recording) as recording:
            self._run_again(kept, recording, until=len(self._saved))

    def second(self) -> None:
        """Run the module again, those that it joins first."""
        runs = [self]
        while runs[-1]._before is not None:
            runs.append(runs[-1]._before)
        made: list[Tensor] = []
        while runs:
            run = runs.pop()
            made = run._run_on(made, is_last=not runs)

    def _run_on(self, made: Sequence[Tensor], *, is_last: bool) -> list[Tensor]:
        """Run the module on what the run before made; keep what its operations save.

        If it is ours and the last one, it stops there: nobody needs its last convolution.
        """
        own = iter(self._kept.grad_fn.saved_tensors)
        wanted = zip(self._made, self._need_grad, strict=True)
        inputs = [
            next(own) if place is None else made[place].requires_grad_(needs_grad)
            for place, needs_grad in wanted
        ]
        kept = *inputs, *own
        # Operations that need the values are computed under the flags of the runs, too.
        pin = _Pin()
        release = self._recording.flags.hold(pin)
        until = len(self._saved) if is_last and self._is_ours else None
        try:
            outputs, count = self._run_again(
                kept, self._recording, until, self._comparison
            )
        except BaseException:
            release()
            raise
        if count != len(self._saved):
            raise RuntimeError(self.differs("fewer operations"))
        if len(outputs) != self._outputs and until is None:
            raise RuntimeError(
                self.differs(f"{len(outputs)} tensors returned for {self._outputs}")
            )
        if self._comparison is not None:
            self._comparison.judge()
        if not graph_is_kept():
            # Each has its value. Who keeps a map keeps no module and no earlier map.
            for reference in self._saved:
                again = reference()
                if again is not None:
                    again.part(pin)
        else:
            self._pin = pin
        return outputs

    def _run_again(
        self,
        kept: Sequence[Tensor],
        recording: RunRecord,
        until: int | None = None,
        comparison: Comparison | None = None,
    ) -> tuple[list[Tensor], int]:
        """Run on inputs and parameters as in the first run, till so much was saved; count it."""
        if until == 0:
            return [], 0
        of_inputs, of_parameters = self._first_ids
        parameters = kept[len(kept) - len(of_parameters) :]
        own: dict[int, Tensor] = {}
        for i, p, look in zip(of_parameters, parameters, self._looks, strict=True):
            if i not in own:
                own[i] = stand_in(p, look)
        leaves = {
            place: own[i] for place, i in zip(self._places, of_parameters, strict=True)
        }
        inputs = [
            own[i] if i in own else x.detach().requires_grad_(needs_grad)
            for i, x, needs_grad in zip(of_inputs, kept, self._need_grad, strict=False)
        ]
        leaves_again = (
            inputs[x] if is_tensor else x
            for x, is_tensor in zip(self._leaves, self._are_tensors, strict=True)
        )
        args, keywords = tree_unflatten(leaves_again, self._structure)
        count, saved, name = 0, self._saved, self.name

        def save(x: Tensor) -> Held:
            nonlocal count
            if count >= len(saved):
                raise RuntimeError(self.differs("more operations"))
            held = Held(name, x.detach())
            if (again := saved[count]()) is not None:
                again.put_again(held)
            if comparison is not None:
                comparison.note_again(count, x)
            count += 1
            if count == until:
                raise _ThatFar
            return held

        outputs: Any = ()
        with (
            contextlib.suppress(_ThatFar),
            repeated(self._owner, recording, leaves),
            saved_tensors_hooks(save, lambda saved: saved.get()),
        ):
            outputs = self._function(*args, **keywords)
        return [y.detach() for y in _tensors_of(outputs)], count


def _report_alone(module: nn.Module) -> None:
    """Warn once of a module that has none to join."""
    _alone.add(module)
    warnings.warn(
        f"{type(module).__name__} has mode 'join', but its input is not what a recomputed "
        "block returned just before, unchanged. It keeps its input, as in mode "
        "'recompute'. Give it that mode, or let the block before it recompute.",
        JoinWarning,
        stacklevel=2,
    )


class _Keep(torch.autograd.Function):
    """Keeps tensors as any operation saves them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.detach()


#: A tensor with a gradient, so that the operation is one of autograd.
_ANCHOR = torch.empty(0, requires_grad=True, dtype=torch.float32)


def _tensors_of(outputs: Any) -> list[Tensor]:
    return [x for x in tree_leaves(outputs) if isinstance(x, Tensor)]
