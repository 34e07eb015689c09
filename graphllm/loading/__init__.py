"""Loading: from a model file and the user's options to a model that is ready to run."""
