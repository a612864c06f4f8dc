"""Models that make images and videos: frozen encoders, a diffusion objective, and the transformer that is trained."""
