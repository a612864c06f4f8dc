"""What is trained: structure of models, their losses, and how families of transformers models are adapted."""
