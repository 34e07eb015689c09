"""Embeddings of texts: encoders, pooling, sentence-transformers directories."""

from .embedding_model import EmbeddingModel

__all__ = ["EmbeddingModel"]
