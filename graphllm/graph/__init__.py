"""The lazy graph: tensors, element types, scopes, op declarations, and rewriting."""
