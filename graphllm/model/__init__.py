"""What model files are written with: configuration, decoder, modules, weight names."""
