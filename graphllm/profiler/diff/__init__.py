"""Op-by-op comparison of two backends or two files."""
