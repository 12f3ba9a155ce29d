import json
import os
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from qkv.checkpoints import StoredTensor, read_safetensors, write_safetensors
from qkv.errors import CheckpointError, SourceError


def write_raw(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_index(folder: Path, weight_map: object) -> Path:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    return index


def one(value: float) -> np.ndarray:
    return np.array([value], np.float32)


# Writing and reading back


def test_what_is_written_reads_back_bit_for_bit(tmp_path):
    rng = np.random.default_rng(3)
    arrays = {
        dtype: np.frombuffer(rng.bytes(48), dtype).reshape(2, -1)
        for dtype in ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1")
    }
    arrays |= {
        "scalar": np.array(2.5, np.float32),
        "empty": np.zeros((0, 3), np.float16),
        "yes": np.array([True]),
    }
    path = tmp_path / "a.safetensors"
    write_safetensors(path, arrays)
    back = read_safetensors(path)
    assert set(back) == set(arrays)
    for name, array in arrays.items():
        assert back[name].shape == array.shape
        assert back[name].decode().dtype == array.dtype
        assert back[name].decode().tobytes() == array.tobytes()


def test_bfloat16_and_float8_pass_through_unchanged(tmp_path):
    rng = np.random.default_rng(4)
    stored = {
        name: StoredTensor(name, (16,), name, np.frombuffer(rng.bytes(16 * size), np.uint8))
        for name, size in (("BF16", 2), ("F8_E4M3", 1), ("F8_E5M2", 1), ("F8_E8M0", 1))
    }
    path = tmp_path / "a.safetensors"
    write_safetensors(path, stored)
    back = read_safetensors(path)
    for name, tensor in stored.items():
        assert (back[name].format, back[name].shape) == (name, (16,))
        assert back[name].data.tobytes() == tensor.data.tobytes()


def test_bfloat16_reads_as_torch_reads_it(tmp_path):
    torch = pytest.importorskip("torch")
    torch_files = pytest.importorskip("safetensors.torch")
    values = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).bfloat16()
    torch_files.save_file({"w": values}, tmp_path / "a.safetensors")
    tensor = read_safetensors(tmp_path / "a.safetensors")["w"]
    np.testing.assert_array_equal(tensor.decode(), values.float().numpy())
    write_safetensors(tmp_path / "b.safetensors", {"w": tensor})
    assert torch.equal(torch_files.load_file(tmp_path / "b.safetensors")["w"], values)


def test_both_ways_agree_with_the_safetensors_library(tmp_path):
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(3, dtype=np.int64)}
    save_file(arrays, tmp_path / "theirs.safetensors")
    ours = read_safetensors(tmp_path / "theirs.safetensors")
    assert {name: tensor.decode().tolist() for name, tensor in ours.items()} == {
        "a": [[0, 1, 2], [3, 4, 5]],
        "b": [0, 1, 2],
    }
    write_safetensors(tmp_path / "ours.safetensors", ours, metadata={"format": "pt"})
    theirs = load_file(tmp_path / "ours.safetensors")
    assert all(np.array_equal(theirs[name], array) for name, array in arrays.items())
    with safe_open(tmp_path / "ours.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_file_can_be_written_over_while_its_tensors_are_mapped(tmp_path):
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"a": one(1)})
    before = read_safetensors(path)
    write_safetensors(path, before | {"b": one(2)})
    assert before["a"].decode().tolist() == [1]
    assert {name: tensor.decode().item() for name, tensor in read_safetensors(path).items()} == {
        "a": 1,
        "b": 2,
    }
    assert [each.name for each in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"a": one(1)})
    contents = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        CheckpointError, match=r"a\.safetensors could not be written: No space left on device"
    ):
        write_safetensors(path, {"a": one(2)})
    assert path.read_bytes() == contents
    assert [each.name for each in tmp_path.iterdir()] == ["a.safetensors"]


def test_what_safetensors_cannot_hold_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    block = StoredTensor("w", (32,), "Q4_0", np.zeros(18, np.uint8))
    with pytest.raises(
        CheckpointError, match="tensor w is stored as Q4_0, which safetensors has no format for"
    ):
        write_safetensors(path, {"w": block})
    with pytest.raises(CheckpointError, match="a tensor cannot be called __metadata__"):
        write_safetensors(path, {"__metadata__": one(1)})
    with pytest.raises(CheckpointError, match="could not be written"):
        write_safetensors(path, {"\ud800": one(1)})
    with pytest.raises(SourceError, match=r"is not a folder, so a\.safetensors cannot be written there"):
        write_safetensors(tmp_path / "none" / "a.safetensors", {"a": one(1)})
    assert not list(tmp_path.iterdir())


# Folders and shards


@pytest.fixture
def shards(tmp_path):
    write_safetensors(tmp_path / "s1", {"a": one(1)})
    write_safetensors(tmp_path / "s2", {"b": one(2)})
    write_index(tmp_path, {"a": "s1", "b": "s2"})
    return tmp_path


def values(tensors: dict[str, StoredTensor]) -> dict[str, float]:
    return {name: tensor.decode().item() for name, tensor in tensors.items()}


def test_a_folder_with_one_file(tmp_path):
    write_safetensors(tmp_path / "model.safetensors", {"a": one(1)})
    assert values(read_safetensors(tmp_path)) == {"a": 1}


def test_a_folder_of_shards_and_its_index_read_the_same(shards):
    assert values(read_safetensors(shards)) == {"a": 1, "b": 2}
    assert values(read_safetensors(shards / "model.safetensors.index.json")) == {"a": 1, "b": 2}


def test_an_absent_shard_is_named(shards):
    """K3: the index names s2, which was deleted."""
    (shards / "s2").unlink()
    with pytest.raises(CheckpointError) as caught:
        read_safetensors(shards)
    assert str(caught.value) == (
        f"model.safetensors.index.json names s2, which is not in {shards}; the download may be incomplete."
    )


def test_a_tensor_outside_the_index_is_named(shards):
    """K3: s1 also holds c."""
    write_safetensors(shards / "s1", {"a": one(1), "c": one(3)})
    with pytest.raises(
        CheckpointError, match=r"^s1 holds tensor c, which model\.safetensors\.index\.json does not name"
    ):
        read_safetensors(shards)


def test_a_tensor_in_the_wrong_shard_is_named(shards):
    """K3: b is in both shards, and the index places it in s2."""
    write_safetensors(shards / "s1", {"a": one(1), "b": one(9)})
    with pytest.raises(
        CheckpointError, match=r"^s1 holds tensor b, which model\.safetensors\.index\.json places in s2"
    ):
        read_safetensors(shards)


def test_a_tensor_that_its_shard_lacks_is_named(shards):
    """K3, the other way: the index promises d."""
    write_index(shards, {"a": "s1", "b": "s2", "d": "s2"})
    with pytest.raises(CheckpointError, match="places tensor d in s2, which does not hold it"):
        read_safetensors(shards)


def test_a_stray_file_is_not_merged(shards):
    """K3: a file that the index does not name is no part of the model."""
    write_safetensors(shards / "stray.safetensors", {"a": one(7), "z": one(8)})
    assert values(read_safetensors(shards)) == {"a": 1, "b": 2}


def test_a_single_file_beside_an_index_of_others_is_ambiguous(shards):
    write_safetensors(shards / "model.safetensors", {"a": one(5)})
    with pytest.raises(CheckpointError, match="pass the path of the one that is meant"):
        read_safetensors(shards)
    assert values(read_safetensors(shards / "model.safetensors")) == {"a": 5}
    write_index(shards, {"a": "model.safetensors", "b": "s2"})
    assert values(read_safetensors(shards)) == {"a": 5, "b": 2}


def test_a_shard_that_is_a_link_out_of_the_folder_is_read(shards, tmp_path_factory):
    """A hub cache consists of such links."""
    blob = tmp_path_factory.mktemp("blobs") / "0123"
    (shards / "s2").rename(blob)
    (shards / "s2").symlink_to(blob)
    assert values(read_safetensors(shards)) == {"a": 1, "b": 2}


@pytest.mark.parametrize("shard", ["../s2", "/etc/passwd", "sub/s2", "..", ".", "", "..\\s2", "s2\0"])
def test_a_shard_may_not_leave_the_folder(shards, shard):
    write_index(shards, {"a": "s1", "b": shard})
    with pytest.raises(CheckpointError, match="which is not a plain file name"):
        read_safetensors(shards)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "has no weight_map"),
        ('{"weight_map": ["s1"]}', "has no weight_map"),
        ('{"weight_map": {"a": 1}}', "has no weight_map"),
        ('{"weight_map": {"a": "s1", "a": "s2"}}', "has two entries named a"),
        ('{"weight_map": ', "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path, text, message):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(text)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors\.index\.json {message}"):
        read_safetensors(tmp_path)


def test_a_folder_with_nothing_to_read_says_so(tmp_path):
    with pytest.raises(SourceError, match="none does not exist"):
        read_safetensors(tmp_path / "none")
    with pytest.raises(SourceError, match="holds no files"):
        read_safetensors(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        SourceError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json\.$"
    ):
        read_safetensors(tmp_path)
    write_safetensors(tmp_path / "adapter.safetensors", {"a": one(1)})
    with pytest.raises(SourceError, match=r"pass the path of adapter\.safetensors if that is the model"):
        read_safetensors(tmp_path)


# Damaged and hostile files


GOOD = entry([2], 0, 8)


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": GOOD}, bytes(7), "has 76 bytes and its header describes 77; the download may be incomplete"),
        ({"a": GOOD}, bytes(9), "has 78 bytes and its header describes 77"),
        ({"a": GOOD, "b": entry([2], 4, 12)}, bytes(12), "invalid offset for tensor `b`"),
        ({"a": GOOD, "b": entry([2], 12, 20)}, bytes(20), "invalid offset for tensor `b`"),
        ({"a": entry([3], 0, 8)}, bytes(8), "a.safetensors is damaged"),
        ({"a": entry([2**63, 2**63], 0, 8)}, bytes(8), "overflow"),
        ({"a": entry([1] * 65, 0, 4)}, bytes(4), "tensor a has a shape that no array can have"),
        ({"a": entry([2], 0, 8, "F7")}, bytes(8), "unknown variant `F7`"),
        (b'{"a": %b, "a": %b}' % ((json.dumps(GOOD).encode(),) * 2), bytes(8), "two entries named a"),
        (b'{"a":["F32",[2],[0,8]]}', bytes(8), "entries lack dtype, shape or data_offsets"),
        (b"{nonsense}", b"", "invalid JSON"),
        (b'{"a":' + b"[" * 100_000, b"", "recursion limit"),
        (b'{"\xff":1}', b"", "invalid UTF-8"),
        (b"", b"", "a.safetensors is damaged"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(tmp_path, header, data, message):
    path = write_raw(tmp_path / "a.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message):
        read_safetensors(path)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 99_000_000, 3])
def test_a_header_longer_than_the_file_costs_no_memory(tmp_path, length):
    path = write_raw(tmp_path / "a.safetensors", b"{}", length=length)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=r"a\.safetensors is damaged"):
        read_safetensors(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_an_empty_or_tiny_file_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    for contents in (b"", b"\x80", b"12345678"):
        path.write_bytes(contents)
        with pytest.raises(CheckpointError, match=r"a\.safetensors is damaged"):
            read_safetensors(path)


def test_names_in_messages_are_short_and_printable(tmp_path):
    name = "\x1b[2J" + "x" * 5000
    path = write_raw(tmp_path / "a.safetensors", {name: entry([1] * 65, 0, 4)}, bytes(4))
    with pytest.raises(CheckpointError) as caught:
        read_safetensors(path)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 200
