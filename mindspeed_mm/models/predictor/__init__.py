"""What is trained of a generation model: diffusers' transformers, as they are, one file for each family."""
