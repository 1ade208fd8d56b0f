"""TensorData: what becomes which dtype, what is rejected, and that numbers survive."""

from __future__ import annotations

import pickle
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tinkex.errors import MissingExtra, ValidationError
from tinkex.types.tensor import TensorData

INT64 = st.integers(-(2**63), 2**63 - 1)
FLOAT32 = st.floats(width=32, allow_nan=False)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.longdouble])
def test_every_numpy_float_becomes_float32(dtype: type) -> None:
    tensor = TensorData.from_numpy(np.array([0.5, -2.0], dtype=dtype))
    assert (tensor.dtype, bytes(tensor.buffer), tensor.shape) == ("float32", struct.pack("<2f", 0.5, -2.0), [2])


@pytest.mark.parametrize(
    "dtype", [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64, np.bool_]
)
def test_every_numpy_int_unsigned_and_bool_becomes_int64(dtype: type) -> None:
    tensor = TensorData.from_numpy(np.array([0, 1], dtype=dtype))
    assert (tensor.dtype, bytes(tensor.buffer), tensor.shape) == ("int64", struct.pack("<2q", 0, 1), [2])


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn], ids=str
)
def test_every_torch_float_becomes_float32(dtype: torch.dtype) -> None:
    tensor = TensorData.from_torch(torch.tensor([0.5, -2.0]).to(dtype))
    assert (tensor.dtype, tensor.data) == ("float32", [0.5, -2.0])


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int32, torch.int64, torch.uint64, torch.bool], ids=str
)
def test_every_torch_int_unsigned_and_bool_becomes_int64(dtype: torch.dtype) -> None:
    tensor = TensorData.from_torch(torch.tensor([0, 1]).to(dtype))
    assert (tensor.dtype, tensor.data) == ("int64", [0, 1])


def test_numbers_are_really_float32_and_not_doubles_under_that_label() -> None:
    assert TensorData([0.1], "float32").data == [struct.unpack("<f", struct.pack("<f", 0.1))[0]] != [0.1]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (np.array([1, 2**63], dtype=np.uint64), r"\[1\]: 9223372036854775808 does not fit int64"),
        (np.array([1 + 2j]), "complex128 cannot be sent"),
        (np.array(["a"]), "cannot be sent"),
        (np.array([object()]), "object cannot be sent"),
        (np.array([[1.0, 1e39]]), r"\[0\]\[1\]: 1e\+39 is beyond the range of float32"),
        (torch.tensor([1 + 2j]), "complex64 cannot be sent"),
        ([1.0, 1e39], r"\[1\].*beyond the range of float32"),
        ([1.0, "2"], r"\[1\]: expected a number, got str '2'"),
        ([1, 2**63], r"\[1\]: 9223372036854775808 does not fit int64"),
        ("12", "expected a list of numbers"),
        (7, "expected a list of numbers"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_its_place(values: object, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        TensorData.from_list(values)


@pytest.mark.parametrize("values", [[1, 1.5], np.array([1, 1.5]), torch.tensor([1, 1.5]), [[1, 1.5]]])
def test_a_fraction_is_never_sent_as_int64(values: object) -> None:
    with pytest.raises(ValidationError, match=r"target_tokens'\](\[0\])?\[1\]: .*1\.5"):
        TensorData.from_list(values, "target_tokens")


@pytest.mark.parametrize("values", [[3.0, 4], np.array([3.0, 4.0]), torch.tensor([3.0, 4.0])])
def test_whole_numbers_in_float_form_pass_as_int64(values: object) -> None:
    assert TensorData.from_list(values, "target_tokens").data == [3, 4]


def test_the_key_decides_the_dtype_of_known_loss_inputs() -> None:
    assert TensorData.from_list([1, 0], "weights").dtype == "float32"
    assert TensorData.from_list(np.array([1, 0]), "advantages").dtype == "float32"
    assert TensorData.from_list([True, False], "weights").data == [1.0, 0.0]
    assert TensorData.from_list([], "target_tokens").dtype == "int64"


@pytest.mark.parametrize(
    ("values", "dtype"),
    [([1, 2], "int64"), ([True], "int64"), ([1, 2.5], "float32"), ([np.int32(1)], "int64"), ([], "float32")],
)
def test_values_decide_the_dtype_of_an_unknown_key(values: list[object], dtype: str) -> None:
    assert TensorData.from_list(values, "my_key").dtype == dtype


@given(st.lists(INT64))
def test_int64_values_survive(values: list[int]) -> None:
    assert TensorData(values, "int64").tolist() == values


@given(st.lists(FLOAT32))
def test_float32_values_survive(values: list[float]) -> None:
    assert TensorData(values, "float32").tolist() == values


def test_nan_and_infinity_pass_here_because_validation_names_the_datum() -> None:
    nan, infinity = TensorData.from_list([float("nan"), float("inf")]).data
    assert nan != nan
    assert infinity == float("inf")


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.sampled_from(["int64", "float32"]))
def test_nested_lists_come_back_as_they_went_in(shape: list[int], dtype: str) -> None:
    array = np.arange(int(np.prod(shape)), dtype=dtype).reshape(shape)
    tensor = TensorData.from_numpy(array)
    assert tensor.shape == shape
    assert tensor.tolist() == array.tolist()
    assert np.array_equal(tensor.to_numpy(), array)
    if array.size:  # a list cannot tell the extents behind an empty one
        assert TensorData(array.tolist(), dtype) == tensor  # type: ignore[arg-type]


def test_ragged_rows_are_refused_and_the_row_is_named() -> None:
    with pytest.raises(ValidationError, match=r"weights'\]\[1\]: ragged: this row has shape \[1\]"):
        TensorData.from_list([[1, 2], [3]], "weights")
    with pytest.raises(ValidationError, match=r"\[1\]: expected a row like those before"):
        TensorData.from_list([[1, 2], 3], "weights")


def test_without_a_shape_a_tensor_is_one_dimensional() -> None:
    tensor = TensorData(data=[1, 2, 3], dtype="int64", shape=None)
    assert tensor.shape is None
    assert tensor.tolist() == [1, 2, 3]
    assert tensor.to_numpy().shape == (3,)
    assert tuple(tensor.to_torch().shape) == (3,)


def test_a_shape_that_does_not_hold_the_values_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"shape \[2, 2\] does not hold 3 values"):
        TensorData([1, 2, 3], "int64", [2, 2])
    with pytest.raises(ValidationError, match="negative extent"):
        TensorData([1, 2], "int64", [-1, -2])


def test_a_scalar_has_an_empty_shape() -> None:
    tensor = TensorData.from_numpy(np.array(2.5))
    assert (tensor.shape, tensor.size, tensor.tolist()) == ([], 1, 2.5)


def test_the_callers_later_changes_do_not_reach_the_tensor() -> None:
    listed, array, tensor = [1.0], np.array([1.0], dtype=np.float32), torch.tensor([1.0])
    made = [TensorData.from_list(listed), TensorData.from_numpy(array), TensorData.from_torch(tensor)]
    listed[0] = array[0] = tensor[0] = 9.0
    assert [each.data for each in made] == [[1.0]] * 3
    copy = made[1].to_numpy()
    copy[0] = 9.0
    assert made[1].data == [1.0]


def test_a_tensor_that_needs_a_gradient_or_is_not_contiguous_is_taken() -> None:
    tensor = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True).T
    assert TensorData.from_torch(tensor).tolist() == [[1.0, 3.0], [2.0, 4.0]]
    assert TensorData.from_torch(torch.eye(2).to_sparse()).tolist() == [[1.0, 0.0], [0.0, 1.0]]


def test_a_padded_tensor_becomes_csr_when_that_is_smaller() -> None:
    dense = torch.zeros(4, 50, dtype=torch.int64)
    dense[0, 3], dense[2, 0], dense[2, 49] = 7, 8, 9
    sparse = TensorData.from_torch_sparse(dense)
    assert sparse.is_sparse
    assert sparse.data == [7, 8, 9]
    assert (sparse.sparse_crow_indices, sparse.sparse_col_indices) == ([0, 1, 1, 3, 3], [3, 0, 49])
    assert (len(sparse), sparse.size, sparse.nbytes) == (3, 200, 24)
    assert torch.equal(sparse.to_torch(), dense)
    assert sparse.tolist() == dense.tolist()
    assert np.array_equal(sparse.to_numpy(), dense.numpy())


def test_the_padding_of_a_sparse_tensor_is_the_callers_choice() -> None:
    dense = torch.full((2, 20), -100)
    dense[1, 4] = 0
    sparse = TensorData.from_torch_sparse(dense, pad_value=-100)
    assert sparse.data == [0]
    assert torch.equal(sparse.to_torch(pad_value=-100), dense)
    assert sparse.tolist(pad_value=-100) == dense.tolist()
    with pytest.raises(ValidationError, match="pad_value must be an int"):
        sparse.tolist(pad_value=0.5)  # type: ignore[arg-type]


def test_csr_is_not_used_when_it_would_be_larger() -> None:
    assert not TensorData.from_torch_sparse(torch.ones(3, 3)).is_sparse
    assert not TensorData.from_torch_sparse(torch.zeros(100)).is_sparse


@pytest.mark.parametrize(
    ("crow", "col", "shape"),
    [
        ([0, 1], [0, 1], [2, 3]),
        ([0, 2, 1, 2], [0, 1], [3, 3]),
        ([0, 1, 2], [0, 3], [2, 3]),
        ([0, 1, 2], None, [2, 3]),
        ([0, 1, 2], [0, 1], None),
        ([0, 1, 3], [0, 1, 2], [2, 3]),
    ],
)
def test_indices_that_contradict_the_shape_are_refused(crow: list[int], col: list[int], shape: list[int]) -> None:
    with pytest.raises(ValidationError):
        TensorData([5, 6], "int64", shape, crow, col)


@pytest.mark.parametrize(
    "tensor",
    [
        TensorData([1.5, 2.5], "float32"),
        TensorData([[1, 2], [3, 4]], "int64"),
        TensorData([5, 6], "int64", [2, 3], [0, 1, 2], [0, 2]),
        TensorData.from_buffer(memoryview(struct.pack("<2q", 1, 2)), "int64", [2]),
    ],
)
def test_a_tensor_pickles_compares_and_reads_its_own_json(tensor: TensorData) -> None:
    for copy in (
        pickle.loads(pickle.dumps(tensor)),
        TensorData.model_validate(tensor.model_dump()),
        TensorData.model_validate_json(tensor.model_dump_json()),
        tensor.model_copy(),
    ):
        assert copy == tensor
        assert hash(copy) == hash(tensor)
    assert tensor != TensorData([9], "int64")


def test_a_buffer_is_used_without_a_copy() -> None:
    buffer = bytearray(struct.pack("<2f", 1.0, 2.0))
    tensor = TensorData.from_buffer(memoryview(buffer), "float32", [2])
    buffer[0:4] = struct.pack("<f", 7.0)
    assert tensor.data == [7.0, 2.0]
    with pytest.raises(ValidationError, match="not a whole number of int64"):
        TensorData.from_buffer(b"1234567", "int64")


def test_an_empty_tensor_is_still_true() -> None:
    assert TensorData([], "int64")


def test_a_repr_never_prints_the_numbers() -> None:
    assert repr(TensorData([1] * 1000, "int64")) == "TensorData(int64, shape=[1000])"


def test_lists_need_neither_numpy_nor_torch_and_arrays_say_which_extra() -> None:
    code = """
import sys
sys.modules["numpy"] = sys.modules["torch"] = None
from tinkex.errors import MissingExtra
from tinkex.types import Datum, ModelInput, SampledSequence
datum = Datum(ModelInput.from_ints([1, 2]), {"weights": [[1, 2], [3, 4]]})
print(datum.loss_fn_inputs["weights"].tolist())
for call in (datum.loss_fn_inputs["weights"].to_numpy, datum.loss_fn_inputs["weights"].to_torch,
             lambda: SampledSequence(stop_reason="stop", tokens=[1]).tokens_np):
    try:
        call()
    except MissingExtra as error:
        print(error.extra)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[[1.0, 2.0], [3.0, 4.0]]", "torch", "torch", "torch"]
    assert issubclass(MissingExtra, ImportError)
