"""Turns of an event loop, to tell whether other callbacks ran between two moments."""

from __future__ import annotations

import asyncio


class LoopTurns:
    """Counts the turns of the running event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._turn()

    def _turn(self) -> None:
        self.count += 1
        asyncio.get_running_loop().call_soon(self._turn)
