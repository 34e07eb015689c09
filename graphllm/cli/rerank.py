"""The verb ``rerank``: the lines of a file by their relevance to a query."""

from __future__ import annotations

from typing import Annotated

from .declarations import Option, verb
from .encoder_options import EncoderOptions, NoTruncate, TextFile, text_lines
from .options import Model
from .output import show, show_json


@verb
def rerank(
    model: Model,
    options: EncoderOptions,
    query: Annotated[str, Option("-q", "--query", help="Query that the documents are ranked by.")],
    file: TextFile = None,
    top_k: Annotated[
        int | None, Option("-n", "--top", help="Number of documents to print; all by default.")
    ] = None,
    json: Annotated[bool, Option("--json", help="Print JSON lines.")] = False,
    refuse: NoTruncate = False,
) -> None:
    """Rank the lines of a text file by their relevance to a query, with a cross-encoder.

    graphllm rerank MODEL -q "Where can I swim?" -f documents.txt
    """
    texts = text_lines(file)
    from ..embedding import SequenceClassifier

    with options.load(SequenceClassifier, model) as loaded:
        ranked = loaded.rerank(query, texts, top_k=top_k, truncate=not refuse)
    for each in ranked:
        text = texts[each.index]
        if json:
            show_json({"line": each.index + 1, "score": each.score, "text": text})
        else:
            show(f"{each.score:.4f}  {text}")
