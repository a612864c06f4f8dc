"""transformers models, unmodified, with the mixins that let them be sharded; one folder per adapted family."""
