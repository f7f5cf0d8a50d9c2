"""Stands in for FlashInfer's paged prefill: computes in plain torch what its documentation says.

Names, shapes and refusals are those of flashinfer.BatchPrefillWithPagedKVCacheWrapper 0.7.4, in its
own words: pages and requests. A keyword of it that isn't here is one that Loraplex doesn't use.
Nobody says that cells behind a request's end aren't read: here they are, with a weight of zero.
"""

import inspect
from itertools import pairwise

import torch
from torch import Tensor

# The parameters of 0.7.4 that are used, in its order.
SIGNATURES = {
    "__init__": ["self", "float_workspace_buffer", "kv_layout"],
    "plan": [
        "self",
        "qo_indptr",
        "paged_kv_indptr",
        "paged_kv_indices",
        "paged_kv_last_page_len",
        "num_qo_heads",
        "num_kv_heads",
        "head_dim_qk",
        "page_size",
        "causal",
        "sm_scale",
        "q_data_type",
        "kv_data_type",
    ],
    "run": ["self", "q", "paged_kv_cache", "out"],
}
ALIGNMENT = 16


def missing_names(wrapper: type, method: str) -> list[str]:
    """Return what a wrapper's method lacks of the names that are used."""
    found = inspect.signature(inspect.unwrap(getattr(wrapper, method))).parameters
    return [name for name in SIGNATURES[method] if name not in found]


class PagedPrefillDouble:
    """One wrapper; `planned` lists the query rows of each request of every plan."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert kv_layout == "NHD"
        assert float_workspace_buffer.dtype == torch.uint8
        assert float_workspace_buffer.data_ptr() % ALIGNMENT == 0
        self.planned: list[list[int]] = []
        self.num_runs = 0

    def plan(
        self,
        qo_indptr: Tensor,  # [num_requests + 1] int32, as the two below
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,  # [num_requests]
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        for array in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert array.dtype == torch.int32
            assert array.is_contiguous()
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        assert int(paged_kv_last_page_len.min()) >= 1
        assert int(paged_kv_last_page_len.max()) <= page_size
        assert num_qo_heads % num_kv_heads == 0
        self._rows = _ranges(qo_indptr)
        self._pages = [paged_kv_indices[pages].long() for pages in _ranges(paged_kv_indptr)]
        self._last_page_len = paged_kv_last_page_len.tolist()
        self._heads = num_qo_heads, num_kv_heads, head_dim_qk
        self._page_size = page_size
        self._causal = causal
        self._sm_scale = head_dim_qk**-0.5 if sm_scale is None else sm_scale
        self._dtypes = q_data_type, kv_data_type or q_data_type
        self.planned.append([rows.stop - rows.start for rows in self._rows])

    def run(
        self,
        q: Tensor,  # [qo_indptr[-1], num_qo_heads, head_dim]
        paged_kv_cache: tuple[Tensor, Tensor],  # [num_pages, page_size, num_kv_heads, head_dim]
        *,
        out: Tensor,
    ) -> Tensor:
        num_qo_heads, num_kv_heads, head_dim = self._heads
        k_cache, v_cache = paged_kv_cache
        assert q.shape == out.shape == (self._rows[-1].stop, num_qo_heads, head_dim)
        assert k_cache.shape[1:] == v_cache.shape[1:] == (self._page_size, num_kv_heads, head_dim)
        assert (q.dtype, k_cache.dtype) == self._dtypes
        assert out.dtype == q.dtype
        for rows, pages, last_page_len in zip(
            self._rows, self._pages, self._last_page_len, strict=True
        ):
            kv_len = (len(pages) - 1) * self._page_size + last_page_len
            k, v = (
                cache[pages.to(cache.device)].flatten(0, 1).float() for cache in (k_cache, v_cache)
            )
            out[rows] = self._attend(q[rows].float(), k, v, kv_len).to(out.dtype)
        self.num_runs += 1
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, kv_len: int) -> Tensor:
        """The causal mask is aligned to the end: the last query sees all kv_len keys."""
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * self._sm_scale
        visible = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device)
        visible[:, kv_len:] = False
        if self._causal:
            visible = visible.tril(kv_len - q.shape[0])
        scores.masked_fill_(~visible, -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def _ranges(indptr: Tensor) -> list[slice]:
    edges = indptr.tolist()
    assert edges[0] == 0
    assert edges == sorted(edges)
    return [slice(start, stop) for start, stop in pairwise(edges)]
