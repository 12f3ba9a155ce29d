import io
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

from qkv.checkpoints import read_gguf, read_safetensors, refuse_pickle, write_safetensors
from qkv.errors import CheckpointError, SourceError

READERS = [(read_safetensors, "model.safetensors"), (read_gguf, "model.gguf")]


class Trap:
    """Unpickling this would raise: a test that passes shows that nothing was unpickled."""

    def __reduce__(self):
        return (pytest.fail, ("a pickle was loaded",))


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Trap()))
    return file.getvalue()


def test_a_pickle_is_refused_with_the_reason():
    with pytest.raises(CheckpointError) as caught:
        refuse_pickle(Path("/models/pytorch_model.bin"))
    assert str(caught.value) == (
        "pytorch_model.bin is a pickle, and loading one runs any code it carries; "
        "convert it to safetensors first (torch.load with weights_only=True, "
        "then safetensors.torch.save_file)."
    )


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_a_folder_with_only_a_pickle_names_it(tmp_path, name):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"anything")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(CheckpointError, match=f"^{name} is a pickle"):
            read_safetensors(path)


def test_a_bin_file_of_another_kind_is_not_called_a_pickle(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"\x06\0\0\0\x0c\0WhisperSpec")
    with pytest.raises(SourceError, match="has neither"):
        read_safetensors(tmp_path)
    (tmp_path / "model.bin").write_bytes(zipped())
    with pytest.raises(CheckpointError, match=r"^model\.bin is a pickle"):
        read_safetensors(tmp_path)


def test_safetensors_beside_a_pickle_is_read(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(zipped())
    write_safetensors(tmp_path / "model.safetensors", {"a": np.ones(1, np.float32)})
    assert read_safetensors(tmp_path)["a"].decode().tolist() == [1]


@pytest.mark.parametrize(("read", "name"), READERS)
@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (zipped(), "is a pickle, and loading one runs any code"),
        (pickle.dumps(Trap(), protocol=2), "is a pickle, and loading one runs any code"),
        (pickle.dumps(Trap(), protocol=5), "is a pickle, and loading one runs any code"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "is a Git LFS pointer"),
        (b"\n<!DOCTYPE html><html><body>Not found</body></html>", "is a web page and not"),
    ],
)
def test_another_kind_of_file_under_this_name_is_recognised(tmp_path, read, name, contents, message):
    (tmp_path / name).write_bytes(contents)
    with pytest.raises(CheckpointError, match=f"^{name} {message}"):
        read(tmp_path / name)


def test_the_two_formats_recognise_each_other(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"GGUF\3\0\0\0" + bytes(16))
    with pytest.raises(CheckpointError, match="is a GGUF file and not safetensors"):
        read_safetensors(tmp_path / "a.safetensors")
    write_safetensors(tmp_path / "a.gguf", {"a": np.ones(1, np.float32)})
    with pytest.raises(CheckpointError, match="is safetensors and not GGUF"):
        read_gguf(tmp_path / "a.gguf")


def test_a_sound_file_that_begins_like_a_pickle_is_read(tmp_path):
    """A header of 640 bytes is written as 80 02, the first bytes of a pickle of protocol 2."""
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"a": np.ones(1, np.float32)}, metadata={"padding": ""})
    spare = 640 - int.from_bytes(path.read_bytes()[:8], "little")
    write_safetensors(path, {"a": np.ones(1, np.float32)}, metadata={"padding": "x" * spare})
    assert path.read_bytes()[:2] == b"\x80\x02"
    assert read_safetensors(path)["a"].decode().tolist() == [1]


@pytest.mark.parametrize(("read", "name"), READERS)
def test_a_missing_path_and_a_folder_are_told_apart(tmp_path, read, name):
    with pytest.raises(SourceError, match=f"{name} does not exist"):
        read(tmp_path / name)
    (tmp_path / name).mkdir()
    with pytest.raises(SourceError, match=f"{name} (is not a file|holds no files)"):
        read(tmp_path / name)
