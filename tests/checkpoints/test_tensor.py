import subprocess
import sys

import numpy as np
import pytest

from qkv.checkpoints import FORMATS, StoredTensor
from qkv.errors import CheckpointError


@pytest.mark.parametrize(
    "dtype", ["f8", "f4", "f2", "c8", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?"]
)
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 3)])
def test_an_array_survives_storage_in_its_own_dtype(dtype, shape):
    array = (np.random.default_rng(1).random(shape) * 4).astype(dtype)
    stored = StoredTensor.from_array("a", array)
    assert stored.nbytes == array.nbytes
    assert stored.elements == array.size
    values = stored.decode()
    assert (values.dtype, values.shape) == (array.dtype, array.shape)
    assert values.tobytes() == array.tobytes()


def test_a_transposed_or_big_endian_array_is_stored_row_major_and_little_endian():
    array = np.arange(6, dtype=">f4").reshape(2, 3).T
    stored = StoredTensor.from_array("a", array)
    assert (stored.format, stored.shape) == ("F32", (3, 2))
    assert stored.data.tobytes() == array.astype("<f4").tobytes("C")


def test_plain_values_are_a_view_on_the_bytes_and_unaligned_ones_a_copy():
    data = np.arange(33, dtype=np.uint8)
    assert np.shares_memory(StoredTensor("a", (8,), "F32", data[:32]).decode(), data)
    unaligned = StoredTensor("a", (8,), "F32", data[1:]).decode()
    assert unaligned.flags.aligned
    assert unaligned.tobytes() == data[1:].tobytes()


def test_a_boolean_byte_other_than_one_is_still_true():
    assert StoredTensor("a", (3,), "BOOL", np.array([0, 1, 2], np.uint8)).decode().tolist() == [
        False,
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("shape", "format", "size", "message"),
    [
        ((2, 3), "F32", 23, r"tensor a of shape \[2, 3\] needs 24 bytes in F32 and has 23"),
        ((33,), "Q4_0", 18, "tensor a has 33 values, which is no multiple of the 32 in a block of Q4_0"),
        ((1,), "Q4_9", 18, "tensor a has the format Q4_9, which is not known"),
        ((1,) * 65, "U8", 1, "tensor a has a shape that no array can have"),
        ((0, 2**62), "U8", 0, "tensor a has a shape that no array can have"),
    ],
)
def test_bytes_that_do_not_fit_are_refused_with_both_numbers(shape, format, size, message):
    with pytest.raises(CheckpointError, match=message):
        StoredTensor("a", shape, format, np.zeros(size, np.uint8))


def test_an_array_of_objects_is_refused():
    with pytest.raises(CheckpointError, match="tensor a has the numpy type object"):
        StoredTensor.from_array("a", np.array([None]))


def test_format_names_are_keys_of_their_own_rows():
    assert all(name == format.name for name, format in FORMATS.items())


def test_reading_checkpoints_imports_no_torch():
    code = "import sys, qkv.checkpoints; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
