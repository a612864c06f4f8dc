"""What is done with trained models: inference, evaluation, fine-tuning recipes."""
