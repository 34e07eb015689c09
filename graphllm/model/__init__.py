"""Building blocks of model files: configuration, decoder, modules, rotary positions."""
