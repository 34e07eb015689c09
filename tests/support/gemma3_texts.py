"""Texts for the demo model."""

from __future__ import annotations

TEXTS = (
    "The capital of France is Paris, a city on the Seine. Its history goes back more than two "
    "thousand years, and today it is known for the Louvre, the Eiffel Tower, and for its food and "
    "fashion. In 1889 the tower was built for the World's Fair, and many thought it would fall.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + "
    "fibonacci(n - 2)\n\nfor i in range(10):\n    print(i, fibonacci(i))\n\nclass Node:\n"
    "    def __init__(self, value):\n        self.value = value\n        self.children = []\n",
)
