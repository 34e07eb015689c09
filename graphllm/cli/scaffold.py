"""A model file to begin with: a family's own, with remarks on what to change."""

from __future__ import annotations

import importlib
import keyword
import re
import textwrap
from pathlib import Path

from .. import models
from ..errors import RequestError

# What is said above each definition of the file.
_REMARKS = {
    "NAMES": "What modules are called, and so weights: see graphllm.model.config.Names.",
    "GGUF": "The architecture of GGUF files that this reads, too. Leave it out if there is none.",
    "GGUF_KEYS": "What GGUF files call keys of config.json, beside the usual ones.",
    "RULES": "What GGUF files call weights.",
    "HF": "Weights of Hugging Face files whose names or rows are not those of the modules here.",
    "TYPES": "Other values of model_type that this reads.",
    "TINY": "Small models for `graphllm validate --tiny`, as a config.json states them: the first "
    "is complete, others change some of its keys. Every key that changes the result should have "
    "another value than the usual one somewhere. model_type names the class of transformers to "
    "compare with; for an architecture of your own leave it out, and write a function "
    "oracle(config, weights, ids).",
    "config": "The decoder's parts (graphllm.model.config). Each key of config.json is read.",
    "Model": "The graph. Decoder's methods (graphllm/model/decoder.py) are its parts: embed, "
    "layer, attn, qkv, rope, attend, mlp, head. Override those that are new in "
    "your model, and leave out the others.",
}
_MODEL = '''class Model(Decoder):
    def layer(self, x, i, batch):
        """Block i: x [T, dim] -> [T, dim]."""
        return super().layer(x, i, batch)
'''


def write_model_file(
    name: str, like: str, force: bool = False, folder: Path = Path()
) -> tuple[Path, bool]:
    """Write ``NAME.py`` and say whether there was one, which is overwritten with ``force`` only.

    RequestError for a name that is none, a family that is unknown, a file that is there.
    """
    known = sorted(family.name for family in models.specs())
    if not name.isidentifier() or keyword.iskeyword(name):
        raise RequestError(
            f"{name!r} cannot be a model file's name: "
            "give one that Python allows (letters, digits, _), without .py"
        )
    if name in known:
        raise RequestError(f"{name} is a family of graphllm's own; choose another name")
    if like not in known:
        raise RequestError(f"--like {like}: no such family; known: {', '.join(known)}")
    path = folder / f"{name}.py"
    there = path.exists()
    if there and not force:
        raise RequestError(f"{path}: is there already; --force overwrites it")
    try:
        path.write_text(model_file_text(name, like), "utf-8")
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}") from None
    return path, there


def model_file_text(name: str, like: str) -> str:
    """The file's text."""
    module = importlib.import_module(f"{models.__name__}.{like}")
    code = Path(str(module.__file__)).read_text("utf-8")
    code = code.replace(
        f'"""{module.__doc__}"""', f'"""{name}: say what it is. Begun as {like}."""'
    )
    code = re.sub(r"^from \.(?=\w)", f"from {models.__name__}.", code, flags=re.M)
    code = re.sub(r"^from \.(?= )", f"from {models.__name__}", code, flags=re.M)
    code = _typed(code, like)
    code = re.sub(r"^Model = Decoder\n", f"\n\n{_MODEL}\n\n", code, flags=re.M)
    for what, remark in _REMARKS.items():
        lines = "".join(f"# {line}\n" for line in textwrap.wrap(remark, 97))
        code = re.sub(rf"^(?={what} = |(def|class) {what}\()", lines, code, count=1, flags=re.M)
    return code


def _typed(code: str, like: str) -> str:
    """The file with the model_type of what it is like in its first small configuration."""
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
