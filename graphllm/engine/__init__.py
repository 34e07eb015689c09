"""From prompts to tokens: requests, the KV cache's blocks, and the loop that runs steps."""
