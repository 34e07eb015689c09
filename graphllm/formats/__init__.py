"""Block formats as NumPy formulas."""
