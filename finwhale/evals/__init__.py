"""What a trained model can do: loss by position, recall over distance, baselines, selection."""
