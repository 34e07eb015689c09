"""Encoders at work: embeddings, reranking, classification, masked language models."""

from .embedding_model import EmbeddingModel
from .masked_language_model import Filling, MaskedLanguageModel
from .sequence_classifier import RankedDocument, SequenceClassifier
from .token_classifier import TokenClassifier, TokenLabel

__all__ = [
    "EmbeddingModel",
    "Filling",
    "MaskedLanguageModel",
    "RankedDocument",
    "SequenceClassifier",
    "TokenClassifier",
    "TokenLabel",
]
