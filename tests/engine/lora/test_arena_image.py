"""An image holds exactly the adapter's numbers, and only whole images have a name."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from adapters.validate import inspect_directory
from engine.lora.arena_image import ImageBroken, build_image, read_header, read_image
from engine.lora.number_formats import NumberOutOfRange, to_words
from tests.adapters.worlds import safetensors_bytes, tensor_name, tiny_base
from tests.engine.lora.worlds import PLACES, SCALE, factors, image_of, peft_folder

RANKS = {"q_proj": 4, "v_proj": 2, "down_proj": 3, "up_proj": 1}
TARGET_OF_PLACE = {
    ("qkv", 0): "q_proj",
    ("qkv", 2): "v_proj",
    ("gate_up", 1): "up_proj",
    ("down", 0): "down_proj",
}


def as_torch(words: np.ndarray, dtype: str) -> torch.Tensor:
    tensor = torch.from_numpy(words)
    return tensor if dtype == "fp32" else tensor.view(torch.bfloat16)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stored", ["F32", "F16", "BF16"])
def test_an_image_has_the_folders_numbers_rounded_as_torch_rounds(
    tmp_path: Path, stored: str, dtype: str
) -> None:
    folder = peft_folder(tmp_path / "adapter", RANKS)
    torch_types = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    tensors = {
        name: torch.from_numpy(array).to(torch_types[stored])
        for name, array in factors(RANKS).items()
    }
    save_file(tensors, folder / "adapter_model.safetensors")

    image = read_image(image_of(folder, tmp_path / "a.arena", dtype=dtype))

    assert image.header.num_rows == {"attention": 4, "mlp": 3}
    assert image.header.max_rank == 4
    assert len(image.header.slices) == len(RANKS) * 2
    for part in image.header.slices:
        target = TARGET_OF_PLACE[part.module, part.slice_index]
        assert part.rank == RANKS[target]
        assert part.scale == SCALE
        wanted = torch.float32 if dtype == "fp32" else torch.bfloat16
        a = tensors[tensor_name(part.layer, target, "A")].float().to(wanted)
        b = tensors[tensor_name(part.layer, target, "B")].float().to(wanted)
        assert torch.equal(as_torch(image.a(part), dtype), a)
        assert torch.equal(as_torch(image.b(part), dtype), b.T)


def test_every_target_has_its_place(tmp_path: Path) -> None:
    ranks = dict.fromkeys(PLACES, 2)
    image = image_of(peft_folder(tmp_path / "adapter", ranks), tmp_path / "a.arena")
    places = {(part.module, part.slice_index) for part in read_header(image).slices}
    assert len(places) == 7


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
def test_bf16_is_rounded_to_nearest_even_bit_for_bit(bits: list[int]) -> None:
    values = np.array(bits, dtype=np.uint32).view(np.float32)
    values = values[np.isfinite(values)]
    expected = torch.from_numpy(values).bfloat16()
    if torch.isinf(expected).any():
        with pytest.raises(NumberOutOfRange, match="too large for bf16"):
            to_words(values, source="F32", dtype="bf16")
    else:
        words = to_words(values, source="F32", dtype="bf16")
        assert np.array_equal(words, expected.view(torch.uint16).numpy())


@pytest.mark.parametrize(
    "value", [1.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, 1e-40, 3.3895e38]
)
def test_ties_and_extremes_round_as_torch_rounds(value: float) -> None:
    values = np.array([value], dtype=np.float32)
    expected = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    assert np.array_equal(to_words(values, source="F32", dtype="bf16"), expected)


def test_a_weight_too_large_for_bf16_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    arrays = factors({"q_proj": 4})
    arrays[tensor_name(1, "q_proj", "B")][0, 0] = 3.4e38
    folder = peft_folder(tmp_path / "adapter", {"q_proj": 4})
    (folder / "adapter_model.safetensors").write_bytes(safetensors_bytes(arrays))
    adapter = inspect_directory(folder, tiny_base()).adapter
    assert adapter is not None
    images = tmp_path / "images"
    images.mkdir()
    with pytest.raises(NumberOutOfRange):
        build_image(adapter, images / "a.arena", content_digest="sha256:a", dtype="bf16")
    assert list(images.iterdir()) == []


def test_broken_images_are_recognised(tmp_path: Path) -> None:
    path = image_of(peft_folder(tmp_path / "adapter", RANKS), tmp_path / "a.arena")
    whole = path.read_bytes()
    with pytest.raises(ImageBroken, match="can't be opened"):
        read_image(tmp_path / "absent.arena")
    for broken in (b"", whole[:10], whole[:200], whole[:-1], whole + b"x", b"X" + whole[1:]):
        path.write_bytes(broken)
        with pytest.raises(ImageBroken):
            read_image(path)
    path.write_bytes(whole[:16] + b"?" + whole[17:])
    with pytest.raises(ImageBroken, match="header"):
        read_header(path)


def test_an_image_outlives_the_deletion_of_its_file(tmp_path: Path) -> None:
    path = image_of(peft_folder(tmp_path / "adapter", RANKS), tmp_path / "a.arena")
    image = read_image(path)
    path.unlink()
    part = image.header.slices[0]
    target = TARGET_OF_PLACE[part.module, part.slice_index]
    assert np.array_equal(image.a(part), factors(RANKS)[tensor_name(0, target, "A")])
