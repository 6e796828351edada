"""A fingerprint is of tensors, and not of the file that they lie in."""

import pytest
import torch

from speechbrain_rev.inference.archive import check_fingerprint, fingerprint_of

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(3)}


@pytest.mark.parametrize(
    "other",
    [
        {"b": WEIGHTS["b"], "a": WEIGHTS["a"]},
        {**WEIGHTS, "a": WEIGHTS["a"].T.contiguous().T},
        {**WEIGHTS, "a": torch.nn.Parameter(WEIGHTS["a"].clone())},
    ],
    ids=["order", "strides", "parameter"],
)
def test_the_same_tensors_have_the_same_fingerprint(other):
    assert fingerprint_of(other) == fingerprint_of(WEIGHTS)


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"a": WEIGHTS["a"]},
        {"c": WEIGHTS["a"], "b": WEIGHTS["b"]},
        {**WEIGHTS, "a": WEIGHTS["a"].reshape(3, 2)},
        {**WEIGHTS, "a": WEIGHTS["a"].view(torch.int32)},
        {**WEIGHTS, "a": WEIGHTS["a"] + torch.eye(2, 3) * 1e-6},
        {**WEIGHTS, "b": torch.tensor([3])},
        {**WEIGHTS, "c": torch.zeros(0)},
    ],
    ids=["none", "fewer", "name", "shape", "type", "value", "axes", "empty"],
)
def test_other_tensors_have_another_fingerprint(other):
    assert fingerprint_of(other) != fingerprint_of(WEIGHTS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.float64])
def test_tensors_of_any_type_have_one(dtype):
    assert len(fingerprint_of({"a": torch.ones(3).to(dtype)})) == 64


@pytest.mark.parametrize("text", ["a\x1b[2J", "a\n", "x" * 501, 7])
def test_a_text_that_a_terminal_would_obey_is_no_fingerprint(text):
    with pytest.raises(ValueError, match="a fingerprint is a text of printable"):
        check_fingerprint(text)
