"""Comparison of profiles or benches, with statistics that tell changes from noise."""
