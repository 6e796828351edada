"""What is asked of torch beyond its public names: that it is there, and in one module."""

import ast
import inspect

import pytest
import torch
from torch import nn

from speechbrain_rev import torch_private
from tests.unit.test_public_names import PACKAGE

#: Attributes of tensors, modules and contexts that torch does not promise, as names or texts.
ATTRIBUTES = {
    "_cdata", "_compiled_call_impl", "_flat_weights", "_flat_weight_refs",
    "_forward_cls", "_is_fsdp_managed_module", "_is_param",
}  # fmt: skip


def private_names(tree):
    """List private names of torch that a module imports, reads or writes as a text."""
    imported = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            path = node.module.split(".")
            if any(part.startswith("_") for part in path):
                yield node.module
            yield from (a.name for a in node.names if a.name.startswith("_"))
            imported |= {a.asname or a.name for a in node.names}
        if isinstance(node, ast.Import):
            for each in node.names:
                path = each.name.split(".")
                if path[0] == "torch" and any(p.startswith("_") for p in path):
                    yield each.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in ATTRIBUTES:
            yield node.value
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            chain = ast.unparse(node)
            if node.attr.startswith("__"):
                continue
            if node.attr in ATTRIBUTES or (
                chain.partition(".")[0] in imported
                and not chain.startswith(("torch._foreach", "torch.ops."))
            ):
                yield chain


@pytest.mark.parametrize(
    "code",
    [
        "layer._compiled_call_impl", "vars(m).get('_is_fsdp_managed_module')",
        "from torch.nn.utils import parametrize\nparametrize._cache_enabled",
        "from torch import _C", "import torch._C", "import torch._dynamo as dynamo",
        "from torch.autograd import graph\ngraph._name", "torch._C._name",
    ],
)  # fmt: skip
def test_private_names_are_found(code):
    assert list(private_names(ast.parse(code)))


def test_private_names_of_torch_stand_in_one_module():
    named = {
        str(file.relative_to(PACKAGE)): set(private_names(ast.parse(file.read_text())))
        for file in PACKAGE.rglob("*.py")
        if file.name != "torch_private.py"
    }
    assert {file: names for file, names in named.items() if names} == {}
    own = set(private_names(ast.parse((PACKAGE / "torch_private.py").read_text())))
    assert len(own) > 5


def test_trees_are_taken_apart_and_put_together():
    tree = {"a": [1, (2, None)], "b": 3}
    leaves, structure = torch_private.tree_flatten(tree)
    assert torch_private.tree_leaves(tree) == leaves == [1, 2, None, 3]
    assert torch_private.tree_unflatten(leaves, structure) == tree
    assert torch_private.tree_map(str, [1, (2,)]) == ["1", ("2",)]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_views_share_a_storage_and_others_do_not(device):
    x, other = torch.empty(2, 3, device=device), torch.empty(2, 3, device=device)
    key = torch_private.storage_key(x)
    assert key == torch_private.storage_key(x[1:].t())
    assert key == torch_private.storage_key(x.untyped_storage())
    assert key != torch_private.storage_key(other)
    assert torch_private.has_storage(x)
    assert not torch_private.has_storage(torch.ones(2).to_sparse())


def test_fakes_and_dispatch_modes_are_known():
    assert not torch_private.is_fake(torch.ones(2))
    assert torch_private.dispatch_mode() is None
    with torch_private.FakeTensorMode() as mode:
        x = torch.ones(2)
        assert torch_private.is_fake(x)
        assert torch_private.dispatch_mode() is mode

    class Counting(torch_private.TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.seen += 1
            return function(*args, **(kwargs or {}))

    with Counting() as counting:
        torch.ones(2) + 1
        seen = counting.seen
        with torch_private.without_dispatch():
            torch.ones(2) + 1
    assert seen == counting.seen >= 2


def test_versions_are_set():
    x = torch.ones(2)
    x.add_(1)
    torch_private.set_version(x, 0)
    assert x._version == 0


def test_a_backward_pass_is_known_and_whether_its_graph_is_kept():
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x.sin()
    y.register_hook(
        lambda g: seen.append(
            (torch_private.in_backward(), torch_private.graph_is_kept())
        )
    )
    assert not torch_private.in_backward()
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert seen == [(True, True), (True, False)]


def test_transforms_are_known():
    seen = []

    def function(x):
        seen.append(torch_private.in_transform())
        return x.sum()

    torch.func.grad(function)(torch.ones(2))
    with torch.autograd.forward_ad.dual_level():
        function(torch.ones(2))
    function(torch.ones(2))
    assert seen == [True, True, False]


def test_the_innermost_hooks_of_saved_tensors_are_known():
    outer, inner = (abs, max), (min, sum)
    assert torch_private.saved_tensor_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(*outer):
        with torch.autograd.graph.saved_tensors_hooks(*inner):
            assert torch_private.saved_tensor_hooks() == inner
        assert torch_private.saved_tensor_hooks() == outer


def test_hooks_of_all_modules_are_known():
    everywhere = torch.nn.modules.module
    assert torch_private.hooks_of_all_modules() == (False, False)
    handle = everywhere.register_module_forward_hook(lambda *_: None)
    assert torch_private.hooks_of_all_modules() == (True, False)
    handle.remove()
    handle = everywhere.register_module_full_backward_hook(lambda *_: None)
    assert torch_private.hooks_of_all_modules() == (False, True)
    handle.remove()


def test_what_was_given_to_the_compiler_is_known():
    plain, in_place, forward = (nn.Linear(2, 2) for _ in range(3))
    in_place.compile(backend="eager")
    forward.forward = torch.compile(forward.forward, backend="eager")
    wrapped = torch.compile(plain, backend="eager")
    assert [*map(torch_private.is_compiled, (plain, in_place, forward, wrapped))] == [
        False, True, True, True,
    ]  # fmt: skip


def test_a_number_is_made_a_pair():
    assert torch_private.pair(3) == (3, 3)
    assert torch_private.pair((1, 2)) == (1, 2)


def test_tracing_is_known():
    seen = []
    x = torch.ones(2)
    torch.jit.trace(lambda x: seen.append(torch_private.is_tracing()) or x + 1, x)
    assert seen[0]
    assert not torch_private.is_tracing()


def test_a_function_is_called_at_the_end_of_a_backward_pass():
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x.sin()
    y.register_hook(
        lambda g: torch_private.at_the_end_of_backward(lambda: seen.append(2))
    )
    x.register_hook(lambda g: seen.append(1))
    y.sum().backward()
    assert seen == [1, 2]


def test_classes_of_layers_and_iterators_are_known():
    assert isinstance(nn.BatchNorm2d(2), torch_private.AnyBatchNorm)
    loader = torch.utils.data.DataLoader([1, 2])
    assert isinstance(iter(loader), torch_private.AnyDataLoaderIterator)


def test_lists_of_weights_are_those_of_recurrent_layers():
    lists = torch_private.lists_of_weights(nn.LSTM(2, 2))
    assert len(lists["_flat_weights"]) == 4
    assert torch_private.lists_of_weights(nn.Linear(2, 2)) == {}


def test_an_alias_poses_as_a_parameter():
    p = nn.Parameter(torch.ones(2))
    p.mark, alias = "mine", p.view_as(p)
    torch_private.pose_as(alias, p)
    assert isinstance(alias, nn.Parameter)
    assert alias.mark == "mine"


def test_cached_parametrizations_are_known():
    assert not torch_private.parametrized_weights_are_kept()
    with torch.nn.utils.parametrize.cached():
        assert torch_private.parametrized_weights_are_kept()


def test_sharded_modules_are_known():
    module = nn.Linear(2, 2)
    assert not torch_private.is_sharded(module)
    from torch.distributed.fsdp._fully_shard import _fully_shard

    # A process group of its own is more than this can start.
    assert "._is_fsdp_managed_module = True" in inspect.getsource(_fully_shard)
    module._is_fsdp_managed_module = True
    assert torch_private.is_sharded(module)


def test_wrappers_are_known():
    assert not torch_private.is_wrapper(torch.ones(2))


def test_the_function_of_a_context_is_known():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            assert torch_private.function_of(ctx) is Doubled
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    Doubled.apply(torch.ones(2, requires_grad=True)).sum().backward()
