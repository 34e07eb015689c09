"""The verb ``classify``: labels of the lines of a file."""

from __future__ import annotations

from typing import Annotated

from .declarations import Option, verb
from .encoder_options import EncoderOptions, NoTruncate, TextFile, text_lines
from .options import Model
from .output import show, show_json


@verb
def classify(
    model: Model,
    options: EncoderOptions,
    file: TextFile = None,
    json: Annotated[
        bool, Option("--json", help="Print JSON lines with the probability of every label.")
    ] = False,
    refuse: NoTruncate = False,
) -> None:
    """Print the most probable label of each line of a text file, and its probability.

    graphllm classify MODEL -f lines.txt
    """
    texts = text_lines(file)
    from ..embedding import SequenceClassifier

    with options.load(SequenceClassifier, model) as loaded:
        found = loaded.classify(texts, truncate=not refuse)
    for text, scores in zip(texts, found, strict=True):
        if json:
            show_json({"text": text, "scores": scores})
        else:
            label = next(iter(scores))
            show(f"{scores[label]:.4f}  {label}  {text}")
