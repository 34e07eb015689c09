"""From a lazy graph to a flat plan: placement, fusion, memory layout."""
