"""How a model is spread over ranks, stepped and stored: the protocol and its implementations."""
