"""Quality of a loaded model: perplexity, KL divergence from another model, multiple choice."""
