"""A dataset whose samples are loaded once."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from bagua.torch_api.cache.loader import CacheLoader


class CachedDataset(Dataset[Any]):
    """The same samples as ``dataset``, from a cache after they were loaded once.

    It suits datasets whose samples are slow to load (decoding, a network) and always the same: put random augmentation
    behind it. ``cache_loader.statistics()`` has the hit rate.

    ``dataset``: with ``__getitem__`` and a length. The other arguments are those of ``CacheLoader``; here values are
    written in twenties by default.
    """

    def __init__(
        self,
        dataset: Any,
        backend: Any = None,
        dataset_name: str = "",
        writer_buffer_size: int = 20,
        **options: Any,
    ) -> None:
        self.dataset = dataset
        self.cache_loader = CacheLoader(backend, dataset_name, writer_buffer_size, **options)

    def __getitem__(self, item: Any) -> Any:
        return self.cache_loader.get(item, self.dataset.__getitem__)

    def __len__(self) -> int:
        return len(self.dataset)
