"""Online inference: an endpoint with OpenAI's interface for one model."""
