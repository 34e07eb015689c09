"""The model ``minilm``: all-MiniLM-L6-v2 from the pip package of the extra ``minilm``."""

from __future__ import annotations

import shutil
import zipfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from ..cache import CacheFile
from ..errors import ModelFileError

_PACKAGE = "all_minilm_l6_v2"
_FOLDER = "all-MiniLM-L6-v2"
_FILES = (  # the last one is written last, so that it marks a complete directory
    "1_Pooling/config.json", "config_sentence_transformers.json", "model.safetensors",
    "modules.json", "sentence_bert_config.json", "special_tokens_map.json", "tokenizer.json",
    "tokenizer_config.json", "config.json",
)  # fmt: skip


def minilm_path() -> Path:
    """Return the path of all-MiniLM-L6-v2, unpacked to the cache on the first call.

    The package holds the directory as a zip archive of 91 MB. Once the cache has every file, the
    package is not needed.

    Raises:
        ModelFileError: neither the files nor the package exist, the package is damaged, or the
            cache cannot be written.
    """
    files = {name: CacheFile(_FOLDER, *name.split("/")) for name in _FILES}
    folder = files["config.json"].path.parent
    if all(file.size(limit=None) is not None for file in files.values()):
        return folder
    package = find_spec(_PACKAGE)  # not imported, since that prints to standard output
    if package is None or package.origin is None:
        raise ModelFileError(
            f"the model minilm is not installed, nor cached as {folder}: "
            "pip install 'graphllm[minilm]'"
        )
    try:
        with zipfile.ZipFile(Path(package.origin).with_name("model.zip")) as archive:
            for name, file in files.items():
                file.replace(partial(_extract, archive, name))
    except (OSError, KeyError, zipfile.BadZipFile) as error:  # a member's checksum is checked, too
        where = getattr(error, "filename", None) or folder
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelFileError(f"{where}: minilm could not be written: {reason}") from None
    return folder


def _extract(archive: zipfile.ZipFile, name: str, part: Path) -> None:
    """Write a member of the archive to ``part``, which must be a new file."""
    with archive.open(name) as source, part.open("xb") as target:
        shutil.copyfileobj(source, target)
    part.chmod(0o600)
