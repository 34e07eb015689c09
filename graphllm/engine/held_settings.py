"""Settings of requests on a device, which are written again only when they change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_

import numpy as np

from ..ops.sampling import mask_words
from ..runtime.buffers import Buffers
from .forward_feeds import Feeds
from .sampling_feeds import Row, mask_feed, settings_feeds

MASK = "mask"  # the leaf of `mask_feed`


class HeldSettings:
    """The settings that the leaves of the sampling program have, and masks of allowed ids.

    Args:
        buffers: buffers of the leaves.
        rows: most rows of a step.
        vocab: size of the vocabulary.
    """

    def __init__(self, buffers: Buffers, rows: int, vocab: int) -> None:
        self._buffers = buffers
        self._masks = np.empty((rows, mask_words(vocab)), np.int32)
        self._open_masks = 0  # rows of the device's masks that allow all ids, from the first on
        self._settings: list[Mapping[str, np.ndarray]] = []  # of the rows that were fed last
        self._held: set[str] = set()  # leaves that have the values of these settings

    def feeds(self, names: set[str], rows: Sequence[Row]) -> Feeds:
        """Return the feeds among ``names``, which the caller writes."""
        feeds = settings_feeds(rows, names)
        if feeds:
            self._settings = [row.settings for row in rows]
            self._held |= feeds.keys()
        if MASK in names:
            feeds[MASK] = self.masks(rows)
        return feeds

    def masks(self, rows: Sequence[Row]) -> np.ndarray:
        """Return the feed of the masks, which the caller writes."""
        self._open_masks = 0 if any(row.grammar for row in rows) else len(rows)
        return mask_feed(rows, self._masks)

    def write(self, names: set[str], rows: Sequence[Row]) -> None:
        """Write the settings among ``names`` of a step that the device does not hold."""
        own, last = [row.settings for row in rows], self._settings
        if len(own) > len(last) or not all(map(is_, own, last)):
            self._held = set()
        missing = names - self._held
        if len(own) <= self._open_masks and not any(row.grammar for row in rows):
            missing.discard(MASK)
        if missing:
            self._buffers.write(self.feeds(missing, rows))

    def forget_unwritten(self, names: set[str]) -> None:
        """Note that the leaves ``names`` may have got further buffers."""
        unwritten = {name for name in names if not self._buffers.written(name)}
        self._held -= unwritten
        if MASK in unwritten:
            self._open_masks = 0

    def forget(self, masks: bool = True) -> None:
        """Forget what the device has; ``masks``: those of allowed ids, too."""
        self._held = set()
        if masks:
            self._open_masks = 0
