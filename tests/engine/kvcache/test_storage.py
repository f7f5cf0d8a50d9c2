"""KV storage: what is written is gathered, what is wiped is zero, and bytes are counted."""

import torch

from engine.kvcache.storage import KVStorage


def storage() -> KVStorage:
    return KVStorage(
        num_layers=2,
        num_blocks=5,
        block_size=4,
        num_kv_heads=2,
        head_dim=8,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )


def test_new_blocks_are_zero() -> None:
    kv = storage()
    assert not kv.k.any()
    assert not kv.v.any()


def test_slots_are_written_in_their_layer_only_and_gathered_by_block() -> None:
    kv = storage()
    k, v = torch.randn(3, 2, 8).bfloat16(), torch.randn(3, 2, 8).bfloat16()
    kv.write(1, torch.tensor([14, 15, 4]), k, v)
    assert not kv.k[0].any()
    got_k, got_v = kv.gather(1, torch.tensor([[3, 1], [1, 0]]))
    assert got_k.shape == (2, 8, 2, 8)
    assert torch.equal(got_k[0, 2:5], k)
    assert torch.equal(got_v[0, 2:5], v)
    assert torch.equal(got_k[1, 0], k[2])
    assert torch.count_nonzero(got_k[1, 1:]) == 0


def test_wiping_zeroes_a_block_in_every_layer_and_no_other() -> None:
    kv = storage()
    kv.k.fill_(torch.nan)
    kv.v.fill_(torch.nan)
    kv.wipe(torch.tensor([2, 4]))
    for tensor in (kv.k, kv.v):
        assert not tensor[:, [2, 4]].any()
        assert tensor[:, [0, 1, 3]].isnan().all()


def test_a_copied_block_is_its_source_in_every_layer_and_stays_so_when_that_changes() -> None:
    kv = storage()
    kv.k.normal_()
    kv.v.normal_()
    k, v = kv.k[:, 1].clone(), kv.v[:, 1].clone()
    untouched = kv.k[:, [0, 2, 3]].clone()
    kv.copy_block(source=1, target=4)
    kv.wipe(torch.tensor([1]))
    assert torch.equal(kv.k[:, 4], k)
    assert torch.equal(kv.v[:, 4], v)
    assert torch.equal(kv.k[:, [0, 2, 3]], untouched)


def test_a_block_has_the_bytes_of_k_and_v_over_all_layers() -> None:
    kv = storage()
    assert kv.block_bytes == 2 * 2 * 4 * 2 * 8 * 2
    assert kv.block_bytes * kv.num_blocks == kv.k.nbytes + kv.v.nbytes
