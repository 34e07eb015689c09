"""Scaffold of a model file: the copy of a model family, with comments on what to change."""

from __future__ import annotations

import importlib
import keyword
import re
import textwrap
from pathlib import Path

from .. import models
from ..atomic_file import AtomicFile
from ..errors import RequestError

# Comment above each definition of the file.
_COMMENTS = {
    "NAMES": "Names of modules, and so of weights; see graphllm.model.config.Names.",
    "GGUF": "Architecture of the GGUF files of this model. Remove it if there are none.",
    "GGUF_KEYS": "GGUF names of config.json keys, in addition to the common ones.",
    "RULES": "GGUF names of weights.",
    "HF": "Hugging Face weights whose names or row order differ from the modules' here.",
    "TYPES": "Other values of model_type of this model.",
    "TINY": "Configurations of small models for `graphllm validate --tiny`. The first is complete, "
    "the others change some of its keys. Every key that changes the result should have a value "
    "other than its default in one of them. model_type selects the class of transformers to "
    "compare with; for an architecture of your own remove it, and write a function "
    "oracle(config, weights, ids).",
    "config": "Configuration of the model (graphllm.model.config) from the keys of config.json.",
}
# Comment above the model, by its base class.
_MODELS = {
    "Decoder": "The graph, built by the methods of Decoder (graphllm/model/decoder.py): embed, "
    "layer, attn, qkv, rope, attend, mlp, head. Override the methods that differ in your model.",
    "Encoder": "The graph, built by the methods of Encoder (graphllm/model/encoder.py): embed, "
    "layer, attn, qkv, feed_forward, head. Override the methods that differ in your model.",
    "EncoderDecoder": "The graph, built by the methods of EncoderDecoder "
    "(graphllm/model/encoder_decoder.py): embed, layer, attn, cross_attn, mlp, head, and by an "
    "Encoder, self.encoder. Override the methods that differ in your model.",
}
_MODEL = '''class Model({base}):
    def layer(self, x, i, batch):
        """Block i: x [T, dim] -> [T, dim]."""
        return super().layer(x, i, batch)
'''


def write_model_file(
    name: str, like: str, force: bool = False, folder: Path = Path()
) -> tuple[Path, bool]:
    """Write the model file ``NAME.py``.

    Args:
        name: name of the model, a Python identifier.
        like: name of the model family to copy.
        force: overwrite an existing file.
        folder: directory of the file.

    Returns:
        The path, and whether an existing file was overwritten.

    Raises:
        RequestError: invalid name, unknown family, existing file without ``force``, or the file
            cannot be written.
    """
    families = {family.name: family for family in models.specs()}
    if not name.isidentifier() or keyword.iskeyword(name):
        raise RequestError(
            f"{name!r} cannot be a model file's name: "
            "give a Python identifier (letters, digits, _), without .py"
        )
    if name in families:
        raise RequestError(f"{name} is a built-in model family; choose another name")
    if like not in families:
        known = ", ".join(sorted(families))
        raise RequestError(f"--like {like}: no such family; known: {known}")
    path = folder / f"{name}.py"
    exists = path.exists()
    if exists and not force:
        raise RequestError(f"{path}: already exists; --force overwrites it")
    try:
        with AtomicFile(path, replace=force) as file:
            file.write(model_file_text(name, like).encode("utf-8"))
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}") from None
    return path, exists


def model_file_text(name: str, like: str) -> str:
    """Return the text of the model file."""
    module = importlib.import_module(f"{models.__name__}.{like}")
    code = Path(str(module.__file__)).read_text("utf-8")
    code = code.replace(
        f'"""{module.__doc__}"""', f'"""{name}: describe the model here. Copied from {like}."""'
    )
    code = re.sub(r"^from \.(?=\w)", f"from {models.__name__}.", code, flags=re.M)
    code = re.sub(r"^from \.(?= )", f"from {models.__name__}", code, flags=re.M)
    code = _typed(code, like)
    base = next(c.__name__ for c in module.Model.__mro__ if c.__name__ in _MODELS)
    model = _MODEL.format(base=base)
    code = re.sub(rf"^Model = {base}\n", f"\n\n{model}\n\n", code, flags=re.M)
    for what, comment in {**_COMMENTS, "Model": _MODELS[base]}.items():
        lines = "".join(f"# {line}\n" for line in textwrap.wrap(comment, 97))
        code = re.sub(rf"^(?={what} = |(def|class) {what}\()", lines, code, count=1, flags=re.M)
    return code


def _typed(code: str, like: str) -> str:
    """Add the model_type of the copied family to the first configuration of TINY."""
    stated = f'"model_type": "{like}"'
    inserted = re.sub(
        r"^TINY = \(\s*\{(\s*)",
        lambda m: f"{m[0]}{stated},{m[1] or chr(10) + 5 * ' '}",
        code,
        count=1,
        flags=re.M,
    )
    if inserted != code:
        return inserted
    return re.sub(
        r"^TINY = (.*)$", rf"TINY = tuple({{{stated}, **each}} for each in \1)", code,
        count=1, flags=re.M,
    )  # fmt: skip
