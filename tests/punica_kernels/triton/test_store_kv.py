"""K and V land in their cells, and nowhere else."""

import pytest
import torch

from punica_kernels.store_kv import store_kv


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(2, 8), (3, 20)])
def test_rows_go_to_their_slots_and_padding_nowhere(
    num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(1)
    # As the k and v parts of a fused product's rows.
    wide = torch.randn(5, 2 + 2 * num_kv_heads, head_dim, generator=generator)
    wide = wide.to(device=device, dtype=dtype)
    k, v = wide[:, 2 : 2 + num_kv_heads], wide[:, 2 + num_kv_heads :]
    cells = torch.full((2, 4, 4, num_kv_heads, head_dim), torch.nan, dtype=dtype, device=device)
    slots = torch.tensor([3, 9, -1, 4, 0], device=device)
    wanted = cells.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            wanted[0, slot // 4, slot % 4], wanted[1, slot // 4, slot % 4] = k[token], v[token]

    store_kv(k, v, k_cells=cells[0], v_cells=cells[1], kv_slots=slots)

    torch.testing.assert_close(cells, wanted, rtol=0, atol=0, equal_nan=True)


def test_cells_may_be_laid_out_head_by_head(device: torch.device) -> None:
    k = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(1)).to(device)
    cells = torch.zeros(2, 3, 2, 4, 8, device=device).transpose(2, 3)
    slots = torch.tensor([5, 11, 2], device=device)
    store_kv(k, k + 1, k_cells=cells[0], v_cells=cells[1], kv_slots=slots)
    for token, slot in enumerate(slots.tolist()):
        assert torch.equal(cells[0, slot // 4, slot % 4], k[token])
        assert torch.equal(cells[1, slot // 4, slot % 4], k[token] + 1)
    assert (cells != 0).sum() == 2 * k.numel()
