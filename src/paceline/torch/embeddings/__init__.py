"""Embeddings whose rows are in sparse tables: modules, stores of rows, and the exchange of rows during training."""

from paceline.torch.embeddings.embedder import Embedder
from paceline.torch.embeddings.modules import Embedding, EmbeddingBag, find_embeddings
from paceline.torch.embeddings.server_tables import ClusterTables
from paceline.torch.embeddings.tables import ReplicatedTables, RowFilters, RowTable, RowTables

__all__ = [
    "ClusterTables",
    "Embedder",
    "Embedding",
    "EmbeddingBag",
    "ReplicatedTables",
    "RowFilters",
    "RowTable",
    "RowTables",
    "find_embeddings",
]
