import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from adapters.digest import adapter_digest
from adapters.errors import AdapterInvalid, AdapterNotFound, StoreBroken
from adapters.manifest import AdapterManifest, allows_no_effect
from adapters.store import AdapterStore
from adapters.validate import Inspection, inspect_directory
from tests.adapters.worlds import (
    config,
    safetensors_bytes,
    tensor_name,
    tensors,
    tiny_base,
    write_adapter,
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AdapterStore]:
    store = AdapterStore(tmp_path / "store")
    yield store
    store.check_invariants()
    assert list((tmp_path / "store" / "staging").iterdir()) == []


def put(store: AdapterStore, **world) -> AdapterManifest:
    base = world.pop("base", tiny_base())
    with store.staging() as staged:
        write_adapter(staged, **world)
        return store.put(staged, inspect_directory(staged, base), base)


def digest_of(folder: Path) -> str:
    adapter = inspect_directory(folder, tiny_base()).adapter
    assert adapter is not None
    return adapter_digest(adapter)


def test_what_is_put_can_be_read_again(store: AdapterStore) -> None:
    manifest = put(store)

    assert store.has(manifest.digest)
    assert store.manifest(manifest.digest) == manifest
    assert (manifest.coverage, manifest.max_rank) == ("4/14 modules", 4)
    assert manifest.lora_id("json") == f"json@{manifest.digest[7:19]}"
    again = inspect_directory(store.path_of(manifest.digest), tiny_base())
    assert again.adapter is not None
    assert adapter_digest(again.adapter) == manifest.digest
    assert store.digests() == (manifest.digest,)


def test_what_was_set_aside_can_come_back_or_go(store: AdapterStore) -> None:
    digest = put(store).digest
    grave = store.set_aside(digest)
    assert grave is not None
    assert not store.has(digest)
    assert store.set_aside(digest) is None
    store.put_back(grave, digest)
    assert store.has(digest)

    grave = store.set_aside(digest)
    assert grave is not None
    put(store)  # the same content comes again meanwhile
    store.put_back(grave, digest)
    assert store.has(digest)

    store.remove(digest)
    assert store.digests() == ()


def test_a_deliberate_no_op_is_remembered(store: AdapterStore) -> None:
    manifest = put(store)
    assert not allows_no_effect(store.path_of(manifest.digest))
    with store.staging() as staged:
        write_adapter(staged)
        inspection = inspect_directory(staged, tiny_base())
        store.put(staged, inspection, tiny_base(), allows_no_effect=True)
    assert allows_no_effect(store.path_of(manifest.digest))
    put(store)
    assert allows_no_effect(store.path_of(manifest.digest))


def test_the_same_content_twice_is_one_version(store: AdapterStore) -> None:
    first = put(store)
    second = put(store, fields=config(lora_dropout=0.5, peft_version="0.21.0"))
    assert second == first
    assert len(store.digests()) == 1


def test_the_order_of_tensors_in_the_file_does_not_matter(tmp_path: Path) -> None:
    arrays = tensors()
    backwards = dict(reversed(arrays.items()))
    assert digest_of(write_adapter(tmp_path / "a", None, arrays)) == digest_of(
        write_adapter(tmp_path / "b", None, backwards)
    )


@pytest.mark.parametrize(
    "fields",
    [config(lora_alpha=9), config(use_rslora=True), config(alpha_pattern={"layers.1.*q_proj": 3})],
)
def test_another_scale_is_another_version(fields: dict, tmp_path: Path) -> None:
    assert digest_of(write_adapter(tmp_path / "a", fields)) != digest_of(
        write_adapter(tmp_path / "b")
    )


def test_one_bit_or_another_number_format_is_another_version(tmp_path: Path) -> None:
    arrays = {n: np.ones_like(a) for n, a in tensors().items()}
    digests = {digest_of(write_adapter(tmp_path / "a", None, arrays))}
    arrays[tensor_name(1, "v_proj", "A")][-1, -1] = np.nextafter(np.float32(1), np.float32(2))
    digests.add(digest_of(write_adapter(tmp_path / "b", None, arrays)))
    half = {n: a.astype(np.float16) for n, a in arrays.items()}
    (tmp_path / "b" / "adapter_model.safetensors").write_bytes(safetensors_bytes(half, "F16"))
    digests.add(digest_of(tmp_path / "b"))
    assert len(digests) == 3


def test_a_refused_adapter_is_never_stored(store: AdapterStore) -> None:
    with store.staging() as staged, pytest.raises(AdapterInvalid, match="no good"):
        store.put(staged, Inspection(adapter=None, problems=("no good",)), tiny_base())
    assert store.digests() == ()


def test_a_base_that_has_changed_renews_the_manifest(store: AdapterStore) -> None:
    old = put(store)
    new = put(store, base=tiny_base(identity="sha256:" + "cd" * 32))
    assert new.digest == old.digest
    assert store.manifest(old.digest).base_identity == "sha256:" + "cd" * 32


def test_what_is_stored_is_not_writable(store: AdapterStore) -> None:
    path = store.path_of(put(store).digest) / "adapter_model.safetensors"
    assert path.stat().st_mode & 0o222 == 0


def test_staging_is_emptied_when_the_block_fails(store: AdapterStore) -> None:
    lent: list[Path] = []

    def crash() -> None:
        with store.staging() as staged:
            lent.append(staged)
            (staged / "half").write_bytes(b"x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        crash()
    assert not lent[0].exists()


def test_what_a_crash_left_in_staging_is_cleaned(store: AdapterStore) -> None:
    leftover = store.root / "staging" / "crashed"
    leftover.mkdir()
    (leftover / "adapter_model.safetensors").write_bytes(b"x")
    assert store.clean_staging() == 1


def test_a_removed_version_is_gone_and_can_come_back(store: AdapterStore) -> None:
    digest = put(store).digest
    store.remove(digest)
    store.remove(digest)
    assert not store.has(digest)
    with pytest.raises(AdapterNotFound):
        store.manifest(digest)
    assert put(store).digest == digest


@pytest.mark.parametrize("digest", ["", "sha256:", "sha256:../..", "sha256:" + "G" * 64, "x"])
def test_a_digest_never_leads_out_of_the_store(digest: str, store: AdapterStore) -> None:
    with pytest.raises(AdapterNotFound):
        store.path_of(digest)


def test_a_damaged_manifest_is_the_operators_matter(store: AdapterStore) -> None:
    manifest = put(store)
    path = store.path_of(manifest.digest) / "manifest.json"
    whole = path.read_bytes()
    path.write_bytes(json.dumps({"digest": 1}).encode())
    with pytest.raises(StoreBroken, match="can't be read"):
        store.manifest(manifest.digest)
    path.write_bytes(whole)


def test_many_writers_of_one_content_meet_in_one_version(store: AdapterStore) -> None:
    with ThreadPoolExecutor(8) as pool:
        digests = {m.digest for m in pool.map(lambda _: put(store), range(16))}
    assert store.digests() == tuple(digests)
    assert len(list((store.root / "versions").iterdir())) == 1
