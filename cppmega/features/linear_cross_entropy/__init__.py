"""The output layer that computes the loss without its logits."""
