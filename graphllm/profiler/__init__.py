"""What a run cost, op by op."""
