"""Comparison of profiles or benches, with statistics that separate changes from noise."""
